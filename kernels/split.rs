//! The split of a call into tasks: each is the exclusive right to compute some output rows, or the part of
//! them that some of the keys give. What passes here is sound to compute from many threads.

use core::marker::PhantomData;
use core::ops::Range;
use core::sync::atomic::AtomicUsize;

use crate::call::{expect, length};
use crate::join;
use crate::pack::MAX_ROWS;
use crate::prefill::KEYS;
use crate::statistics::Sink;
use crate::view::count;
use crate::{Call, DType, Element, Error, Level, Scratch, Stage, ViewMut};
use analysis::Observed;

mod analysis;
mod run;

/// How a call is split into tasks: (batch entry, key/value head, queries, keys). A task has all the query
/// heads of its key/value head, so that K and V are read once for them (one, where it tells what keys receive). None of this changes a bit of the
/// result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// Queries of a task, where there are many.
    pub tokens: usize,
    /// Tasks that a thread takes at a time: while it computes one it asks for the memory of the next.
    pub run: usize,
    /// What becomes of the spans that the keys of few queries are computed in.
    pub spans: Spans,
}

/// Few query rows take their keys in spans, whose results are joined in order. Where they lie is up to the
/// number of keys and changes the rounding; who computes them does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spans {
    /// One task computes all of them.
    Together,
    /// Each is a task of its own: for fewer heads than threads.
    Apart,
}

/// The kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// For many query rows: rows in the lanes.
    Prefill,
    /// For few query rows on a key/value head: features in the lanes.
    Decode,
}

/// Keys of a span at least: joining costs the work of a few keys.
const SPAN: usize = 1024;

/// Spans at most: their results take memory.
const MOST_SPANS: usize = 32;

/// The tasks of a call, to be computed by as many threads as there are. No two of them write the same row.
#[derive(Debug)]
pub struct Tasks<'a> {
    call: &'a Call<'a>,
    job: Job<'a>,
    /// Batch entries, key/value heads (or query heads, where a task has one alone), blocks of queries, spans
    /// of keys.
    grid: [usize; 4],
    /// Queries of a block.
    tokens: usize,
    /// Tasks that are given out at a time.
    run: usize,
    /// The next task to give out.
    next: AtomicUsize,
}

#[derive(Debug)]
enum Job<'a> {
    Attend { parts: *mut f32, out: RowsMut<'a> },
    Scores { stage: Stage, heads: Range<usize>, queries: Range<usize>, out: RowsMut<'a> },
    Observe { observed: Observed<'a>, out: RowsMut<'a> },
}

// SAFETY: what is shared is read only, but for the rows of the output, LSE, statistics and parts, and of those
// each task owns its own alone: `Tasks::take` gives every number out once, different numbers are different
// (batch, head, tokens or span), and different rows are different places (`ViewMut`, or compact). What parts
// are joined to is for `Tasks::finish`, which has the tasks alone.
unsafe impl Send for Tasks<'_> {}
unsafe impl Sync for Tasks<'_> {}

/// The right to compute some keys' part in the rows of some queries and of query heads on one key/value head:
/// all of them, or one.
#[derive(Clone)]
pub(crate) struct Task<'a> {
    pub call: &'a Call<'a>,
    pub b: usize,
    pub hk: usize,
    pub heads: Range<usize>,
    pub tokens: Range<usize>,
    pub keys: Range<usize>,
    /// Where the keys end that the same thread computes next.
    pub ahead: usize,
    /// What the same thread computes after this.
    pub after: Option<Unit>,
    /// Where the records of the head's rows go, or null where the rows themselves are written.
    pub part: *mut f32,
    pub rows: RowsMut<'a>,
}

/// A batch entry, a key/value head and a first query.
#[derive(Clone, Copy)]
pub(crate) struct Unit {
    pub b: usize,
    pub hk: usize,
    pub token: usize,
}

/// As [`Task`], for the scores of some of these heads.
pub(crate) struct ScoresTask<'a> {
    pub call: &'a Call<'a>,
    pub b: usize,
    pub hk: usize,
    pub tokens: Range<usize>,
    pub heads: Range<usize>,
    pub stage: Stage,
    pub out: RowsMut<'a>,
}

/// Pointers to a whole output. Only the rows named by the owning task may be written through it: their places
/// are disjoint but interleaved (`[B, L, H, D]`), which slices cannot express.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowsMut<'a> {
    ptr: *mut u8,
    pub dtype: DType,
    /// In bytes.
    pub strides: [isize; 4],
    /// Head and token of row `[_, 0, 0]`.
    first: [usize; 2],
    /// Of packed rows, the first token of each batch entry.
    starts: Option<&'a [usize]>,
    pub lse: Option<*mut f32>,
    pub statistics: Option<Sink<'a>>,
    _data: PhantomData<&'a mut [u8]>,
}

impl RowsMut<'_> {
    /// Start of the row of a head and token.
    #[inline(always)]
    pub fn row(&self, b: usize, head: usize, token: usize) -> *mut u8 {
        let (b, token) = self.starts.map_or((b, token), |starts| (0, starts[b] + token));
        let index = [b, head - self.first[0], token - self.first[1]];
        let offset = index.iter().zip(self.strides).fold(0, |sum, (&i, stride)| sum + i as isize * stride);
        self.ptr.wrapping_offset(offset)
    }

    /// Whether the features of a row lie side by side.
    #[inline(always)]
    pub fn is_dense(&self) -> bool {
        self.strides[3] == self.dtype.size() as isize
    }
}

