//! Multi-head attention with its projections, out of a [`VarBuilder`].

use candle_core::{Result, Tensor, bail};
use candle_nn::{Linear, Module, VarBuilder, linear_b, rotary_emb};

use crate::op::NAME;
use crate::{KvCache, Options, sdpa};

/// The sizes of a [`MultiHead`], and what its projections have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MultiHeadConfig {
    /// Features of a token, in and out.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads: `heads` is a multiple of it.
    pub kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Which projections have a bias.
    pub bias: Bias,
}

/// Which projections have a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Bias {
    /// None of them: Llama, Mistral, Qwen 3.
    #[default]
    None,
    /// Queries, keys and values: Qwen 2.
    Inputs,
    /// All four.
    All,
}

impl MultiHeadConfig {
    /// `heads` heads that split `width` features, each with a key/value head of its own, without biases.
    /// Struct update syntax changes what differs.
    pub fn new(width: usize, heads: usize) -> Self {
        let head_dim = width.checked_div(heads).unwrap_or(0);
        Self { width, heads, kv_heads: heads, head_dim, bias: Bias::None }
    }
}

/// Multi-head attention with its projections, named `q_proj`, `k_proj`, `v_proj` and `o_proj` as in
/// candle-transformers' Llama.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// use headwise_candle::{KvCache, MultiHead, MultiHeadConfig, Options};
///
/// let builder = VarBuilder::zeros(DType::F32, &Device::Cpu); // or `VarBuilder::from_mmaped_safetensors`
/// let config = MultiHeadConfig { kv_heads: 2, ..MultiHeadConfig::new(64, 8) };
/// let layer = MultiHead::new(config, builder.pp("model.layers.0.self_attn"))?;
///
/// let x = Tensor::randn(0f32, 1., (1, 10, 64), &Device::Cpu)?; // [B, S, width]
/// let y = layer.forward(&x, &Options::new().causal())?;
/// assert_eq!(y.dims(), [1, 10, 64]);
///
/// let mut cache = KvCache::new(1024);
/// layer.forward_cached(&x.narrow(1, 0, 9)?, &mut cache, &Options::new().causal())?; // the prompt
/// layer.forward_cached(&x.narrow(1, 9, 1)?, &mut cache, &Options::new().causal())?; // a step
/// assert_eq!(cache.lens(), [10]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MultiHead {
    config: MultiHeadConfig,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    rotary: Option<[Tensor; 2]>,
}

impl MultiHead {
    /// The layer whose weights `builder` has under `q_proj`, `k_proj`, `v_proj` and `o_proj`.
    ///
    /// # Errors
    /// If `heads` is not a multiple of `kv_heads`, or if a tensor is missing or has another shape.
    pub fn new(config: MultiHeadConfig, builder: VarBuilder<'_>) -> Result<Self> {
        let MultiHeadConfig { width, heads, kv_heads, head_dim, bias } = config;
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            bail!("{NAME}: {heads} query heads are no multiple of {kv_heads} key/value heads");
        }
        let linear = |inputs, outputs, bias, name| linear_b(inputs, outputs, bias, builder.pp(name));
        let inputs = bias != Bias::None;
        Ok(Self {
            config,
            q: linear(width, heads * head_dim, inputs, "q_proj")?,
            k: linear(width, kv_heads * head_dim, inputs, "k_proj")?,
            v: linear(width, kv_heads * head_dim, inputs, "v_proj")?,
            o: linear(heads * head_dim, width, bias == Bias::All, "o_proj")?,
            rotary: None,
        })
    }

    /// Rotary positions (Su et al. 2021, "RoFormer", section 3.2) for queries and keys, feature `i` with
    /// feature `i + head_dim / 2` as in Llama: `cos` and `sin`, `[positions, head_dim / 2]`. With a cache a
    /// token's position is the number of tokens appended before it.
    ///
    /// # Errors
    /// If the shapes are others.
    pub fn with_rotary(mut self, cos: &Tensor, sin: &Tensor) -> Result<Self> {
        let half = self.config.head_dim / 2;
        for (argument, table) in [("cos", cos), ("sin", sin)] {
            let (positions, features) = table.dims2()?;
            if features != half || positions != cos.dim(0)? {
                bail!("{NAME}: {argument} has shape {:?}, expected [positions, {half}]", table.shape());
            }
        }
        self.rotary = Some([cos.clone(), sin.clone()]);
        Ok(self)
    }

    /// The sizes.
    pub fn config(&self) -> MultiHeadConfig {
        self.config
    }

    /// Self-attention of `x [B, S, width]`, of the same shape. Nothing is hidden but by `options`.
    ///
    /// # Errors
    /// As [`sdpa`], and if there are fewer rotary positions than tokens. Gradients flow as
    /// [`Options::backward`] says.
    pub fn forward(&self, x: &Tensor, options: &Options) -> Result<Tensor> {
        let [q, k, v] = self.project(x, 0)?;
        self.join(&sdpa(&q, &k, &v, options)?)
    }

    /// Self-attention over what the cache holds and `x [B, S, width]`, whose keys and values are appended to
    /// it: a prompt, a part of one, or one token of each sequence. Give `options` as `causal()`.
    ///
    /// # Errors
    /// As [`KvCache::attend`]; with rotary positions also if the sequences do not all have as many tokens.
    pub fn forward_cached(&self, x: &Tensor, cache: &mut KvCache, options: &Options) -> Result<Tensor> {
        let start = cache.appended().first().copied().unwrap_or(0);
        if self.rotary.is_some() && cache.appended().iter().any(|&tokens| tokens != start) {
            bail!("{NAME}: rotary positions of sequences with {:?} tokens, not the same", cache.appended());
        }
        let [q, k, v] = self.project(x, start)?;
        self.join(&cache.attend(&q, &k, &v, options)?)
    }

    /// Queries, keys and values, `[B, heads, S, head_dim]`, of tokens from position `start` on.
    fn project(&self, x: &Tensor, start: usize) -> Result<[Tensor; 3]> {
        let MultiHeadConfig { heads, kv_heads, head_dim, .. } = self.config;
        let (batch, tokens, _) = x.dims3()?;
        let split = |linear: &Linear, heads| {
            linear.forward(x)?.reshape((batch, tokens, heads, head_dim))?.transpose(1, 2)
        };
        let (q, k, v) = (split(&self.q, heads)?, split(&self.k, kv_heads)?, split(&self.v, kv_heads)?);
        let Some([cos, sin]) = &self.rotary else { return Ok([q, k, v]) };
        if start + tokens > cos.dim(0)? {
            bail!("{NAME}: {} rotary positions for {} tokens", cos.dim(0)?, start + tokens);
        }
        let [cos, sin] = [cos.narrow(0, start, tokens)?, sin.narrow(0, start, tokens)?];
        // candle's fast form has no gradients, and does not say so.
        let turn = |x: Tensor| match x.track_op() {
            true => rotary_emb::rope_slow(&x.contiguous()?, &cos, &sin),
            false => rotary_emb::rope(&x.contiguous()?, &cos, &sin),
        };
        Ok([turn(q)?, turn(k)?, v])
    }

    /// The output projection of `y [B, heads, S, head_dim]`.
    fn join(&self, y: &Tensor) -> Result<Tensor> {
        self.o.forward(&y.transpose(1, 2)?.flatten_from(2)?)
    }
}
