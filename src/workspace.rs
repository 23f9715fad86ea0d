//! Memory that the caller owns: what calls need while they run, kept for the next one.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use headwise_kernels::{Part, Scratch};

/// The memory that calls need beside their arguments. It grows to the largest call it has met, so that from
/// the second like call on nothing is allocated, and is freed when dropped. [`Attention`](crate::Attention)
/// borrows it ([`workspace`](crate::Attention::workspace)): for each thread at work about 1 MiB, whatever the
/// lengths, for few queries on a long cache the results of its spans, and what
/// [`received`](crate::StatisticsOptions::received) says. Layers keep what lies between their
/// projections and their attention in it, too; one may serve all layers of a model in turn.
///
/// Without one, attention keeps that memory with each thread, until the thread ends.
///
/// ```
/// use headwise::{Attention, View, ViewMut, Workspace};
/// let (x, mut out) = ([1.0; 8], [0.0; 8]);
/// let x = View::bhld(&x, [1, 1, 2, 4])?;
/// let workspace = Workspace::new();
/// let attention = Attention::new().causal().workspace(&workspace);
/// attention.run(x, x, x, ViewMut::bhld(&mut out, [1, 1, 2, 4])?)?;
/// let bytes = workspace.bytes();
/// attention.run(x, x, x, ViewMut::bhld(&mut out, [1, 1, 2, 4])?)?;
/// assert_eq!(workspace.bytes(), bytes); // nothing more
/// # Ok::<(), headwise::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Workspace {
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
    /// What the heads give, `[rows, heads, d_v]`.
    pub(crate) heads: Vec<f32>,
    /// Normalised rows.
    pub(crate) normed: Vec<f32>,
    pub(crate) scratch: Scratches,
}

impl Workspace {
    /// An empty workspace; it allocates when first used.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same, which keeps the time that each part of attention takes, at a small cost: see
    /// [`Workspace::times`].
    pub fn timed() -> Self {
        Self { scratch: Scratches { timed: true, ..Scratches::default() }, ..Self::default() }
    }

    /// The time of each [`Part`] of all calls so far, summed over the threads, in the processor's unit: shares
    /// of their sum mean something. Zeros without [`Workspace::timed`].
    pub fn times(&self) -> [u64; Part::ALL.len()] {
        let idle = lock(&self.scratch.idle);
        idle.iter().fold([0; Part::ALL.len()], |sum, scratch| {
            let times = scratch.times();
            std::array::from_fn(|part| sum[part] + times[part])
        })
    }

    /// Bytes held now, but for what calls under way have borrowed.
    pub fn bytes(&self) -> usize {
        let Self { q, k, v, heads, normed, scratch } = self;
        let layer: usize = [q, k, v, heads, normed].iter().map(|buffer| buffer.capacity()).sum();
        layer * size_of::<f32>() + scratch.bytes()
    }
}

/// A workspace holds nothing but memory: the clone of one is a new one.
impl Clone for Workspace {
    fn clone(&self) -> Self {
        Self::new()
    }
}

/// Scratch for any number of threads, of one call or of many at a time.
#[derive(Default)]
pub(crate) struct Scratches {
    idle: Mutex<Vec<Scratch>>,
    /// For the calling thread, what tasks leave to be joined.
    parts: Mutex<Scratch>,
    timed: bool,
}

impl Scratches {
    /// Has scratch for so many threads ready.
    pub fn reserve(&self, threads: usize) {
        let mut idle = lock(&self.idle);
        while idle.len() < threads {
            idle.push(self.fresh());
        }
    }

    fn fresh(&self) -> Scratch {
        if self.timed { Scratch::timed() } else { Scratch::new() }
    }

    /// Lends one to a thread.
    pub fn lend<R>(&self, f: impl FnOnce(&mut Scratch) -> R) -> R {
        let scratch = lock(&self.idle).pop(); // not locked any more when `f` runs
        let mut scratch = scratch.unwrap_or_else(|| self.fresh());
        let result = f(&mut scratch);
        lock(&self.idle).push(scratch);
        result
    }

    /// Makes all as large as the largest: which thread meets which tasks is up to chance, and the next like
    /// call is to find room for any of them everywhere.
    pub fn even_out(&self) {
        let mut idle = lock(&self.idle);
        let most = idle.iter().fold(Default::default(), |most, scratch| scratch.sizes_or(most));
        idle.iter_mut().for_each(|scratch| scratch.grow(most));
    }

    /// Lends the memory for parts. It is taken out meanwhile: while a call waits for its tasks, its thread may
    /// run another one.
    pub fn lend_parts<R>(&self, f: impl FnOnce(&mut Scratch) -> R) -> R {
        let mut parts = std::mem::take(&mut *lock(&self.parts));
        let result = f(&mut parts);
        *lock(&self.parts) = parts;
        result
    }

    fn bytes(&self) -> usize {
        lock(&self.idle).iter().map(Scratch::bytes).sum::<usize>() + lock(&self.parts).bytes()
    }
}

/// The numbers in it would fill pages.
impl fmt::Debug for Scratches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes of scratch", self.bytes())
    }
}

/// Nothing that is done under the lock can leave it half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
