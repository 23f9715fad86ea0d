//! Splits a call into tasks and runs them; the only file that starts work on threads.
//!
//! A task is some queries of all the query heads on one key/value head. Rows do not depend on each other, so
//! the split of the queries may follow the number of threads. Where the keys of few queries are cut in spans
//! does not (`Call::spans`), only whether the spans are tasks of their own: so the number of threads changes
//! no bit of the result.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use headwise_kernels::{
    Call, DType, Element, Error, Kernel, Level, Observe, Scratch, Spans, Split, Stage, Tasks, ViewMut,
};
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use crate::workspace::Scratches;

/// Which threads compute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Threads {
    /// The current rayon pool: the global one, or the one whose `install` the call runs in.
    #[default]
    Pool,
    /// The calling thread.
    Calling,
}

/// What a computation runs on. It changes no bit of a result but by the level.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Run {
    /// The instruction set; without it `HEADWISE_LEVEL` decides, and without that the processor.
    pub level: Option<Level>,
    /// The threads.
    pub threads: Threads,
}

/// Query rows (tokens times heads of a group) of a task, and the time that a row takes, in those of the
/// largest: while a task is computed, a block of keys and values stays in the cache for all of its rows, and
/// below 64 rows tiles are narrower (AVX-512, D 64 and 128, 512 and 2048 keys; at the other levels small
/// tasks cost less).
const SIZES: [(usize, f64); 6] = [(512, 1.0), (256, 1.0), (128, 1.0), (64, 1.03), (32, 1.2), (16, 1.6)];

/// Tasks a thread that even out what tasks differ in: with more of them none need be smaller.
const ENOUGH: usize = 16;

/// Below this many multiply-adds waking other threads costs more than it saves (about 50 µs on one core, at
/// the usual levels). Two threads that are awake gain from about 15 µs on; one that sleeps takes some 60 µs
/// to come.
const SEQUENTIAL: usize = 2_000_000;

/// The same at a level, by how fast it is.
fn too_little(level: Level) -> usize {
    match level {
        Level::Scalar => SEQUENTIAL / 3,
        Level::Amx => SEQUENTIAL * 2,
        _ => SEQUENTIAL,
    }
}

/// How a call is computed. See [`crate::Attention::plan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    level: Level,
    dtypes: [DType; 2],
    tile: [usize; 2],
    kernels: [Option<Kernel>; 2],
    split: Split,
    tasks: usize,
    threads: usize,
    why_threads: &'static str,
}

impl Plan {
    pub(crate) fn new(call: &Call<'_>, level: Level, threads: Threads) -> Result<Self, Error> {
        let ([b, hq, lq, _], hk) = (call.out_shape(), call.kv_heads());
        let nothing = b == 0 || hq == 0 || lq == 0;
        let (threads, why_threads) = match threads {
            Threads::Calling => (1, "asked for"),
            Threads::Pool if call.work() < too_little(level) => (1, "too little work to share"),
            Threads::Pool => (rayon::current_num_threads(), "the current rayon pool"),
        };
        // At most as many as there are rows, whose number fits.
        let blocks = |tokens| if nothing { 0 } else { b * hk * lq.div_ceil(tokens) };
        let b = if nothing { 0 } else { b };
        let most = (0..b).map(|b| call.spans(b).1).max().unwrap_or(1);
        let mut tokens = tokens(call, b, 1);
        let mut spans = Spans::Together;
        if threads > 1 && most > 1 && blocks(tokens) < 4 * threads {
            spans = Spans::Apart;
        }
        let each = if spans == Spans::Apart { most } else { 1 };
        if each < 4 * threads {
            tokens = self::tokens(call, b, threads);
        }
        let tasks = blocks(tokens).saturating_mul(each);
        let threads = threads.min(tasks.max(1));
        let mut kernels = [None; 2];
        for b in 0..b {
            let kernel = call.kernel(level, b)?;
            kernels[usize::from(kernel == Kernel::Decode)] = Some(kernel);
        }
        // A few at a time, but enough left to even out.
        let run = (tasks / (ENOUGH * threads)).clamp(1, 8);
        let split = Split { tokens, run, spans };
        let tile = level.tile()?;
        Ok(Self { level, dtypes: call.dtypes(), tile, kernels, split, tasks, threads, why_threads })
    }

