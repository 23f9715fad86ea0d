//! Head analysis in f64 from whole attention maps, each definition as it is written: what the streamed ones
//! are held against. Not meant for work.

use headwise_kernels::{Call, Element, Error, Stored, Terms, View};

use super::Statistic;
use crate::reference::{self, Reference};

/// The statistics of all rows, with the attention that they come from.
#[derive(Debug, Clone, PartialEq)]
pub struct StatisticsReference {
    /// The attention.
    pub attention: Reference,
    /// `[B, Hq, Lq]`, of packed queries too.
    pub rows: Vec<RowReference>,
    /// `sum over i of p(i, j)`, `[B, Hq, Lk]`.
    pub received: Vec<f64>,
}

/// The statistics of one row.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RowReference {
    /// In the order of [`Statistic::ALL`].
    pub numbers: [f64; Statistic::ALL.len()],
    /// The first key with the largest weight.
    pub largest_key: usize,
    /// Visible keys.
    pub keys: usize,
}

/// Computes the [statistics](Statistic); `special [B, Lk]`.
///
/// # Errors
/// As [`crate::Attention::run`].
pub fn statistics<'a, T: Element, C: Stored>(
    q: View<'a, T>,
    k: View<'a, C>,
    v: View<'a, C>,
    terms: &Terms<'a>,
    special: Option<&[bool]>,
) -> Result<StatisticsReference, Error> {
    let call = Call::new(q, k, v, terms)?;
    let attention = reference::attention(q, k, v, terms)?;
    let ([b, hq, lq, dv], lk) = (call.out_shape(), call.keys_axis());
    let mut rows = vec![RowReference::default(); b * hq * lq];
    let mut received = vec![0.0; b * hq * lk];
    for (at, row) in rows.iter_mut().enumerate() {
        let (head, b, h, i) = (at / lq, at / (hq * lq), at / lq % hq, at % lq);
        let (p, scores) = (&attention.weights[at * lk..][..lk], &attention.biased[at * lk..][..lk]);
        let keys: Vec<usize> = (0..lk).filter(|&j| scores[j] != f64::NEG_INFINITY).collect();
        if keys.is_empty() {
            continue;
        }
        keys.iter().for_each(|&j| received[head * lk + j] += p[j]);
        let pos = call.pos(b, i) as f64;
        let sink = terms.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[h]));
        let term = |p: f64| if p == 0.0 { 0.0 } else { -p * p.ln() };
        let sum = |f: &dyn Fn(usize) -> f64| keys.iter().map(|&j| f(j)).sum::<f64>();
        let entropy = sum(&|j| term(p[j])) + term((sink - attention.lse[at]).exp());
        let outcomes = keys.len() + usize::from(sink != f64::NEG_INFINITY);
        let heaviest = |best, &j| if p[j] > p[best] { j } else { best };
        let largest_key = keys.iter().fold(keys[0], heaviest);
        let out = &attention.out[at * dv..][..dv];
        row.numbers = [
            entropy,
            if outcomes > 1 { entropy / (outcomes as f64).ln() } else { 0.0 },
            p[largest_key],
            sum(&|j| if j == 0 { p[j] } else { 0.0 }),
            sum(&|j| if special.is_some_and(|special| special[b * lk + j]) { p[j] } else { 0.0 }),
            sum(&|j| p[j] * (pos - j as f64)),
            sum(&|j| p[j] * (pos - j as f64).abs()),
            sum(&|j| if j as f64 == pos { p[j] } else { 0.0 }),
            sum(&|j| if j as f64 == pos - 1.0 { p[j] } else { 0.0 }),
            sum(&|j| if j as f64 == pos + 1.0 { p[j] } else { 0.0 }),
            out.iter().map(|x| x * x).sum::<f64>().sqrt(),
        ];
        (row.largest_key, row.keys) = (largest_key, keys.len());
    }
    Ok(StatisticsReference { attention, rows, received })
}

/// Weights of the rows of two heads: `ln 2` times the square of their Jensen-Shannon distance, by its
/// definition `H((p + q) / 2) - (H(p) + H(q)) / 2` in nats; what the weights lack to 1 is one more outcome.
pub fn jensen_shannon_divergence(p: &[f64], q: &[f64]) -> f64 {
    let rest = |p: &[f64]| (1.0 - p.iter().sum::<f64>()).max(0.0);
    let whole = |p: &[f64]| [p, &[rest(p)]].concat();
    let entropy = |p: &[f64]| p.iter().filter(|&&p| p > 0.0).map(|p| -p * p.ln()).sum::<f64>();
    let (p, q) = (whole(p), whole(q));
    let middle: Vec<f64> = p.iter().zip(&q).map(|(p, q)| (p + q) / 2.0).collect();
    entropy(&middle) - (entropy(&p) + entropy(&q)) / 2.0
}
