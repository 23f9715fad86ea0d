//! What a layer does to rows between its products: norms and rotary positions. Plain loops over slices,
//! compiled for each level; sums have sixteen partial sums, so that they vectorise.

use crate::call::length;
use crate::isa::Isa;
use crate::level::Op;
use crate::{Error, Level};

/// Partial sums of a row.
const LANES: usize = 16;

/// A norm over each row's features.
#[derive(Debug, Clone, Copy)]
pub struct RowNorm<'a> {
    /// Which norm.
    pub kind: NormKind,
    /// `[features]`.
    pub weight: &'a [f32],
    /// `[features]`.
    pub bias: Option<&'a [f32]>,
    /// Added to the variance or mean square.
    pub eps: f32,
}

/// Which norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// LayerNorm: mean 0 and variance 1.
    Layer,
    /// RMSNorm: mean square 1.
    Rms,
}

impl RowNorm<'_> {
    /// Normalises the rows of `x` in place, each as long as `weight`.
    ///
    /// # Errors
    /// [`Error::Length`] if `x` is not a whole number of rows or `bias` is not as long as `weight`,
    /// [`Error::LevelUnavailable`].
    pub fn in_place(&self, level: Level, x: &mut [f32]) -> Result<(), Error> {
        let features = self.weight.len();
        length("x", x.len(), x.len().checked_div(features).unwrap_or(0) * features)?;
        self.bias.map_or(Ok(()), |bias| length("bias", bias.len(), features))?;
        level.dispatch(NormRows { norm: *self, x })
    }

    /// As [`RowNorm::in_place`], from `x` to `out`.
    ///
    /// # Errors
    /// As [`RowNorm::in_place`]; [`Error::Length`] if `out` is not as long as `x`.
    pub fn apply(&self, level: Level, x: &[f32], out: &mut [f32]) -> Result<(), Error> {
        length("out", out.len(), x.len())?;
        let features = self.weight.len().max(1);
        // Row by row, so that a row is still in the nearest cache when it is normalised.
        let each = (4096 / features).max(1) * features;
        for (x, out) in x.chunks(each).zip(out.chunks_mut(each)) {
            out.copy_from_slice(x);
            self.in_place(level, out)?;
        }
        Ok(())
    }
}

struct NormRows<'a> {
    norm: RowNorm<'a>,
    x: &'a mut [f32],
}

impl Op for NormRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa, const NQ: usize, const MR: usize>(self, _: I) {
        let Self { norm: RowNorm { kind, weight, bias, eps }, x } = self;
        let n = weight.len();
        if n == 0 {
            return;
        }
        for row in x.chunks_exact_mut(n) {
            // The mean, rounded, and what rounding took from it: beside a large mean that is not little.
            let (mean, rest) = match kind {
                NormKind::Layer => {
                    let mean = sum(row, |x| x) / n as f32;
                    (mean, sum(row, |x| x - mean) / n as f32)
                }
                NormKind::Rms => (0.0, 0.0),
            };
            let from_mean = |x: f32| (x - mean) - rest;
            let factor = 1.0 / (sum(row, |x| from_mean(x) * from_mean(x)) / n as f32 + eps).sqrt();
            match bias {
                Some(bias) => {
                    for ((x, w), b) in row.iter_mut().zip(weight).zip(bias) {
                        *x = from_mean(*x) * factor * w + b;
                    }
                }
                None => {
                    for (x, w) in row.iter_mut().zip(weight) {
                        *x = from_mean(*x) * factor * w;
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn sum(row: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut sums = [0.0; LANES];
    let (blocks, rest) = row.as_chunks::<LANES>();
    for block in blocks {
        for (sum, x) in sums.iter_mut().zip(block) {
            *sum += f(*x);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += f(*x);
    }
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
        half /= 2;
    }
    sums[0]
}

/// Which features of a head turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// Feature `i` with feature `i + width / 2` (GPT-NeoX, Llama in Hugging Face's files).
    Halves,
    /// Feature `2 i` with feature `2 i + 1` (RoFormer, GPT-J, Llama in Meta's files).
    Interleaved,
}

/// Turns the first `2 * cos.len()` features of each head of a row, `head` features each, by the angles whose
/// cosines and sines are given.
///
/// # Errors
/// [`Error::Length`] unless `sin` is as long as `cos`, a head has so many features and the row is whole
/// heads; [`Error::LevelUnavailable`].
pub fn rotate(
    level: Level,
    pairing: Pairing,
    [cos, sin]: [&[f32]; 2],
    row: &mut [f32],
    head: usize,
) -> Result<(), Error> {
    length("sin", sin.len(), cos.len())?;
    length("head", head, head.max(2 * cos.len()))?;
    length("row", row.len(), row.len().checked_div(head).unwrap_or(0) * head)?;
    level.dispatch(Rotate { pairing, cos, sin, row, head })
}

struct Rotate<'a> {
    pairing: Pairing,
    cos: &'a [f32],
    sin: &'a [f32],
    row: &'a mut [f32],
    head: usize,
}

impl Op for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<I: Isa, const NQ: usize, const MR: usize>(self, _: I) {
        let Self { pairing, cos, sin, row, head } = self;
        if head == 0 {
            return;
        }
        let half = cos.len();
        for head in row.chunks_exact_mut(head) {
            let turned = &mut head[..2 * half];
            match pairing {
                Pairing::Halves => {
                    let (first, second) = turned.split_at_mut(half);
                    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                    }
                }
                Pairing::Interleaved => {
                    let (pairs, _) = turned.as_chunks_mut::<2>();
                    for ((pair, cos), sin) in pairs.iter_mut().zip(cos).zip(sin) {
                        let [a, b] = *pair;
                        *pair = [a * cos - b * sin, b * cos + a * sin];
                    }
                }
            }
        }
    }
}
