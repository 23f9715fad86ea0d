//! Statistics of heads, out of the same pass as the attention.
//!
//! ```text
//! entropy            -sum over j of p(j) ln p(j)             0: one key; ln n: all n keys alike
//! normalised         entropy / ln n                          0 to 1, whatever the length
//! largest            max over j of p(j)                      a hard or a soft head
//! first, special     p(0), sum over special j of p(j)        heads that rest: Clark et al. 2019
//! distance           sum over j of p(j) (pos - j)            positive: looks back
//! |distance|         sum over j of p(j) |pos - j|            local or far
//! diagonal, previous, next    p(pos), p(pos - 1), p(pos + 1) heads by position: Voita et al. 2019
//! norm               |out_i|                                 what is passed on: Kobayashi et al. 2020
//! ```
//!
//! (Clark et al. 2019, "What Does BERT Look At?", sections 3 and 4; Voita et al. 2019, "Analyzing Multi-Head
//! Self-Attention", section 5; Kobayashi et al. 2020, "Attention is Not Only a Weight", section 2.)
//!
//! A row counts where it sees a key: rows behind `q_lens`, behind a gate of 0 and rows whose keys are all
//! hidden do not. With a sink the weights of the keys sum to less than 1. The sink is one more key, without
//! index, place and value: its weight counts in the entropy, its presence in `n`, and in nothing else.

use std::fmt;

use headwise_kernels::{Call, Element, Error, HeadSums, Observe, RowStatistics, Stored, View, ViewMut};

use super::blocks::zeros;
use crate::Attention;

/// What [`HeadStatistics`] and [`RowStatistics`] tell; see the fields of the latter for how each is defined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Statistic {
    /// In nats.
    Entropy,
    /// The entropy as a share of the largest possible one. Rows that see one key only do not count.
    NormalisedEntropy,
    /// The largest weight.
    Largest,
    /// Weight on key 0.
    First,
    /// Weight on the special keys. Rows count where there are [`StatisticsOptions::special`] keys.
    Special,
    /// Mean of `pos - j`.
    Distance,
    /// Mean of `|pos - j|`.
    AbsoluteDistance,
    /// Weight on the key at the query's own place. Rows count where it is one of the valid keys, here and for
    /// the next two; hidden ones have weight 0.
    Diagonal,
    /// Weight on the key before that.
    Previous,
    /// Weight on the key after that.
    Next,
    /// The norm of the output.
    Norm,
}

/// How many there are.
const STATISTICS: usize = Statistic::ALL.len();

impl Statistic {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Entropy,
        Self::NormalisedEntropy,
        Self::Largest,
        Self::First,
        Self::Special,
        Self::Distance,
        Self::AbsoluteDistance,
        Self::Diagonal,
        Self::Previous,
        Self::Next,
        Self::Norm,
    ];

    /// The name in tables and files: that of the field of [`RowStatistics`].
    pub fn name(self) -> &'static str {
        match self {
            Self::Entropy => "entropy",
            Self::NormalisedEntropy => "normalised_entropy",
            Self::Largest => "largest",
            Self::First => "first",
            Self::Special => "special",
            Self::Distance => "distance",
            Self::AbsoluteDistance => "absolute_distance",
            Self::Diagonal => "diagonal",
            Self::Previous => "previous",
            Self::Next => "next",
            Self::Norm => "norm",
        }
    }

    /// Its number in a row.
    pub fn of(self, row: &RowStatistics) -> f32 {
        numbers(row)[self as usize]
    }
}

impl fmt::Display for Statistic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The numbers of a row in the order of [`Statistic`].
fn numbers(row: &RowStatistics) -> [f32; STATISTICS] {
    [
        row.entropy,
        row.normalised_entropy,
        row.largest,
        row.first,
        row.special,
        row.distance,
        row.absolute_distance,
        row.diagonal,
        row.previous,
        row.next,
        row.norm,
    ]
}

/// What [`Attention::run_with_statistics`] is asked for beside the statistics of each batch entry and head.
#[derive(Debug, Clone, Copy, Default)]
pub struct StatisticsOptions<'a> {
    special: Option<&'a [bool]>,
    rows: bool,
    received: bool,
}

impl<'a> StatisticsOptions<'a> {
    /// Nothing more.
    pub fn new() -> Self {
        Self::default()
    }

    /// The special keys, such as separators: compact `[B, Lk]`, true = special. (`Lk` of packed keys is the
    /// longest sequence.)
    pub fn special(mut self, keys: &'a [bool]) -> Self {
        self.special = Some(keys);
        self
    }

    /// Keeps the statistics of each row: [`Statistics::rows`].
    pub fn rows(mut self) -> Self {
        self.rows = true;
        self
    }

    /// Sums the weights that each key receives: [`Statistics::received`]. In the same pass, too: each thread
    /// keeps the weights of a block of rows until it is done with them, up to 330 bytes for each key, and each
    /// head of a batch entry has a sum for each key and 256 queries (32 at most), to be joined in the end. Each
    /// query head then reads K and V for itself, which changes the last bits of the other sums in a group.
    pub fn received(mut self) -> Self {
        self.received = true;
        self
    }
}