    /// The instruction set.
    pub fn level(&self) -> Level {
        self.level
    }

    /// The kernel's name, `{level}-{type}`, such as `avx512-f32`; with two types, that of the queries and
    /// that of keys and values, where they differ.
    pub fn kernel(&self) -> String {
        match self.dtypes {
            [q, kv] if q == kv => format!("{}-{q}", self.level),
            [q, kv] => format!("{}-{q}-{kv}", self.level),
        }
    }

    /// One sentence for people: which kernel, tile and split, and why.
    pub fn describe(&self) -> String {
        let Self { tile: [rows, columns], tasks, threads, why_threads, .. } = self;
        let kernel = |kernel: &Kernel| match kernel {
            Kernel::Prefill if self.level == Level::Amx => {
                "prefill kernel, products of bf16 in tiles of 16 x 16".to_string()
            }
            Kernel::Prefill => {
                let dots = if self.level == self.level.exact() { "" } else { "dot products of bf16, " };
                format!("prefill kernel, {dots}{rows} query rows x {columns} keys a tile")
            }
            Kernel::Decode => "decode kernel".to_string(),
        };
        let kernels = self.kernels.iter().flatten().map(kernel).collect::<Vec<_>>().join(", and ");
        let Split { tokens, spans, .. } = self.split;
        let spans = if spans == Spans::Apart { " and a span of keys" } else { "" };
        let f16 = self.dtypes.contains(&DType::F16).then(|| self.level.widens_f16()).flatten();
        let f16 = f16.map_or(String::new(), |how| format!(" ({how})"));
        format!(
            "{}{f16} {kernels}: {tasks} tasks of up to {tokens} tokens{spans} on {threads} threads \
             ({why_threads})",
            self.kernel()
        )
    }

    pub(crate) fn run<T: Element>(
        &self,
        call: &Call<'_>,
        out: ViewMut<'_, T>,
        lse: Option<&mut [f32]>,
        scratch: Option<&Scratches>,
    ) -> Result<(), Error> {
        with_parts(scratch, |parts| {
            let tasks = call.split(self.split, out, lse, parts)?;
            self.each(&tasks, scratch)?;
            tasks.finish();
            Ok(())
        })
    }

    /// As [`Plan::run`], and tells what the heads did.
    pub(crate) fn run_with_statistics<T: Element>(
        &self,
        call: &Call<'_>,
        out: ViewMut<'_, T>,
        observe: Observe<'_>,
        scratch: Option<&Scratches>,
    ) -> Result<(), Error> {
        with_parts(scratch, |parts| {
            let tasks = call.split_with_statistics(self.split.run, out, observe, parts)?;
            self.each(&tasks, scratch)?;
            tasks.finish();
            Ok(())
        })
    }

    pub(crate) fn run_scores(
        &self,
        call: &Call<'_>,
        stage: Stage,
        heads: Range<usize>,
        queries: Range<usize>,
        out: &mut [f32],
        scratch: Option<&Scratches>,
    ) -> Result<(), Error> {
        self.each(&call.split_scores(stage, heads, queries, out, self.split.tokens)?, scratch)
    }

    /// Computes all tasks. Each thread takes the next one when it is done with its last.
    fn each(&self, tasks: &Tasks<'_>, scratch: Option<&Scratches>) -> Result<(), Error> {
        share(self.threads, scratch, |scratch| tasks.run_next(self.level, scratch))
    }
}

