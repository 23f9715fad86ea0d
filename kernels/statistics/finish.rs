//! From the sums of a block of rows to the statistics of each.

use super::{RowStatistics, Sink, Sums};
use crate::block::{Block, Buffers, Stack};
use crate::exp::ln;
use crate::isa::Isa;
use crate::pack::{MAX_ROWS, unpack};
use crate::products::{divide, shift};

/// f32 in the statistics of a row: whole vectors of any level, so that a block of them is transposed.
const FIELDS: usize = size_of::<RowStatistics>() / size_of::<f32>();
const _: () = assert!(FIELDS == 16 && core::mem::offset_of!(RowStatistics, norm) == 10 * size_of::<f32>());

/// Lane `i`.
///
/// # Safety
/// `x` must have so many.
unsafe fn lane<V, const NQ: usize>(x: &[V; NQ], i: usize) -> f32 {
    // SAFETY: the caller's: vectors of f32.
    unsafe { *x.as_ptr().cast::<f32>().add(i) }
}

/// Writes the statistics of the rows of a block.
pub(crate) struct Finish<'a, I: Isa, const NQ: usize> {
    pub isa: I,
    pub stack: &'a Stack<'a>,
    pub block: &'a Block,
    pub buffers: Buffers<I::f32s>,
    pub sink: Sink<'a>,
    /// What the unscaled output is multiplied by.
    pub factor: [I::f32s; NQ],
}

impl<I: Isa, const NQ: usize> pulp::WithSimd for Finish<'_, I, NQ> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        // SAFETY: made in `Stack::end`, whose caller answers for the buffers and the right to the rows.
        unsafe { self.run() };
    }
}

