//! The end of a block of rows: dividing by the sums and writing.

use super::{Block, Buffers, Stack};
use crate::isa::Isa;
use crate::join;
use crate::pack::{self, MAX_ROWS, canonical};
use crate::products::divide;
use crate::split::RowsMut;
use crate::statistics::Finish;

impl Stack<'_> {
    /// A maximum of a row of a head as a score. A sink comes out as it went in.
    #[inline(always)]
    fn score(&self, max: f32, head: usize) -> f32 {
        const LN_4: f64 = 2.0 * core::f64::consts::LN_2;
        match self.call.terms.sinks {
            Some(sinks) if sinks[head] * self.unit == max => sinks[head],
            _ => (f64::from(max) * LN_4) as f32,
        }
    }

    /// Divides by the sums and writes the rows; notes the rows that NaN may have leaked into.
    ///
    /// # Safety
    /// The buffers must hold blocks of `NQ` vectors; the rows of the block must be among those that `out` is
    /// the right to write.
    #[inline(always)]
    pub(super) unsafe fn end<I: Isa, const NQ: usize>(
        &self,
        isa: I,
        block: &mut Block,
        buffers: Buffers<I::f32s>,
        out: &RowsMut<'_>,
    ) {
        let (call, dv) = (self.call, self.call.v.shape()[3]);
        let rows = self.rows(block);
        let zero = isa.splat_f32s(0.0);
        // SAFETY: the caller's.
        let [m, l] = unsafe { *buffers.ml.cast::<[[I::f32s; NQ]; 2]>() };
        if block.fresh {
            for c in 0..dv * NQ {
                // SAFETY: `ot` holds Dv rows.
                unsafe { *buffers.ot.add(c) = zero };
            }
        }
        // SAFETY: `m` and `l` have NQ * LANES >= count lanes; the LSE goes with the row; rows of the task
        // have Dv features, as have their records.
        unsafe {
            self.check::<I, NQ>(isa, block, buffers); // the statistics do not count such rows
            if self.part.is_null() {
                let mut gate = [isa.splat_f32s(1.0); NQ];
                if let Some(gates) = call.terms.gates {
                    gate = rows.lanes(isa, |head, _| gates[head]);
                }
                let factor = divide(isa, gate, l);
                let mut place = [core::ptr::null_mut(); MAX_ROWS];
                rows.each(block.count, |i, head, token| place[i] = out.row(self.b, head, token));
                if let Some(lse) = out.lse {
                    rows.each(block.count, |i, head, token| {
                        let (m, l) = (*m.as_ptr().cast::<f32>().add(i), *l.as_ptr().cast::<f32>().add(i));
                        let lse = lse.add(call.row_index(self.b, head, token));
                        *lse = if l == 0.0 {
                            f32::NEG_INFINITY
                        } else {
                            canonical(self.score(m, head) + l.ln())
                        };
                    });
                }
                pack::unpack_to::<I, NQ>(isa, buffers.ot, factor, &place[..block.count], out, dv);
                if let Some(sink) = self.statistics {
                    isa.vectorize(Finish::<I, NQ> { isa, stack: self, block, buffers, sink, factor });
                }
            } else {
                let mut place = [core::ptr::null_mut(); MAX_ROWS];
                rows.each(block.count, |i, head, token| {
                    let record = join::place(self.part, call, self.hk, head, token);
                    let (m, l) = (*m.as_ptr().cast::<f32>().add(i), *l.as_ptr().cast::<f32>().add(i));
                    *join::state(record, dv) = [self.score(m, head), l];
                    place[i] = record.cast();
                });
                let (one, stride) = ([isa.splat_f32s(1.0); NQ], size_of::<f32>() as isize);
                pack::unpack::<I, f32, NQ>(isa, buffers.ot, one, &place[..block.count], stride, dv);
            }
        }
    }

    /// Notes the rows that NaN may have leaked into.
    ///
    /// # Safety
    /// As for [`Stack::end`].
    #[inline(always)]
    unsafe fn check<I: Isa, const NQ: usize>(&self, isa: I, block: &mut Block, buffers: Buffers<I::f32s>) {
        if !block.hidden || block.again {
            return;
        }
        let zero = isa.splat_f32s(0.0);
        let mut check = [zero; NQ];
        for c in 0..self.call.v.shape()[3] {
            for (n, check) in check.iter_mut().enumerate() {
                // SAFETY: `ot` holds Dv rows of NQ vectors. 0 * x is 0, or NaN where x is not finite.
                *check = isa.mul_add_e_f32s(unsafe { *buffers.ot.add(c * NQ + n) }, zero, *check);
            }
        }
        for i in 0..block.count {
            // SAFETY: `check` has NQ * LANES >= count lanes.
            let finite = unsafe { *check.as_ptr().cast::<f32>().add(i) } == 0.0;
            block.leaked |= u64::from(!finite) << i;
        }
    }
}
