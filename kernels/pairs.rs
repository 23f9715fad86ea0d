//! bf16 in pairs, two terms that follow each other in one lane: what dot products take, and tiles as their
//! right operand.

use core::ops::Range;

use half::bf16;

use crate::element::{Load, Store};
use crate::isa::Isa;
use crate::pack::{MAX_ROWS, blocks};
use crate::prefill::KEYS;
use crate::tensor::Tensor;

/// The upper halves of two vectors, those of the first below those of the second.
#[inline(always)]
fn pair<I: Isa>(isa: I, first: I::f32s, second: I::f32s) -> I::f32s {
    let low = isa.wrapping_dyn_shr_u32s(isa.transmute_u32s_f32s(first), isa.splat_u32s(16));
    let high = isa.and_u32s(isa.transmute_u32s_f32s(second), isa.splat_u32s(0xffff_0000));
    isa.transmute_f32s_u32s(isa.or_u32s(low, high))
}

/// The nearest bf16, ties to even, in the upper half of each lane: for numbers far from overflow, and NaN
/// (Dekker 1971, "A floating-point technique for extending the available precision", section 4.2).
#[inline(always)]
fn rounded<I: Isa>(isa: I, x: I::f32s) -> I::f32s {
    let spread = isa.mul_f32s(x, isa.splat_f32s(65537.0));
    isa.sub_f32s(spread, isa.sub_f32s(spread, x))
}

/// Packs queries: lane `i` of `packed[c]` is features `2c` and `2c + 1` of row `i` times `factor`, a power of
/// two; zeros behind the features, up to `pairs`.
///
/// # Safety
/// Each of the first `NQ * LANES` rows must be one of `q`, of bf16; `packed` must hold `pairs * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn pack<I: Isa, const NQ: usize>(
    isa: I,
    q: &Tensor<'_>,
    rows: &[*const u8; MAX_ROWS],
    factor: f32,
    packed: *mut I::f32s,
    pairs: usize,
) {
    let (lanes, d, stride) = (I::F32_LANES, q.shape()[3], q.strides()[3]);
    // SAFETY: the caller's.
    unsafe {
        if q.is_dense() && d == 2 * pairs && pairs >= lanes {
            let scale = isa.splat_f32s(factor);
            for n in 0..NQ {
                for c in blocks(pairs, lanes) {
                    let mut square = isa.square();
                    for (x, row) in square.as_mut().iter_mut().zip(&rows[n * lanes..]) {
                        *x = f32::load(isa, row.cast::<f32>().wrapping_add(c));
                    }
                    for (t, x) in isa.transpose(square).as_ref().iter().enumerate() {
                        let bits = isa.transmute_u32s_f32s(*x);
                        let low =
                            isa.transmute_f32s_u32s(isa.wrapping_dyn_shl_u32s(bits, isa.splat_u32s(16)));
                        let high = isa.transmute_f32s_u32s(isa.and_u32s(bits, isa.splat_u32s(0xffff_0000)));
                        *packed.add((c + t) * NQ + n) =
                            pair(isa, isa.mul_f32s(low, scale), isa.mul_f32s(high, scale));
                    }
                }
            }
            return;
        }
        let places = core::slice::from_raw_parts_mut(packed.cast::<[bf16; 2]>(), pairs * NQ * lanes);
        places.fill([bf16::ZERO; 2]);
        for (i, row) in rows[..NQ * lanes].iter().enumerate() {
            for c in 0..d {
                let x = (*row.wrapping_offset(c as isize * stride).cast::<bf16>()).to_f32_const();
                places[c / 2 * NQ * lanes + i][c % 2] = bf16::from_f32_const(x * factor);
            }
        }
    }
}

/// Rounds weights to bf16 and pairs them, in place: vector `p` comes from the rows `2p` and `2p + 1` of the
/// first `rows`, an even number, of which those outside `used` count as zeros.
///
/// # Safety
/// `st` must hold `rows * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn weights<I: Isa, const NQ: usize>(
    isa: I,
    st: *mut I::f32s,
    rows: usize,
    used: Range<usize>,
) {
    let zero = isa.splat_f32s(0.0);
    // SAFETY: the caller's. A pair is written no further along than it was read.
    unsafe {
        for row in (0..used.start).chain(used.end..rows) {
            for n in 0..NQ {
                *st.add(row * NQ + n) = zero;
            }
        }
        for p in 0..rows / 2 {
            for n in 0..NQ {
                let (first, second) = (*st.add(2 * p * NQ + n), *st.add((2 * p + 1) * NQ + n));
                *st.add(p * NQ + n) = pair(isa, rounded(isa, first), rounded(isa, second));
            }
        }
    }
}

