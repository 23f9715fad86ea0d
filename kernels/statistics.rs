//! What a row of attention looks like, in numbers, in the same pass as the attention itself.
//!
//! ```text
//! t(j) = s(j) - m,  w(j) = 4^t(j),  l = sum of w(j)            m: running maximum; a sink has t = sink - m
//! entropy   = ln l - ln 4 (sum of w t) / l                      -ln p(j) = ln l - t(j) ln 4
//! distance  = (sum of w (pos - j)) / l,  largest = 4^(s_max - m) / l,  and so on
//! ```
//!
//! All of these sums are lane-wise, beside the sum of the softmax: a new maximum rescales them like `l`, and
//! `sum of w t` moves by `(m_old - m_new) l`. A key block costs a few operations for each score more; the
//! masses on single keys are read out of the block that holds them.

use core::ops::Range;

use crate::block::{Block, Buffers, Stack};
use crate::exp::UNDERFLOW_4;
use crate::isa::Isa;
use crate::products::shift;
use crate::received::Columns;
use crate::terms::Rows;
pub(crate) use finish::Finish;

mod finish;

/// The statistics of one query row. `p(j)` are its weights; a sink is one more key, without index, place and
/// value: its weight counts in the entropy and nowhere else. All numbers of a row that sees no key are 0.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C, align(64))]
pub struct RowStatistics {
    /// `-sum over j of p(j) ln p(j)`, in nats, the sink's term included.
    pub entropy: f32,
    /// The entropy divided by that of equal weights, the logarithm of the number of visible keys (with a
    /// sink, one more); 0 where that number is below 2.
    pub normalised_entropy: f32,
    /// The largest weight of a key.
    pub largest: f32,
    /// The weight of key 0.
    pub first: f32,
    /// The weights of the special keys together.
    pub special: f32,
    /// `sum over j of p(j) (pos - j)`: positive where the row looks back.
    pub distance: f32,
    /// `sum over j of p(j) |pos - j|`.
    pub absolute_distance: f32,
    /// The weight of the key at `pos`; 0 where there is none.
    pub diagonal: f32,
    /// The weight of the key at `pos - 1`.
    pub previous: f32,
    /// The weight of the key at `pos + 1`.
    pub next: f32,
    /// The Euclidean norm of the output, gate included, before it is rounded to its type.
    pub norm: f32,
    /// The key of the largest weight, the first one of equals.
    pub largest_key: u32,
    /// Visible keys.
    pub keys: u32,
}

/// Sums over the rows of a head that see a key.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[repr(C)]
pub struct HeadSums {
    /// Of the f32 of [`RowStatistics`], in their order.
    pub sums: [f64; SUMMED],
    /// Rows that see a key.
    pub rows: u64,
    /// Those of them that see more than one, or a sink, too.
    pub several: u64,
    /// Those of them that have a valid key at `pos`, at `pos - 1` and at `pos + 1`.
    pub near: [u64; 3],
}

/// How many f32 there are in [`RowStatistics`].
const SUMMED: usize = 11;

impl HeadSums {
    /// Adds those of other rows.
    pub fn add(&mut self, other: &Self) {
        self.sums.iter_mut().zip(other.sums).for_each(|(sum, x)| *sum += x);
        self.near.iter_mut().zip(other.near).for_each(|(sum, x)| *sum += x);
        self.rows += other.rows;
        self.several += other.several;
    }
}

/// What [`crate::Call::split_with_statistics`] writes and needs beside the call.
#[derive(Debug)]
pub struct Observe<'a> {
    /// The sums of each head, `[B, Hq]`.
    pub heads: &'a mut [HeadSums],
    /// The statistics of each row, where [`crate::Call::row_index`] says.
    pub rows: Option<&'a mut [RowStatistics]>,
    /// The special keys, `[B, Lk]`.
    pub special: Option<&'a [bool]>,
    /// What each key receives, `sum over i of p(i, j)`, `[B, Hq, Lk]`.
    pub received: Option<&'a mut [f32]>,
}

