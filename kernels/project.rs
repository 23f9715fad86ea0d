//! Projections:
//!
//! ```text
//! Y[r][o] = then( sum over t of X[r][t] * W[t][o] + bias[o] )        X [rows, in], W [in, out], Y [rows, out]
//! ```
//!
//! Why it is fast: the product is a register tile of some rows times 64 outputs. Every weight vector is used
//! for all rows of the tile, every element of X is one scalar, broadcast from where it lies. The weights are
//! packed in the order of use when they are loaded, so a call packs nothing: few rows cost no more than
//! reading the weights once, which are asked for some KiB ahead (in half precision half as many bytes); many
//! rows run at the multiply-add limit.
//!
//! The bits of a row depend on where the inputs are cut (multiples of `STEPS`) and on nothing else: neither
//! on the rows beside it nor on the number of threads.

use core::marker::PhantomData;
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::call::length;
use crate::isa::Isa;
use crate::level::Op;
use crate::view::count;
use crate::{Error, Level, Scratch};
use part::Part;
use weights::{Chunk, PANEL};

pub use activate::Activation;
pub use weights::{Weight, WeightLayout, Weights};

mod activate;
mod part;
mod weights;

/// Inputs after which sums go to the output and come back: a panel's part of the weights, 64 KiB, stays in
/// the second-level cache for all rows of a task (the bench `projection`: 128 and 512 are within 5 %).
const STEPS: usize = 256;

/// Rows of a task: their part of X stays in the second-level cache beside the weights.
const ROWS: usize = 192;

/// Rows up to which weights in half precision are widened in registers, for each tile anew: while few rows
/// wait for the memory that costs nothing, and one row of 2048 x 2048 takes 0.45 to 0.65 of its time in f32.
/// With more rows they are widened once for all tiles, into the second-level cache (the bench `projection`:
/// equal from 24 rows on at 2048 x 2048, from 16 on at 384 x 384). Without vectors f16 take long to widen: once
/// is enough.
const DIRECT: usize = 24;

/// What is done with a projection's result.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Then<'a> {
    /// It is written.
    #[default]
    Store,
    /// It is added to what the output holds: a residual in place.
    Accumulate,
    /// This is added, `[rows, out]`: a residual.
    Add(&'a [f32]),
    /// A function is applied.
    Activate(Activation),
}

/// One projection: the arguments of a call.
#[derive(Debug)]
pub struct Projection<'a> {
    /// `[rows, in]`, compact.
    pub x: &'a [f32],
    /// The weights.
    pub weights: &'a Weights,
    /// `[out]`.
    pub bias: Option<&'a [f32]>,
    /// What is done with the result.
    pub then: Then<'a>,
    /// `[rows, out]`, compact.
    pub out: &'a mut [f32],
}

/// A checked projection.
#[derive(Debug, Clone, Copy)]
struct Job<'a> {
    x: &'a [f32],
    weights: Option<&'a Weights>,
    bias: Option<&'a [f32]>,
    then: Then<'a>,
    out: *mut f32,
    rows: usize,
}

impl<'a> Job<'a> {
    const NONE: Self =
        Job { x: &[], weights: None, bias: None, then: Then::Store, out: core::ptr::null_mut(), rows: 0 };

    fn new(p: Projection<'a>) -> Result<Self, Error> {
        let (inputs, outputs) = (p.weights.inputs(), p.weights.outputs());
        // With no inputs X is empty, whatever the number of rows.
        let rows = p.x.len().checked_div(inputs).or(p.out.len().checked_div(outputs)).unwrap_or(0);
        length("x", p.x.len(), rows * inputs)?;
        let shape = [1, 1, rows, outputs];
        length("out", p.out.len(), count(shape).ok_or(Error::TooLarge { argument: "out", shape })?)?;
        p.bias.map_or(Ok(()), |bias| length("bias", bias.len(), outputs))?;
        if let Then::Add(residual) = p.then {
            length("residual", residual.len(), p.out.len())?;
        }
        let Projection { x, weights, bias, then, out } = p;
        Ok(Self { x, weights: Some(weights), bias, then, out: out.as_mut_ptr(), rows })
    }

    fn panels(&self) -> usize {
        self.weights.map_or(0, Weights::panels)
    }

    fn tasks(&self) -> usize {
        self.rows.div_ceil(ROWS) * self.panels()
    }
}

/// Up to three projections (queries, keys and values) as tasks, each with a part of an output of its own.
#[derive(Debug)]
pub struct Projections<'a> {
    jobs: [Job<'a>; 3],
    next: AtomicUsize,
    run: usize,
    _outputs: PhantomData<&'a mut [f32]>,
}

