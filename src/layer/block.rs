//! The layer with its residual and norm:
//!
//! ```text
//! pre-norm:  y = x + attention(norm(x))        post-norm: y = norm(x + attention(x))
//! ```
//!
//! The residual is added while the last projection writes its result: the only pass of its own is the norm.

use headwise_kernels::{Error, Stored, Then};

use super::Workspace;
use super::heads::MultiHead;
use super::norm::Norm;
use super::tokens::{Tokens, buffer};
use crate::{Attention, KvCache};

/// Where the norm of a block stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormOrder {
    /// Before the layer, the residual around both (GPT-2, Llama; Xiong et al. 2020, "On Layer Normalization
    /// in the Transformer Architecture").
    Pre,
    /// Behind the sum (Vaswani et al. 2017, BERT).
    Post,
}

/// A [`MultiHead`] layer with its residual and norm, `d_out = d_model`.
#[derive(Debug, Clone)]
pub struct AttentionBlock {
    layer: MultiHead,
    norm: Norm,
    order: NormOrder,
}

impl AttentionBlock {
    /// A block of its parts.
    ///
    /// # Errors
    /// [`Error::Length`] unless `layer` gives as many features as it takes, and `norm` has so many.
    pub fn new(layer: MultiHead, norm: Norm, order: NormOrder) -> Result<Self, Error> {
        let expected = layer.config().d_model;
        for (argument, got) in [("d_out", layer.config().d_out), ("norm", norm.features())] {
            if got != expected {
                return Err(Error::Length { argument, got, expected });
            }
        }
        Ok(Self { layer, norm, order })
    }

    /// The layer.
    pub fn layer(&self) -> &MultiHead {
        &self.layer
    }

    /// The norm.
    pub fn norm(&self) -> &Norm {
        &self.norm
    }

    /// Where the norm stands.
    pub fn order(&self) -> NormOrder {
        self.order
    }

    /// Self-attention: `x [rows, d_model]` into `out`, of the same size.
    ///
    /// # Errors
    /// As [`MultiHead::forward`].
    pub fn forward(
        &self,
        x: Tokens<'_>,
        attention: &Attention<'_>,
        workspace: &mut Workspace,
        out: &mut [f32],
    ) -> Result<(), Error> {
        self.run(x, None, None::<&mut KvCache<f32>>, attention, workspace, out)
    }

    /// Cross-attention on `keys`, also as values; the norm before it is that of the queries only.
    ///
    /// # Errors
    /// As [`MultiHead::forward_cross`].
    pub fn forward_cross(
        &self,
        x: Tokens<'_>,
        keys: Tokens<'_>,
        attention: &Attention<'_>,
        workspace: &mut Workspace,
        out: &mut [f32],
    ) -> Result<(), Error> {
        self.run(x, Some(keys), None::<&mut KvCache<f32>>, attention, workspace, out)
    }

    /// Self-attention with a cache.
    ///
    /// # Errors
    /// As [`MultiHead::forward_cached`].
    pub fn forward_cached<C: Stored>(
        &self,
        x: Tokens<'_>,
        cache: &mut KvCache<C>,
        attention: &Attention<'_>,
        workspace: &mut Workspace,
        out: &mut [f32],
    ) -> Result<(), Error> {
        self.run(x, None, Some(cache), attention, workspace, out)
    }

    fn run<C: Stored>(
        &self,
        x: Tokens<'_>,
        keys: Option<Tokens<'_>>,
        cache: Option<&mut KvCache<C>>,
        attention: &Attention<'_>,
        workspace: &mut Workspace,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let d_model = self.layer.config().d_model;
        x.check("x", d_model)?;
        let (on, then) = (attention.runs_on(), Then::Add(x.data()));
        match self.order {
            NormOrder::Post => {
                let keys = keys.unwrap_or(x);
                self.layer.run([x, keys, keys], cache, attention, then, workspace, out)?;
                self.norm.in_place(out, on)
            }
            NormOrder::Pre => {
                let mut memory = core::mem::take(&mut workspace.normed);
                let result = (|| {
                    let normed = buffer(&mut memory, x.rows(), d_model)?;
                    self.norm.forward(x.data(), normed, on)?;
                    let x = x.with_data(normed);
                    let keys = keys.unwrap_or(x);
                    self.layer.run([x, keys, keys], cache, attention, then, workspace, out)
                })();
                workspace.normed = memory;
                result
            }
        }
    }
}
