//! What a layer costs: parameters, operations, memory.

use super::heads::MultiHead;

/// The sizes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CostShape {
    /// Sequences.
    pub batch: usize,
    /// Query tokens of each.
    pub queries: usize,
    /// Key tokens of each: those of this call that are not in a cache yet are `new_keys`.
    pub keys: usize,
    /// Key tokens of each that this call projects.
    pub new_keys: usize,
}

/// What a call needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Bytes of weights and biases, as packed.
    pub weights: usize,
    /// Bytes of keys and values in a cache for `batch * keys` tokens.
    pub cache: usize,
    /// Bytes of the workspace.
    pub workspace: usize,
}

impl MultiHead {
    /// Numbers that were learned: weights, biases, norms. Heads split the width, they do not multiply it:
    /// with `d_k = d_v = d_model / heads` their number does not depend on `heads`.
    pub fn parameters(&self) -> usize {
        let linears: usize = self.linears().iter().map(|linear| linear.parameters()).sum();
        linears + self.norms().iter().flatten().map(|norm| norm.parameters()).sum::<usize>()
    }

    /// Floating-point operations of a call, two a multiply-add: projections, and both products of the
    /// attention over all pairs. `usize::MAX` where they are more.
    pub fn flops(&self, shape: CostShape) -> usize {
        let CostShape { batch, queries, keys, new_keys } = shape;
        let [q, k, v, out] = self.linears();
        let product = |factors: &[usize]| factors.iter().fold(2usize, |n, &f| n.saturating_mul(f));
        let config = self.config();
        let terms = [
            product(&[batch, queries, q.inputs(), q.outputs()]),
            product(&[batch, new_keys, k.inputs(), k.outputs()]),
            product(&[batch, new_keys, v.inputs(), v.outputs()]),
            product(&[batch, config.heads, queries, keys, config.d_k.saturating_add(config.d_v)]),
            product(&[batch, queries, out.inputs(), out.outputs()]),
        ];
        terms.into_iter().fold(0, usize::saturating_add)
    }

    /// Bytes that a call needs beside its inputs and outputs (each thread adds about 1 MiB of scratch).
    /// `usize::MAX` where they are more.
    pub fn memory(&self, shape: CostShape) -> Cost {
        let CostShape { batch, queries, keys, new_keys } = shape;
        let [q, k, v, out] = self.linears();
        let floats = |rows: usize, width: usize| rows.saturating_mul(width).saturating_mul(size_of::<f32>());
        let rows = |tokens: usize| batch.saturating_mul(tokens);
        let kv = k.outputs().saturating_add(v.outputs());
        Cost {
            weights: self.linears().iter().map(|linear| linear.bytes()).sum(),
            cache: floats(rows(keys), kv),
            workspace: floats(rows(queries), q.outputs().saturating_add(out.inputs()))
                .saturating_add(floats(rows(new_keys), kv)),
        }
    }
}
