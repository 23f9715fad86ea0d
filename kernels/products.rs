//! The two products of attention as bodies of the register tile, and the online softmax between them.

use crate::isa::Isa;
use crate::tile::{self, Feed, Tile};

/// What the products of a call are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Products {
    /// Multiply-adds of f32.
    MultiplyAdds,
    /// Of bf16, two terms at a time: [`Isa::dot`].
    Dots,
    /// Of bf16, in tiles.
    Tiles,
}

/// Rows of K or V as f32, features side by side: in the caller's memory or copied to scratch. For dots a f32 is
/// two bf16, features of a key that follow each other or a feature of two values.
#[derive(Clone, Copy)]
pub(crate) struct Source {
    pub ptr: *const f32,
    /// Distance between rows.
    pub row: isize,
}

impl Source {
    /// The same rows without the first ones.
    #[inline(always)]
    pub fn skip(self, rows: usize) -> Self {
        Self { ptr: self.ptr.wrapping_offset(rows as isize * self.row), ..self }
    }
}

/// `st[j] = sum over c of k[j][c] * qt[c]`, and the maximum over j.
pub(crate) struct Scores<I: Isa, const NQ: usize, const DOTS: bool> {
    pub isa: I,
    pub d: usize,
    pub k: Source,
    pub qt: *const I::f32s,
    pub st: *mut I::f32s,
    pub max: [I::f32s; NQ],
    /// What is left of the scale, and the unit, for dots.
    pub factor: f32,
    /// Rows to ask for meanwhile.
    pub feed: Feed,
}

impl<I: Isa, const NQ: usize, const DOTS: bool> Tile for Scores<I, NQ, DOTS> {
    #[inline(always)]
    fn tile<const M: usize>(&mut self, j: usize) {
        let Self { isa, d, k, qt, st, .. } = *self;
        // SAFETY: made with D readable features for each key, and room in `st`.
        unsafe {
            let (k, feed) = (k.skip(j), &mut self.feed);
            let acc = tile::product::<I, NQ, M, DOTS>(isa, d, k.ptr, [k.row, 1], qt, feed);
            let factor = isa.splat_f32s(self.factor);
            for (m, acc) in acc.iter().enumerate() {
                for (x, acc) in acc.iter().enumerate() {
                    let acc = if DOTS { &isa.mul_f32s(*acc, factor) } else { acc };
                    self.max[x] = isa.max_f32s(*acc, self.max[x]);
                    *st.add((j + m) * NQ + x) = *acc;
                }
            }
        }
    }
}

/// `ot[c] = ot[c] * correction + sum over j of v[j][c] * st[j]`.
pub(crate) struct Values<I: Isa, const NQ: usize, const DOTS: bool> {
    pub isa: I,
    pub n: usize,
    pub v: Source,
    pub st: *const I::f32s,
    pub ot: *mut I::f32s,
    pub correction: [I::f32s; NQ],
    /// `ot` holds nothing yet.
    pub fresh: bool,
    /// Rows to ask for meanwhile.
    pub feed: Feed,
}

impl<I: Isa, const NQ: usize, const DOTS: bool> Tile for Values<I, NQ, DOTS> {
    #[inline(always)]
    fn tile<const M: usize>(&mut self, c: usize) {
        let Self { isa, n, v, st, ot, correction, fresh, .. } = *self;
        // SAFETY: made with `n` readable values, and room in `ot` for every feature.
        unsafe {
            let (v, row, feed) = (v.ptr.wrapping_add(c), v.row, &mut self.feed);
            let acc = tile::product::<I, NQ, M, DOTS>(isa, n, v, [1, row], st, feed);
            for (m, acc) in acc.iter().enumerate() {
                for (x, acc) in acc.iter().enumerate() {
                    let ot = &mut *ot.add((c + m) * NQ + x);
                    *ot = if fresh { *acc } else { isa.mul_add_e_f32s(*ot, correction[x], *acc) };
                }
            }
        }
    }
}

/// Multiplies scores by a factor and returns the largest of each lane.
///
/// # Safety
/// `st` must hold `n * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn scale<I: Isa, const NQ: usize>(
    isa: I,
    st: *mut I::f32s,
    n: usize,
    factor: f32,
) -> [I::f32s; NQ] {
    let (factor, mut max) = (isa.splat_f32s(factor), [isa.splat_f32s(f32::NEG_INFINITY); NQ]);
    for j in 0..n {
        for (x, max) in max.iter_mut().enumerate() {
            // SAFETY: the caller's.
            let st = unsafe { &mut *st.add(j * NQ + x) };
            *st = isa.mul_f32s(*st, factor);
            *max = isa.max_f32s(*st, *max);
        }
    }
    max
}

/// Turns scores into weights relative to the new maximum, in place; adds them to the sums; returns the factor
/// for what was accumulated under the old maximum.
///
/// # Safety
/// `st` must hold `n * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn softmax<I: Isa, const NQ: usize>(
    isa: I,
    st: *mut I::f32s,
    n: usize,
    max: [I::f32s; NQ],
    [m, l]: &mut [[I::f32s; NQ]; 2],
) -> [I::f32s; NQ] {
    let zero = isa.splat_f32s(0.0);
    let (mut sum, mut correction, mut new) = ([zero; NQ], [zero; NQ], max);
    for x in 0..NQ {
        new[x] = isa.max_f32s(m[x], max[x]);
    }
    let shift = shift(isa, new);
    for x in 0..NQ {
        correction[x] = isa.power_of_4(isa.sub_f32s(m[x], shift[x]));
    }
    for j in 0..n {
        for x in 0..NQ {
            // SAFETY: the caller's.
            let st = unsafe { &mut *st.add(j * NQ + x) };
            *st = isa.power_of_4(isa.sub_f32s(*st, shift[x]));
            sum[x] = isa.add_f32s(sum[x], *st);
        }
    }
    for x in 0..NQ {
        l[x] = isa.mul_add_e_f32s(l[x], correction[x], sum[x]);
    }
    *m = new;
    correction
}

/// What to subtract before the power: the maximum, or 0 where nothing is visible yet (-inf - 0 is -inf, whose
/// power is 0).
#[inline(always)]
pub(crate) fn shift<I: Isa, const NQ: usize>(isa: I, mut max: [I::f32s; NQ]) -> [I::f32s; NQ] {
    let minus_inf = isa.splat_f32s(f32::NEG_INFINITY);
    for m in &mut max {
        *m = isa.select_f32s(isa.equal_f32s(*m, minus_inf), isa.splat_f32s(0.0), *m);
    }
    max
}

/// `x / l`, and 0 where `l` is 0: where nothing is visible.
#[inline(always)]
pub(crate) fn divide<I: Isa, const NQ: usize>(
    isa: I,
    mut x: [I::f32s; NQ],
    l: [I::f32s; NQ],
) -> [I::f32s; NQ] {
    let zero = isa.splat_f32s(0.0);
    for (x, l) in x.iter_mut().zip(l) {
        *x = isa.select_f32s(isa.equal_f32s(l, zero), zero, isa.div_f32s(*x, l));
    }
    x
}
