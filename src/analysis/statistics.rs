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

use std::cell::Cell;
use std::fmt;

use headwise_kernels::{Call, Element, Error, Observe, RowStatistics, Stored, View, ViewMut};

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
#[inline]
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

    /// Sums the weights that each key receives: [`Statistics::received`]. They need the sums of all rows
    /// first, so the scores are computed once more: 1.6 to 2 times the time of [`Attention::run`] in all.
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
    /// As [`Attention::run`], and returns what the heads did: see [`crate::analysis`]. It takes 1.05 to 1.1
    /// times as long as [`Attention::run`] at 2048 tokens, 1.2 times at 128 (D = 64) and 1.4 times at 64 (D =
    /// 32), where the end of a row counts (AVX-512; the bench `statistics` measures it). It is the prefill
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
        let ([b, hq, ..], lk) = (call.out_shape(), call.keys_axis());
        let mut entries = zeros("entries", [b, hq, 1, 1])?;
        let plan = self.plan_of(&call)?;
        let states = if options.received { call.rows() } else { 0 };
        let mut states = zeros("states", [states, 1, 1, 1])?;
        let compute = |rows: &mut [RowStatistics]| {
            let states = options.received.then_some(&mut states[..]);
            let observe = Observe { rows: &mut *rows, special: options.special, states };
            plan.run_with_statistics(&call, out, observe, self.scratch)?;
            sum(&call, options, rows, &mut entries);
            Ok(())
        };
        let mut rows = None;
        if options.rows {
            compute(rows.insert(zeros("rows", [call.rows(), 1, 1, 1])?))?;
        } else {
            with_kept(call.rows(), compute)?;
        }
        let mut received = None;
        if options.received {
            plan.run_received(
                &call,
                &states,
                received.insert(zeros("received", [b, hq, lk, 1])?),
                self.scratch,
            )?;
        }
        Ok(Statistics { query_heads: hq, entries, rows, received })
    }
}

/// Lends rows that are kept from call to call: memory that is new costs more than what is written to it.
fn with_kept(n: usize, f: impl FnOnce(&mut [RowStatistics]) -> Result<(), Error>) -> Result<(), Error> {
    thread_local! {
        // Taken out while in use: while this call waits, rayon may run another one on its thread.
        static ROWS: Cell<Vec<RowStatistics>> = const { Cell::new(Vec::new()) };
    }
    let mut rows = ROWS.take();
    if rows.len() < n {
        rows = zeros("rows", [n, 1, 1, 1])?;
    }
    let result = f(&mut rows[..n]);
    ROWS.set(rows);
    result
}

/// Sums the rows of each batch entry and head, in order.
fn sum(
    call: &Call<'_>,
    options: &StatisticsOptions<'_>,
    rows: &[RowStatistics],
    entries: &mut [HeadStatistics],
) {
    let [_, hq, ..] = call.out_shape();
    for (at, entry) in entries.iter_mut().enumerate() {
        let (b, h) = (at / hq, at % hq);
        let (first, keys) = (call.row_index(b, h, 0), call.kv_len(b) as i64);
        let sink = call.terms().sinks.is_some_and(|sinks| sinks[h] != f32::NEG_INFINITY);
        let (mut seeing, mut several, mut near, first_pos) = (0, 0, [0; 3], call.pos(b, 0));
        let mut sums = [0.0; STATISTICS]; // not those of `entry`: in registers
        for (i, row) in rows[first..][..call.q_len(b)].iter().enumerate() {
            if row.keys == 0 {
                continue;
            }
            let pos = first_pos.saturating_add(i as i64);
            seeing += 1;
            several += u64::from(row.keys > 1 || sink);
            for (count, key) in near.iter_mut().zip([pos, pos.saturating_sub(1), pos.saturating_add(1)]) {
                *count += u64::from((0..keys).contains(&key));
            }
            sums.iter_mut().zip(numbers(row)).for_each(|(sum, x)| *sum += f64::from(x));
        }
        entry.sums = sums;
        entry.counts = [seeing; STATISTICS];
        entry.counts[Statistic::NormalisedEntropy as usize] = several;
        entry.counts[Statistic::Special as usize] = if options.special.is_some() { seeing } else { 0 };
        for (statistic, count) in
            [Statistic::Diagonal, Statistic::Previous, Statistic::Next].into_iter().zip(near)
        {
            entry.counts[statistic as usize] = count;
        }
    }
}
