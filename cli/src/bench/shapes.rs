//! The named shapes, their inputs, and the rows of the f64 reference that every result is checked against.

use std::sync::Arc;

use headwise::{Attention, Level, Position, Terms, View, ViewMut, reference};

use super::buffer::Buffer;
use crate::Failure;

/// The sizes of a problem: `B x Hq/Hk x Lq x Lk x D`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub name: &'static str,
    pub b: usize,
    pub hq: usize,
    pub hk: usize,
    pub lq: usize,
    pub lk: usize,
    pub d: usize,
    pub causal: bool,
}

#[rustfmt::skip]
pub(crate) const SHAPES: [Shape; 15] = [
    Shape { name: "bert",         b: 8,  hq: 12, hk: 12, lq: 128,  lk: 128,   d: 64,  causal: false },
    Shape { name: "classic",      b: 1,  hq: 8,  hk: 8,  lq: 512,  lk: 512,   d: 64,  causal: false },
    Shape { name: "prefill",      b: 1,  hq: 32, hk: 8,  lq: 2048, lk: 2048,  d: 128, causal: true },
    Shape { name: "long",         b: 1,  hq: 8,  hk: 8,  lq: 8192, lk: 8192,  d: 64,  causal: false },
    Shape { name: "long-causal",  b: 1,  hq: 8,  hk: 8,  lq: 8192, lk: 8192,  d: 64,  causal: true },
    Shape { name: "vit",          b: 4,  hq: 12, hk: 12, lq: 197,  lk: 197,   d: 64,  causal: false },
    Shape { name: "minilm",       b: 16, hq: 12, hk: 12, lq: 64,   lk: 64,    d: 32,  causal: false },
    Shape { name: "cross",        b: 1,  hq: 8,  hk: 8,  lq: 77,   lk: 4096,  d: 40,  causal: false },
    Shape { name: "decode",       b: 1,  hq: 32, hk: 8,  lq: 1,    lk: 4096,  d: 128, causal: false },
    Shape { name: "decode-batch", b: 16, hq: 32, hk: 8,  lq: 1,    lk: 1024,  d: 128, causal: false },
    Shape { name: "decode-long",  b: 1,  hq: 32, hk: 8,  lq: 1,    lk: 65536, d: 128, causal: false },
    Shape { name: "decode-mha",   b: 1,  hq: 32, hk: 32, lq: 1,    lk: 4096,  d: 128, causal: false },
    Shape { name: "decode-mqa",   b: 1,  hq: 32, hk: 1,  lq: 1,    lk: 16384, d: 128, causal: false },
    Shape { name: "decode-short", b: 1,  hq: 32, hk: 8,  lq: 1,    lk: 512,   d: 128, causal: false },
    Shape { name: "speculate",    b: 1,  hq: 32, hk: 8,  lq: 4,    lk: 4096,  d: 128, causal: true },
];

impl Shape {
    pub fn parse(name: &str) -> Result<Self, String> {
        SHAPES
            .into_iter()
            .find(|shape| shape.name == name)
            .ok_or_else(|| format!("the shapes are {}", SHAPES.map(|shape| shape.name).join(", ")))
    }

    /// Two for every multiply-add of the two products, over the visible pairs.
    pub fn flop(&self) -> f64 {
        let hidden = if self.causal { self.lq * (self.lq - 1) / 2 } else { 0 };
        (4 * self.b * self.hq * (self.lq * self.lk - hidden) * self.d) as f64
    }

    /// Numbers in K, and as many in V.
    fn keys(&self) -> usize {
        self.b * self.hk * self.lk * self.d
    }

    /// Bytes of K and V, where a call is about reading them: with few queries.
    pub fn bytes_to_read(&self) -> Option<f64> {
        (self.lq <= 4).then(|| (2 * self.keys() * size_of::<f32>()) as f64)
    }
}