/// Where the statistics of a task go, and which keys are special, `[B, Lk]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sink<'a> {
    pub rows: Option<*mut RowStatistics>,
    pub special: Option<&'a [bool]>,
    /// The task's part in the sums of head 0, in f32 to that of the next head, and whether what keys receive
    /// follows the sums.
    pub part: *mut f32,
    pub stride: usize,
    pub received: bool,
    /// Where a task adds up what keys receive.
    pub columns: Columns,
}

/// f32 of the sums in a part.
pub(crate) const HEAD: usize = size_of::<HeadSums>() / size_of::<f32>();

impl<'a> Sink<'a> {
    /// For parts that begin at `part`, before what the tasks add.
    pub fn new(
        rows: Option<*mut RowStatistics>,
        special: Option<&'a [bool]>,
        part: *mut f32,
        stride: usize,
        received: bool,
    ) -> Self {
        Self { rows, special, part, stride, received, columns: Columns::NONE }
    }

    /// The task's sums of a head.
    #[inline(always)]
    fn sums(&self, head: usize) -> *mut HeadSums {
        self.part.wrapping_add(head * self.stride).cast()
    }

    /// What keys receive from the task's rows of a head.
    pub fn received_from(&self, head: usize) -> *mut f32 {
        self.part.wrapping_add(head * self.stride + HEAD)
    }
}

/// Sums of a block of rows, relative to the running maximum.
#[repr(C)]
struct Sums<I: Isa, const NQ: usize> {
    /// Not a sum: the position, and the largest score of a key and that key.
    pos: [I::f32s; NQ],
    largest: [I::f32s; NQ],
    largest_key: [I::u32s; NQ],
    /// Visible keys, where a mask or bias may hide some.
    keys: [I::f32s; NQ],
    /// `w t`.
    scores: [I::f32s; NQ],
    /// `w (pos - j)` and `w |pos - j|`.
    distance: [[I::f32s; NQ]; 2],
    /// `w` of key 0, and of the special keys.
    named: [[I::f32s; NQ]; 2],
    /// `w` of the keys at `pos - 1`, `pos` and `pos + 1`.
    near: [[I::f32s; NQ]; 3],
}

/// Vectors in [`Sums`] for each vector of rows.
pub(crate) const SUMS: usize = 12;

/// Starts the sums.
///
/// # Safety
/// The buffers must hold blocks of `NQ` vectors, with sums.
#[inline(always)]
pub(crate) unsafe fn begin<I: Isa, const NQ: usize>(
    isa: I,
    stack: &Stack<'_>,
    rows: &Rows<'_>,
    buffers: Buffers<I::f32s>,
) {
    const { assert!(size_of::<Sums<I, NQ>>() == SUMS * NQ * size_of::<I::f32s>()) };
    let (zero, first) = (isa.splat_f32s(0.0), stack.call.pos(stack.b, 0));
    // SAFETY: the caller's. Written in place: a whole `Sums` would be copied.
    let sums = unsafe { &mut *buffers.sums.cast::<Sums<I, NQ>>() };
    sums.pos = rows.lanes(isa, |_, token| first.saturating_add(token as i64) as f32);
    for x in 0..NQ {
        (sums.largest[x], sums.largest_key[x]) = (isa.splat_f32s(f32::NEG_INFINITY), isa.splat_u32s(0));
        (sums.keys[x], sums.scores[x]) = (zero, zero);
        for sum in sums.distance.iter_mut().chain(&mut sums.named).chain(&mut sums.near) {
            sum[x] = zero;
        }
    }
}

/// One step of the online softmax, as in `products.rs`, with the sums for the statistics. Returns the factor
/// for what was accumulated under the old maximum.
pub(crate) struct Step<'a, I: Isa, const NQ: usize> {
    pub isa: I,
    pub stack: &'a Stack<'a>,
    pub block: &'a Block,
    pub buffers: Buffers<I::f32s>,
    pub sink: Sink<'a>,
    pub keys: Range<usize>,
    pub max: [I::f32s; NQ],
    pub st: *mut I::f32s,
}

impl<I: Isa, const NQ: usize> pulp::WithSimd for Step<'_, I, NQ> {
    type Output = [I::f32s; NQ];

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) -> [I::f32s; NQ] {
        // SAFETY: made in `Stack::step`, whose caller answers for the buffers.
        unsafe { self.run() }
    }
}