/// Copies keys, row `j` being key `j` of the block that `keys` lie in, with zeros behind the features, up to
/// `width`, and in the rows of other keys.
///
/// # Safety
/// `keys` must lie inside the axis of `k`, of bf16, and in one block of `KEYS`; `to` must hold
/// `KEYS * width` elements.
pub(crate) unsafe fn keys(
    k: &Tensor<'_>,
    [b, hk]: [usize; 2],
    keys: &Range<usize>,
    width: usize,
    to: *mut bf16,
) {
    let (d, stride, start) = (k.shape()[3], k.strides()[3], keys.start / KEYS * KEYS);
    // SAFETY: the caller's.
    unsafe {
        let rows = core::slice::from_raw_parts_mut(to, KEYS * width);
        for (j, to) in rows.chunks_exact_mut(width).enumerate() {
            let key = start + j;
            let (features, rest) = to.split_at_mut(d);
            if !keys.contains(&key) {
                to.fill(bf16::ZERO);
                continue;
            }
            rest.fill(bf16::ZERO);
            let row = k.row(b, hk, key);
            // Without features a row may be anywhere, also where no slice may be.
            if k.is_dense() && d > 0 {
                features.copy_from_slice(core::slice::from_raw_parts(row.cast(), d));
                continue;
            }
            for (c, x) in features.iter_mut().enumerate() {
                *x = *row.wrapping_offset(c as isize * stride).cast();
            }
        }
    }
}

/// Pairs values: element `c` of row `p` is feature `c` of keys `2p` and `2p + 1` of the block that `keys` lie in,
/// zero where the key is not among them or its bit in `shown` is 0. Only pairs with one of `keys` are written.
///
/// # Safety
/// As for [`keys`], of `v`; `to` must hold `KEYS / 2 * Dv` pairs.
#[inline(always)]
pub(crate) unsafe fn pair_values<I: Isa>(
    isa: I,
    v: &Tensor<'_>,
    head: [usize; 2],
    keys: &Range<usize>,
    shown: u64,
    to: *mut [bf16; 2],
) {
    let (lanes, dv, stride) = (I::F32_LANES, v.shape()[3], v.strides()[3]);
    let (rows, start) = (shown_rows(v, head, keys, shown), keys.start / KEYS * KEYS);
    // SAFETY: the caller's.
    unsafe {
        for p in (keys.start - start) / 2..(keys.end - start).div_ceil(2) {
            let (both, to) = ([rows[2 * p], rows[2 * p + 1]], to.add(p * dv));
            if v.is_dense() && dv >= lanes {
                for c in blocks(dv, lanes) {
                    let [first, second] = both.map(|row| load(isa, row, c));
                    f32::store(isa, to.add(c).cast(), pair(isa, first, second));
                }
                continue;
            }
            for c in 0..dv {
                let one = |row: *const u8| {
                    if row.is_null() { bf16::ZERO } else { *row.wrapping_offset(c as isize * stride).cast() }
                };
                *to.add(c) = both.map(one);
            }
        }
    }
}

/// The rows of the keys of a block, those of `keys` whose bit in `shown` is 1; the others null.
#[inline(always)]
fn shown_rows(v: &Tensor<'_>, [b, hk]: [usize; 2], keys: &Range<usize>, shown: u64) -> [*const u8; KEYS] {
    let start = keys.start / KEYS * KEYS;
    let mut rows = [core::ptr::null(); KEYS];
    for (j, row) in rows.iter_mut().enumerate() {
        if keys.contains(&(start + j)) && shown >> j & 1 == 1 {
            *row = v.row(b, hk, start + j);
        }
    }
    rows
}

/// A vector of a row from feature `c` on, or zeros if it is null.
///
/// # Safety
/// The row must have these features, of bf16.
#[inline(always)]
unsafe fn load<I: Isa>(isa: I, row: *const u8, c: usize) -> I::f32s {
    // SAFETY: the caller's.
    if row.is_null() { isa.splat_f32s(0.0) } else { unsafe { bf16::load(isa, row.cast::<bf16>().add(c)) } }
}

/// Transposes values: element `j` of row `c` is feature `c` of key `j` of the block that `keys` lie in, zero
/// where the key is not among them or bit `j` of `shown` is 0, and behind the features, up to `height`.
///
/// # Safety
/// As for [`keys`], of `v`; `to` must hold `height * KEYS` elements.
#[inline(always)]
pub(crate) unsafe fn values<I: Isa>(
    isa: I,
    v: &Tensor<'_>,
    head: [usize; 2],
    keys: &Range<usize>,
    height: usize,
    shown: u64,
    to: *mut bf16,
) {
    let (lanes, dv, stride) = (I::F32_LANES, v.shape()[3], v.strides()[3]);
    let rows = shown_rows(v, head, keys, shown);
    // SAFETY: the caller's.
    unsafe {
        if v.is_dense() && dv == height && dv.is_multiple_of(lanes) {
            for p in (0..KEYS / 2).step_by(lanes) {
                for c in (0..dv).step_by(lanes) {
                    let mut square = isa.square();
                    for (i, x) in square.as_mut().iter_mut().enumerate() {
                        let first = load(isa, rows[2 * (p + i)], c);
                        *x = pair(isa, first, load(isa, rows[2 * (p + i) + 1], c));
                    }
                    for (t, x) in isa.transpose(square).as_ref().iter().enumerate() {
                        f32::store(isa, to.cast::<f32>().add((c + t) * KEYS / 2 + p), *x);
                    }
                }
            }
            return;
        }
        core::slice::from_raw_parts_mut(to, height * KEYS).fill(bf16::ZERO);
        for (j, row) in rows.iter().enumerate().filter(|(_, row)| !row.is_null()) {
            for c in 0..dv {
                *to.add(c * KEYS + j) = *row.wrapping_offset(c as isize * stride).cast();
            }
        }
    }
}
