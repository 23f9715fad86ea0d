//! The layer with fewer heads. Pruning: rows of W_Q, W_K and W_V and columns of W_O are gone, and so is the
//! work; the bias of W_O stays whole. Pooling: several key/value heads become one, their mean.
//!
//! Query heads on one key/value head may go unevenly: nothing is repeated or filled up, the layer remembers
//! how many are left on each ([`MultiHead::groups`]). Numbers of heads are those of the layer as it was made,
//! and do not move when heads before them go.

use core::ops::Range;

use headwise_kernels::{Error, WeightLayout};

use super::heads::MultiHead;
use super::linear::Linear;
use super::norm::Norm;

/// Neighbouring query heads and the key/value heads that they read, equally many on each. Places among the
/// heads that are left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadGroup {
    /// Query heads.
    pub heads: Range<usize>,
    /// Key/value heads.
    pub kv_heads: Range<usize>,
}

impl MultiHead {
    /// Removes query heads, named by their numbers in the layer as it was made. A key/value head goes with
    /// the last query head on it. What is left is the layer with gates of 0 on what is gone, but for
    /// rounding.
    ///
    /// What a call gives for each head (slopes, sinks, gates, the head axis of a mask or bias) is for the
    /// heads that are left: [`MultiHead::select`] picks it from what was there for all.
    ///
    /// ```
    /// # use headwise::layer::{Linear, MultiHead, MultiHeadConfig, WeightLayout};
    /// # let linear = |i, o| Linear::new(&vec![0.5; i * o], WeightLayout::OutIn, [i, o], None);
    /// # let config = MultiHeadConfig { kv_heads: 2, ..MultiHeadConfig::new(16, 4) };
    /// # let (q, k, v, out) = (linear(16, 16)?, linear(16, 8)?, linear(16, 8)?, linear(16, 16)?);
    /// let mut layer = MultiHead::new(config, q, k, v, out)?; // 4 query heads of 4 features, 2 to a group
    /// layer.prune(&[1])?;
    /// layer.prune(&[2, 3])?; // and with them their key/value head
    /// assert_eq!((layer.kept(), layer.config().kv_heads), (&[0][..], 1));
    /// assert_eq!(layer.parameters(), 4 * 16 * 4);
    /// assert_eq!(layer.select(&[0.5, 0.25, 0.125, 0.0625])?, [0.5]); // slopes
    /// # Ok::<(), headwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::BeyondAxis`] if there was no such head, [`Error::Length`] if a norm over all heads forbids
    /// it. The layer stays as it was.
    pub fn prune(&mut self, heads: &[usize]) -> Result<(), Error> {
        if let Some((index, &got)) = heads.iter().enumerate().find(|&(_, &head)| head >= self.made_with) {
            return Err(Error::BeyondAxis { argument: "heads", index, got, axis: self.made_with });
        }
        let [q_norm, k_norm] = self.norms();
        self.check_norm("q_norm", q_norm)?;
        self.check_norm("k_norm", k_norm)?;
        // Places, among the heads there are now, of those that stay; of key/value heads those still in use.
        let (mut places, mut kv_places, mut groups) = (Vec::new(), Vec::new(), Vec::new());
        let mut first = 0;
        for (kv, &group) in self.groups.iter().enumerate() {
            let before = places.len();
            places.extend((first..first + group).filter(|&place| !heads.contains(&self.kept[place])));
            first += group;
            if places.len() > before {
                kv_places.push(kv);
                groups.push(places.len() - before);
            }
        }
        let (d_k, d_v) = (self.config.d_k, self.config.d_v);
        let q = self.q.keep_outputs(&places, d_k)?;
        let k = self.k.keep_outputs(&kv_places, d_k)?;
        let v = self.v.keep_outputs(&kv_places, d_v)?;
        let out = self.out.keep_inputs(&places, d_v)?;
        (self.q, self.k, self.v, self.out) = (q, k, v, out);
        (self.config.heads, self.config.kv_heads) = (places.len(), kv_places.len());
        self.kept = places.iter().map(|&place| self.kept[place]).collect();
        self.groups = groups;
        Ok(())
    }

    /// Makes `kv_heads` key/value heads of those there are: each the mean of as many neighbours, weights and
    /// biases, and read by all their query heads (Ainslie et al. 2023, "GQA", section 2.1). A model is meant
    /// to be trained some more afterwards; where the heads of a group were equal, nothing changes.
    ///
    /// # Errors
    /// [`Error::Value`] unless `kv_heads` divides the number there is, [`Error::Length`] if a norm over all
    /// keys forbids it. The layer stays as it was.
    pub fn mean_pool_kv(&mut self, kv_heads: usize) -> Result<(), Error> {
        let now = self.config.kv_heads;
        if kv_heads == 0 || !now.is_multiple_of(kv_heads) {
            let must = "above 0 and a divisor of the layer's key/value heads";
            return Err(Error::Value { argument: "kv_heads", got: kv_heads as f32, must });
        }
        self.check_norm("k_norm", self.norms()[1])?;
        let n = now / kv_heads;
        if n > 1 {
            let (d_k, d_v) = (self.config.d_k, self.config.d_v);
            (self.k, self.v) = (self.k.mean_outputs(n, d_k)?, self.v.mean_outputs(n, d_v)?);
            self.groups = self.groups.chunks(n).map(|groups| groups.iter().sum()).collect();
            self.config.kv_heads = kv_heads;
        }
        Ok(())
    }

