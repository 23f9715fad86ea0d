//! Projections:
//!
//! ```text
//! Y[r][o] = then( sum over t of X[r][t] * W[t][o] + bias[o] )        X [rows, in], W [in, out], Y [rows, out]
//! ```
//!
//! Why it is fast: the product is a register tile of some rows times 64 outputs. Every weight vector is used
//! for all rows of the tile, every element of X is one scalar, broadcast from where it lies. The weights are
//! packed in the order of use when they are loaded, so a call packs nothing: few rows cost no more than
//! reading the weights once, which are asked for some KiB ahead; many rows run at the multiply-add limit.
//!
//! The bits of a row depend on where the inputs are cut (multiples of `STEPS`) and on nothing else: neither on
//! the rows beside it nor on the number of threads.

use core::marker::PhantomData;
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::call::length;
use crate::exp;
use crate::isa::Isa;
use crate::level::Op;
use crate::view::count;
use crate::{Error, Level};
use weights::PANEL;

pub use weights::{WeightLayout, Weights};

mod weights;

/// Inputs after which sums go to the output and come back: a panel's part of the weights, 64 KiB, stays in the
/// second-level cache for all rows of a task.
const STEPS: usize = 256;

/// Rows of a task.
const ROWS: usize = 192;

/// Steps of a tile after which to ask for more weights.
const PACE: usize = 4;

/// Floats of a cache line.
const LINE: usize = 64 / size_of::<f32>();

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