impl<I: Isa, const NQ: usize> Finish<'_, I, NQ> {
    /// # Safety
    /// The buffers must hold blocks of `NQ` vectors, with sums; the rows must be the task's.
    #[inline(always)]
    unsafe fn run(self) {
        let Self { isa, stack, block, buffers, sink, .. } = self;
        let (call, b, rows) = (stack.call, stack.b, stack.rows(block));
        // SAFETY: the caller's.
        let ([m, l], sums) =
            unsafe { (&*buffers.ml.cast::<[[I::f32s; NQ]; 2]>(), &mut *buffers.sums.cast::<Sums<I, NQ>>()) };
        let one = isa.splat_f32s(1.0);
        if !call.is_masked() {
            let given = &call.terms;
            sums.keys = if given.causal || given.left.is_some() || given.right.is_some() {
                rows.lanes(isa, |_, token| call.keys(b, token).len() as f32)
            } else {
                [isa.splat_f32s(call.kv_len(b) as f32); NQ]
            };
        }
        let mut sinks = [isa.splat_f32s(0.0); NQ];
        if let Some(given) = call.terms.sinks {
            sinks = rows.lanes(isa, |head, _| if given[head] == f32::NEG_INFINITY { 0.0 } else { 1.0 });
        }
        let (share, shift) = (divide(isa, [one; NQ], *l), shift(isa, *m));
        // SAFETY: the caller's.
        let norm = unsafe { self.norms() };
        let (zero, ln_4) = (isa.splat_f32s(0.0), isa.splat_f32s(2.0 * core::f32::consts::LN_2));
        let mut fields = [[zero; NQ]; FIELDS];
        for x in 0..NQ {
            let mean = isa.mul_f32s(sums.scores[x], share[x]); // of the scores, in base 4
            let entropy = isa.sub_f32s(ln(isa, l[x]), isa.mul_f32s(mean, ln_4));
            // Rounding must not make it negative; NaN stays.
            let entropy = isa.select_f32s(isa.less_than_f32s(entropy, zero), zero, entropy);
            let outcomes = isa.add_f32s(sums.keys[x], sinks[x]);
            let several = isa.less_than_f32s(one, outcomes);
            let even = ln(isa, isa.select_f32s(several, outcomes, one));
            let normalised = isa.select_f32s(several, isa.div_f32s(entropy, even), zero);
            let largest = isa.power_of_4(isa.sub_f32s(sums.largest[x], shift[x]));
            let weights = [
                largest,
                sums.named[0][x],
                sums.named[1][x],
                sums.distance[0][x],
                sums.distance[1][x],
                sums.near[1][x],
                sums.near[0][x],
                sums.near[2][x],
            ];
            (fields[0][x], fields[1][x], fields[10][x]) = (entropy, normalised, norm[x]);
            for (field, weight) in fields[2..10].iter_mut().zip(weights) {
                field[x] = isa.mul_f32s(weight, share[x]);
            }
            let none = isa.equal_f32s(sums.keys[x], zero);
            fields[..11].iter_mut().for_each(|field| field[x] = isa.select_f32s(none, zero, field[x]));
        }
        // A row that NaN may have leaked into is computed again, and counts then.
        let counted = (u64::MAX >> (64 - block.count)) & !block.leaked;
        // SAFETY: the caller's.
        unsafe {
            self.add(&fields, sums, &sinks, counted);
            if sink.received {
                sink.columns.add::<I, NQ>(isa, (stack, block), buffers, [shift, share], counted);
            }
        }
        let Some(to) = sink.rows else { return };
        // SAFETY: every array has NQ * LANES >= count lanes; the statistics go with the row.
        unsafe {
            let mut place = [core::ptr::null_mut(); MAX_ROWS];
            rows.each(block.count, |i, head, token| {
                place[i] = to.add(call.row_index(b, head, token)).cast();
            });
            let (place, stride) = (&place[..block.count], size_of::<f32>() as isize);
            unpack::<I, f32, NQ>(isa, fields.as_ptr().cast(), [one; NQ], place, stride, FIELDS);
            let largest_key = sums.largest_key.as_ptr().cast::<u32>();
            for (i, &place) in place.iter().enumerate() {
                let row = &mut *place.cast::<RowStatistics>();
                row.keys = lane(&sums.keys, i) as u32;
                row.largest_key = if row.keys == 0 { 0 } else { *largest_key.add(i) };
            }
        }
    }

    /// Adds the rows with a bit in `counted` to the sums of their heads.
    ///
    /// # Safety
    /// As for [`Finish::run`].
    #[inline(always)]
    unsafe fn add(
        &self,
        fields: &[[I::f32s; NQ]; FIELDS],
        sums: &Sums<I, NQ>,
        sinks: &[I::f32s; NQ],
        counted: u64,
    ) {
        let Self { isa, stack, block, sink, .. } = *self;
        let (zero, one) = (isa.splat_f32s(0.0), isa.splat_f32s(1.0));
        let (rows, len) = (stack.rows(block), stack.call.kv_len(stack.b) as i64);
        let pos = |token: usize| stack.call.pos(stack.b, token);
        let [mut seeing, mut several] = [[zero; NQ]; 2];
        for x in 0..NQ {
            let keys = isa.hide(sums.keys[x], counted >> (x * I::F32_LANES));
            seeing[x] = isa.select_f32s(isa.less_than_f32s(zero, keys), one, zero);
            let more = isa.less_than_f32s(one, isa.add_f32s(keys, sinks[x]));
            several[x] = isa.select_f32s(more, seeing[x], zero);
        }
        // SAFETY: the task's sums, which nobody else holds; every array has NQ * LANES >= count lanes.
        unsafe {
            let mut all = false;
            if let [head] = *stack.heads {
                let to = &mut *sink.sums(head);
                for (to, field) in to.sums.iter_mut().zip(fields) {
                    let mut sum = zero;
                    for x in 0..NQ {
                        let counts = isa.less_than_f32s(zero, seeing[x]);
                        sum = isa.add_f32s(sum, isa.select_f32s(counts, field[x], zero));
                    }
                    let sum = isa.reduce_sum_f32s(sum);
                    if sum < 1e37 {
                        *to += f64::from(sum);
                        continue;
                    }
                    // Norms may be so large that their sum is beyond f32.
                    for i in 0..block.count {
                        *to += if lane(&seeing, i) == 0.0 { 0.0 } else { f64::from(lane(field, i)) };
                    }
                }
                let (mut all_seeing, mut all_several) = (zero, zero);
                for x in 0..NQ {
                    all_seeing = isa.add_f32s(all_seeing, seeing[x]);
                    all_several = isa.add_f32s(all_several, several[x]);
                }
                let seeing = isa.reduce_sum_f32s(all_seeing) as u64;
                to.rows += seeing;
                to.several += isa.reduce_sum_f32s(all_several) as u64;
                all = seeing == block.count as u64;
                if all {
                    let first = pos(rows.token);
                    for (to, beside) in to.near.iter_mut().zip([0, -1, 1]) {
                        let start = first.saturating_add(beside);
                        let end = start.saturating_add(block.count as i64);
                        *to += (end.min(len) - start.max(0)).max(0) as u64;
                    }
                }
            }
            if all {
                return;
            }
            rows.each(block.count, |i, head, token| {
                if lane(&seeing, i) == 0.0 {
                    return;
                }
                let (to, pos) = (&mut *sink.sums(head), pos(token));
                for (to, beside) in to.near.iter_mut().zip([0, -1, 1]) {
                    *to += u64::from((0..len).contains(&pos.saturating_add(beside)));
                }
                if stack.heads.len() > 1 {
                    to.sums.iter_mut().zip(fields).for_each(|(to, x)| *to += f64::from(lane(x, i)));
                    (to.rows, to.several) = (to.rows + 1, to.several + lane(&several, i) as u64);
                }
            });
        }
    }

    /// The norms of the outputs. Where squares of very large or small ones leave the range of f32 they are
    /// scaled first.
    ///
    /// # Safety
    /// As for [`Finish::run`].
    #[inline(always)]
    unsafe fn norms(&self) -> [I::f32s; NQ] {
        let Self { isa, stack, buffers, factor, .. } = *self;
        let (dv, zero, one) = (stack.call.v.shape()[3], isa.splat_f32s(0.0), isa.splat_f32s(1.0));
        let mut norms = [zero; NQ];
        for c in 0..dv {
            for (x, norm) in norms.iter_mut().enumerate() {
                // SAFETY: `ot` holds Dv rows of NQ vectors.
                let y = isa.mul_f32s(unsafe { *buffers.ot.add(c * NQ + x) }, factor[x]);
                *norm = isa.mul_add_e_f32s(y, y, *norm);
            }
        }
        let (low, high) = (isa.splat_f32s(1e-20), isa.splat_f32s(1e30));
        let mut fits = one;
        for norm in norms {
            let large = isa.select_f32s(isa.less_than_f32s(low, norm), one, zero);
            fits = isa.min_f32s(fits, isa.select_f32s(isa.less_than_f32s(norm, high), large, zero));
        }
        if isa.reduce_min_f32s(fits) == 0.0 {
            // SAFETY: the caller's.
            return unsafe { self.norms_of_any_size() };
        }
        for norm in &mut norms {
            *norm = isa.sqrt_f32s(*norm);
        }
        norms
    }

    /// [`Finish::norms`] in two passes.
    ///
    /// # Safety
    /// As for [`Finish::run`].
    #[inline(always)]
    unsafe fn norms_of_any_size(&self) -> [I::f32s; NQ] {
        let Self { isa, stack, buffers, factor, .. } = *self;
        let (dv, zero, one) = (stack.call.v.shape()[3], isa.splat_f32s(0.0), isa.splat_f32s(1.0));
        let (small, large) = (isa.splat_f32s(1e-15), isa.splat_f32s(1e15));
        let (up, down) = (isa.splat_f32s(2f32.powi(100)), isa.splat_f32s(2f32.powi(-80)));
        let (mut max, mut scale, mut norms) = ([zero; NQ], [one; NQ], [zero; NQ]);
        for c in 0..dv {
            for (x, max) in max.iter_mut().enumerate() {
                // SAFETY: `ot` holds Dv rows of NQ vectors.
                let y = isa.mul_f32s(unsafe { *buffers.ot.add(c * NQ + x) }, factor[x]);
                *max = isa.max_f32s(isa.abs_f32s(y), *max);
            }
        }
        for (max, scale) in max.into_iter().zip(&mut scale) {
            *scale = isa.select_f32s(isa.less_than_f32s(max, small), up, *scale);
            *scale = isa.select_f32s(isa.less_than_f32s(large, max), down, *scale);
        }
        for c in 0..dv {
            for (x, norm) in norms.iter_mut().enumerate() {
                // SAFETY: as above. The factor first: its product with the scale may leave the range.
                let y = isa.mul_f32s(unsafe { *buffers.ot.add(c * NQ + x) }, factor[x]);
                let y = isa.mul_f32s(y, scale[x]);
                *norm = isa.mul_add_e_f32s(y, y, *norm);
            }
        }
        for (norm, scale) in norms.iter_mut().zip(scale) {
            *norm = isa.div_f32s(isa.sqrt_f32s(*norm), scale);
        }
        norms
    }
}