    /// The query heads that are left, by their numbers in the layer as it was made, in their order.
    pub fn kept(&self) -> &[usize] {
        &self.kept
    }

    /// Which query heads read which key/value heads: one group, unless pruning has left different numbers of
    /// query heads on them.
    pub fn groups(&self) -> impl Iterator<Item = HeadGroup> {
        let (mut head, mut kv) = (0, 0);
        self.groups.chunk_by(|a, b| a == b).map(move |run| {
            let group =
                HeadGroup { heads: head..head + run.iter().sum::<usize>(), kv_heads: kv..kv + run.len() };
            (head, kv) = (group.heads.end, group.kv_heads.end);
            group
        })
    }

    /// Of data with an equal part for each head of the layer as it was made, the parts of those that are
    /// left: slopes, sinks, gates, or a bias `[H, L, S]`.
    ///
    /// # Errors
    /// [`Error::Length`] if `data` has no equal parts.
    pub fn select<T: Clone>(&self, data: &[T]) -> Result<Vec<T>, Error> {
        let part = data.len().checked_div(self.made_with).unwrap_or(0);
        if part * self.made_with != data.len() {
            let expected = part * self.made_with;
            return Err(Error::Length { argument: "data", got: data.len(), expected });
        }
        Ok(self.kept.iter().flat_map(|&head| &data[head * part..][..part]).cloned().collect())
    }

    /// Refuses a norm over the features of all heads: what it divides by is theirs together.
    fn check_norm(&self, argument: &'static str, norm: Option<&Norm>) -> Result<(), Error> {
        let expected = self.config.d_k;
        match norm.map(Norm::features) {
            Some(got) if got != expected => Err(Error::Length { argument, got, expected }),
            _ => Ok(()),
        }
    }
}

impl Linear {
    /// Some blocks of `d` outputs.
    fn keep_outputs(&self, blocks: &[usize], d: usize) -> Result<Linear, Error> {
        let weights = self.weights(WeightLayout::OutIn);
        let rows = |block: &usize| &weights[block * d * self.inputs()..][..d * self.inputs()];
        let weights: Vec<f32> = blocks.iter().flat_map(rows).copied().collect();
        let part = |bias: &[f32]| blocks.iter().flat_map(|block| bias[block * d..][..d].to_vec()).collect();
        let bias: Option<Vec<f32>> = self.bias().map(part);
        self.with_outputs(&weights, bias, blocks.len() * d)
    }

    /// The mean of each `n` neighbouring blocks of `d` outputs.
    fn mean_outputs(&self, n: usize, d: usize) -> Result<Linear, Error> {
        let mean = |x: &[f32], block: usize| -> Vec<f32> {
            let mut means = Vec::with_capacity(x.len() / n);
            for group in x.chunks_exact((n * block).max(1)) {
                means.extend((0..block).map(|i| {
                    let sum: f64 = group.iter().skip(i).step_by(block).map(|&x| f64::from(x)).sum();
                    (sum / n as f64) as f32
                }));
            }
            means
        };
        let weights = mean(&self.weights(WeightLayout::OutIn), d * self.inputs());
        let bias = self.bias().map(|bias| mean(bias, d));
        self.with_outputs(&weights, bias, self.outputs() / n)
    }

    /// A map with the same inputs, of weights `[outputs, inputs]`, packed in the type of these.
    fn with_outputs(&self, weights: &[f32], bias: Option<Vec<f32>>, outputs: usize) -> Result<Linear, Error> {
        let weights = self.packed().pack_like(weights, WeightLayout::OutIn, self.inputs(), outputs)?;
        Linear::with_weights(weights, bias.as_deref())
    }

    /// Some blocks of `d` inputs.
    fn keep_inputs(&self, blocks: &[usize], d: usize) -> Result<Linear, Error> {
        let weights = self.weights(WeightLayout::InOut);
        let rows = |block: &usize| &weights[block * d * self.outputs()..][..d * self.outputs()];
        let weights: Vec<f32> = blocks.iter().flat_map(rows).copied().collect();
        let (inputs, outputs) = (blocks.len() * d, self.outputs());
        let weights = self.packed().pack_like(&weights, WeightLayout::InOut, inputs, outputs)?;
        Linear::with_weights(weights, self.bias())
    }
}
