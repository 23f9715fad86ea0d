//! The split of a call into tasks: each is the exclusive right to compute some output rows, or the part of
//! them that some of the keys give. What passes here is sound to compute from many threads.

use core::marker::PhantomData;
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::call::{expect, length};
use crate::join;
use crate::pack::MAX_ROWS;
use crate::prefill::KEYS;
use crate::view::count;
use crate::{Call, Element, Error, Level, Scratch, Stage, ViewMut};

/// How a call is split into tasks: (batch entry, key/value head, queries, keys). A task has all the query heads
/// of its key/value head, so that K and V are read once for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// Which kernel computes.
    pub kernel: Kernel,
    /// Queries of a task. Not for [`Kernel::Decode`], which takes all of them.
    pub tokens: usize,
    /// Keys of a task, rounded up to a multiple of 64. Where there are several spans they are joined in their
    /// order when all are done; where they lie changes the rounding.
    pub span: usize,
}

/// The kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// For many query rows: rows in the lanes.
    Prefill,
    /// For few query rows, at most 64 on a key/value head: features in the lanes.
    Decode,
}

/// The tasks of a call, to be computed by as many threads as there are. No two of them write the same row.
#[derive(Debug)]
pub struct Tasks<'a, T> {
    call: &'a Call<'a, T>,
    job: Job<'a, T>,
    /// Batch entries, key/value heads, blocks of queries, spans of keys.
    grid: [usize; 4],
    tokens: usize,
    /// The first key/value head.
    hk: usize,
    /// The next task to give out.
    next: AtomicUsize,
}

#[derive(Debug)]
enum Job<'a, T> {
    Attend { kernel: Kernel, span: usize, parts: *mut f32, out: RowsMut<'a, T> },
    Scores { stage: Stage, heads: Range<usize>, queries: Range<usize>, out: RowsMut<'a, f32> },
}

// SAFETY: what is shared is read only, but for the rows of the output and the parts, and of those each task
// owns its own alone: `Tasks::take` gives every number out once, different numbers are different (batch, head,
// tokens or span), and different rows are different places (`ViewMut`, or compact).
unsafe impl<T: Element> Send for Tasks<'_, T> {}
unsafe impl<T: Element> Sync for Tasks<'_, T> {}

/// The right to compute some keys' part in the rows of some queries and of all query heads on one key/value
/// head.
pub(crate) struct Task<'a, T> {
    pub call: &'a Call<'a, T>,
    pub b: usize,
    pub hk: usize,
    pub tokens: Range<usize>,
    pub keys: Range<usize>,
    /// Where the records of the head's rows go, or null where the rows themselves are written.
    pub part: *mut f32,
    pub rows: RowsMut<'a, T>,
}

/// The same for the scores of some of these heads.
pub(crate) struct ScoresTask<'a, T> {
    pub call: &'a Call<'a, T>,
    pub b: usize,
    pub hk: usize,
    pub tokens: Range<usize>,
    pub heads: Range<usize>,
    pub stage: Stage,
    pub out: RowsMut<'a, f32>,
}

/// Pointers to a whole output. Only the rows named by the owning task may be written through it: their places
/// are disjoint but interleaved (`[B, L, H, D]`), which slices cannot express.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowsMut<'a, T> {
    ptr: *mut T,
    pub strides: [isize; 4],
    /// Head and token of row `[_, 0, 0]`.
    first: [usize; 2],
    pub lse: Option<*mut f32>,
    _data: PhantomData<&'a mut [T]>,
}

impl<T> RowsMut<'_, T> {
    /// Start of the row of a head and token.
    #[inline(always)]
    pub fn row(&self, b: usize, head: usize, token: usize) -> *mut T {
        let index = [b, head - self.first[0], token - self.first[1]];
        let offset = index.iter().zip(self.strides).fold(0, |sum, (&i, stride)| sum + i as isize * stride);
        self.ptr.wrapping_offset(offset)
    }
}

