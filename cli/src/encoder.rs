//! The encoder of BERT (Devlin et al. 2019) and of the sentence models that grew from it:
//!
//! ```text
//! X = norm(word[id] + position[i] + type[0])
//! each layer:  X = norm(X + attention(X))      X = norm(X + gelu(X W1 + b1) W2 + b2)
//! embedding = pooled / |pooled|                pooled: the mean of a text's rows, or its first row
//! ```
//!
//! Texts of different lengths lie one after the other, without padding. Word rows are read from the file as
//! they are needed; the weights of the layers are packed when the encoder is loaded.
//!
//! It lives with the command, not in the library: what is BERT's in it (names, configuration, pooling) serves
//! one family of models, and what serves all of them is the library's already. Each step is public, so that
//! who looks into a model can take the steps and see what lies between: the queries of a layer are
//! `layer.attention.layer()`'s first linear map of its input.

use headwise::layer::{
    Activation, Checkpoint, LayerOptions, NormOrder, Tensor, Then, WeightLayout, WeightsError,
};
use headwise::{Attention, AttentionBlock, Error, Linear, Norm, Run, Tokens, Workspace};
use serde::Deserialize;

/// What an encoder needs of a model's `config.json`.
#[derive(Debug, Clone, Deserialize)]
pub struct Config {
    /// Features of a token.
    pub hidden_size: usize,
    /// Features between the two maps of a feed-forward step.
    pub intermediate_size: usize,
    /// Heads of a layer.
    pub num_attention_heads: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// The most tokens of a text.
    pub max_position_embeddings: usize,
    /// Kinds of text.
    #[serde(default = "two")]
    pub type_vocab_size: usize,
    /// Added to the variance of a norm.
    #[serde(default = "small")]
    pub layer_norm_eps: f32,
    /// Between the two maps of a feed-forward step.
    pub hidden_act: HiddenAct,
    /// How tokens know where they stand.
    #[serde(default)]
    pub position_embedding_type: PositionEmbedding,
    /// Whether later tokens are hidden.
    #[serde(default)]
    pub is_decoder: bool,
}

fn two() -> usize {
    2
}

fn small() -> f32 {
    1e-12
}

/// The functions that encoders use, by the names of configurations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum HiddenAct {
    Gelu,
    GeluNew,
    GeluPytorchTanh,
    Relu,
    #[serde(alias = "swish")]
    Silu,
}

impl From<HiddenAct> for Activation {
    fn from(name: HiddenAct) -> Self {
        match name {
            HiddenAct::Gelu => Self::Gelu,
            HiddenAct::GeluNew | HiddenAct::GeluPytorchTanh => Self::GeluTanh,
            HiddenAct::Relu => Self::Relu,
            HiddenAct::Silu => Self::Silu,
        }
    }
}

/// How tokens know where they stand: only a row for each position is supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum PositionEmbedding {
    #[default]
    Absolute,
}

/// Which of a text's rows become its embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pooling {
    /// The mean of all.
    #[default]
    Mean,
    /// The first.
    First,
}

/// The token ids of some texts, one after the other.
#[derive(Debug, Clone)]
pub struct Batch {
    ids: Vec<u32>,
    /// Where each text begins, and where the last one ends.
    starts: Vec<usize>,
}

impl Batch {
    /// A batch of these texts.
    pub fn new<'t>(texts: impl IntoIterator<Item = &'t [u32]>) -> Self {
        let mut batch = Self { ids: Vec::new(), starts: vec![0] };
        for ids in texts {
            batch.ids.extend_from_slice(ids);
            batch.starts.push(batch.ids.len());
        }
        batch
    }

    /// Texts.
    pub fn texts(&self) -> usize {
        self.starts.len() - 1
    }

    /// Tokens of all texts.
    pub fn rows(&self) -> usize {
        self.ids.len()
    }

    /// Where each text begins, and where the last one ends.
    pub fn starts(&self) -> &[usize] {
        &self.starts
    }
}

/// Memory of a forward pass, kept from call to call.
#[derive(Debug, Default)]
pub struct Memory {
    workspace: Workspace,
    /// Rows between the layers.
    x: Vec<f32>,
    /// Rows between the two steps of a layer.
    attended: Vec<f32>,
    /// Rows between the two maps of the feed-forward step.
    inner: Vec<f32>,
}

/// One layer.
#[derive(Debug)]
pub struct Layer {
    /// Attention, residual and norm.
    pub attention: AttentionBlock,
    up: Linear,
    activation: Activation,
    down: Linear,
    norm: Norm,
}

impl Memory {
    /// What the attention of the last layer has left.
    pub fn workspace(&self) -> &Workspace {
        &self.workspace
    }
}

