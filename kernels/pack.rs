//! Transposes and copies between the caller's memory and scratch.
//!
//! Blocks of `LANES x LANES` go through registers. Where the features are not a multiple of `LANES` the last
//! block overlaps the one before, so nothing outside a row is touched and there is no slow tail; rows shorter
//! than a vector, or with an inner stride, go element by element.

use half::{bf16, f16};

use crate::DType;
use crate::element::{Element, Store, Stored};
use crate::isa::Isa;
use crate::split::RowsMut;
use crate::tensor::Tensor;
use crate::view::finite;

/// The most rows a block of queries can have: `NQ * LANES` at any level.
pub(crate) const MAX_ROWS: usize = 64;

/// Starts of the column blocks that cover `0..n`, the last one overlapping; none if a vector does not fit.
#[inline(always)]
pub(crate) fn blocks(n: usize, lanes: usize) -> impl Iterator<Item = usize> {
    let count = if n < lanes { 0 } else { n.div_ceil(lanes) };
    (0..count).map(move |i| (i * lanes).min(n - lanes))
}

/// Packs queries: `packed[c][i] = rows[i][c] * factor`, `NQ` vectors for each feature `c` of `q`.
///
/// # Safety
/// Each of the first `NQ * LANES` rows must be one of `q`; `packed` must hold `D * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn pack<I: Isa, const NQ: usize>(
    isa: I,
    q: &Tensor<'_>,
    rows: &[*const u8; MAX_ROWS],
    factor: f32,
    packed: *mut I::f32s,
) {
    let (stride, d) = (q.strides()[3], q.shape()[3]);
    // SAFETY: the caller's: rows of this type, with D features at their stride.
    unsafe {
        match q.dtype {
            DType::F32 => pack_rows::<I, f32, NQ>(isa, rows, stride, d, factor, packed),
            DType::F16 => pack_rows::<I, f16, NQ>(isa, rows, stride, d, factor, packed),
            DType::Bf16 => pack_rows::<I, bf16, NQ>(isa, rows, stride, d, factor, packed),
            DType::I8 => unreachable!("queries are elements"),
        }
    }
}

