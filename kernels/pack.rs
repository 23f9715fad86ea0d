//! Transposes and copies between the caller's memory and scratch.
//!
//! Blocks of `LANES x LANES` go through registers. Where the features are not a multiple of `LANES` the last
//! block overlaps the one before, so nothing outside a row is touched and there is no slow tail; rows shorter
//! than a vector, or with an inner stride, go element by element.

use crate::Element;
use crate::element::Lanes;
use crate::isa::Isa;

/// The most rows a block of queries can have: `NQ * LANES` at any level.
pub(crate) const MAX_ROWS: usize = 64;

/// Starts of the column blocks that cover `0..n`, the last one overlapping; none if a vector does not fit.
#[inline(always)]
fn blocks(n: usize, lanes: usize) -> impl Iterator<Item = usize> {
    let count = if n < lanes { 0 } else { n.div_ceil(lanes) };
    (0..count).map(move |i| (i * lanes).min(n - lanes))
}

/// Packs queries: `packed[c][i] = rows[i][c] * factor`, `NQ` vectors for each feature `c < d`.
///
/// # Safety
/// Each of the first `NQ * LANES` rows must be readable at `c * stride` for `c < d`; `packed` must hold
/// `d * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn pack<I: Isa, T: Element, const NQ: usize>(
    isa: I,
    rows: &[*const T; MAX_ROWS],
    stride: isize,
    d: usize,
    factor: f32,
    packed: *mut I::f32s,
) {
    let lanes = I::F32_LANES;
    if stride != 1 || d < lanes {
        for c in 0..d {
            for (i, row) in rows[..NQ * lanes].iter().enumerate() {
                // SAFETY: the caller's.
                unsafe {
                    let x = (*row.wrapping_offset(c as isize * stride)).to_f32() * factor;
                    *packed.cast::<f32>().add(c * NQ * lanes + i) = x;
                }
            }
        }
        return;
    }
    let factor = isa.splat_f32s(factor);
    for n in 0..NQ {
        for c in blocks(d, lanes) {
            let mut square = isa.square();
            for (x, row) in square.as_mut().iter_mut().zip(&rows[n * lanes..]) {
                // SAFETY: `c + lanes <= d`.
                *x = unsafe { T::load(isa, row.wrapping_add(c)) };
            }
            for (t, x) in isa.transpose(square).as_ref().iter().enumerate() {
                // SAFETY: `c + t < d`.
                unsafe { *packed.add((c + t) * NQ + n) = isa.mul_f32s(*x, factor) };
            }
        }
    }
}

/// NaN as the one NaN, and 0 as the positive one: which NaN a sum returns is up to the order of its operands,
/// and whether a sum of underflown terms ends at -0 to whether a 0 was added for a hidden pair.
#[inline(always)]
pub(crate) fn canonical(x: f32) -> f32 {
    if x.is_nan() { f32::NAN } else { x + 0.0 }
}

/// Writes the output: `rows[i][c] = packed[c][i] * factor[i]` for the first `count` rows, [`canonical`].
///
/// # Safety
/// Each of the first `count` rows must be writable at `c * stride` for `c < dv`; `packed` must hold `dv * NQ`
/// vectors.
#[inline(always)]
pub(crate) unsafe fn unpack<I: Isa, T: Element, const NQ: usize>(
    isa: I,
    packed: *const I::f32s,
    factor: [I::f32s; NQ],
    rows: &[*mut T; MAX_ROWS],
    count: usize,
    stride: isize,
    dv: usize,
) {
    let lanes = I::F32_LANES;
    if stride != 1 || dv < lanes {
        for (i, row) in rows[..count].iter().enumerate() {
            for c in 0..dv {
                // SAFETY: the caller's; `factor` is `NQ * LANES` f32.
                unsafe {
                    let x =
                        *packed.cast::<f32>().add(c * NQ * lanes + i) * *factor.as_ptr().cast::<f32>().add(i);
                    *row.wrapping_offset(c as isize * stride) = T::from_f32(canonical(x));
                }
            }
        }
        return;
    }
    let nan = isa.splat_f32s(f32::NAN);
    for (n, factor) in factor.into_iter().enumerate() {
        let rows = &rows[(n * lanes).min(count)..count.min((n + 1) * lanes)];
        for c in blocks(dv, lanes) {
            let mut square = isa.square();
            for (t, x) in square.as_mut().iter_mut().enumerate() {
                // SAFETY: `c + t < dv`.
                let y = isa.mul_f32s(unsafe { *packed.add((c + t) * NQ + n) }, factor);
                let y = isa.add_f32s(y, isa.splat_f32s(0.0));
                *x = isa.select_f32s(isa.equal_f32s(y, y), y, nan);
            }
            for (x, row) in isa.transpose(square).as_ref().iter().zip(rows) {
                // SAFETY: `c + lanes <= dv`.
                unsafe { T::store(isa, row.wrapping_add(c), *x) };
            }
        }
    }
}

/// Copies `n` rows of `d` elements to compact f32 rows.
///
/// # Safety
/// `src + j * row + c * stride` must be readable for `j < n`, `c < d`; `dst` must hold `n * d` f32.
#[inline(always)]
pub(crate) unsafe fn copy<I: Isa, T: Element>(
    isa: I,
    src: *const T,
    [row, stride]: [isize; 2],
    n: usize,
    d: usize,
    dst: *mut f32,
) {
    for j in 0..n {
        let (src, dst) = (src.wrapping_offset(j as isize * row), dst.wrapping_add(j * d));
        if stride == 1 && d >= I::F32_LANES {
            for c in blocks(d, I::F32_LANES) {
                // SAFETY: `c + LANES <= d`.
                unsafe { f32::store(isa, dst.add(c), T::load(isa, src.wrapping_add(c))) };
            }
        } else {
            for c in 0..d {
                // SAFETY: the caller's.
                unsafe { *dst.add(c) = (*src.wrapping_offset(c as isize * stride)).to_f32() };
            }
        }
    }
}
