//! The two products of a block of rows in tiles of bf16: what `products.rs` is to f32.

use core::ops::Range;

use half::bf16;

use super::{Buffers, Span, Stack};
use crate::isa::Isa;
use crate::pairs;
use crate::prefill::KEYS;
use crate::tiles::{self, Product};

impl Stack<'_> {
    /// Scores of the block of keys, without the scale's fraction, for the rows up to the last one `seen`.
    ///
    /// # Safety
    /// As for [`Stack::scores`], and the span's keys must have been copied for tiles.
    #[inline(always)]
    pub(super) unsafe fn tile_scores<I: Isa, const NQ: usize>(
        &self,
        span: &Span,
        seen: &Range<usize>,
        buffers: Buffers<I::f32s>,
    ) {
        let (width, row) = (self.widths()[0], NQ * size_of::<I::f32s>());
        let product = Product {
            a: span.k.ptr.cast(),
            a_row: width * size_of::<bf16>(),
            b: buffers.qt.cast_const().cast(),
            b_row: row,
            c: buffers.st.cast(),
            c_row: row,
            rows: (self.first_score(seen) + seen.len()).div_ceil(tiles::SIDE),
            columns: NQ * I::F32_LANES / tiles::SIDE,
            steps: width / tiles::STEP,
            add: false,
        };
        // SAFETY: the caller's.
        unsafe { product.run() };
    }

    /// Adds the values of a block of keys by the weights in the rows `used` of `st`.
    ///
    /// # Safety
    /// As for [`Stack::scores`], and the span's values must have been copied for tiles.
    #[inline(always)]
    pub(super) unsafe fn tile_values<I: Isa, const NQ: usize>(
        &self,
        isa: I,
        span: &Span,
        used: Range<usize>,
        buffers: Buffers<I::f32s>,
        correction: [I::f32s; NQ],
        fresh: bool,
    ) {
        let (height, row) = (self.widths()[1], NQ * size_of::<I::f32s>());
        let steps = used.end.div_ceil(tiles::STEP);
        // SAFETY: the caller's: `st` has room for a block of keys, `ot` for the features in whole tiles.
        unsafe {
            pairs::weights::<I, NQ>(isa, buffers.st, steps * tiles::STEP, used);
            if !fresh {
                for c in 0..height {
                    for (x, correction) in correction.iter().enumerate() {
                        let ot = &mut *buffers.ot.add(c * NQ + x);
                        *ot = isa.mul_f32s(*ot, *correction);
                    }
                }
            }
            let product = Product {
                a: span.v.ptr.cast(),
                a_row: KEYS * size_of::<bf16>(),
                b: buffers.st.cast_const().cast(),
                b_row: row,
                c: buffers.ot.cast(),
                c_row: row,
                rows: height / tiles::SIDE,
                columns: NQ * I::F32_LANES / tiles::SIDE,
                steps,
                add: !fresh,
            };
            product.run();
        }
    }
}