impl Call<'_> {
    /// Splits the work into tasks, which together write every row: `out` has the shape `[B, Hq, Lq, Dv]`,
    /// `lse` is compact `[B, Hq, Lq]`. `parts` lends the memory for what has to be joined.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Length`] if `out` or `lse` has another size, [`Error::Type`] if `out` is
    /// not of the type of Q, [`Error::Tokens`] if sequences of `out` are not as long as those of Q,
    /// [`Error::TooLarge`] for parts beyond what there can be.
    pub fn split<'o, T: Element>(
        &'o self,
        split: Split,
        out: ViewMut<'o, T>,
        lse: Option<&'o mut [f32]>,
        parts: &'o mut Scratch,
    ) -> Result<Tasks<'o>, Error> {
        let out = self.rows_of(out, lse)?;
        let ([b, _, lq, _], hk) = (self.q.shape(), self.kv_heads());
        let tokens = split.tokens.max(1);
        let mut grid = [b, hk, lq.div_ceil(tokens), 1];
        if self.group == 0 || grid.contains(&0) {
            grid = [0; 4]; // the other sizes may be huge
        }
        let mut ptr = core::ptr::null_mut();
        if split.spans == Spans::Apart && grid[0] > 0 {
            grid[3] = (0..b).map(|b| self.spans(b).1).max().unwrap_or(1);
            if grid[3] > 1 {
                let shape = [b, hk, grid[3], self.part_len()];
                let floats = count(shape).ok_or(Error::TooLarge { argument: "parts", shape })?;
                ptr = parts.floats(floats).as_mut_ptr();
            }
        }
        let job = Job::Attend { parts: ptr, out };
        Ok(Tasks { call: self, job, grid, tokens, run: split.run.max(1), next: AtomicUsize::new(0) })
    }

    /// The right to write all rows, whose places must fit the call.
    fn rows_of<'o, T: Element>(
        &self,
        mut out: ViewMut<'o, T>,
        lse: Option<&'o mut [f32]>,
    ) -> Result<RowsMut<'o>, Error> {
        expect("out", out.shape(), self.out_shape())?;
        if T::DTYPE != self.q.dtype {
            return Err(Error::Type { argument: "out", got: T::DTYPE, expected: self.q.dtype });
        }
        if let Some(lse) = &lse {
            length("lse", lse.len(), self.rows())?;
        }
        let [b, _, lq, _] = self.q.shape();
        let starts = out.starts();
        if starts.is_some() || !self.q.is_strided() {
            let len = |b: usize| starts.map_or(lq, |starts| starts[b + 1] - starts[b]);
            (0..b).try_for_each(|b| crate::call::tokens("out", b, len(b), self.q.len(b)))?;
        }
        let (strides, ptr) = (bytes(out.strides(), T::DTYPE), out.as_mut_ptr().cast());
        let lse = lse.map(|lse| lse.as_mut_ptr());
        let (dtype, first) = (T::DTYPE, [0, 0]);
        Ok(RowsMut { ptr, dtype, strides, first, starts, lse, statistics: None, _data: PhantomData })
    }

    /// As [`Call::split`], for the scores of some heads and queries: `out` is compact `[B, heads.len(),
    /// queries.len(), Lk]`. Values are not read; the call must have been made with `Dv = 0`.
    ///
    /// # Errors
    /// [`Error::Range`] if heads or queries reach beyond their axes, [`Error::Length`] if `out` has
    /// another length, [`Error::Shape`] if `Dv` is not 0, [`Error::TooLarge`] if no such `out` can be.
    pub fn split_scores<'o>(
        &'o self,
        stage: Stage,
        heads: Range<usize>,
        queries: Range<usize>,
        out: &'o mut [f32],
        tokens: usize,
    ) -> Result<Tasks<'o>, Error> {
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
        let (ptr, dtype, strides) = (out.as_mut_ptr().cast(), DType::F32, bytes(strides, DType::F32));
        let (first, starts, lse, statistics) = ([heads.start, queries.start], None, None, None);
        let out = RowsMut { ptr, dtype, strides, first, starts, lse, statistics, _data: PhantomData };
        let tokens = tokens.max(1);
        let mut grid = [0; 4];
        if len > 0 {
            let kv_heads = heads.end.div_ceil(self.group) - heads.start / self.group;
            grid = [b, kv_heads, queries.len().div_ceil(tokens), 1];
        }
        let job = Job::Scores { stage, heads, queries, out };
        Ok(Tasks { call: self, job, grid, tokens, run: 1, next: AtomicUsize::new(0) })
    }

    /// The kernel for a batch entry.
    ///
    /// # Errors
    /// [`Error::LevelUnavailable`].
    pub fn kernel(&self, level: Level, b: usize) -> Result<Kernel, Error> {
        let few = self.group.saturating_mul(self.q_len(b)) <= level.few_rows()?;
        Ok(if few { Kernel::Decode } else { Kernel::Prefill })
    }

    /// Size and number of the spans that the keys of a batch entry are computed in.
    pub fn spans(&self, b: usize) -> (usize, usize) {
        let len = self.kv_len(b);
        let mut span = len.max(1);
        if self.group.saturating_mul(self.q_len(b)) <= MAX_ROWS {
            span = len.div_ceil(MOST_SPANS).max(SPAN).next_multiple_of(KEYS);
        }
        (span, len.div_ceil(span).max(1))
    }

    /// f32 of the records of one key/value head's rows over one span.
    fn part_len(&self) -> usize {
        let rows = self.group.saturating_mul(self.q.shape()[2]).min(MAX_ROWS);
        rows.saturating_mul(join::record(self.v.shape()[3]))
    }
}

/// Strides in bytes. Wrapping: those of axes with one element are never used.
fn bytes(strides: [isize; 4], dtype: DType) -> [isize; 4] {
    strides.map(|stride| stride.wrapping_mul(dtype.size() as isize))
}
