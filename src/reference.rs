//! The formula in f64, in four named passes over whole matrices: what every kernel is held against.
//!
//! It allocates `[B, Hq, Lq, Lk]` several times over and is not meant for work.

use headwise_kernels::{Call, Element, Error, Terms, View};

/// All that the reference computes, compact, in f64.
#[derive(Debug, Clone, PartialEq)]
pub struct Reference {
    /// `scale * <q, k>`, `[B, Hq, Lq, Lk]`; hidden pairs are -inf in this and the next two.
    pub scaled: Vec<f64>,
    /// After the cap.
    pub capped: Vec<f64>,
    /// After bias and slopes: the logits.
    pub biased: Vec<f64>,
    /// The softmax weights, `[B, Hq, Lq, Lk]`, 0 for hidden pairs.
    pub weights: Vec<f64>,
    /// `[B, Hq, Lq]`.
    pub lse: Vec<f64>,
    /// `[B, Hq, Lq, Dv]`.
    pub out: Vec<f64>,
}

/// Computes the formula of the [crate's top](crate) as it is written.
///
/// # Errors
/// As [`crate::Attention::run`].
pub fn attention<'a, T: Element>(
    q: View<'a, T>,
    k: View<'a, T>,
    v: View<'a, T>,
    terms: &Terms<'a>,
) -> Result<Reference, Error> {
    let call = Call::new(q, k, v, terms)?;
    let at = |x: View<'a, T>, i| x.get(i).map_or(0.0, |x| x.to_f32() as f64);
    Ok(evaluate(&call, [&|i| at(q, i), &|i| at(k, i), &|i| at(v, i)]))
}

/// An element of Q, K or V.
pub(crate) type At<'f> = &'f dyn Fn([usize; 4]) -> f64;

/// The same on any numbers: the call gives the shapes and terms only.
pub(crate) fn evaluate<T: Element>(call: &Call<'_, T>, [q, k, v]: [At<'_>; 3]) -> Reference {
    let terms = call.terms();
    let ([b, hq, lq, dv], hk, lk, d) = (call.out_shape(), call.kv_heads(), call.keys_axis(), call.features());
    let rows = b * hq * lq; // of packed queries, too: rows behind a sequence are zeros
    let n = rows * lk;
    let [mut scaled, mut capped, mut biased, mut weights] =
        [f64::NEG_INFINITY, f64::NEG_INFINITY, f64::NEG_INFINITY, 0.0].map(|x| vec![x; n]);
    let (mut lse, mut out) = (vec![f64::NEG_INFINITY; rows], vec![0.0; rows * dv]);
    let of = |x: Option<&[f32]>, h: usize, otherwise: f64| x.map_or(otherwise, |x| x[h] as f64);

    for row in 0..rows {
        let (b, h, i) = (row / (hq * lq), row / lq % hq, row % lq);
        let (kv_head, pos) = (h / (hq / hk), call.pos(b, i) as f64);
        let gate = of(terms.gates, h, 1.0);
        if gate == 0.0 || i >= call.q_len(b) {
            continue;
        }
        // 1. visibility
        let visible = |j: usize| {
            let (x, far) = (j as f64, |side: Option<usize>| side.map_or(f64::INFINITY, |w| w as f64));
            let near = pos - far(terms.left) <= x && x <= pos + far(terms.right);
            let shown = terms.mask.is_none_or(|mask| broadcast(mask, [b, h, i, j]))
                && terms.bias.is_none_or(|bias| broadcast(bias, [b, h, i, j]) != f32::NEG_INFINITY);
            j < call.kv_len(b) && (!terms.causal || x <= pos) && near && shown
        };
        let keys: Vec<usize> = (0..lk).filter(|&j| visible(j)).collect();
        // 2. scores
        for &j in &keys {
            let dot: f64 = (0..d).map(|c| q([b, h, i, c]) * k([b, kv_head, j, c])).sum();
            let s = call.scale() as f64 * dot;
            let cap = terms.softcap.map_or(s, |cap| cap as f64 * (s / cap as f64).tanh());
            let bias = terms.bias.map_or(0.0, |bias| broadcast(bias, [b, h, i, j]) as f64);
            let distance = terms.slopes.map_or(0.0, |slopes| slopes[h] as f64 * (pos - j as f64).abs());
            let at = row * lk + j;
            (scaled[at], capped[at], biased[at]) = (s, cap, cap + bias - distance);
        }
        // 3. softmax
        let sink = of(terms.sinks, h, f64::NEG_INFINITY);
        let max = keys.iter().fold(sink, |m, &j| m.max(biased[row * lk + j]));
        let shift = if max == f64::NEG_INFINITY { 0.0 } else { max };
        let scores = keys.iter().map(|&j| (biased[row * lk + j] - shift).exp());
        let sum = scores.sum::<f64>() + (sink - shift).exp();
        lse[row] = shift + sum.ln();
        for &j in &keys {
            let weight = (biased[row * lk + j] - shift).exp() / sum;
            weights[row * lk + j] = if weight.is_nan() && sum == 0.0 { 0.0 } else { weight };
        }
        // 4. values
        for &j in &keys {
            for c in 0..dv {
                out[row * dv + c] += gate * weights[row * lk + j] * v([b, kv_head, j, c]);
            }
        }
    }
    Reference { scaled, capped, biased, weights, lse, out }
}

/// The element that `view` broadcasts to `index`.
fn broadcast<T: Copy>(view: View<'_, T>, index: [usize; 4]) -> T {
    let shape = view.shape();
    let index = core::array::from_fn(|axis| if shape[axis] == 1 { 0 } else { index[axis] });
    view.get(index).expect("`Call::new` has checked that it broadcasts")
}
