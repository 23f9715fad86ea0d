//! What a forward pass has left in its workspace: the queries, keys, values and outputs of the heads, and
//! what each head adds to the layer's output.

use headwise_kernels::{Error, Then, View, WeightLayout};

use super::heads::MultiHead;
use super::linear::Linear;
use super::tokens::{Tokens, buffer};
use crate::Attention;
use crate::plan::Run;
use crate::workspace::Workspace;

impl MultiHead {
    /// The queries `[B, H, Lq, d_k]`, keys `[B, H_kv, Lk, d_k]` and values of the last pass over `x` and
    /// `keys` (the same tokens in self-attention) in this workspace, normalised and turned: what
    /// [`Attention::run_with_statistics`] and the rest of [`crate::analysis`] take, together with
    /// [`MultiHead::attention`]. With a cache, its keys and values take the place of these. Of a layer that was
    /// pruned unevenly they go there group by group: [`MultiHead::groups`] and [`View::heads`].
    ///
    /// ```
    /// use headwise::{Attention, Linear, MultiHead, MultiHeadConfig};
    /// use headwise::{StatisticsOptions, Tokens, ViewMut, Workspace};
    /// # use headwise::layer::WeightLayout;
    /// # let weights: Vec<f32> = (0..64).map(|i| (i as f32).sin()).collect();
    /// # let linear = || Linear::new(&weights, WeightLayout::OutIn, [8, 8], None);
    /// # let x: Vec<f32> = (0..5 * 8).map(|i| (i as f32).cos()).collect();
    /// let layer = MultiHead::new(MultiHeadConfig::new(8, 2), linear()?, linear()?, linear()?, linear()?)?;
    /// let (mut y, mut workspace) = (vec![0.0; 5 * 8], Workspace::new());
    /// let (x, attention) = (Tokens::ragged(&x, &[0, 2, 5])?, Attention::new().causal());
    /// layer.forward(x, &attention, &mut workspace, &mut y)?;
    ///
    /// let [q, k, v] = layer.projected(x, x, &workspace)?;
    /// let mut out = vec![0.0; 5 * 8];
    /// let to = ViewMut::blhd(&mut out, [1, 5, 2, 4])?.packed(&[0, 2, 5])?;
    /// let options = StatisticsOptions::new();
    /// let statistics = layer.attention(&attention).run_with_statistics(q, k, v, to, &options)?;
    /// assert_eq!(statistics.heads().len(), 2);
    /// # Ok::<(), headwise::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Length`] if the workspace holds less: it has not seen these tokens.
    pub fn projected<'v>(
        &self,
        x: Tokens<'v>,
        keys: Tokens<'v>,
        workspace: &'v Workspace,
    ) -> Result<[View<'v, f32>; 3], Error> {
        let config = self.config;
        let q = held("x", &workspace.q, x.rows(), config.heads * config.d_k)?;
        let k = held("keys", &workspace.k, keys.rows(), config.kv_heads * config.d_k)?;
        let v = held("keys", &workspace.v, keys.rows(), config.kv_heads * config.d_v)?;
        Ok([
            x.view(q, config.heads, config.d_k)?,
            keys.view(k, config.kv_heads, config.d_k)?,
            keys.view(v, config.kv_heads, config.d_v)?,
        ])
    }

    /// The outputs of the heads `[B, H, Lq, d_v]` in the last pass over `x`, before they are projected.
    ///
    /// # Errors
    /// As [`MultiHead::projected`].
    pub fn head_outputs<'v>(&self, x: Tokens<'v>, workspace: &'v Workspace) -> Result<View<'v, f32>, Error> {
        let config = self.config;
        let joined = held("x", &workspace.heads, x.rows(), config.heads * config.d_v)?;
        x.view(joined, config.heads, config.d_v)
    }

    /// `attention` with the layer's own factor on `<q, k>`, where it has one and the call names none.
    pub fn attention<'a>(&self, attention: &Attention<'a>) -> Attention<'a> {
        match self.scale() {
            Some(scale) if attention.terms().scale.is_none() => attention.scale(scale),
            _ => *attention,
        }
    }

    /// Calls `f` with the number of each head and what it adds to the output of the last pass over `x`: `O_h
    /// W_O,h`, `[rows, d_out]`. Together with the bias they are the output. All of them take as long as one
    /// output projection, and the packing of its weights.
    ///
    /// # Errors
    /// As [`MultiHead::projected`]; [`Error::LevelUnavailable`].
    pub fn contributions(
        &self,
        x: Tokens<'_>,
        run: Run,
        workspace: &Workspace,
        mut f: impl FnMut(usize, &[f32]),
    ) -> Result<(), Error> {
        let (config, width) = (self.config, self.config.heads * self.config.d_v);
        let joined = held("x", &workspace.heads, x.rows(), width)?;
        let (mut inputs, mut part) = (Vec::new(), Vec::new());
        let part = buffer(&mut part, x.rows(), config.d_out)?;
        let weights = self.out.weights(WeightLayout::InOut);
        let each = config.d_v * config.d_out;
        for head in 0..config.heads {
            inputs.clear();
            for row in joined.chunks_exact(width.max(1)) {
                inputs.extend_from_slice(&row[head * config.d_v..][..config.d_v]);
            }
            let (weights, sizes) = (&weights[head * each..][..each], [config.d_v, config.d_out]);
            Linear::new(weights, WeightLayout::InOut, sizes, None)?.forward(
                &inputs,
                Then::Store,
                run,
                part,
            )?;
            f(head, part);
        }
        Ok(())
    }
}

/// The first `rows * width` numbers of what a workspace holds.
fn held<'v>(
    argument: &'static str,
    memory: &'v [f32],
    rows: usize,
    width: usize,
) -> Result<&'v [f32], Error> {
    let expected = rows.saturating_mul(width);
    memory.get(..expected).ok_or(Error::Length { argument, got: memory.len(), expected })
}
