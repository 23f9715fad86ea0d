//! One step of the online softmax over the scores of a block of rows.

use core::ops::Range;

use super::{Block, Buffers, Span, Stack};
use crate::clock::Part;
use crate::extra::Added;
use crate::isa::Isa;
use crate::pairs;
use crate::prefill::KEYS;
use crate::products::{Products, Values, softmax};
use crate::statistics;
use crate::tile::{self, Feed};

impl Stack<'_> {
    /// One step of the online softmax: the scores of the block over the keys `seen`, of which `max` are the
    /// largest in each lane.
    ///
    /// # Safety
    /// As for [`Stack::scores`].
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn step<I: Isa, const NQ: usize, const MR: usize>(
        &self,
        isa: I,
        block: &mut Block,
        buffers: Buffers<I::f32s>,
        span: &Span,
        seen: Range<usize>,
        max: [I::f32s; NQ],
        added: Option<&Added>,
    ) {
        // SAFETY: the caller's.
        unsafe {
            let ml = &mut *buffers.ml.cast::<[[I::f32s; NQ]; 2]>();
            let first = self.first_score(&seen);
            let st = buffers.st.wrapping_add(first * NQ);
            let correction = match self.statistics {
                None => softmax(isa, st, seen.len(), max, ml),
                Some(sink) => {
                    let (stack, keys) = (self, seen.clone());
                    isa.vectorize(statistics::Step::<I, NQ> {
                        isa,
                        stack,
                        block,
                        buffers,
                        sink,
                        keys,
                        max,
                        st,
                    })
                }
            };
            self.clock.lap(Part::Softmax);
            let fresh = core::mem::replace(&mut block.fresh, false);
            let ot = buffers.ot;
            let ahead = span.ahead(1, added);
            let (n, dv) = (seen.len(), self.call.v.shape()[3]);
            let used = first..first + n;
            match self.products {
                Products::MultiplyAdds => {
                    let v = span.v.skip(seen.start - span.keys.start);
                    let feed = Feed::new(ahead, dv, n, MR);
                    let mut values = Values::<I, NQ, false> { isa, n, v, st, ot, correction, fresh, feed };
                    tile::cover::<MR>(dv, &mut values);
                }
                Products::Dots if I::DOTS => {
                    // Values lie in pairs, from the first one of a block of keys on.
                    let (n, v) = (used.end.div_ceil(2), span.v.skip(seen.start % KEYS / 2));
                    let (st, feed) = (buffers.st, Feed::new(ahead, dv, n, MR));
                    pairs::weights::<I, NQ>(isa, st, 2 * n, used);
                    let mut values = Values::<I, NQ, true> { isa, n, v, st, ot, correction, fresh, feed };
                    tile::cover::<MR>(dv, &mut values);
                }
                Products::Dots => unreachable!("dots are for levels that have them"),
                Products::Tiles => {
                    Feed::new(ahead, dv, n, MR).all(isa);
                    self.tile_values::<I, NQ>(isa, span, used, buffers, correction, fresh);
                }
            }
            self.clock.lap(Part::Values);
        }
    }
}