/// The statistics of a head over some rows: sums, so that those of many calls [add up](Self::add).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct HeadStatistics {
    sums: [f64; STATISTICS],
    counts: [u64; STATISTICS],
}

impl HeadStatistics {
    fn of(sums: &HeadSums, special: bool) -> Self {
        let mut counts = [sums.rows; STATISTICS];
        counts[Statistic::NormalisedEntropy as usize] = sums.several;
        counts[Statistic::Special as usize] = if special { sums.rows } else { 0 };
        let near = [Statistic::Diagonal, Statistic::Previous, Statistic::Next];
        near.into_iter().zip(sums.near).for_each(|(statistic, rows)| counts[statistic as usize] = rows);
        Self { sums: sums.sums, counts }
    }

    /// Rows that count: see [`Statistic`] for what counts.
    pub fn rows(&self, statistic: Statistic) -> u64 {
        self.counts[statistic as usize]
    }

    /// The mean over the rows that count, if there are any.
    pub fn mean(&self, statistic: Statistic) -> Option<f64> {
        let rows = self.rows(statistic);
        (rows > 0).then(|| self.sums[statistic as usize] / rows as f64)
    }

    /// Joins the statistics of other rows: each row weighs the same.
    pub fn add(&mut self, other: &Self) {
        for i in 0..STATISTICS {
            self.sums[i] += other.sums[i];
            self.counts[i] += other.counts[i];
        }
    }
}

/// What [`Attention::run_with_statistics`] returns.
#[derive(Debug, Clone, PartialEq)]
pub struct Statistics {
    query_heads: usize,
    entries: Vec<HeadStatistics>,
    rows: Option<Vec<RowStatistics>>,
    received: Option<Vec<f32>>,
}

impl Statistics {
    /// Of each batch entry and query head, `[B, Hq]`.
    pub fn entries(&self) -> &[HeadStatistics] {
        &self.entries
    }

    /// Of each query head, over the batch, `[Hq]`.
    pub fn heads(&self) -> Vec<HeadStatistics> {
        let mut heads = vec![HeadStatistics::default(); self.query_heads];
        for entry in self.entries.chunks_exact(self.query_heads.max(1)) {
            heads.iter_mut().zip(entry).for_each(|(head, entry)| head.add(entry));
        }
        heads
    }

    /// Of each row, laid out as [`Attention::run_with_lse`]'s `lse`, `[B, Hq, Lq]`, if
    /// [asked for](StatisticsOptions::rows).
    pub fn rows(&self) -> Option<&[RowStatistics]> {
        self.rows.as_deref()
    }

    /// `sum over i of p(i, j)`, the weight that each key receives from all queries, `[B, Hq, Lk]`, if
    /// [asked for](StatisticsOptions::received). For each head they sum to the number of its rows that
    /// see a key (with sinks, to less).
    pub fn received(&self) -> Option<&[f32]> {
        self.received.as_deref()
    }
}

impl<'a> Attention<'a> {
    /// As [`Attention::run`], and returns what the heads did: see [`crate::analysis`]. It takes 1.03 to 1.06
    /// times as long as [`Attention::run`] at 2048 tokens, 1.1 times at 128 (D = 64) and 1.2 times at 64 (D =
    /// 32), where the end of a row counts; with what keys receive 1.15, 1.16 and 1.25 to 1.3 times (AVX-512;
    /// the bench `statistics` measures it). It is the prefill
    /// kernel in f32 at every level: few query rows, which would go to the kernel for decoding, and bf16
    /// multiplied as such come out rounded a little differently.
    ///
    /// # Errors
    /// As [`Attention::run`]; [`Error::Length`] if the special keys are not `B * Lk`.
    pub fn run_with_statistics<T: Element, C: Stored>(
        &self,
        q: View<'a, T>,
        k: View<'a, C>,
        v: View<'a, C>,
        out: ViewMut<'_, T>,
        options: &StatisticsOptions<'_>,
    ) -> Result<Statistics, Error> {
        let call = Call::new(q, k, v, self.terms())?;
        let ([b, hq, ..], lk, special) = (call.out_shape(), call.keys_axis(), options.special);
        let mut sums = zeros::<HeadSums>("entries", [b, hq, 1, 1])?;
        let plan = self.plan_of(&call)?;
        let mut rows = options.rows.then(|| zeros("rows", [call.rows(), 1, 1, 1])).transpose()?;
        let mut received = options.received.then(|| zeros("received", [b, hq, lk, 1])).transpose()?;
        let (rows_to, received_to) = (rows.as_deref_mut(), received.as_deref_mut());
        let observe = Observe { heads: &mut sums, rows: rows_to, special, received: received_to };
        plan.run_with_statistics(&call, out, observe, self.scratch)?;
        let entries = sums.iter().map(|sums| HeadStatistics::of(sums, special.is_some())).collect();
        Ok(Statistics { query_heads: hq, entries, rows, received })
    }
}
