//! What heads do with the tokens themselves: copying, and relations that somebody has annotated.

use headwise_kernels::{Element, Error, Stored, View, ViewMut};

use super::{StatisticsOptions, blocks};
use crate::Attention;

/// How much of a head's weight lies on the keys of a pattern, over the rows that have such keys: sums, so
/// that those of many calls [add up](Self::add).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PatternScore {
    mass: f64,
    chance: f64,
    rows: u64,
}

impl PatternScore {
    /// Mean weight on the pattern's keys: 1 for a head that does nothing else.
    pub fn mean(&self) -> Option<f64> {
        (self.rows > 0).then(|| self.mass / self.rows as f64)
    }

    /// What equal weights on the same visible keys would score.
    pub fn chance(&self) -> Option<f64> {
        (self.rows > 0).then(|| self.chance / self.rows as f64)
    }

    /// Rows that have keys of the pattern.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Joins the score over other rows.
    pub fn add(&mut self, other: &Self) {
        self.mass += other.mass;
        self.chance += other.chance;
        self.rows += other.rows;
    }

    /// One row: its weights and the keys of the pattern.
    fn count(&mut self, row: &[f32], visible: usize, keys: impl Iterator<Item = usize>) {
        let (mut mass, mut share, mut any) = (0.0, 0, false);
        for key in keys {
            mass += f64::from(row[key]);
            share += usize::from(row[key] > 0.0);
            any = true;
        }
        if any {
            self.mass += mass;
            self.chance += share as f64 / visible as f64;
            self.rows += 1;
        }
    }
}

/// Scores of a head that need the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct TokenPatterns {
    /// Weight on the tokens that follow earlier copies of the query's token: a head that continues what has
    /// been seen before (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Olsson et
    /// al. 2022, "In-context Learning and Induction Heads").
    pub induction: PatternScore,
    /// Weight on the earlier copies themselves (Wang et al. 2022, "Interpretability in the Wild").
    pub duplicate: PatternScore,
}

impl TokenPatterns {
    /// Joins the scores over other rows.
    pub fn add(&mut self, other: &Self) {
        self.induction.add(&other.induction);
        self.duplicate.add(&other.duplicate);
    }
}

/// Induction and duplicate-token scores of each query head, `[Hq]`. `tokens [B, Lk]` are those of the keys,
/// in any numbering; query `i` has the token at its place `pos(i)` among them, so that keys from a cache
/// count. Rows without an earlier copy, or that see no key, do not count. A weight that underflows to 0
/// counts as hidden for the chance. Costs two passes over the scores, and `O(Lk)` memory for a block of rows.
///
/// ```
/// use headwise::{Attention, View, patterns};
/// // A head that finds the key after the last copy: one-hot queries on keys shifted by one.
/// let tokens = [0, 1, 2, 0, 1, 2];
/// let one_hot = |shift: usize| -> Vec<f32> {
///     let on = |i: usize, c: u32| i >= shift && tokens[i - shift] == c;
///     (0..6).flat_map(|i| (0..3).map(move |c| if on(i, c) { 40.0 } else { 0.0 })).collect()
/// };
/// let (q, k) = (one_hot(0), one_hot(1));
/// let (q, k) = (View::bhld(&q, [1, 1, 6, 3])?, View::bhld(&k, [1, 1, 6, 3])?);
/// let scores = patterns::tokens(&Attention::new().causal(), q, k, &tokens)?;
/// assert!(scores[0].induction.mean() > Some(0.999) && scores[0].duplicate.mean() < Some(0.001));
/// # Ok::<(), headwise::Error>(())
/// ```
///
/// # Errors
/// As [`Attention::scores`]; [`Error::Length`] if there are not `B * Lk` tokens.
pub fn tokens<'a, T: Element, C: Stored>(
    attention: &Attention<'a>,
    q: View<'a, T>,
    k: View<'a, C>,
    tokens: &[u32],
) -> Result<Vec<TokenPatterns>, Error> {
    let ([b, heads, ..], lk) = (q.shape(), k.shape()[2]);
    if Some(tokens.len()) != b.checked_mul(lk) {
        let expected = b.saturating_mul(lk);
        return Err(Error::Length { argument: "tokens", got: tokens.len(), expected });
    }
    let mut patterns: Vec<TokenPatterns> = blocks::zeros("patterns", [heads, 1, 1, 1])?;
    // Of each token the last key before it with the same one.
    let mut before = vec![None; tokens.len()];
    for (tokens, before) in tokens.chunks(lk.max(1)).zip(before.chunks_mut(lk.max(1))) {
        let mut last = std::collections::HashMap::new();
        for (j, (token, before)) in tokens.iter().zip(before).enumerate() {
            *before = last.insert(token, j);
        }
    }
    blocks::each(attention, q, k, 1, |call, block| {
        for b in 0..b {
            for i in block.queries.start..block.queries.end.min(call.q_len(b)) {
                let pos = usize::try_from(call.pos(b, i)).ok().filter(|&pos| pos < call.kv_len(b));
                let Some(pos) = pos else { continue };
                let before = &before[b * lk..][..lk];
                let copies = || std::iter::successors(before[pos], |&j| before[j]);
                if copies().next().is_none() {
                    continue;
                }
                for head in block.heads.clone() {
                    let row = block.row(b, head, i);
                    let visible = row.iter().filter(|&&p| p > 0.0).count();
                    if visible > 0 {
                        patterns[head].induction.count(row, visible, copies().map(|j| j + 1));
                        patterns[head].duplicate.count(row, visible, copies());
                    }
                }
            }
        }
        Ok(())
    })?;
    Ok(patterns)
}