impl Layer {
    /// `x = layer(x)`, the rows of a batch.
    ///
    /// # Errors
    /// As [`AttentionBlock::forward`].
    pub fn forward(&self, x: &mut [f32], batch: &Batch, memory: &mut Memory) -> Result<(), Error> {
        self.attend(x, batch, &Attention::new(), memory)?;
        self.feed(x, batch, memory)
    }

    /// The first step: attention, residual and norm, into the memory.
    ///
    /// # Errors
    /// As [`AttentionBlock::forward`].
    pub fn attend(
        &self,
        x: &[f32],
        batch: &Batch,
        attention: &Attention<'_>,
        memory: &mut Memory,
    ) -> Result<(), Error> {
        memory.attended.resize(x.len(), 0.0);
        let x = Tokens::ragged(x, &batch.starts)?;
        self.attention.forward(x, attention, &mut memory.workspace, &mut memory.attended)
    }

    /// The second step: the feed-forward maps, residual and norm, from the memory to `x`.
    ///
    /// # Errors
    /// [`Error::Length`] unless [`Layer::attend`] was given as many rows.
    pub fn feed(&self, x: &mut [f32], batch: &Batch, memory: &mut Memory) -> Result<(), Error> {
        let Memory { attended, inner, .. } = memory;
        inner.resize(batch.rows() * self.up.outputs(), 0.0);
        self.up.forward(attended, Then::Activate(self.activation), Run::default(), inner)?;
        self.down.forward(inner, Then::Add(attended), Run::default(), x)?;
        self.norm.in_place(x, Run::default())
    }

    /// Removes heads from its attention.
    ///
    /// # Errors
    /// As [`MultiHead::prune`](headwise::MultiHead::prune).
    pub fn prune(&mut self, heads: &[usize]) -> Result<(), Error> {
        let mut layer = self.attention.layer().clone();
        layer.prune(heads)?;
        let (norm, order) = (self.attention.norm().clone(), self.attention.order());
        self.attention = AttentionBlock::new(layer, norm, order)?;
        Ok(())
    }
}

/// An encoder, loaded.
#[derive(Debug)]
pub struct Encoder<'a> {
    words: Tensor<'a>,
    /// `[positions, hidden]`, the row of text kind 0 added to each.
    places: Vec<f32>,
    norm: Norm,
    layers: Vec<Layer>,
    hidden: usize,
    pooling: Pooling,
}

impl<'a> Encoder<'a> {
    /// Loads an encoder from the weights of a model.
    ///
    /// # Errors
    /// Those of the first part that has any: the embeddings, then each layer.
    pub fn load(
        checkpoint: &Checkpoint<'a>,
        config: &Config,
        pooling: Pooling,
    ) -> Result<Self, WeightsError> {
        let hidden = config.hidden_size;
        let root = if checkpoint.has("bert.embeddings.word_embeddings.weight") { "bert." } else { "" };
        let table = |name: &str| checkpoint.tensor(&format!("{root}embeddings.{name}_embeddings.weight"));
        let words = table("word");
        let words = words.and_then(|words| {
            let vocabulary = words.shape().first().copied().unwrap_or(0);
            words.of_shape(&[vocabulary, hidden])
        });
        let places =
            table("position").and_then(|tensor| tensor.of_shape(&[config.max_position_embeddings, hidden]));
        let kinds = table("token_type").and_then(|tensor| tensor.of_shape(&[config.type_vocab_size, hidden]));
        let (words, places, kinds) = match (words, places, kinds) {
            (Ok(words), Ok(places), Ok(kinds)) => (words, places, kinds),
            (words, places, kinds) => {
                let errors = words.err().into_iter().chain(places.err()).chain(kinds.err());
                return Err(WeightsError::Tensors(errors.collect()));
            }
        };
        let norm =
            checkpoint.layer_norm(&format!("{root}embeddings.LayerNorm"), hidden, config.layer_norm_eps)?;
        let layers = (0..config.num_hidden_layers)
            .map(|index| Self::layer(checkpoint, config, &format!("{root}encoder.layer.{index}")))
            .collect::<Result<_, _>>()?;
        let (mut places, mut kind) = (places.numbers(), Vec::new());
        kinds.append_row(0, &mut kind);
        for row in places.chunks_exact_mut(hidden) {
            row.iter_mut().zip(&kind).for_each(|(x, kind)| *x += kind);
        }
        Ok(Self { words, places, norm, layers, hidden, pooling })
    }