/// Functions applied to each element of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// `x/2 * (1 + erf(x / sqrt 2))` (Hendrycks and Gimpel 2016, "Gaussian Error Linear Units").
    Gelu,
    /// `x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`: the approximation in the same paper, section 2.
    GeluTanh,
    /// `x / (1 + exp(-x))`.
    Silu,
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
    /// [`Error::Length`] if a slice does not fit the weights or the others.
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
    pub fn run_next(&self, level: Level) -> Result<bool, Error> {
        let start = self.next.fetch_add(self.run, Ordering::Relaxed);
        let mut some = false;
        for task in start..start + self.run {
            let Some((job, index)) = self.find(task) else { break };
            level.dispatch(Task { job, index })?;
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
}

impl Op for Task<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa, const NQ: usize, const MR: usize>(self, isa: I) {
        let Self { job, index } = self;
        let Some(weights) = job.weights else { return };
        let (inputs, outputs, panels) = (weights.inputs(), weights.outputs(), job.panels());
        let (first, panel) = (index / panels * ROWS, index % panels);
        let rows = ROWS.min(job.rows - first);
        let column = panel * PANEL;
        let mut at = 0;
        loop {
            let steps = STEPS.min(inputs - at);
            let part = Part {
                isa,
                steps,
                x: job.x.as_ptr().wrapping_add(first * inputs + at),
                x_row: inputs,
                w: weights.panel(panel).wrapping_add(at * PANEL),
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
            unsafe { part.rows::<NQ, MR>(rows) };
            at += steps;
            if at == inputs {
                break;
            }
        }
    }
}

/// Asks for the weights that come next in memory, for the second-level cache, evenly while all tiles of some
/// rows run over those before: what comes from memory comes while there is something to compute.
struct Ahead {
    at: *const f32,
    left: usize,
    pace: usize,
}

impl Ahead {
    /// The share of tile `tile` of `tiles` in the `steps` vectors of weights at `next`.
    #[inline(always)]
    fn new(next: *const f32, steps: usize, tile: usize, tiles: usize) -> Self {
        let lines = steps * PANEL / LINE;
        let (start, end) = (tile * lines / tiles, (tile + 1) * lines / tiles);
        let left = end - start;
        Self { at: next.wrapping_add(start * LINE), left, pace: left.div_ceil((steps / PACE).max(1)) }
    }

    #[inline(always)]
    fn step<I: Isa>(&mut self, isa: I) {
        for _ in 0..self.pace.min(self.left) {
            isa.prefetch(self.at);
            self.at = self.at.wrapping_add(LINE);
            self.left -= 1;
        }
    }
}

/// Some rows times some inputs of one panel.
#[derive(Clone, Copy)]
struct Part<I> {
    isa: I,
    steps: usize,
    x: *const f32,
    x_row: usize,
    w: *const f32,
    out: *mut f32,
    out_row: usize,
    columns: usize,
    bias: Option<*const f32>,
    /// What the sums are added to, row for row as the output: it may be the output.
    base: Option<*const f32>,
    activation: Option<Activation>,
}

impl<I: Isa> Part<I> {
    /// Cuts the rows in tiles of nearly the same height: low ones wait for their own sums.
    ///
    /// # Safety
    /// As [`Part::tile`] for all rows.
    #[inline(always)]
    unsafe fn rows<const NQ: usize, const MR: usize>(self, rows: usize) {
        let tiles = rows.div_ceil(MR);
        for tile in 0..tiles {
            let (start, end) = (tile * rows / tiles, (tile + 1) * rows / tiles);
            let part = Self {
                x: self.x.wrapping_add(start * self.x_row),
                out: self.out.wrapping_add(start * self.out_row),
                base: self.base.map(|base| base.wrapping_add(start * self.out_row)),
                ..self
            };
            let mut ahead = Ahead::new(self.w.wrapping_add(self.steps * PANEL), self.steps, tile, tiles);
            // SAFETY: the caller's.
            unsafe {
                match end - start {
                    1 if NQ * I::F32_LANES < PANEL => part.tile::<8, 1>(&mut ahead),
                    1 => part.tile::<NQ, 1>(&mut ahead),
                    2 => part.tile::<NQ, 2>(&mut ahead),
                    3 => part.tile::<NQ, 3>(&mut ahead),
                    4 => part.tile::<NQ, 4>(&mut ahead),
                    5 => part.tile::<NQ, 5>(&mut ahead),
                    _ => part.tile::<NQ, 6>(&mut ahead),
                }
            }
        }
    }

    /// `M` rows times the panel, `NQ` vectors at a time.
    ///
    /// # Safety
    /// `M` rows of `steps` elements at `x`, `steps * 64` at `w`, and `M` rows of `columns` at `out`, at `base`
    /// and at `bias`.
    #[inline(always)]
    unsafe fn tile<const NQ: usize, const M: usize>(&self, ahead: &mut Ahead) {
        let wide = NQ * I::F32_LANES;
        for column in (0..self.columns).step_by(wide) {
            // SAFETY: the caller's.
            unsafe {
                let mut acc = self.product::<NQ, M>(self.w.wrapping_add(column), ahead);
                for (m, acc) in acc.iter_mut().enumerate() {
                    self.finish(m, column, acc);
                }
            }
        }
    }

    /// The register tile.
    ///
    /// # Safety
    /// As [`Part::tile`].
    #[inline(always)]
    unsafe fn product<const NQ: usize, const M: usize>(
        &self,
        w: *const f32,
        ahead: &mut Ahead,
    ) -> [[I::f32s; NQ]; M] {
        let isa = self.isa;
        let mut acc = [[isa.splat_f32s(0.0); NQ]; M];
        let (mut x, mut w) = (self.x, w);
        let mut step = |acc: &mut [[I::f32s; NQ]; M]| {
            // SAFETY: the caller's.
            unsafe {
                let vectors = w.cast::<[I::f32s; NQ]>().read_unaligned();
                for (m, acc) in acc.iter_mut().enumerate() {
                    let scalar = isa.splat_f32s(*x.wrapping_add(m * self.x_row));
                    for (acc, vector) in acc.iter_mut().zip(vectors) {
                        *acc = isa.mul_add_e_f32s(scalar, vector, *acc);
                    }
                }
            }
            x = x.wrapping_add(1);
            w = w.wrapping_add(PANEL);
        };
        let next = self.x.wrapping_add(M * self.x_row);
        for block in 0..self.steps / PACE {
            ahead.step(isa);
            for m in (block % PACE * 2..M).take(2) {
                isa.prefetch_near(next.wrapping_add(m * self.x_row + block * PACE));
            }
            for _ in 0..PACE {
                step(&mut acc);
            }
        }
        for _ in 0..self.steps % PACE {
            step(&mut acc);
        }
        acc
    }

    /// Adds what the sums are added to, applies the activation and writes.
    ///
    /// # Safety
    /// As [`Part::tile`].
    #[inline(always)]
    unsafe fn finish<const NQ: usize>(&self, m: usize, column: usize, acc: &mut [I::f32s; NQ]) {
        let (isa, lanes) = (self.isa, I::F32_LANES);
        let at = m * self.out_row + column;
        let whole = column + NQ * lanes <= self.columns;
        for (n, acc) in acc.iter_mut().enumerate() {
            let column = column + n * lanes;
            let some = if whole { lanes } else { lanes.min(self.columns.saturating_sub(column)) };
            let mut y = *acc;
            // SAFETY: the caller's; `some` columns from `column` on lie inside the row.
            unsafe {
                if let Some(bias) = self.bias {
                    y = isa.add_f32s(y, load(isa, bias.wrapping_add(column), some));
                }
                if let Some(base) = self.base {
                    y = isa.add_f32s(y, load(isa, base.wrapping_add(at + n * lanes), some));
                }
                if let Some(activation) = self.activation {
                    y = activate(isa, activation, y);
                }
                store(isa, self.out.wrapping_add(at + n * lanes), some, y);
            }
        }
    }
}

/// The first `some` lanes from memory, 0 in the others.
///
/// # Safety
/// `some` elements must be readable.
#[inline(always)]
unsafe fn load<I: Isa>(isa: I, ptr: *const f32, some: usize) -> I::f32s {
    // SAFETY: the caller's.
    unsafe {
        if some == I::F32_LANES {
            return ptr.cast::<I::f32s>().read_unaligned();
        }
        let mut x = isa.splat_f32s(0.0);
        core::ptr::copy_nonoverlapping(ptr, (&raw mut x).cast::<f32>(), some);
        x
    }
}

/// Writes the first `some` lanes.
///
/// # Safety
/// `some` elements must be writable.
#[inline(always)]
unsafe fn store<I: Isa>(_: I, ptr: *mut f32, some: usize, x: I::f32s) {
    // SAFETY: the caller's.
    unsafe {
        if some == I::F32_LANES {
            ptr.cast::<I::f32s>().write_unaligned(x);
        } else {
            core::ptr::copy_nonoverlapping((&raw const x).cast::<f32>(), ptr, some);
        }
    }
}

#[inline(always)]
fn activate<I: Isa>(isa: I, activation: Activation, x: I::f32s) -> I::f32s {
    let splat = |x: f32| isa.splat_f32s(x);
    match activation {
        Activation::Relu => isa.max_f32s(x, splat(0.0)),
        Activation::Gelu => {
            let half = isa.mul_f32s(x, splat(0.5));
            isa.mul_add_e_f32s(half, erf(isa, isa.mul_f32s(x, splat(core::f32::consts::FRAC_1_SQRT_2))), half)
        }
        Activation::GeluTanh => {
            let half = isa.mul_f32s(x, splat(0.5));
            let cube = isa.mul_f32s(isa.mul_f32s(x, x), x);
            let inner = isa.mul_add_e_f32s(cube, splat(0.044715), x);
            let inner = isa.mul_f32s(inner, splat((2.0 / core::f32::consts::PI).sqrt()));
            isa.mul_add_e_f32s(half, exp::tanh(isa, inner), half)
        }
        Activation::Silu => {
            let e = exp::exp(isa, isa.neg_f32s(isa.abs_f32s(x)));
            let y = isa.select_f32s(isa.less_than_f32s(x, splat(0.0)), e, splat(1.0));
            isa.div_f32s(isa.mul_f32s(x, y), isa.add_f32s(splat(1.0), e))
        }
    }
}

/// `erf` within 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26): `1 - (a1 t + .. + a5 t^5) exp(-x^2)` with
/// `t = 1 / (1 + p |x|)`, and the sign of x.
#[inline(always)]
fn erf<I: Isa>(isa: I, x: I::f32s) -> I::f32s {
    const A: [f32; 5] = [0.254_829_6, -0.284_496_72, 1.421_413_8, -1.453_152_1, 1.061_405_4];
    let splat = |x: f32| isa.splat_f32s(x);
    let size = isa.abs_f32s(x);
    let t = isa.div_f32s(splat(1.0), isa.mul_add_e_f32s(size, splat(0.327_591_1), splat(1.0)));
    let sum = A.into_iter().rev().fold(splat(0.0), |sum, a| isa.mul_f32s(isa.add_f32s(sum, splat(a)), t));
    let e = exp::exp(isa, isa.neg_f32s(isa.mul_f32s(x, x)));
    let y = isa.sub_f32s(splat(1.0), isa.mul_f32s(sum, e));
    isa.select_f32s(isa.less_than_f32s(x, splat(0.0)), isa.neg_f32s(y), y)
}