#[inline(always)]
unsafe fn pack_rows<I: Isa, T: Stored, const NQ: usize>(
    isa: I,
    rows: &[*const u8; MAX_ROWS],
    stride: isize,
    d: usize,
    factor: f32,
    packed: *mut I::f32s,
) {
    let lanes = I::F32_LANES;
    if stride != size_of::<T>() as isize || d < lanes {
        for c in 0..d {
            for (i, row) in rows[..NQ * lanes].iter().enumerate() {
                // SAFETY: the caller's.
                unsafe {
                    let x = (*row.wrapping_offset(c as isize * stride).cast::<T>()).to_f32() * factor;
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
                *x = unsafe { T::load(isa, row.cast::<T>().wrapping_add(c)) };
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

/// Writes the output, in its type: see [`unpack`].
///
/// # Safety
/// The rows must be some of `out`, with `dv` features; `packed` must hold `dv * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn unpack_to<I: Isa, const NQ: usize>(
    isa: I,
    packed: *const I::f32s,
    factor: [I::f32s; NQ],
    rows: &[*mut u8],
    out: &RowsMut<'_>,
    dv: usize,
) {
    let stride = out.strides[3];
    // SAFETY: the caller's: rows of this type, with features at their stride.
    unsafe {
        match out.dtype {
            DType::F32 => unpack::<I, f32, NQ>(isa, packed, factor, rows, stride, dv),
            DType::F16 => unpack::<I, f16, NQ>(isa, packed, factor, rows, stride, dv),
            DType::Bf16 => unpack::<I, bf16, NQ>(isa, packed, factor, rows, stride, dv),
            DType::I8 => unreachable!("outputs are elements"),
        }
    }
}

/// Writes rows: `rows[i][c] = packed[c][i] * factor[i]`, [`canonical`].
///
/// # Safety
/// Each of the rows, at most `NQ * LANES`, must be writable at `c * stride` bytes for `c < dv`; `packed` must
/// hold `dv * NQ` vectors.
#[inline(always)]
pub(crate) unsafe fn unpack<I: Isa, T: Element, const NQ: usize>(
    isa: I,
    packed: *const I::f32s,
    factor: [I::f32s; NQ],
    rows: &[*mut u8],
    stride: isize,
    dv: usize,
) {
    let lanes = I::F32_LANES;
    if stride != size_of::<T>() as isize || dv < lanes {
        for (i, row) in rows.iter().enumerate() {
            for c in 0..dv {
                // SAFETY: the caller's; `factor` is `NQ * LANES` f32.
                unsafe {
                    let x =
                        *packed.cast::<f32>().add(c * NQ * lanes + i) * *factor.as_ptr().cast::<f32>().add(i);
                    *row.wrapping_offset(c as isize * stride).cast() = T::from_f32(canonical(x));
                }
            }
        }
        return;
    }
    let nan = isa.splat_f32s(f32::NAN);
    for (n, factor) in factor.into_iter().enumerate() {
        let rows = &rows[(n * lanes).min(rows.len())..rows.len().min((n + 1) * lanes)];
        for c in blocks(dv, lanes) {
            let mut square = isa.square();
            for (t, x) in square.as_mut().iter_mut().enumerate() {
                // SAFETY: `c + t < dv`.
                let y = isa.mul_f32s(unsafe { *packed.add((c + t) * NQ + n) }, factor);
                let y = isa.add_f32s(y, isa.splat_f32s(0.0));
                *x = isa.select_f32s(isa.equal_f32s(y, y), y, nan);
            }
            // As many rows as there are, but a loop of fixed length: it is unrolled, and the square stays in
            // registers.
            for (i, x) in isa.transpose(square).as_ref().iter().enumerate() {
                if i < rows.len() {
                    // SAFETY: `c + lanes <= dv`.
                    unsafe { T::store(isa, rows[i].cast::<T>().wrapping_add(c), *x) };
                }
            }
        }
    }
}

/// Rows that a copy looks ahead: far apart, they are not fetched before they are asked for.
const AHEAD: usize = 8;

/// Copies `n` rows of Q, K or V, from row `[b, h, token]` on and one stride apart, to compact f32 rows: widened,
/// and integers multiplied by their scales.
///
/// # Safety
/// The rows must be there; `dst` must hold `n` of them.
#[inline(always)]
pub(crate) unsafe fn copy<I: Isa>(isa: I, x: &Tensor<'_>, row: [usize; 3], n: usize, dst: *mut f32) {
    // SAFETY: the caller's: rows of this type, with as many features as `x` has, at their stride.
    unsafe {
        match x.dtype {
            DType::F32 => copy_rows::<I, f32>(isa, x, row, n, dst),
            DType::F16 => copy_rows::<I, f16>(isa, x, row, n, dst),
            DType::Bf16 => copy_rows::<I, bf16>(isa, x, row, n, dst),
            DType::I8 => {
                copy_rows::<I, i8>(isa, x, row, n, dst);
                scale_rows(x, row, n, dst);
            }
        }
    }
}

#[inline(always)]
unsafe fn copy_rows<I: Isa, C: Stored>(isa: I, x: &Tensor<'_>, row: [usize; 3], n: usize, dst: *mut f32) {
    let ([_, _, by_row, stride], d, [b, h, token]) = (x.strides(), x.shape()[3], row);
    let first = x.row(b, h, token);
    for j in 0..n {
        let (src, dst) = (first.wrapping_offset(j as isize * by_row), dst.wrapping_add(j * d));
        if x.is_dense() && n > AHEAD {
            let next = src.wrapping_offset(AHEAD as isize * by_row);
            for byte in (0..d * size_of::<C>()).step_by(64) {
                isa.prefetch_near(next.wrapping_add(byte));
            }
        }
        if x.is_dense() && d >= I::F32_LANES {
            for c in blocks(d, I::F32_LANES) {
                // SAFETY: `c + LANES <= d`.
                unsafe { f32::store(isa, dst.add(c), C::load(isa, src.cast::<C>().wrapping_add(c))) };
            }
        } else {
            for c in 0..d {
                // SAFETY: the caller's.
                unsafe { *dst.add(c) = (*src.wrapping_offset(c as isize * stride).cast::<C>()).to_f32() };
            }
        }
    }
}

/// Multiplies compact rows by the scales of their groups of features.
#[inline(always)]
unsafe fn scale_rows(x: &Tensor<'_>, [b, h, token]: [usize; 3], n: usize, dst: *mut f32) {
    let (Some(first), Some(([by_row, by_group], per))) = (x.scale(b, h, token), x.scale_strides()) else {
        return;
    };
    let d = x.shape()[3];
    for j in 0..n {
        // SAFETY: the caller's; each group of a row has a scale.
        let row = unsafe { core::slice::from_raw_parts_mut(dst.add(j * d), d) };
        for (group, features) in row.chunks_mut(per).enumerate() {
            let offset = j as isize * by_row + group as isize * by_group;
            // SAFETY: as above.
            let scale = finite(unsafe { *first.wrapping_offset(offset) });
            features.iter_mut().for_each(|x| *x *= scale);
        }
    }
}