impl<T: Element> Call<'_, T> {
    /// Splits the work into tasks, which together write every row: `out` has the shape `[B, Hq, Lq, Dv]`,
    /// `lse` is compact `[B, Hq, Lq]`. `parts` lends the memory for what has to be joined.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Length`] if `out` or `lse` has another size.
    pub fn split<'o>(
        &'o self,
        split: Split,
        mut out: ViewMut<'o, T>,
        lse: Option<&'o mut [f32]>,
        parts: &'o mut Scratch,
    ) -> Result<Tasks<'o, T>, Error> {
        expect("out", out.shape(), self.out_shape())?;
        if let Some(lse) = &lse {
            length("lse", lse.len(), self.rows())?;
        }
        let (strides, ptr) = (out.strides(), out.as_mut_ptr());
        let lse = lse.map(|lse| lse.as_mut_ptr());
        let out = RowsMut { ptr, strides, first: [0, 0], lse, _data: PhantomData };
        let ([b, _, lq, _], hk) = (self.q.shape(), self.kv_heads());
        let mut tokens = split.tokens.max(1);
        if split.kernel == Kernel::Decode {
            tokens = lq.max(1);
            expect_few(self.group.saturating_mul(lq))?;
        }
        let span = split.span.max(1).checked_next_multiple_of(KEYS).unwrap_or(usize::MAX);
        let spans = self.k.shape()[2].div_ceil(span).max(1);
        let mut grid = [b, hk, lq.div_ceil(tokens), spans];
        if self.group == 0 || grid.contains(&0) {
            grid = [0; 4]; // the other sizes may be huge
        }
        let mut ptr = core::ptr::null_mut();
        if spans > 1 && grid[0] > 0 {
            let shape = [b, hk, spans, self.part_len()];
            let floats = count(shape).ok_or(Error::TooLarge { argument: "parts", shape })?;
            ptr = parts.floats(floats).as_mut_ptr();
        }
        let job = Job::Attend { kernel: split.kernel, span, parts: ptr, out };
        Ok(Tasks { call: self, job, grid, tokens, hk: 0, next: AtomicUsize::new(0) })
    }

    /// As [`Call::split`], for the scores of some heads and queries: `out` is compact `[B, heads.len(),
    /// queries.len(), Lk]`. Values are not read; the call must have been made with `Dv = 0`.
    ///
    /// # Errors
    /// [`Error::Range`] if heads or queries reach beyond their axes, [`Error::Length`] if `out` has
    /// another length, [`Error::Shape`] if `Dv` is not 0.
    pub fn split_scores<'o>(
        &'o self,
        stage: Stage,
        heads: Range<usize>,
        queries: Range<usize>,
        out: &'o mut [f32],
        tokens: usize,
    ) -> Result<Tasks<'o, T>, Error> {
        let ([b, hq, lq, _], [_, hk, lk, _]) = (self.q.shape(), self.v.shape());
        expect("v", self.v.shape(), [b, hk, lk, 0])?;
        for (argument, range, axis) in [("heads", &heads, hq), ("queries", &queries, lq)] {
            if range.start > range.end || range.end > axis {
                return Err(Error::Range { argument, got: [range.start, range.end], axis });
            }
        }
        let shape = [b, heads.len(), queries.len(), lk];
        let len = count(shape).ok_or(Error::TooLarge { argument: "scores", shape })?;
        length("out", out.len(), len)?;
        let stride = |axes: &[usize]| axes.iter().product::<usize>() as isize;
        let strides = [stride(&shape[1..]), stride(&shape[2..]), stride(&shape[3..]), 1];
        let first = [heads.start, queries.start];
        let out = RowsMut { ptr: out.as_mut_ptr(), strides, first, lse: None, _data: PhantomData };
        let tokens = tokens.max(1);
        let mut grid = [0; 4];
        if len > 0 {
            let kv_heads = heads.end.div_ceil(self.group) - heads.start / self.group;
            grid = [b, kv_heads, queries.len().div_ceil(tokens), 1];
        }
        let hk = heads.start.checked_div(self.group).unwrap_or(0);
        let job = Job::Scores { stage, heads, queries, out };
        Ok(Tasks { call: self, job, grid, tokens, hk, next: AtomicUsize::new(0) })
    }

    /// f32 of the records of one key/value head's rows over one span.
    fn part_len(&self) -> usize {
        let rows = self.group * self.q.shape()[2];
        rows.saturating_mul(join::record(self.v.shape()[3]))
    }
}

