//! Records: what a task leaves of a row when it has seen some of the keys only; and joining them.
//!
//! ```text
//! record  o[0..Dv], not divided; m, l: running maximum and sum
//! m = max over spans of m_s    l = sum of l_s exp(m_s - m)    out = sum of o_s exp(m_s - m) / l
//! ```
//!
//! Spans are joined in their order, so the bits depend on where they lie and not on who computed them.

use crate::pack::canonical;
use crate::split::RowsMut;
use crate::{Call, Element};

/// f32 in the record of a row: its unscaled output in whole vectors of any level, then maximum and sum.
pub(crate) fn record(dv: usize) -> usize {
    dv.next_multiple_of(WIDEST) + WIDEST
}

/// Lanes of the widest level.
const WIDEST: usize = 16;

/// The record of a row among those of its key/value head.
#[inline(always)]
pub(crate) fn place<T: Element>(
    records: *mut f32,
    call: &Call<'_, T>,
    hk: usize,
    head: usize,
    token: usize,
) -> *mut f32 {
    let row = token * call.group + head - hk * call.group;
    records.wrapping_add(row * record(call.v.shape()[3]))
}

/// Maximum and sum in a record.
#[inline(always)]
pub(crate) fn state(record: *mut f32, dv: usize) -> *mut [f32; 2] {
    record.wrapping_add(dv.next_multiple_of(WIDEST)).cast()
}

/// Joins the records of `spans` spans, `len` f32 apart, and writes the rows of a key/value head.
///
/// # Safety
/// The records of all rows that are computed must be there, and the rows be for the caller to write.
pub(crate) unsafe fn join<T: Element>(
    call: &Call<'_, T>,
    b: usize,
    hk: usize,
    records: *mut f32,
    len: usize,
    spans: usize,
    out: &RowsMut<'_, T>,
) {
    let ([_, _, lq, _], dv) = (call.q.shape(), call.v.shape()[3]);
    for token in 0..lq {
        for h in 0..call.group {
            let head = hk * call.group + h;
            let gate = call.terms.gates.map_or(1.0, |gates| gates[head]);
            let first = place(records, call, hk, head, token);
            let row = out.row(b, head, token);
            let closed = gate == 0.0 || token >= call.q_len(b);
            // SAFETY: the caller's.
            unsafe {
                let [mut max, mut sum] = if closed { [f32::NEG_INFINITY, 0.0] } else { *state(first, dv) };
                if !closed && spans > 1 {
                    for span in 1..spans {
                        max = max.max((*state(first.wrapping_add(span * len), dv))[0]);
                    }
                    sum = 0.0;
                    for span in 0..spans {
                        let record = first.wrapping_add(span * len);
                        let [m, l] = *state(record, dv);
                        let weight = if m == max { 1.0 } else { (m - max).exp() };
                        sum += l * weight;
                        for c in 0..dv {
                            let x = *record.add(c) * weight;
                            *first.add(c) = if span == 0 { x } else { *first.add(c) + x };
                        }
                    }
                }
                let factor = if sum == 0.0 { 0.0 } else { gate / sum };
                for c in 0..dv {
                    let x = if sum == 0.0 { 0.0 } else { canonical(*first.add(c) * factor) };
                    *row.wrapping_offset(c as isize * out.strides[3]) = T::from_f32(x);
                }
                if let Some(lse) = out.lse {
                    let x = if sum == 0.0 { f32::NEG_INFINITY } else { canonical(max + sum.ln()) };
                    *lse.add(call.lse_index(b, head, token)) = x;
                }
            }
        }
    }
}
