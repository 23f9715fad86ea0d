//! The layer in f64, in named passes: what the layer is held against. Not meant for work.

use headwise_kernels::{Call, Error, Pairing, WeightLayout};

use super::heads::{MultiHead, MultiHeadConfig};
use super::linear::Linear;
use super::norm::{Norm, NormKind};
use super::rotary::Rotary;
use super::tokens::Tokens;
use crate::Attention;
use crate::reference::evaluate;

/// `layer` on `x`, `keys` and `values` (the same for self-attention), `[rows, d_out]`.
///
/// # Errors
/// As [`MultiHead::forward_cross`].
pub fn forward(
    layer: &MultiHead,
    [x, keys, values]: [Tokens<'_>; 3],
    attention: &Attention<'_>,
) -> Result<Vec<f64>, Error> {
    let MultiHeadConfig { d_model, heads, d_k, d_v, key_width, value_width, .. } = layer.config();
    x.check("x", d_model)?;
    keys.check("keys", key_width)?;
    values.check("values", value_width)?;
    let [wq, wk, wv, wo] = layer.linears();
    // 1. projections
    let mut q = project(wq, &wide(x.data()));
    let mut k = project(wk, &wide(keys.data()));
    let v = project(wv, &wide(values.data()));
    // 2. norms
    let [q_norm, k_norm] = layer.norms();
    q_norm.into_iter().for_each(|n| q = norm(n, &q));
    k_norm.into_iter().for_each(|n| k = norm(n, &k));
    // 3. rotary positions
    if let Some(rotary) = layer.rotary() {
        turn(rotary, x, d_k, &mut q);
        turn(rotary, keys, d_k, &mut k);
    }
    // 4. a key/value head of its own for each query head
    let (k, v) = (repeat(layer, &k, d_k), repeat(layer, &v, d_v));
    // 5. attention; the call is for shapes and terms, the numbers come in f64
    let mut terms = *attention.terms();
    terms.scale = terms.scale.or(layer.scale());
    let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<f32>>();
    let (q32, k32, v32) = (narrow(&q), narrow(&k), narrow(&v));
    let call = Call::new(
        x.view(&q32, heads, d_k)?,
        keys.view(&k32, heads, d_k)?,
        values.view(&v32, heads, d_v)?,
        &terms,
    )?;
    let at = |data: &[f64], tokens: Tokens<'_>, heads: usize, d: usize, [b, h, i, c]: [usize; 4]| {
        if i >= tokens.len(b) { 0.0 } else { data[((tokens.start(b) + i) * heads + h) * d + c] }
    };
    let result = evaluate(
        &call,
        [&|i| at(&q, x, heads, d_k, i), &|i| at(&k, keys, heads, d_k, i), &|i| at(&v, values, heads, d_v, i)],
    );
    // 6. heads side by side
    let longest = call.out_shape()[2];
    let mut joined = vec![0.0; x.rows() * heads * d_v];
    for row in 0..x.rows() {
        let [b, i] = x.find(row);
        for h in 0..heads {
            let from = ((b * heads + h) * longest + i) * d_v;
            joined[(row * heads + h) * d_v..][..d_v].copy_from_slice(&result.out[from..from + d_v]);
        }
    }
    // 7. the last projection
    let out = project(wo, &joined);
    Ok(if wo.inputs() == 0 { project_nothing(wo, x.rows()) } else { out })
}

/// `norm` of rows.
pub fn norm(norm: &Norm, x: &[f64]) -> Vec<f64> {
    let mut out = Vec::with_capacity(x.len());
    let n = norm.features();
    for row in x.chunks_exact(n.max(1)) {
        let mean = match norm.kind() {
            NormKind::Layer => row.iter().sum::<f64>() / n as f64,
            NormKind::Rms => 0.0,
        };
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        for (i, x) in row.iter().enumerate() {
            let y = (x - mean) / (variance + norm.eps() as f64).sqrt() * norm.weight()[i] as f64;
            out.push(y + norm.bias().map_or(0.0, |bias| bias[i] as f64));
        }
    }
    out
}

/// `x [rows, inputs]` through a linear map, `[rows, outputs]`.
pub fn project(linear: &Linear, x: &[f64]) -> Vec<f64> {
    let (inputs, weights) = (linear.inputs(), linear.weights(WeightLayout::OutIn));
    let mut out = Vec::new();
    for row in x.chunks_exact(inputs.max(1)) {
        for o in 0..linear.outputs() {
            let weights = &weights[o * inputs..][..inputs];
            let sum: f64 = row.iter().zip(weights).map(|(x, &w)| x * w as f64).sum();
            out.push(sum + linear.bias().map_or(0.0, |bias| bias[o] as f64));
        }
    }
    out
}

fn project_nothing(linear: &Linear, rows: usize) -> Vec<f64> {
    let row = |o: usize| linear.bias().map_or(0.0, |bias| bias[o] as f64);
    (0..rows).flat_map(|_| (0..linear.outputs()).map(row)).collect()
}

/// `x [rows, kv_heads, d]` with each head as often as there are query heads on it.
fn repeat(layer: &MultiHead, x: &[f64], d: usize) -> Vec<f64> {
    let row = |x: &[f64]| -> Vec<f64> {
        let heads = layer.groups.iter().zip(x.chunks_exact(d));
        heads.flat_map(|(&n, head)| head.repeat(n)).collect()
    };
    let width = layer.groups.len() * d;
    if width == 0 { Vec::new() } else { x.chunks_exact(width).flat_map(row).collect() }
}

fn turn(rotary: &Rotary, tokens: Tokens<'_>, d: usize, x: &mut [f64]) {
    let half = rotary.width() / 2;
    let width = x.len().checked_div(tokens.rows()).unwrap_or(0);
    for (row, x) in x.chunks_exact_mut(width.max(1)).enumerate() {
        let position = tokens.position(row, |_| 0) as f64;
        for head in x.chunks_exact_mut(d) {
            for (i, frequency) in rotary.frequencies().iter().enumerate() {
                let (sin, cos) = (position * frequency).sin_cos();
                let [first, second] = match rotary.pairing() {
                    Pairing::Halves => [i, i + half],
                    Pairing::Interleaved => [2 * i, 2 * i + 1],
                };
                let (a, b) = (head[first], head[second]);
                (head[first], head[second]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| x as f64).collect()
}
