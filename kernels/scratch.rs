//! Scratch memory of one thread.

use aligned_vec::{AVec, ConstAlign};

/// What one thread needs while it computes a task. Grows to the largest task it has met: below 1 MiB at any
/// number of tokens for `D + Dv` up to 2048.
#[derive(Debug)]
pub struct Scratch {
    memory: AVec<f32, ConstAlign<64>>,
    records: AVec<f32, ConstAlign<64>>,
    heads: Vec<usize>,
    rows: Vec<usize>,
}

impl Scratch {
    /// Empty scratch; it allocates when first used.
    pub fn new() -> Self {
        Self { memory: AVec::new(64), records: AVec::new(64), heads: Vec::new(), rows: Vec::new() }
    }

    /// Bytes held now.
    pub fn bytes(&self) -> usize {
        let lists = self.heads.capacity() + self.rows.capacity();
        let floats = self.memory.len() + self.records.len();
        floats * size_of::<f32>() + lists * size_of::<usize>()
    }

    /// Disjoint buffers of at least the given numbers of f32, each on a cache line of its own.
    #[inline(always)]
    pub(crate) fn take<const N: usize>(memory: &mut Memory, sizes: [usize; N]) -> [&mut [f32]; N] {
        let sizes = sizes.map(|n| n.next_multiple_of(16));
        let total = sizes.iter().sum();
        if memory.len() < total {
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

    /// The memory, and two lists: of heads and of rows.
    pub(crate) fn parts(&mut self) -> (&mut Memory, &mut Vec<usize>, &mut Vec<usize>) {
        (&mut self.memory, &mut self.heads, &mut self.rows)
    }
}

pub(crate) type Memory = AVec<f32, ConstAlign<64>>;

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}
