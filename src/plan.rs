//! Splits a call into tasks and runs them; the only file that knows of threads.
//!
//! A task is up to `tokens` queries of all the query heads on one key/value head. Rows do not depend on each
//! other and the keys are cut at fixed places, so neither the split nor the number of threads changes a bit
//! of the result.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::ops::Range;

use headwise_kernels::{Call, Element, Error, Level, Scratch, Stage, ViewMut};
use rayon::iter::{ParallelBridge, ParallelIterator};

/// Which threads compute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Threads {
    /// The current rayon pool.
    #[default]
    Pool,
    /// The calling thread.
    Calling,
}

/// Query rows (tokens times heads of a group) of a full task: while they are computed, a block of keys and
/// values stays in the cache for all of them.
const ROWS: usize = 256;

/// Below this many multiply-adds waking other threads costs more than it saves (about 50 µs on one core).
const SEQUENTIAL: usize = 2_000_000;

/// How a call is computed. See [`crate::Attention::plan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    level: Level,
    element: &'static str,
    tile: [usize; 2],
    tokens: usize,
    tasks: usize,
    threads: usize,
    why_threads: &'static str,
}

impl Plan {
    pub(crate) fn new<T: Element>(call: &Call<'_, T>, level: Level, threads: Threads) -> Result<Self, Error> {
        let [b, hq, lq, _] = call.out_shape();
        let (hk, full) = (call.kv_heads(), ROWS.div_ceil(call.group().max(1)));
        let nothing = b == 0 || hq == 0 || lq == 0;
        // At most as many as there are rows, whose number fits.
        let tasks = |tokens| if nothing { 0 } else { b * hk * lq.div_ceil(tokens) };
        let (threads, why_threads) = match threads {
            Threads::Calling => (1, "asked for"),
            Threads::Pool if call.work() < SEQUENTIAL => (1, "too little work to share"),
            Threads::Pool => (rayon::current_num_threads(), "the current rayon pool"),
        };
        // Four tasks a thread even out what tasks differ in; fewer rows than a quarter of a full task cost
        // more in re-reading K and V than the evenness is worth.
        let mut tokens = full;
        while threads > 1 && tokens > full.div_ceil(4) && tasks(tokens) < 4 * threads {
            tokens = tokens.div_ceil(2);
        }
        let tasks = tasks(tokens);
        let threads = threads.min(tasks.max(1));
        Ok(Self { level, element: T::NAME, tile: level.tile()?, tokens, tasks, threads, why_threads })
    }

    /// The instruction set.
    pub fn level(&self) -> Level {
        self.level
    }

    /// The kernel's name, `{level}-{type}`, such as `avx512-f32`.
    pub fn kernel(&self) -> String {
        format!("{}-{}", self.level, self.element)
    }

    /// One sentence for people: which kernel, tile and split, and why.
    pub fn describe(&self) -> String {
        let Self { tile: [rows, columns], tokens, tasks, threads, why_threads, .. } = self;
        format!(
            "{} prefill kernel, {rows} query rows x {columns} keys a tile, {tasks} tasks of up to {tokens} \
             tokens on {threads} threads ({why_threads})",
            self.kernel()
        )
    }

    pub(crate) fn run<T: Element>(
        &self,
        call: &Call<'_, T>,
        out: ViewMut<'_, T>,
        lse: Option<&mut [f32]>,
    ) -> Result<(), Error> {
        let mut tasks = call.split(out, lse, self.tokens)?;
        if self.threads > 1 {
            tasks.sort_by_key(|task| Reverse(task.cost())); // the longest first: no thread ends on a long one
        }
        self.each(tasks, |task, scratch| task.run(self.level, scratch))
    }

    pub(crate) fn run_scores<T: Element>(
        &self,
        call: &Call<'_, T>,
        stage: Stage,
        heads: Range<usize>,
        queries: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let tasks = call.split_scores(stage, heads, queries, out, self.tokens)?;
        self.each(tasks, |task, scratch| task.run(self.level, scratch))
    }

    fn each<K: Send>(
        &self,
        tasks: Vec<K>,
        run: impl Fn(K, &mut Scratch) -> Result<(), Error> + Sync,
    ) -> Result<(), Error> {
        if self.threads == 1 {
            return with_scratch(|scratch| tasks.into_iter().try_for_each(|task| run(task, scratch)));
        }
        tasks.into_iter().par_bridge().try_for_each(|task| with_scratch(|scratch| run(task, scratch)))
    }
}

/// Lends the thread's scratch, which is kept from call to call.
fn with_scratch<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    thread_local! {
        static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::new());
    }
    SCRATCH.with_borrow_mut(f)
}
