//! The layer without some of its heads: their rows of W_Q, W_K, W_V and their columns of W_O are gone, and so
//! is the work. The bias of W_O stays whole.

use headwise_kernels::{Error, WeightLayout};

use super::heads::MultiHead;
use super::linear::Linear;

impl MultiHead {
    /// Removes query heads, named by their numbers in the layer as it was made: numbers do not move when
    /// heads before them go. A key/value head goes with the last query head on it.
    ///
    /// What a call gives for each head (slopes, sinks, gates, the head axis of a mask or bias) is for the
    /// heads that are left: [`MultiHead::select`] picks it from what was there for all.
    ///
    /// # Errors
    /// [`Error::BeyondAxis`] if there was no such head; [`Error::Heads`] if the key/value heads that are left
    /// would serve different numbers of query heads; [`Error::Length`] if a norm over all heads forbids it.
    /// The layer stays as it was.
    pub fn prune(&mut self, heads: &[usize]) -> Result<(), Error> {
        if let Some((index, &got)) = heads.iter().enumerate().find(|&(_, &head)| head >= self.made_with) {
            return Err(Error::BeyondAxis { argument: "heads", index, got, axis: self.made_with });
        }
        let config = self.config;
        for (argument, norm) in ["q_norm", "k_norm"].into_iter().zip(self.norms()) {
            match norm.map(|norm| norm.features()) {
                Some(got) if got != config.d_k => {
                    return Err(Error::Length { argument, got, expected: config.d_k });
                }
                _ => {}
            }
        }
        // Places, among the heads there are now, of those that stay.
        let stays = |place: &usize| !heads.contains(&self.kept[*place]);
        let places: Vec<usize> = (0..config.heads).filter(stays).collect();
        let group = config.heads.checked_div(config.kv_heads).unwrap_or(1);
        let mut kv_places: Vec<usize> = places.iter().map(|place| place / group).collect();
        kv_places.dedup();
        let new_group = places.len().checked_div(kv_places.len()).unwrap_or(0);
        let even = places.chunks(new_group.max(1)).zip(&kv_places);
        let even = even.into_iter().all(|(places, kv)| places.iter().all(|place| place / group == *kv));
        if new_group * kv_places.len() != places.len() || !even {
            return Err(Error::Heads { query: places.len(), key: kv_places.len() });
        }
        let q = self.q.keep_outputs(&places, config.d_k)?;
        let k = self.k.keep_outputs(&kv_places, config.d_k)?;
        let v = self.v.keep_outputs(&kv_places, config.d_v)?;
        let out = self.out.keep_inputs(&places, config.d_v)?;
        (self.q, self.k, self.v, self.out) = (q, k, v, out);
        (self.config.heads, self.config.kv_heads) = (places.len(), kv_places.len());
        self.kept = places.iter().map(|&place| self.kept[place]).collect();
        Ok(())
    }

    /// The query heads that are left, by their numbers in the layer as it was made.
    pub fn kept(&self) -> &[usize] {
        &self.kept
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
}

impl Linear {
    /// Some blocks of `d` outputs.
    fn keep_outputs(&self, blocks: &[usize], d: usize) -> Result<Linear, Error> {
        let weights = self.weights(WeightLayout::OutIn);
        let rows = |block: &usize| &weights[block * d * self.inputs()..][..d * self.inputs()];
        let weights: Vec<f32> = blocks.iter().flat_map(rows).copied().collect();
        let part = |bias: &[f32]| blocks.iter().flat_map(|block| bias[block * d..][..d].to_vec()).collect();
        let bias: Option<Vec<f32>> = self.bias().map(part);
        let (inputs, outputs) = (self.inputs(), blocks.len() * d);
        let weights = self.packed().pack_like(&weights, WeightLayout::OutIn, inputs, outputs)?;
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