/// Below this a weight is 0 for certain; a score of -inf is taken for it, so that `0 * t` is 0.
const LOWEST: f32 = UNDERFLOW_4 - 1.0;

impl<I: Isa, const NQ: usize> Step<'_, I, NQ> {
    /// # Safety
    /// The buffers must hold blocks of `NQ` vectors, with sums; `st` the scores of the keys.
    #[inline(always)]
    unsafe fn run(self) -> [I::f32s; NQ] {
        let Self { isa, buffers, ref keys, max, st, .. } = self;
        // SAFETY: the caller's.
        let ([m, l], sums) = unsafe {
            (&mut *buffers.ml.cast::<[[I::f32s; NQ]; 2]>(), &mut *buffers.sums.cast::<Sums<I, NQ>>())
        };
        // SAFETY: the caller's.
        unsafe { self.before(sums) };
        let zero = isa.splat_f32s(0.0);
        let (one, lowest) = (isa.splat_f32s(1.0), isa.splat_f32s(LOWEST));
        let (mut correction, mut new) = ([zero; NQ], max);
        for x in 0..NQ {
            new[x] = isa.max_f32s(m[x], max[x]);
        }
        let shift = shift(isa, new);
        for x in 0..NQ {
            let moved = isa.sub_f32s(m[x], shift[x]);
            let factor = isa.power_of_4(moved);
            correction[x] = factor;
            // Names of their own for what the loop keeps in registers.
            let (mut sum, mut scores, mut distance, mut absolute) = (zero, zero, zero, zero);
            let mut ahead = isa.sub_f32s(sums.pos[x], isa.splat_f32s(keys.start as f32));
            for j in 0..keys.len() {
                // SAFETY: the caller's.
                let st = unsafe { &mut *st.add(j * NQ + x) };
                let t = isa.sub_f32s(*st, shift[x]);
                let w = isa.power_of_4(t);
                *st = w;
                sum = isa.add_f32s(sum, w);
                scores = isa.mul_add_e_f32s(w, isa.max_f32s(lowest, t), scores);
                distance = isa.mul_add_e_f32s(w, ahead, distance);
                absolute = isa.mul_add_e_f32s(w, isa.abs_f32s(ahead), absolute);
                ahead = isa.sub_f32s(ahead, one);
            }
            let before = isa.mul_f32s(l[x], factor);
            l[x] = isa.mul_add_e_f32s(l[x], factor, sum);
            let moved = isa.mul_add_e_f32s(before, isa.max_f32s(lowest, moved), scores);
            sums.scores[x] = isa.mul_add_e_f32s(sums.scores[x], factor, moved);
            for (sum, more) in sums.distance.iter_mut().zip([distance, absolute]) {
                sum[x] = isa.mul_add_e_f32s(sum[x], factor, more);
            }
            for sum in sums.named.iter_mut().chain(&mut sums.near) {
                sum[x] = isa.mul_f32s(sum[x], factor);
            }
        }
        *m = new;
        // SAFETY: the caller's.
        unsafe {
            if self.sink.received {
                (*buffers.kept).keep::<I, NQ>(keys, new);
            }
            self.named(&mut sums.named);
            self.near(&mut sums.near);
        }
        correction
    }

    /// From the scores: how many keys are visible, and which is the heaviest.
    ///
    /// # Safety
    /// As for [`Step::run`].
    #[inline(always)]
    unsafe fn before(&self, sums: &mut Sums<I, NQ>) {
        let Self { isa, stack, ref keys, max, st, .. } = *self;
        let (zero, one) = (isa.splat_f32s(0.0), isa.splat_f32s(1.0));
        if stack.call.is_masked() {
            let hidden = isa.splat_f32s(f32::NEG_INFINITY);
            for j in 0..keys.len() {
                for x in 0..NQ {
                    // SAFETY: the caller's.
                    let score = unsafe { *st.add(j * NQ + x) };
                    let count = isa.select_f32s(isa.equal_f32s(score, hidden), zero, one);
                    sums.keys[x] = isa.add_f32s(sums.keys[x], count);
                }
            }
        }
        for (x, max) in max.into_iter().enumerate() {
            let larger = isa.less_than_f32s(sums.largest[x], max);
            if self.sink.rows.is_none() {
                sums.largest[x] = isa.select_f32s(larger, max, sums.largest[x]);
                continue;
            }
            if isa.reduce_max_f32s(isa.select_f32s(larger, one, zero)) == 0.0 {
                continue;
            }
            sums.largest[x] = isa.select_f32s(larger, max, sums.largest[x]);
            // NaN is equal to nothing. The last one found, backwards, is the first one.
            let target = isa.select_f32s(larger, max, isa.splat_f32s(f32::NAN));
            for j in (0..keys.len()).rev() {
                // SAFETY: the caller's.
                let found = isa.equal_f32s(unsafe { *st.add(j * NQ + x) }, target);
                let key = isa.splat_u32s((keys.start + j) as u32);
                sums.largest_key[x] = isa.select_u32s(found, key, sums.largest_key[x]);
            }
        }
    }

    /// Adds the weights of key 0 and of the special keys.
    ///
    /// # Safety
    /// As for [`Step::run`]; `st` holds weights.
    #[inline(always)]
    unsafe fn named(&self, [first, special]: &mut [[I::f32s; NQ]; 2]) {
        let Self { isa, stack, ref keys, st, sink, .. } = *self;
        let add = |sum: &mut [I::f32s; NQ], j: usize| {
            for (x, sum) in sum.iter_mut().enumerate() {
                // SAFETY: the caller's.
                *sum = isa.add_f32s(*sum, unsafe { *st.add(j * NQ + x) });
            }
        };
        if keys.start == 0 {
            add(first, 0);
        }
        if let Some(flags) = sink.special {
            let flags = &flags[stack.b * stack.call.k.shape()[2]..][keys.clone()];
            // SAFETY: a block has at most 64 keys.
            let mut bits = unsafe { isa.bits(flags.as_ptr(), flags.len()) };
            while bits != 0 {
                add(special, bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }

    /// Adds the weights of the keys beside each row's position.
    ///
    /// # Safety
    /// As for [`Step::named`].
    #[inline(always)]
    unsafe fn near(&self, near: &mut [[I::f32s; NQ]; 3]) {
        let Self { stack, block, ref keys, st, .. } = *self;
        let (start, end, first) = (keys.start as i64, keys.end as i64, stack.call.pos(stack.b, 0));
        let pos = |token: usize| first.saturating_add(token as i64);
        let [from, to] = [block.row, block.row + block.count - 1].map(|row| pos(stack.token_of(row)));
        if to.saturating_add(1) < start || from.saturating_sub(1) >= end {
            return;
        }
        let (rows, width, st) = (stack.rows(block), NQ * I::F32_LANES, st.cast::<f32>());
        if let [_] = stack.heads {
            // The rows of one head stand side by side, as their keys do.
            for (near, beside) in near.iter_mut().zip([-1, 0, 1]) {
                let first = from + beside - start; // the key of row 0, from the block's first on
                let rows =
                    (-first).max(0) as usize..(end - start - first).clamp(0, block.count as i64) as usize;
                let near = near.as_mut_ptr().cast::<f32>();
                for i in rows {
                    // SAFETY: `near` has `width` lanes, of which `st` has as many for each key of the block.
                    unsafe {
                        *near.add(i) +=
                            *st.offset(first as isize * width as isize + (i * (width + 1)) as isize)
                    };
                }
            }
            return;
        }
        rows.each(block.count, |i, _, token| {
            let pos = pos(token);
            for (beside, near) in near.iter_mut().enumerate() {
                let key = pos.saturating_add(beside as i64 - 1);
                if (start..end).contains(&key) {
                    // SAFETY: `near` has `width` lanes, of which `st` has as many for each key of the block.
                    unsafe {
                        *near.as_mut_ptr().cast::<f32>().add(i) += *st.add((key - start) as usize * width + i)
                    };
                }
            }
        });
    }
}