/// Queries of a task, of `b` batch entries: the number that lets the threads be done first, by an estimate.
fn tokens(call: &Call<'_>, b: usize, threads: usize) -> usize {
    let mut best = (f64::INFINITY, 0);
    for (rows, cost) in SIZES.into_iter().filter(|&(rows, _)| rows <= call.rows_of_a_task()) {
        let tokens = rows.div_ceil(call.group().max(1));
        let (mut tasks, mut total, [mut largest, mut last]) = (0, 0.0, [0.0; 2]);
        for b in 0..b {
            let end = call.q_len(b);
            let task = |start: usize| call.pairs(b, start, end.min(start.saturating_add(tokens))) as f64;
            tasks += call.kv_heads() * end.div_ceil(tokens);
            total += (call.kv_heads() * call.pairs(b, 0, end)) as f64;
            largest = [0, end / 2, end.saturating_sub(tokens)].map(task).into_iter().fold(largest, f64::max);
            last = task(0);
        }
        // Like tasks go in rounds. Of others the last one starts when the threads have shared all the rest,
        // and it is one between the largest and, under causal, the smallest.
        let (rounds, t) = (tasks.div_ceil(threads) as f64 * largest, threads as f64);
        let late = (largest + last) / 2.0 * (t - 1.0);
        let listed = f64::max(largest, (total + late) / t);
        let time = cost * rounds.min(listed);
        if time < 0.98 * best.0 {
            best = (time, tokens);
        }
        if threads == 1 || tasks >= ENOUGH * threads {
            break;
        }
    }
    best.1.max(1)
}

/// Lends scratch of the caller's, or the thread's, which is kept from call to call.
fn with_scratch<R>(of_caller: Option<&Scratches>, f: impl FnOnce(&mut Scratch) -> R) -> R {
    thread_local! {
        static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::new());
    }
    match of_caller {
        Some(scratch) => scratch.lend(f),
        None => SCRATCH.with_borrow_mut(f),
    }
}

/// Lends memory for parts, likewise.
fn with_parts<R>(of_caller: Option<&Scratches>, f: impl FnOnce(&mut Scratch) -> R) -> R {
    thread_local! {
        // Taken out while in use: while this call waits, rayon may run another one on its thread.
        static PARTS: Cell<Scratch> = Cell::default();
    }
    match of_caller {
        Some(scratch) => scratch.lend_parts(f),
        None => {
            let mut parts = PARTS.take();
            let result = f(&mut parts);
            PARTS.set(parts);
            result
        }
    }
}

/// Threads for this many multiply-adds.
pub(crate) fn threads_for(threads: Threads, work: usize) -> usize {
    match threads {
        Threads::Pool if work >= SEQUENTIAL => rayon::current_num_threads(),
        _ => 1,
    }
}

/// Calls `next` on some threads, each with scratch, until it says that nothing is left.
pub(crate) fn share(
    threads: usize,
    scratch: Option<&Scratches>,
    next: impl Fn(&mut Scratch) -> Result<bool, Error> + Sync,
) -> Result<(), Error> {
    let work = || {
        with_scratch(scratch, |scratch| {
            while next(scratch)? {}
            Ok(())
        })
    };
    if threads <= 1 {
        return work();
    }
    scratch.inspect(|scratch| scratch.reserve(threads));
    let result = (0..threads).into_par_iter().with_max_len(1).try_for_each(|_| work());
    scratch.inspect(|scratch| scratch.even_out());
    result
}

/// Calls `f` with the number of the first row and some rows of `data`, `width` each, on some threads.
pub(crate) fn share_rows(
    threads: usize,
    data: &mut [f32],
    width: usize,
    f: impl Fn(usize, &mut [f32]) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let rows = data.len().checked_div(width).unwrap_or(0);
    if threads <= 1 || rows == 0 {
        return f(0, data);
    }
    let each = rows.div_ceil(4 * threads);
    data.par_chunks_mut(each * width).enumerate().try_for_each(|(index, rows)| f(index * each, rows))
}

#[cfg(test)]
mod balance;
