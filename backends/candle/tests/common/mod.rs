//! What the tests share: numbers, tensors in unusual layouts, the f64 reference.
#![allow(dead_code, reason = "each test target uses a part")]

use candle_core::{D, DType, Device, Result, Tensor};
use headwise_candle::headwise::{Terms, View, reference};

/// Uniform in [-1, 1): splitmix64.
pub fn fill(n: usize, seed: u64) -> Vec<f32> {
    let mix = |i: u64| {
        let mut x = (seed << 40 | i).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n as u64).map(mix).collect()
}

pub fn tensor(shape: [usize; 4], seed: u64) -> Tensor {
    let data = fill(shape.iter().product(), seed);
    Tensor::from_vec(data, (shape[0], shape[1], shape[2], shape[3]), &Device::Cpu).unwrap()
}

/// How a tensor comes to lie in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Lies {
    Compact,
    /// Tokens outside the heads, then transposed.
    TokensOutside,
    /// A part of a larger tensor, narrowed on every axis.
    Narrowed,
    /// Features outside the tokens, then transposed.
    FeaturesOutside,
    /// One batch entry and one head for all.
    Broadcast,
}

pub const LIES: [Lies; 5] =
    [Lies::Compact, Lies::TokensOutside, Lies::Narrowed, Lies::FeaturesOutside, Lies::Broadcast];

/// A tensor `[B, H, L, D]` that lies so.
pub fn lying(lies: Lies, [b, h, l, d]: [usize; 4], seed: u64) -> Result<Tensor> {
    match lies {
        Lies::Compact => Ok(tensor([b, h, l, d], seed)),
        Lies::TokensOutside => tensor([b, l, h, d], seed).transpose(1, 2),
        Lies::Narrowed => {
            let mut part = tensor([b + 1, h + 2, l + 3, d + 5], seed);
            for (axis, (start, len)) in [(1, b), (1, h), (2, l), (3, d)].into_iter().enumerate() {
                part = part.narrow(axis, start, len)?;
            }
            Ok(part)
        }
        Lies::FeaturesOutside => tensor([b, h, d, l], seed).transpose(2, 3),
        Lies::Broadcast => tensor([1, 1, l, d], seed).broadcast_as((b, h, l, d)),
    }
}

/// The elements in order, as f32.
pub fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The f64 reference.
pub fn expected(q: &Tensor, k: &Tensor, v: &Tensor, terms: &Terms<'_>) -> Vec<f64> {
    let [data_q, data_k, data_v] = [q, k, v].map(numbers);
    let view = |tensor: &Tensor, data| {
        let (b, h, l, d) = tensor.dims4().unwrap();
        View::bhld(data, [b, h, l, d]).unwrap()
    };
    reference::attention(view(q, &data_q), view(k, &data_k), view(v, &data_v), terms).unwrap().out
}

/// The largest difference; NaN counts as infinite.
pub fn difference(got: &[f32], want: impl IntoIterator<Item = f64>) -> f64 {
    let want: Vec<f64> = want.into_iter().collect();
    assert_eq!(got.len(), want.len());
    let difference = |(&got, want): (&f32, f64)| (f64::from(got) - want).abs();
    let each = got.iter().zip(want).map(difference);
    each.fold(0.0, |max, x| if x.is_nan() { f64::INFINITY } else { x.max(max) })
}

/// What models write: matrix product, softmax, matrix product, with an additive mask.
pub fn three_steps(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, bias: Option<&Tensor>) -> Result<Tensor> {
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    let mut scores = (q.matmul(&k.t()?)? * scale)?;
    if let Some(bias) = bias {
        scores = scores.broadcast_add(bias)?;
    }
    candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v)
}