// SAFETY: the pointers are exclusive borrows of the outputs, which the tasks share out: each part belongs to
// one task, and `next` gives each task to one caller.
unsafe impl Send for Projections<'_> {}
unsafe impl Sync for Projections<'_> {}

impl<'a> Projections<'a> {
    /// Checks the projections and cuts them for `threads` threads.
    ///
    /// # Errors
    /// [`Error::Length`] if a slice does not fit the weights or the others, [`Error::TooLarge`] if none can.
    pub fn new<const N: usize>(projections: [Projection<'a>; N], threads: usize) -> Result<Self, Error> {
        const { assert!(N <= 3) };
        let mut jobs = [Job::NONE; 3];
        for (job, projection) in jobs.iter_mut().zip(projections) {
            *job = Job::new(projection)?;
        }
        let tasks: usize = jobs.iter().map(Job::tasks).sum();
        // Panels that follow each other in memory, but enough left to even out.
        let run = (tasks / (4 * threads.max(1))).clamp(1, 8);
        Ok(Self { jobs, next: AtomicUsize::new(0), run, _outputs: PhantomData })
    }

    /// Computes the next tasks, if there are any: whether there were.
    ///
    /// # Errors
    /// [`Error::LevelUnavailable`].
    pub fn run_next(&self, level: Level, scratch: &mut Scratch) -> Result<bool, Error> {
        let start = self.next.fetch_add(self.run, Ordering::Relaxed);
        let mut some = false;
        for task in start..start + self.run {
            let Some((job, index)) = self.find(task) else { break };
            level.dispatch(Task { job, index, scratch })?;
            some = true;
        }
        Ok(some)
    }

    fn find(&self, mut task: usize) -> Option<(&Job<'a>, usize)> {
        for job in &self.jobs {
            if task < job.tasks() {
                return Some((job, task));
            }
            task -= job.tasks();
        }
        None
    }
}

/// Some rows times one panel.
struct Task<'t, 'a> {
    job: &'t Job<'a>,
    index: usize,
    scratch: &'t mut Scratch,
}

impl Op for Task<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa, const NQ: usize, const MR: usize>(self, isa: I) {
        let Self { job, index, scratch } = self;
        let Some(weights) = job.weights else { return };
        let (inputs, outputs, panels) = (weights.inputs(), weights.outputs(), job.panels());
        let (first, panel) = (index / panels * ROWS, index % panels);
        let rows = ROWS.min(job.rows - first);
        let column = panel * PANEL;
        let room = scratch.floats(STEPS * PANEL);
        let direct = rows <= if I::F32_LANES == 1 { MR } else { DIRECT };
        let mut at = 0;
        loop {
            let steps = STEPS.min(inputs - at);
            let chunk = weights.chunk(panel, at, steps);
            let (behind, bytes) = chunk.behind();
            let part = Part {
                isa,
                steps,
                x: job.x.as_ptr().wrapping_add(first * inputs + at),
                x_row: inputs,
                behind,
                bytes,
                out: job.out.wrapping_add(first * outputs + column),
                out_row: outputs,
                columns: PANEL.min(outputs - column),
                bias: job.bias.filter(|_| at == 0).map(|bias| bias[column..].as_ptr()),
                base: match job.then {
                    _ if at > 0 => Some(job.out.wrapping_add(first * outputs + column).cast_const()),
                    Then::Accumulate => Some(job.out.wrapping_add(first * outputs + column).cast_const()),
                    Then::Add(residual) => Some(residual.as_ptr().wrapping_add(first * outputs + column)),
                    Then::Store | Then::Activate(_) => None,
                },
                activation: match job.then {
                    Then::Activate(activation) if at + steps == inputs => Some(activation),
                    _ => None,
                },
            };
            // SAFETY: the rows and columns lie inside X and the output, whose part is this task's alone; the
            // panel holds `steps` times 64 weights.
            unsafe {
                match chunk {
                    Chunk::F16(w) if direct => part.rows::<_, NQ, MR>(w.as_ptr(), rows),
                    Chunk::Bf16(w) if direct => part.rows::<_, NQ, MR>(w.as_ptr(), rows),
                    // One call for all that is f32: it is inlined.
                    wide => part.rows::<_, NQ, MR>(wide.widen(isa, room).as_ptr(), rows),
                }
            }
            at += steps;
            if at == inputs {
                break;
            }
        }
    }
}
