//! The attention map in blocks of rows, each whole but gone when the next one comes.

use std::ops::Range;

use headwise_kernels::{Call, Element, Error, Stage, Stored, View};

use crate::Attention;

/// Queries of a block at most: enough for every lane of the kernel.
const QUERIES: usize = 64;

/// Weights of a block, where one row of it is not more.
const WEIGHTS: usize = 1 << 20;

/// Some queries of some heads, with their weights.
pub(super) struct Block<'a> {
    pub heads: Range<usize>,
    pub queries: Range<usize>,
    weights: &'a [f32],
    keys: usize,
}

impl<'a> Block<'a> {
    /// The weights of a row over all keys, valid or not.
    pub fn row(&self, b: usize, head: usize, query: usize) -> &'a [f32] {
        let (head, query) = (head - self.heads.start, query - self.queries.start);
        let row = (b * self.heads.len() + head) * self.queries.len() + query;
        &self.weights[row * self.keys..][..self.keys]
    }
}

/// Calls `f` with every row that is computed, as blocks of `heads` heads and some queries of all batch
/// entries.
pub(super) fn each<'a, T: Element, C: Stored>(
    attention: &Attention<'a>,
    q: View<'a, T>,
    k: View<'a, C>,
    heads: usize,
    mut f: impl FnMut(&Call<'_>, &Block<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    let call = Call::new(q, k, k.first_features(0), attention.terms())?;
    let ([b, hq, lq, _], keys) = (call.out_shape(), call.keys_axis());
    if [b, hq, lq, keys].contains(&0) {
        return Ok(());
    }
    let queries = (WEIGHTS / (b * heads * keys)).clamp(1, QUERIES);
    let mut memory = Vec::new();
    for first in (0..hq).step_by(heads) {
        let heads = first..hq.min(first + heads);
        for first in (0..lq).step_by(queries) {
            let (heads, queries) = (heads.clone(), first..lq.min(first + queries));
            memory.resize(b * heads.len() * queries.len() * keys, 0.0);
            attention.scores(Stage::Weights, q, k, heads.clone(), queries.clone(), &mut memory)?;
            f(&call, &Block { heads, queries, weights: &memory, keys })?;
        }
    }
    Ok(())
}
