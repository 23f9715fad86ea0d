//! What lies between the two products of `decode.rs`: scales, terms and softmax of a chunk of keys; and the end.

use core::ops::Range;

use super::{CHUNK, Few, Pointers};
use crate::element::{Load, Store};
use crate::exp::exp;
use crate::isa::Isa;
use crate::join::state;
use crate::products::shift;
use crate::tensor::Tensor;
use crate::view::finite;
use crate::{extra, terms};

impl Few<'_> {
    /// Multiplies the scores, or the weights, of some keys by the scales of K, or V. Asks for those of the
    /// next chunk: without it a batch of 16 x 1024 keys takes 1.7 times as long.
    ///
    /// # Safety
    /// The scores must hold the keys, in whole vectors.
    #[inline(always)]
    pub(super) unsafe fn scale<I: Isa>(&self, isa: I, x: &Tensor<'_>, hk: usize, keys: &Range<usize>) {
        let Some(([stride, _], _)) = x.scale_strides() else { return };
        let (mut scales, mut j) = ([0.0; CHUNK], 0);
        while j < keys.len() {
            let key = keys.start + j;
            let Some(first) = x.scale(self.b, hk, key) else { return };
            let run = x.run(self.b, key).min(keys.len() - j);
            for (i, scale) in scales[j..j + run].iter_mut().enumerate() {
                // SAFETY: a key inside the axis has a scale.
                *scale = finite(unsafe { *first.wrapping_offset(i as isize * stride) });
            }
            j += run;
            if j == keys.len() {
                for line in (0..CHUNK).step_by(16) {
                    isa.prefetch(first.wrapping_offset((run + line) as isize * stride).cast());
                }
            }
        }
        for r in 0..self.count {
            for x in (0..keys.len()).step_by(I::F32_LANES) {
                // SAFETY: the caller's; `CHUNK` is a multiple of the lanes.
                unsafe {
                    let s = self.s.add(r * CHUNK + x);
                    f32::store(
                        isa,
                        s,
                        isa.mul_f32s(f32::load(isa, s), f32::load(isa, scales.as_ptr().add(x))),
                    );
                }
            }
        }
    }

    /// Cap, slopes, bias and visibility; -inf behind the keys up to a whole vector. Whether every row sees
    /// all of the keys.
    ///
    /// # Safety
    /// The scores must hold the keys, in whole vectors.
    #[inline(always)]
    pub(super) unsafe fn terms<I: Isa>(&mut self, isa: I, keys: &Range<usize>) -> bool {
        let (terms, n, lanes) = (&self.call.terms, keys.len(), I::F32_LANES);
        let vectors = n.div_ceil(lanes);
        let plain = !self.call.is_masked() && terms.softcap.is_none() && terms.slopes.is_none();
        let all_see = self.keys[self.count - 1][0]..self.keys[0][1];
        if plain && n % lanes == 0 && all_see.start <= keys.start && keys.end <= all_see.end {
            return true;
        }
        let mut whole = true;
        for r in 0..self.count {
            let (head, token) = self.rows.get(r);
            let s: *mut I::f32s = self.s.wrapping_add(r * CHUNK).cast();
            let mut seen = interval(self.keys[r][0]..self.keys[r][1], keys);
            // SAFETY: the caller's.
            unsafe {
                if let Some(cap) = terms.softcap {
                    terms::cap(isa, s, vectors, cap);
                }
                if let Some(slopes) = terms.slopes {
                    let ahead = self.call.pos(self.b, token).saturating_sub(keys.start as i64) as f32;
                    let (ahead, slope) = (isa.splat_f32s(ahead), isa.splat_f32s(-slopes[head]));
                    for x in 0..vectors {
                        let j = terms::count_from(isa, x * lanes);
                        let distance = isa.abs_f32s(isa.sub_f32s(ahead, j));
                        *s.add(x) = isa.mul_add_e_f32s(slope, distance, *s.add(x));
                    }
                }
                if let Some(bias) = &terms.bias {
                    let row = bias.row(self.b, head, token);
                    for j in 0..n {
                        let x = *row.wrapping_offset((keys.start + j) as isize * bias.strides()[3]);
                        *s.cast::<f32>().add(j) += x;
                        seen &= !(u64::from(x == f32::NEG_INFINITY) << j);
                    }
                }
                if let Some(mask) = &terms.mask {
                    let stride = mask.strides()[3];
                    let row = mask.row(self.b, head, token).wrapping_offset(keys.start as isize * stride);
                    seen &= extra::bits(isa, row, stride, n);
                }
                let all = seen == u64::MAX >> (64 - n);
                whole &= all;
                if !all || n % lanes > 0 {
                    for x in 0..vectors {
                        *s.add(x) = isa.hide(*s.add(x), seen >> (x * lanes));
                    }
                }
            }
            self.seen[r] = seen;
        }
        whole
    }

    /// One step of the online softmax for each row. The sums stay apart in lanes until the end, and nothing
    /// has to be rescaled where no score exceeds the maximum, which is nearly always. Asks for the first rows
    /// `ahead`, or the memory would have nothing to do meanwhile.
    ///
    /// # Safety
    /// The scores must hold `n` keys, in whole vectors.
    #[inline(always)]
    pub(super) unsafe fn softmax<I: Isa>(&mut self, isa: I, n: usize, ahead: &Pointers) {
        for r in 0..self.count {
            if let Some(next) = ahead[..n].get(r) {
                for byte in (0..self.bytes[0]).step_by(64) {
                    isa.prefetch(next.wrapping_add(byte));
                }
            }
            // SAFETY: the caller's; there is a vector of sums for each row.
            let (s, sum) = unsafe {
                let s = self.s.add(r * CHUNK).cast::<I::f32s>();
                let sum = self.l.add(r * I::F32_LANES).cast::<I::f32s>();
                (core::slice::from_raw_parts_mut(s, n.div_ceil(I::F32_LANES)), &mut *sum)
            };
            let before = isa.splat_f32s(self.m[r]);
            let mut max = before;
            for s in s.iter() {
                max = isa.max_f32s(*s, max);
            }
            self.correction[r] = 1.0;
            if isa.first_true_m32s(isa.greater_than_f32s(max, before)) < I::F32_LANES {
                self.m[r] = isa.reduce_max_f32s(max);
                let [shift] = shift(isa, [isa.splat_f32s(self.m[r])]);
                let correction = exp(isa, isa.sub_f32s(before, shift));
                self.correction[r] = isa.reduce_max_f32s(correction);
                *sum = isa.mul_f32s(*sum, correction);
            }
            let [shift] = shift(isa, [isa.splat_f32s(self.m[r])]);
            // By themselves first: beside a large sum, many small weights would all be rounded to one side.
            let mut chunk = isa.splat_f32s(0.0);
            for s in s {
                *s = exp(isa, isa.sub_f32s(*s, shift));
                chunk = isa.add_f32s(chunk, *s);
            }
            *sum = isa.add_f32s(*sum, chunk);
        }
    }

    /// Writes maximum and sum of each row to its record.
    ///
    /// # Safety
    /// There must be a vector of sums for each row.
    #[inline(always)]
    pub(super) unsafe fn end<I: Isa>(&self, isa: I) {
        for r in 0..self.count {
            // SAFETY: the caller's.
            unsafe {
                let sum = isa.reduce_sum_f32s(*self.l.add(r * I::F32_LANES).cast::<I::f32s>());
                *state(self.o[r], self.call.v.shape()[3]) = [self.m[r], sum];
            }
        }
    }
}

/// The keys of a chunk that lie in an interval, as bits.
#[inline(always)]
fn interval(seen: Range<usize>, keys: &Range<usize>) -> u64 {
    let clamp = |j: usize| j.clamp(keys.start, keys.end) - keys.start;
    let below = |j: usize| if j == 0 { 0 } else { u64::MAX >> (64 - j) };
    below(clamp(seen.end)) & !below(clamp(seen.start))
}
