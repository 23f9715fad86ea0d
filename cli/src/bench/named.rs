//! The named shapes. The bench `attention` measures the same ones.

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
    pub fn keys(&self) -> usize {
        self.b * self.hk * self.lk * self.d
    }

    /// Whether a call is about reading K and V: with few queries.
    pub fn is_reading(&self) -> bool {
        self.lq <= 4
    }
}