/// A shape with its inputs, uniform in [-1, 1], and some rows of the right answer.
pub(crate) struct Case {
    pub shape: Shape,
    q: Buffer,
    /// K and V of the largest shape, which the cases share; each uses the front.
    kv: Arc<[Buffer; 2]>,
    pub out: Buffer,
    /// Row of `out` and what it must hold.
    expected: Vec<(usize, Vec<f64>)>,
}

/// Multiply-adds of the reference that a shape may cost: the long ones are checked in fewer rows.
const REFERENCE_WORK: usize = 8_000_000;

impl Case {
    /// A case for each shape.
    pub fn all(shapes: &[Shape]) -> Result<Vec<Self>, Failure> {
        let keys = shapes.iter().map(Shape::keys).max().unwrap_or(0);
        let kv = Arc::new([Buffer::new(keys, uniform(2))?, Buffer::new(keys, uniform(3))?]);
        shapes.iter().map(|&shape| Self::new(shape, Arc::clone(&kv))).collect()
    }

    fn new(shape: Shape, kv: Arc<[Buffer; 2]>) -> Result<Self, Failure> {
        let Shape { b, hq, hk, lq, lk, d, causal, .. } = shape;
        let rows = b * hq * lq;
        let q = Buffer::new(rows * d, uniform(1))?;
        let [k, v] = &*kv;
        let samples = (REFERENCE_WORK / (lk * d)).clamp(8, rows);
        let row = |sample| sample * (rows - 1) / (samples - 1); // the first, the last, and others between
        let expected = (0..samples).map(row).map(|row| {
            let (b, h, i) = (row / (hq * lq), row / lq % hq, row % lq);
            let kv = (b * hk + h / (hq / hk)) * lk * d;
            let position = Position::At((i + lk - lq) as i64);
            let answer = reference::attention(
                View::bhld(&q[row * d..][..d], [1, 1, 1, d])?,
                View::bhld(&k[kv..][..lk * d], [1, 1, lk, d])?,
                View::bhld(&v[kv..][..lk * d], [1, 1, lk, d])?,
                &Terms { causal, position, ..Terms::default() },
            )?;
            Ok((row, answer.out))
        });
        let expected = expected.collect::<Result<_, headwise::Error>>().map_err(Failure::usage)?;
        Ok(Self { out: Buffer::new(rows * d, |_| 0.0)?, shape, q, kv, expected })
    }

    /// Q, K and V, and the output.
    pub fn parts(&mut self) -> ([&[f32]; 3], &mut [f32]) {
        let [k, v] = self.kv.each_ref().map(|buffer| &buffer[..self.shape.keys()]);
        ([&self.q, k, v], &mut self.out)
    }

    /// One call of the library, on the current pool.
    pub fn attention(&mut self, level: Level) -> Result<(), headwise::Error> {
        let Shape { b, hq, hk, lq, lk, d, causal, .. } = self.shape;
        let attention = if causal { Attention::new().causal() } else { Attention::new() };
        let ([q, k, v], out) = self.parts();
        attention.level(level).run(
            View::bhld(q, [b, hq, lq, d])?,
            View::bhld(k, [b, hk, lk, d])?,
            View::bhld(v, [b, hk, lk, d])?,
            ViewMut::bhld(out, [b, hq, lq, d])?,
        )
    }

    /// The largest error of `out` in the rows that are known; NaN counts as infinite.
    pub fn max_error(&self) -> f64 {
        let d = self.shape.d;
        let errors = self.expected.iter().flat_map(|(row, expected)| {
            let out = &self.out[row * d..][..d];
            out.iter().zip(expected).map(|(&out, expected)| (f64::from(out) - expected).abs())
        });
        errors.fold(0.0, |max, error| if error.is_nan() { f64::INFINITY } else { error.max(max) })
    }
}

/// Splitmix64, its upper 24 bits as a number in [-1, 1).
fn uniform(seed: u64) -> impl Fn(usize) -> f32 {
    move |i| {
        let mut x = (seed << 40 | i as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