impl<T: Element> Tasks<'_, T> {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.grid.iter().product()
    }

    /// The number of a task that nobody has got yet.
    fn take(&self) -> Option<usize> {
        let next = |n| (n < self.count()).then_some(n + 1);
        self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()
    }

    /// Computes a task that nobody has taken yet, with the kernel of `level`; `false` if there was none.
    /// Under causal the long ones come first.
    ///
    /// # Errors
    /// [`Error::LevelUnavailable`] if this processor does not have the level.
    pub fn run_next(&self, level: Level, scratch: &mut Scratch) -> Result<bool, Error> {
        let Some(number) = self.take() else { return Ok(false) };
        let ([_, hks, blocks, spans], call) = (self.grid, self.call);
        let (span_number, rest) = (number % spans, number / spans);
        let (block, hk, b) = (blocks - 1 - rest % blocks, rest / blocks % hks, rest / blocks / hks);
        let cut = |axis: Range<usize>, size: usize, block: usize| {
            let start = axis.start + block * size;
            start..axis.end.min(start.saturating_add(size))
        };
        match &self.job {
            &Job::Attend { kernel, span, parts, out: rows } => {
                let [_, _, lq, _] = call.q.shape();
                let (tokens, keys) =
                    (cut(0..lq, self.tokens, block), cut(0..call.k.shape()[2], span, span_number));
                let part = if spans > 1 {
                    parts.wrapping_add(((b * hks + hk) * spans + span_number) * call.part_len())
                } else {
                    core::ptr::null_mut()
                };
                let task = Task { call, b, hk, tokens, keys, part, rows };
                match kernel {
                    Kernel::Prefill => T::prefill(task, level, scratch)?,
                    Kernel::Decode => T::decode(task, level, scratch)?,
                }
            }
            Job::Scores { stage, heads, queries, out } => {
                let (hk, stage, out) = (hk + self.hk, *stage, *out);
                let tokens = cut(queries.clone(), self.tokens, block);
                let group = hk * call.group..(hk + 1) * call.group;
                let heads = group.start.max(heads.start)..group.end.min(heads.end);
                T::scores(ScoresTask { call, b, hk, tokens, heads, stage, out }, level, scratch)?;
            }
        }
        Ok(true)
    }

    /// Joins what the tasks have left in parts. Rows are complete only after this.
    pub fn finish(self) {
        let [batch, heads, _, spans] = self.grid;
        let Job::Attend { parts, out, .. } = self.job else { return };
        if spans < 2 {
            return;
        }
        let (call, len) = (self.call, self.call.part_len());
        for (b, hk) in (0..batch).flat_map(|b| (0..heads).map(move |hk| (b, hk))) {
            let part = parts.wrapping_add((b * heads + hk) * spans * len);
            // SAFETY: the records of all the spans of this head, and its rows; the tasks are done, `self` was
            // borrowed by them.
            unsafe { join::join(call, b, hk, part, len, spans, &out) };
        }
    }
}

fn expect_few(rows: usize) -> Result<(), Error> {
    match rows {
        0..=MAX_ROWS => Ok(()),
        got => Err(Error::BeyondAxis { argument: "query rows", index: 0, got, axis: MAX_ROWS }),
    }
}
