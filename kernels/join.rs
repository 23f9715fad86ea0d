//! Records: what a task leaves of a row when it has seen some of the keys only; and joining them.
//!
//! ```text
//! record  o[0..Dv], not divided; m, l: running maximum and sum
//! join    m = max(m_1, m_2)    l = sum of l_s exp(m_s - m)    o = sum of o_s exp(m_s - m)
//! row     out = o / l          lse = m + ln l
//! ```
//!
//! Spans are joined in their order, so the bits depend on where they lie and not on who computed them.

use core::ops::Range;

use half::{bf16, f16};

use crate::pack::canonical;
use crate::split::RowsMut;
use crate::{Call, DType, Element, RowStatistics};

/// f32 in the record of a row: its unscaled output in whole vectors of any level, then maximum and sum.
pub(crate) fn record(dv: usize) -> usize {
    dv.next_multiple_of(WIDEST) + WIDEST
}

/// Lanes of the widest level.
pub(crate) const WIDEST: usize = 16;

/// The record of a row among those of its key/value head.
#[inline(always)]
pub(crate) fn place(records: *mut f32, call: &Call<'_>, hk: usize, head: usize, token: usize) -> *mut f32 {
    let row = token * call.group + head - hk * call.group;
    records.wrapping_add(row * record(call.v.shape()[3]))
}

/// Maximum and sum in a record.
#[inline(always)]
pub(crate) fn state(record: *mut f32, dv: usize) -> *mut [f32; 2] {
    record.wrapping_add(dv.next_multiple_of(WIDEST)).cast()
}

/// Adds the records `more` of some rows to `records`.
///
/// # Safety
/// Both must hold the records of these rows, as far as they are computed.
pub(crate) unsafe fn add(
    call: &Call<'_>,
    b: usize,
    hk: usize,
    tokens: Range<usize>,
    records: *mut f32,
    more: *mut f32,
) {
    let dv = call.v.shape()[3];
    for (head, token) in rows(call.heads_of(hk), tokens) {
        if is_closed(call, b, head, token) {
            continue;
        }
        let [sum, more] = [records, more].map(|records| place(records, call, hk, head, token));
        // SAFETY: the caller's; two records do not overlap.
        unsafe {
            let ([m, l], [m_more, l_more]) = (*state(sum, dv), *state(more, dv));
            let max = m.max(m_more);
            let weight = |m: f32| if m == max { 1.0 } else { (m - max).exp() };
            let (w, w_more) = (weight(m), weight(m_more));
            *state(sum, dv) = [max, l * w + l_more * w_more];
            let (sum, more) =
                (core::slice::from_raw_parts_mut(sum, dv), core::slice::from_raw_parts(more, dv));
            for (sum, more) in sum.iter_mut().zip(more) {
                *sum = *sum * w + more * w_more;
            }
        }
    }
}

/// Divides by the sums and writes the rows: zeros where nothing is computed.
///
/// # Safety
/// `records` must hold the records of these rows, as far as they are computed; they must be for the caller to
/// write.
pub(crate) unsafe fn write(
    call: &Call<'_>,
    b: usize,
    hk: usize,
    tokens: Range<usize>,
    records: *mut f32,
    out: &RowsMut<'_>,
) {
    let dv = call.v.shape()[3];
    for (head, token) in rows(call.heads_of(hk), tokens) {
        // SAFETY: the caller's; a record has Dv outputs.
        unsafe {
            if is_closed(call, b, head, token) {
                zero(call, [b, head, token], out);
                continue;
            }
            let record = place(records, call, hk, head, token);
            let ([m, l], gate) = (*state(record, dv), call.terms.gates.map_or(1.0, |gates| gates[head]));
            // Where all visible scores are -inf the outputs are 0 too, but for a NaN among the visible
            // values.
            let (factor, lse) =
                if l == 0.0 { (0.0, f32::NEG_INFINITY) } else { (gate / l, canonical(m + l.ln())) };
            put(call, [b, head, token], out, |c| canonical(*record.add(c) * factor), lse);
        }
    }
}

/// Writes a row that is not computed.
///
/// # Safety
/// The row must be for the caller to write.
pub(crate) unsafe fn zero(call: &Call<'_>, row: [usize; 3], out: &RowsMut<'_>) {
    // SAFETY: the caller's; statistics go with the row.
    unsafe {
        put(call, row, out, |_| 0.0, f32::NEG_INFINITY);
        if let Some(rows) = out.statistics.and_then(|sink| sink.rows) {
            *rows.add(call.row_index(row[0], row[1], row[2])) = RowStatistics::default();
        }
    }
}

/// Writes the features and the LSE of a row: batch entry, head, token.
///
/// # Safety
/// The row must be for the caller to write.
unsafe fn put(
    call: &Call<'_>,
    [b, head, token]: [usize; 3],
    out: &RowsMut<'_>,
    feature: impl Fn(usize) -> f32,
    lse: f32,
) {
    let (row, stride, dv) = (out.row(b, head, token), out.strides[3], call.v.shape()[3]);
    // SAFETY: the features of the caller's row.
    unsafe {
        match out.dtype {
            DType::F16 => put_features::<f16>(row, stride, dv, feature),
            DType::Bf16 => put_features::<bf16>(row, stride, dv, feature),
            _ => put_features::<f32>(row, stride, dv, feature),
        }
    }
    if let Some(place) = out.lse {
        // SAFETY: the LSE goes with the row.
        unsafe { *place.add(call.row_index(b, head, token)) = lse };
    }
}

/// Writes the features of a row, `stride` bytes apart.
///
/// # Safety
/// They must be the caller's to write.
unsafe fn put_features<T: Element>(row: *mut u8, stride: isize, dv: usize, feature: impl Fn(usize) -> f32) {
    for c in 0..dv {
        // SAFETY: the caller's.
        unsafe { *row.wrapping_offset(c as isize * stride).cast() = T::from_f32(feature(c)) };
    }
}

/// Head and token of the rows of some queries.
pub(crate) fn rows(heads: Range<usize>, tokens: Range<usize>) -> impl Iterator<Item = (usize, usize)> {
    tokens.flat_map(move |token| heads.clone().map(move |head| (head, token)))
}

/// Whether a row is not computed.
pub(crate) fn is_closed(call: &Call<'_>, b: usize, head: usize, token: usize) -> bool {
    token >= call.q_len(b) || call.is_closed(head)
}