    fn layer(checkpoint: &Checkpoint<'a>, config: &Config, name: &str) -> Result<Layer, WeightsError> {
        let (hidden, inner, eps) = (config.hidden_size, config.intermediate_size, config.layer_norm_eps);
        let attention = checkpoint
            .multi_head(&format!("{name}.attention"), LayerOptions::new(config.num_attention_heads));
        let norm = checkpoint.layer_norm(&format!("{name}.attention.output.LayerNorm"), hidden, eps);
        let linear = |part: &str, sizes| {
            checkpoint.linear(&format!("{name}.{part}.dense"), WeightLayout::OutIn, sizes)
        };
        let (up, down) = (linear("intermediate", [hidden, inner]), linear("output", [inner, hidden]));
        let last = checkpoint.layer_norm(&format!("{name}.output.LayerNorm"), hidden, eps);
        // All that is wrong with the layer in one error.
        let mut wrong = Vec::new();
        for error in [
            attention.as_ref().err(),
            norm.as_ref().err(),
            up.as_ref().err(),
            down.as_ref().err(),
            last.as_ref().err(),
        ] {
            match error {
                Some(WeightsError::Tensors(errors)) => wrong.extend(errors.iter().cloned()),
                Some(other) => return Err(other.clone()),
                None => {}
            }
        }
        if !wrong.is_empty() {
            return Err(WeightsError::Tensors(wrong));
        }
        let attention = AttentionBlock::new(attention?, norm?, NormOrder::Post)?;
        Ok(Layer { attention, up: up?, activation: config.hidden_act.into(), down: down?, norm: last? })
    }

    /// Features of an embedding.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// The most tokens of a text.
    pub fn positions(&self) -> usize {
        self.places.len() / self.hidden
    }

    /// Different tokens.
    pub fn vocabulary(&self) -> usize {
        self.words.shape()[0]
    }

    /// The layers.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The layers, to be changed.
    pub fn layers_mut(&mut self) -> &mut [Layer] {
        &mut self.layers
    }

    /// The rows `[rows, hidden]` that go into the first layer.
    ///
    /// # Errors
    /// [`Error::BeyondAxis`] if a text has more tokens than there are positions or a token is not in the
    /// vocabulary.
    pub fn embed(&self, batch: &Batch, x: &mut Vec<f32>) -> Result<(), Error> {
        x.clear();
        x.reserve(batch.rows() * self.hidden);
        for (text, bounds) in batch.starts.windows(2).enumerate() {
            let ids = &batch.ids[bounds[0]..bounds[1]];
            if ids.len() > self.positions() {
                let (got, axis) = (ids.len(), self.positions());
                return Err(Error::BeyondAxis { argument: "tokens", index: text, got, axis });
            }
            for (&id, place) in ids.iter().zip(self.places.chunks_exact(self.hidden)) {
                let start = x.len();
                if !self.words.append_row(id as usize, x) {
                    let (got, axis) = (id as usize, self.vocabulary());
                    return Err(Error::BeyondAxis { argument: "token ids", index: text, got, axis });
                }
                x[start..].iter_mut().zip(place).for_each(|(x, place)| *x += place);
            }
        }
        self.norm.in_place(x, Run::default())
    }

    /// The embedding of each text, `[texts, hidden]`, of length 1, from the rows behind the last layer. An
    /// empty text has none: its row is 0.
    ///
    /// # Errors
    /// [`Error::Length`] unless `x` is `[rows, hidden]`.
    pub fn pool(&self, x: &[f32], batch: &Batch) -> Result<Vec<f32>, Error> {
        let expected = batch.rows() * self.hidden;
        if x.len() != expected {
            return Err(Error::Length { argument: "x", got: x.len(), expected });
        }
        let mut out = vec![0.0; batch.texts() * self.hidden];
        for (bounds, to) in batch.starts.windows(2).zip(out.chunks_exact_mut(self.hidden)) {
            let last = match self.pooling {
                Pooling::Mean => bounds[1],
                Pooling::First => bounds[1].min(bounds[0] + 1),
            };
            for row in x[bounds[0] * self.hidden..last * self.hidden].chunks_exact(self.hidden) {
                to.iter_mut().zip(row).for_each(|(to, x)| *to += x);
            }
            let norm = to.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
            if norm > 0.0 {
                to.iter_mut().for_each(|x| *x = (f64::from(*x) / norm) as f32);
            }
        }
        Ok(out)
    }

    /// All of it: the embedding of each text of the batch, `[texts, hidden]`.
    ///
    /// # Errors
    /// As [`Encoder::embed`], [`Layer::forward`] and [`Encoder::pool`].
    pub fn forward(&self, batch: &Batch, memory: &mut Memory) -> Result<Vec<f32>, Error> {
        let mut x = std::mem::take(&mut memory.x);
        let result = (|| {
            self.embed(batch, &mut x)?;
            for layer in &self.layers {
                layer.forward(&mut x, batch, memory)?;
            }
            self.pool(&x, batch)
        })();
        memory.x = x;
        result
    }
}
