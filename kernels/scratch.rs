//! Scratch memory of one thread.

use aligned_vec::{AVec, ConstAlign};

use crate::clock::{Clock, Part};

/// What one thread needs while it computes a task. Grows to the largest task it has met: below 1 MiB at any
/// number of tokens for `D + Dv` up to 2048, but for the weights that are kept for what keys receive.
#[derive(Debug)]
pub struct Scratch {
    memory: AVec<f32, ConstAlign<64>>,
    records: AVec<f32, ConstAlign<64>>,
    heads: Vec<usize>,
    rows: Vec<usize>,
    clock: Clock,
}

impl Scratch {
    /// Empty scratch; it allocates when first used.
    pub fn new() -> Self {
        let (heads, rows) = (Vec::new(), Vec::new());
        Self { memory: AVec::new(64), records: AVec::new(64), heads, rows, clock: Clock::default() }
    }

    /// The same, which keeps the time of each part of the tasks that it serves.
    pub fn timed() -> Self {
        Self { clock: Clock::running(), ..Self::new() }
    }

    /// What it has kept, in the order of [`Part::ALL`], in the unit of [`ticks`](crate::ticks).
    pub fn times(&self) -> [u64; Part::ALL.len()] {
        self.clock.ticks()
    }

    /// Bytes held now.
    pub fn bytes(&self) -> usize {
        let lists = self.heads.capacity() + self.rows.capacity();
        let floats = self.memory.capacity() + self.records.capacity();
        floats * size_of::<f32>() + lists * size_of::<usize>()
    }

    /// Elements of its buffers, each at least as many as in `other`.
    pub fn sizes_or(&self, other: [usize; 4]) -> [usize; 4] {
        let Self { memory, records, heads, rows, .. } = self;
        let sizes = [memory.len(), records.len(), heads.capacity(), rows.capacity()];
        core::array::from_fn(|i| sizes[i].max(other[i]))
    }

    /// Grows its buffers to such sizes at least.
    pub fn grow(&mut self, [memory, records, heads, rows]: [usize; 4]) {
        let _: [_; 1] = Self::take(&mut self.memory, [memory]);
        let _: [_; 1] = Self::take(&mut self.records, [records]);
        self.heads.reserve_exact(heads.saturating_sub(self.heads.len()));
        self.rows.reserve_exact(rows.saturating_sub(self.rows.len()));
    }

    /// Disjoint buffers of at least the given numbers of f32, each on a cache line of its own.
    #[inline(always)]
    pub(crate) fn take<const N: usize>(memory: &mut Memory, sizes: [usize; N]) -> [&mut [f32]; N] {
        let sizes = sizes.map(|n| n.next_multiple_of(16));
        let total = sizes.iter().sum();
        if memory.len() < total {
            memory.reserve_exact(total - memory.len());
            memory.resize(total, 0.0);
        }
        let mut rest = &mut memory[..];
        sizes.map(|n| {
            let (taken, tail) = core::mem::take(&mut rest).split_at_mut(n);
            rest = tail;
            taken
        })
    }

    /// At least `n` f32.
    pub(crate) fn floats(&mut self, n: usize) -> &mut [f32] {
        let [floats] = Self::take(&mut self.memory, [n]);
        floats
    }

    /// At least `n` f32 beside those, for records.
    pub(crate) fn records(&mut self, n: usize) -> *mut f32 {
        let [floats] = Self::take(&mut self.records, [n]);
        floats.as_mut_ptr()
    }

    /// The memory, two lists, of heads and of rows, and the clock.
    pub(crate) fn parts(&mut self) -> (&mut Memory, &mut Vec<usize>, &mut Vec<usize>, &Clock) {
        (&mut self.memory, &mut self.heads, &mut self.rows, &self.clock)
    }
}

pub(crate) type Memory = AVec<f32, ConstAlign<64>>;

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}
