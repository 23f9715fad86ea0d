//! What a kernel's rounding may do to a case's answer.

use headwise::reference::Reference;
use headwise::{DType, Element, Stored, View};

use super::{Case, Typed, Values};

/// What each row's output and LSE may differ by, but for the rounding of the output; `None` where f32 may
/// overflow on the way.
///
/// A score is off by rounding in proportion to the sum of |q||k|; a weight, relatively, by twice that.
pub(super) struct Limits<'a>(pub &'a Case, pub &'a Reference);

impl Typed for Limits<'_> {
    type Output = Vec<Option<[f64; 2]>>;

    fn call<T: Element, C: Stored>(self, q: View<'_, T>, k: View<'_, C>, v: View<'_, C>) -> Self::Output {
        let Self(case, reference) = self;
        const EPS: f64 = f32::EPSILON as f64;
        // For inputs uniform in [-1, 1], whose rounding errors cancel. Where elements are equal they do not:
        // 80 products of broadcast features err to one side, and a plain softmax in f32 exceeds it.
        const BUDGET: f64 = 2e-6;
        let plain = case.scale.is_none() && case.bias.is_none() && case.slopes.is_none();
        let budgeted =
            case.independent && case.values == Values::Unit && case.dtypes == [DType::F32; 2] && plain;
        let ([batch, hq, lq, d], [_, hk, lk, dv]) = (q.shape(), v.shape());
        let of_q = |i| q.value(i).map_or(0.0, |x| f64::from(x.abs()));
        let of_kv = |x: View<'_, C>, i| x.value(i).map_or(0.0, |x| f64::from(x.abs()));
        let scale = case.scale.unwrap_or(1.0 / (d as f32).sqrt()).abs() as f64;
        let row = |row: usize| {
            let (b, h, i) = (row / (hq * lq), row / lq % hq, row % lq);
            let kv_head = h / (hq / hk);
            let (mut score, mut value) = (1.0f64, 0.0f64);
            for j in (0..lk).filter(|j| reference.biased[row * lk + j] != f64::NEG_INFINITY) {
                let dot: f64 = (0..d).map(|c| of_q([b, h, i, c]) * of_kv(k, [b, kv_head, j, c])).sum();
                let biased = reference.biased[row * lk + j];
                let added = biased - reference.capped[row * lk + j];
                let bias = case
                    .bias
                    .as_ref()
                    .and_then(|bias| bias.view().broadcast([batch, hq, lq, lk])?.get([b, h, i, j]));
                let bias = bias.unwrap_or(0.0) as f64;
                // Max ignores NaN: a row that sees NaN is compared as not finite, whatever the limits.
                let terms = [dot * scale, biased.abs(), bias.abs(), (added - bias).abs()];
                score = terms.into_iter().fold(score, f64::max);
                for c in 0..dv {
                    value = value.max(of_kv(v, [b, kv_head, j, c]));
                }
            }
            let largest = (0..d).map(|c| of_q([b, h, i, c])).fold(0.0, f64::max) * scale;
            let fits = score < 1e37 && largest < 1e37 && value < 1e37;
            if !fits && !reference.out[row * dv..][..dv].iter().any(|x| x.is_nan()) {
                return None;
            }
            let score = EPS * score * (4.0 + (d as f64).sqrt());
            let gate = case.gates.as_ref().map_or(1.0, |gates| gates[h].abs() as f64);
            let out = gate * value * (2.0 * score + 1e-6 + EPS * (lk as f64).sqrt());
            let out = if budgeted { out.min(gate * BUDGET) } else { out };
            let lse = 2.0 * score + 1e-6 + EPS * ((lk as f64).sqrt() + 2.0 * reference.lse[row].abs());
            (score < 0.25).then_some([out, lse])
        };
        (0..reference.lse.len()).map(row).collect()
    }
}
