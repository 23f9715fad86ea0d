//! The terms between the scaled score and the softmax, on a block of transposed scores `st[j][i]`: cap,
//! slopes, bias and mask (as `extra.rs` prepares them), visibility. Each is a pass of its own over a block
//! that lies in the nearest cache; only blocks that need a pass pay for it.

use core::ops::Range;

use crate::call::Call;
use crate::isa::Isa;
use crate::pack::MAX_ROWS;

/// The query rows of a block: head and token of each lane. Lanes past its rows repeat the last one, so that
/// they compute something harmless.
pub(crate) struct Rows {
    pub head: [usize; MAX_ROWS],
    pub token: [usize; MAX_ROWS],
}

/// `st = cap * tanh(st / cap)`.
///
/// # Safety
/// `st` must hold `vectors` vectors.
#[inline(always)]
pub(crate) unsafe fn cap<I: Isa>(isa: I, st: *mut I::f32s, vectors: usize, cap: f32) {
    let (cap, inverse) = (isa.splat_f32s(cap), isa.splat_f32s(1.0 / cap));
    for x in 0..vectors {
        // SAFETY: the caller's.
        let st = unsafe { &mut *st.add(x) };
        *st = isa.mul_f32s(cap, crate::exp::tanh(isa, isa.mul_f32s(*st, inverse)));
    }
}

/// `st[j][i] -= slope_i * |pos_i - j|` for the keys `keys`.
///
/// # Safety
/// `st` must hold `keys.len() * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn slopes<I: Isa, const NQ: usize>(
    isa: I,
    call: &Call<'_>,
    b: usize,
    rows: &Rows,
    slopes: &[f32],
    st: *mut I::f32s,
    keys: Range<usize>,
) {
    // Distances from the first key of the block: exact in f32 up to 2^24.
    let ahead = |i: usize| call.pos(b, rows.token[i]).saturating_sub(keys.start as i64) as f32;
    let slope: [I::f32s; NQ] = lanes(isa, |i| -slopes[rows.head[i]]);
    let ahead: [I::f32s; NQ] = lanes(isa, ahead);
    for j in 0..keys.len() {
        let j_f32 = isa.splat_f32s(j as f32);
        for n in 0..NQ {
            // SAFETY: the caller's.
            let st = unsafe { &mut *st.add(j * NQ + n) };
            let distance = isa.abs_f32s(isa.sub_f32s(ahead[n], j_f32));
            *st = isa.mul_add_e_f32s(slope[n], distance, *st);
        }
    }
}

/// `st += extra`, where it is given (for scores of an earlier stage only hiding), and exactly -inf where
/// `extra` is -inf or the mask's bit is 0, whatever `st` was. Returns the largest score of each lane.
///
/// # Safety
/// `st` and `extra` must hold `keys * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn add<I: Isa, const NQ: usize>(
    isa: I,
    st: *mut I::f32s,
    extra: Option<*const I::f32s>,
    mask: Option<&[u64; 64]>,
    keys: usize,
    sum: bool,
) -> [I::f32s; NQ] {
    let minus_inf = isa.splat_f32s(f32::NEG_INFINITY);
    let mut max = [minus_inf; NQ];
    for j in 0..keys {
        for (n, max) in max.iter_mut().enumerate() {
            // SAFETY: the caller's.
            let st = unsafe { &mut *st.add(j * NQ + n) };
            if let Some(extra) = extra {
                // SAFETY: the caller's.
                let extra = unsafe { *extra.add(j * NQ + n) };
                let x = if sum { isa.add_f32s(*st, extra) } else { *st };
                *st = isa.select_f32s(isa.equal_f32s(extra, minus_inf), minus_inf, x);
            }
            if let Some(mask) = mask {
                *st = isa.hide(*st, mask[j] >> (n * I::F32_LANES));
            }
            *max = isa.max_f32s(*st, *max);
        }
    }
    max
}

/// Hides the pairs outside each row's interval of keys.
///
/// # Safety
/// `st` must hold `keys.len() * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn hide<I: Isa, const NQ: usize>(
    isa: I,
    call: &Call<'_>,
    b: usize,
    rows: &Rows,
    st: *mut I::f32s,
    keys: Range<usize>,
) {
    let clamp = |j: usize| j.clamp(keys.start, keys.end) - keys.start;
    let start: [I::u32s; NQ] = lanes_u32(isa, |i| clamp(call.keys(b, rows.token[i]).start) as u32);
    let len: [I::u32s; NQ] = lanes_u32(isa, |i| {
        let visible = call.keys(b, rows.token[i]);
        clamp(visible.end).saturating_sub(clamp(visible.start)) as u32
    });
    let minus_inf = isa.splat_f32s(f32::NEG_INFINITY);
    for j in 0..keys.len() {
        let j_u32 = isa.splat_u32s(j as u32);
        for n in 0..NQ {
            // SAFETY: the caller's.
            let st = unsafe { &mut *st.add(j * NQ + n) };
            // Unsigned: below the start wraps round to a large number.
            let visible = isa.less_than_u32s(isa.sub_u32s(j_u32, start[n]), len[n]);
            *st = isa.select_f32s(visible, *st, minus_inf);
        }
    }
}

/// The largest score of each lane; NaN may or may not count.
///
/// # Safety
/// `st` must hold `keys * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn max<I: Isa, const NQ: usize>(isa: I, st: *const I::f32s, keys: usize) -> [I::f32s; NQ] {
    let mut max = [isa.splat_f32s(f32::NEG_INFINITY); NQ];
    for j in 0..keys {
        for (n, max) in max.iter_mut().enumerate() {
            // SAFETY: the caller's.
            *max = isa.max_f32s(unsafe { *st.add(j * NQ + n) }, *max);
        }
    }
    max
}

/// `NQ` vectors with `f(i)` in lane `i`.
#[inline(always)]
pub(crate) fn lanes<I: Isa, const NQ: usize>(isa: I, f: impl Fn(usize) -> f32) -> [I::f32s; NQ] {
    let mut x = [isa.splat_f32s(0.0); NQ];
    let flat = x.as_mut_ptr().cast::<f32>();
    for i in 0..NQ * I::F32_LANES {
        // SAFETY: `x` is `NQ * LANES` f32.
        unsafe { *flat.add(i) = f(i) };
    }
    x
}

#[inline(always)]
fn lanes_u32<I: Isa, const NQ: usize>(isa: I, f: impl Fn(usize) -> u32) -> [I::u32s; NQ] {
    let mut x = [isa.splat_u32s(0); NQ];
    let flat = x.as_mut_ptr().cast::<u32>();
    for i in 0..NQ * I::F32_LANES {
        // SAFETY: `x` is `NQ * LANES` u32.
        unsafe { *flat.add(i) = f(i) };
    }
    x
}
