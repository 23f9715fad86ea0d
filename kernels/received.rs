//! What each key receives from all rows of a head:
//!
//! ```text
//! received[j] = sum over i of p(i, j) = sum over i of w(i, j) 4^(m'(i) - m(i)) / l(i)
//! ```
//!
//! The weights `w` of a block of rows stay where each step of the softmax has left them, one block of keys
//! behind the other, relative to the maximum `m'` of their time. Once maximum `m` and sum `l` are known they
//! are scaled and added to a vector of sums for each key, whose lanes are added at the end of the task. That
//! takes memory for the weights of one block of rows, and no second pass.

use core::ops::Range;

use crate::block::{Block, Buffers, Stack};
use crate::isa::Isa;
use crate::pack::MAX_ROWS;
use crate::prefill::KEYS;

/// What there is to say of the weights over a block of keys.
#[repr(C, align(64))]
pub(crate) struct Kept {
    /// The keys, none if no row sees any: there are no weights then.
    keys: Range<usize>,
    /// The maximum that the weights are relative to.
    max: [f32; MAX_ROWS],
}

impl Kept {
    /// Says of which keys the weights are, and what they are relative to.
    #[inline(always)]
    pub fn keep<I: Isa, const NQ: usize>(&mut self, keys: &Range<usize>, max: [I::f32s; NQ]) {
        self.keys = keys.clone();
        // SAFETY: no level has more rows in a block.
        unsafe { self.max.as_mut_ptr().cast::<[I::f32s; NQ]>().write_unaligned(max) };
    }
}

/// Where the weights of some rows are added up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Columns {
    /// A vector for each key from `first` on, in whole blocks.
    pub sums: *mut f32,
    first: usize,
    len: usize,
    /// Blocks of keys, and f32 from what is kept over one of them to the next.
    pub blocks: usize,
    stride: usize,
}

impl Columns {
    /// For no keys.
    pub const NONE: Self = Self { sums: core::ptr::null_mut(), first: 0, len: 0, blocks: 0, stride: 0 };

    /// For some keys, and blocks of at most `width` rows.
    pub fn new(keys: Range<usize>, width: usize) -> Self {
        let first = keys.start / KEYS * KEYS;
        let len = keys.end.saturating_sub(first);
        let stride = size_of::<Kept>() / size_of::<f32>() + KEYS * width;
        Self { first, len, blocks: len.div_ceil(KEYS), stride, ..Self::NONE }
    }

    /// f32 kept of a block of rows.
    pub fn kept(&self) -> usize {
        self.blocks * self.stride
    }

    /// Says that nothing is kept yet.
    ///
    /// # Safety
    /// `kept` must have room for what is kept of a block of rows.
    pub unsafe fn clear(&self, kept: *mut Kept) {
        for index in 0..self.blocks {
            // SAFETY: the caller's.
            unsafe { (&raw mut (*self.at(kept, index)).keys).write(0..0) };
        }
    }

    /// Of what is kept, that over a block of keys.
    fn at(&self, kept: *mut Kept, index: usize) -> *mut Kept {
        kept.cast::<f32>().wrapping_add(index * self.stride).cast()
    }

    /// The buffers for a step over the keys from `start` on: their scores become weights where those are kept.
    #[inline(always)]
    pub fn place<V>(&self, buffers: Buffers<V>, start: usize) -> Buffers<V> {
        if self.blocks == 0 {
            return buffers;
        }
        let kept = self.at(buffers.kept, (start - self.first) / KEYS);
        Buffers { kept, st: kept.wrapping_add(1).cast(), ..buffers }
    }

    /// Writes the sums, a number for each key that they are of, and zeros up to a multiple of 4.
    ///
    /// # Safety
    /// `received` must have room for all keys of the head and those zeros.
    #[inline(always)]
    pub unsafe fn finish<I: Isa>(&self, isa: I, received: *mut f32) {
        let (sums, to) = (self.sums.cast::<I::f32s>(), received.wrapping_add(self.first));
        for j in (0..self.len).step_by(4) {
            // SAFETY: whole blocks of vectors; the caller's.
            unsafe {
                *to.add(j).cast() = isa.sums(sums.add(j).cast::<[I::f32s; 4]>().read());
            }
        }
    }

    /// Adds the weights of those rows of a block that have a bit in `rows`. In the end the maximum was `shift`,
    /// and a weight `share` of the sum.
    ///
    /// # Safety
    /// `buffers` must be those of the block, with what was kept, and there must be a vector for each key.
    #[inline(always)]
    pub unsafe fn add<I: Isa, const NQ: usize>(
        &self,
        isa: I,
        (stack, block): (&Stack<'_>, &Block),
        buffers: Buffers<I::f32s>,
        [shift, mut share]: [[I::f32s; NQ]; 2],
        rows: u64,
    ) {
        let (zero, none) = (isa.splat_f32s(0.0), isa.splat_f32s(f32::NEG_INFINITY));
        let (mut nan, mut all) = ([zero; NQ], zero);
        for x in 0..NQ {
            nan[x] = isa.select_f32s(isa.equal_f32s(share[x], share[x]), zero, isa.splat_f32s(1.0));
            all = isa.max_f32s(all, nan[x]);
            let out = isa.equal_f32s(isa.hide(nan[x], rows >> (x * I::F32_LANES)), none);
            share[x] = isa.select_f32s(out, zero, share[x]);
        }
        let some_nan = isa.reduce_max_f32s(all) > 0.0;
        for index in 0..self.blocks {
            // SAFETY: the caller's.
            unsafe {
                let kept = self.at(buffers.kept, index);
                let (keys, max) = ((*kept).keys.clone(), &raw const (*kept).max);
                if keys.is_empty() {
                    continue;
                }
                let (weights, mut factor) = (kept.add(1).cast::<I::f32s>(), [zero; NQ]);
                let max = max.cast::<[I::f32s; NQ]>().read_unaligned();
                for x in 0..NQ {
                    let power = isa.power_of_4(isa.sub_f32s(max[x], shift[x]));
                    factor[x] = isa.mul_f32s(power, share[x]);
                }
                let sums = self.sums.cast::<I::f32s>().add(keys.start - self.first);
                if some_nan {
                    // The keys that such a row does not see receive nothing from it, those that it sees NaN.
                    for x in 0..NQ {
                        factor[x] = isa.select_f32s(isa.equal_f32s(nan[x], zero), factor[x], zero);
                    }
                    let (nan, width) = (nan.as_ptr().cast::<f32>(), NQ * I::F32_LANES);
                    for i in (0..width).filter(|&i| rows >> i & 1 == 0 || *nan.add(i) != 0.0) {
                        for (j, key) in keys.clone().enumerate() {
                            let seen = rows >> i & 1 == 1 && stack.sees(block.row + i, key);
                            let weight = weights.cast::<f32>().add(j * width + i);
                            *weight = if seen { f32::NAN } else { 0.0 };
                        }
                    }
                }
                for j in 0..keys.len() {
                    let mut sum = *sums.add(j);
                    for (x, factor) in factor.iter().enumerate() {
                        sum = isa.mul_add_e_f32s(*weights.add(j * NQ + x), *factor, sum);
                    }
                    *sums.add(j) = sum;
                }
            }
        }
    }
}