/// A query and a key that belong together, by an annotation: a verb and its object, a pronoun and the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pair {
    /// The batch entry.
    pub b: usize,
    /// The query.
    pub query: usize,
    /// The key.
    pub key: usize,
}

/// How often a head's heaviest key is an annotated one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PairScore {
    /// Rows whose heaviest key is one of those annotated for it.
    pub hits: u64,
    /// Rows with annotations that see a key.
    pub rows: u64,
}

impl PairScore {
    /// The share of hits.
    pub fn share(&self) -> Option<f64> {
        (self.rows > 0).then(|| self.hits as f64 / self.rows as f64)
    }

    /// Joins the score over other rows.
    pub fn add(&mut self, other: &Self) {
        self.hits += other.hits;
        self.rows += other.rows;
    }
}

/// Of each query head, `[Hq]`, in how many of the annotated rows the heaviest key is the annotated one (Clark
/// et al. 2019, "What Does BERT Look At?", section 4). A query with several annotated keys is one row, hit by
/// any of them. Costs the scores of one pass, without values.
///
/// # Errors
/// As [`Attention::scores`]; [`Error::BeyondAxis`] if a pair names a batch entry, query or key that is not
/// there.
pub fn pairs<'a, T: Element, C: Stored>(
    attention: &Attention<'a>,
    q: View<'a, T>,
    k: View<'a, C>,
    pairs: &[Pair],
) -> Result<Vec<PairScore>, Error> {
    let v = k.first_features(0);
    let call = headwise_kernels::Call::new(q, k, v, attention.terms())?;
    let ([b, heads, lq, _], lk) = (call.out_shape(), call.keys_axis());
    for (index, pair) in pairs.iter().enumerate() {
        for (argument, got, axis) in
            [("pairs.b", pair.b, b), ("pairs.query", pair.query, lq), ("pairs.key", pair.key, lk)]
        {
            if got >= axis {
                return Err(Error::BeyondAxis { argument, index, got, axis });
            }
        }
    }
    let mut scores: Vec<PairScore> = blocks::zeros("scores", [heads, 1, 1, 1])?;
    if pairs.is_empty() {
        return Ok(scores);
    }
    let mut pairs = pairs.to_vec();
    pairs.sort_unstable();
    let options = StatisticsOptions::new().rows();
    let statistics =
        attention.run_with_statistics(q, k, v, ViewMut::<T>::bhld(&mut [], [b, heads, lq, 0])?, &options)?;
    let rows = statistics.rows().unwrap_or(&[]);
    for row in pairs.chunk_by(|a, b| (a.b, a.query) == (b.b, b.query)) {
        let Pair { b, query, .. } = row[0];
        if query >= call.q_len(b) {
            continue;
        }
        for (head, score) in scores.iter_mut().enumerate() {
            let statistics = &rows[call.row_index(b, head, query)];
            if statistics.keys > 0 {
                score.rows += 1;
                score.hits += u64::from(row.iter().any(|pair| pair.key == statistics.largest_key as usize));
            }
        }
    }
    Ok(scores)
}
