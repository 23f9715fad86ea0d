//! BERT's encoder (Devlin et al. 2019) on candle's public operations, with headwise in the place of
//! attention.

use candle_core::{Result, Tensor};
use candle_nn::{Embedding, LayerNorm, Linear, Module, VarBuilder, embedding, layer_norm, linear};
use candle_transformers::models::bert::Config;
use headwise_candle::{Options, sdpa};

pub struct Bert {
    words: Embedding,
    positions: Embedding,
    types: Embedding,
    norm: LayerNorm,
    layers: Vec<Layer>,
}

struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    attention_norm: LayerNorm,
    up: Linear,
    down: Linear,
    norm: LayerNorm,
    heads: usize,
}

impl Bert {
    pub fn load(vb: VarBuilder, config: &Config) -> Result<Self> {
        let (hidden, eps) = (config.hidden_size, config.layer_norm_eps);
        let table = |rows, name| embedding(rows, hidden, vb.pp("embeddings").pp(name));
        let layers = (0..config.num_hidden_layers).map(|i| Layer::load(vb.pp("encoder.layer").pp(i), config));
        Ok(Self {
            words: table(config.vocab_size, "word_embeddings")?,
            positions: table(config.max_position_embeddings, "position_embeddings")?,
            types: table(config.type_vocab_size, "token_type_embeddings")?,
            norm: layer_norm(hidden, eps, vb.pp("embeddings.LayerNorm"))?,
            layers: layers.collect::<Result<_>>()?,
        })
    }

    /// Tokens `[B, L]`, of which each sequence has `lens[b]`, as vectors `[B, L, hidden]`.
    pub fn forward(&self, ids: &Tensor, lens: &[usize]) -> Result<Tensor> {
        let positions = Tensor::arange(0, ids.dim(1)? as u32, ids.device())?;
        let x = (self.words.forward(ids)? + self.types.forward(&ids.zeros_like()?)?)?;
        let x = self.norm.forward(&x.broadcast_add(&self.positions.forward(&positions)?)?)?;
        let options = Options::new().kv_lens(lens);
        self.layers.iter().try_fold(x, |x, layer| layer.forward(&x, &options))
    }
}

impl Layer {
    fn load(vb: VarBuilder, config: &Config) -> Result<Self> {
        let (hidden, eps) = (config.hidden_size, config.layer_norm_eps);
        let projection = |name| linear(hidden, hidden, vb.pp("attention").pp(name));
        Ok(Self {
            query: projection("self.query")?,
            key: projection("self.key")?,
            value: projection("self.value")?,
            output: projection("output.dense")?,
            attention_norm: layer_norm(hidden, eps, vb.pp("attention.output.LayerNorm"))?,
            up: linear(hidden, config.intermediate_size, vb.pp("intermediate.dense"))?,
            down: linear(config.intermediate_size, hidden, vb.pp("output.dense"))?,
            norm: layer_norm(hidden, eps, vb.pp("output.LayerNorm"))?,
            heads: config.num_attention_heads,
        })
    }

    fn forward(&self, x: &Tensor, options: &Options) -> Result<Tensor> {
        let (b, l, hidden) = x.dims3()?;
        let heads = |x: Tensor| x.reshape((b, l, self.heads, hidden / self.heads))?.transpose(1, 2);
        let [q, k, v] = [&self.query, &self.key, &self.value].map(|projection| heads(projection.forward(x)?));
        let y = sdpa(&q?, &k?, &v?, options)?.transpose(1, 2)?.reshape((b, l, hidden))?;
        let x = self.attention_norm.forward(&(self.output.forward(&y)? + x)?)?;
        let y = self.down.forward(&self.up.forward(&x)?.gelu_erf()?)?;
        self.norm.forward(&(y + x)?)
    }
}
