//! One output row in plain code, pair by pair: where NaN or infinity lies behind hidden pairs.
//!
//! The tiles multiply hidden values by a weight of 0, and `0 * NaN` is NaN. A row that comes out not finite, of a
//! block that had hidden pairs, is computed once more here, where a hidden pair is skipped.

use crate::call::Call;
use crate::{Element, View};

/// Computes row `(b, head, token)` into `acc` (`Dv` long, overwritten) and returns its LSE.
pub(crate) fn row<T: Element>(
    call: &Call<'_, T>,
    b: usize,
    head: usize,
    token: usize,
    acc: &mut [f32],
) -> f32 {
    let terms = &call.terms;
    let hk = head / call.group;
    let (d, dv) = (call.q.shape()[3], call.v.shape()[3]);
    let at = |x: &View<'_, T>, i| x.get(i).map_or(0.0, T::to_f32);
    let (mut m, mut l) = match terms.sinks.map(|sinks| sinks[head]) {
        Some(sink) if sink != f32::NEG_INFINITY => (sink, 1.0),
        _ => (f32::NEG_INFINITY, 0.0),
    };
    acc.fill(0.0);
    for j in call.keys(b, token) {
        let index = [b, head, token, j];
        let bias = terms.bias.and_then(|bias| bias.get(index)).unwrap_or(0.0);
        let shown = terms.mask.and_then(|mask| mask.get(index)).unwrap_or(true);
        if !shown || bias == f32::NEG_INFINITY {
            continue;
        }
        let dot: f32 =
            (0..d).map(|c| at(&call.q, [b, head, token, c]) * call.scale * at(&call.k, [b, hk, j, c])).sum();
        let capped = terms.softcap.map_or(dot, |cap| cap * (dot / cap).tanh());
        let distance = (call.pos(b, token).saturating_sub(j as i64)).unsigned_abs() as f32;
        let s = capped + bias - terms.slopes.map_or(0.0, |slopes| slopes[head] * distance);
        let shift = f32::max(m, s); // NaN only if both are
        let shift = if shift == f32::NEG_INFINITY { 0.0 } else { shift };
        let (old, new) = (flushed_exp(m - shift), flushed_exp(s - shift));
        m = f32::max(m, s);
        l = l * old + new;
        for (c, acc) in acc[..dv].iter_mut().enumerate() {
            *acc = *acc * old + new * at(&call.v, [b, hk, j, c]);
        }
    }
    let gate = terms.gates.map_or(1.0, |gates| gates[head]);
    let factor = if l == 0.0 { 0.0 } else { gate / l };
    acc[..dv].iter_mut().for_each(|x| *x *= factor);
    if l == 0.0 { f32::NEG_INFINITY } else { m + l.ln() }
}

/// exp, and exactly 0 where that is not a normal number.
fn flushed_exp(x: f32) -> f32 {
    if x < crate::exp::UNDERFLOW { 0.0 } else { x.exp() }
}
