//! A quantised Llama on candle's public operations, with headwise's cache in the place of attention: what
//! `candle_transformers::models::quantized_llama` does otherwise.

use std::io::{Read, Seek};

use candle_core::quantized::{QMatMul, gguf_file};
use candle_core::{Device, Error, IndexOp, Result, Tensor};
use candle_nn::rotary_emb::rope_i;
use candle_nn::{Embedding, Module};
use candle_transformers::quantized_nn::RmsNorm;
use headwise_candle::{KvCache, Options};

pub struct Llama {
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    output: QMatMul,
    rotary: Rotary,
}

struct Rotary {
    cos: Tensor,
    sin: Tensor,
}

struct Layer {
    attention_norm: RmsNorm,
    query: QMatMul,
    key: QMatMul,
    value: QMatMul,
    output: QMatMul,
    mlp_norm: RmsNorm,
    gate: QMatMul,
    up: QMatMul,
    down: QMatMul,
    heads: usize,
    kv_heads: usize,
    cache: KvCache,
}

impl Llama {
    pub fn load<R: Seek + Read>(
        file: &gguf_file::Content,
        reader: &mut R,
        max_tokens: usize,
    ) -> Result<Self> {
        let device = Device::Cpu;
        let meta = |name: &str| {
            let name = format!("llama.{name}");
            file.metadata.get(&name).ok_or_else(|| Error::Msg(format!("no {name} in the file")))
        };
        let size = |name: &str| Ok::<_, Error>(meta(name)?.to_u32()? as usize);
        let (heads, kv_heads) = (size("attention.head_count")?, size("attention.head_count_kv")?);
        let hidden = size("embedding_length")?;
        let base = meta("rope.freq_base").and_then(gguf_file::Value::to_f32).unwrap_or(10_000.0);
        let eps = f64::from(meta("attention.layer_norm_rms_epsilon")?.to_f32()?);

        let mut tensor = |name: &str| file.tensor(reader, &format!("{name}.weight"), &device);
        let words = tensor("token_embd")?;
        let embedding = Embedding::new(words.dequantize(&device)?, hidden);
        let output = QMatMul::from_qtensor(tensor("output").unwrap_or(words))?;
        let norm = RmsNorm::from_qtensor(tensor("output_norm")?, eps)?;
        let mut layers = Vec::new();
        for i in 0..size("block_count")? {
            let mut tensor = |name: &str| tensor(&format!("blk.{i}.{name}"));
            layers.push(Layer {
                attention_norm: RmsNorm::from_qtensor(tensor("attn_norm")?, eps)?,
                query: QMatMul::from_qtensor(tensor("attn_q")?)?,
                key: QMatMul::from_qtensor(tensor("attn_k")?)?,
                value: QMatMul::from_qtensor(tensor("attn_v")?)?,
                output: QMatMul::from_qtensor(tensor("attn_output")?)?,
                mlp_norm: RmsNorm::from_qtensor(tensor("ffn_norm")?, eps)?,
                gate: QMatMul::from_qtensor(tensor("ffn_gate")?)?,
                up: QMatMul::from_qtensor(tensor("ffn_up")?)?,
                down: QMatMul::from_qtensor(tensor("ffn_down")?)?,
                heads,
                kv_heads,
                cache: KvCache::new(max_tokens),
            });
        }
        let rotary = Rotary::new(hidden / heads, base, max_tokens)?;
        Ok(Self { embedding, layers, norm, output, rotary })
    }

    /// The logits behind the last of `tokens [1, n]`, of which the first has position `start`.
    pub fn forward(&mut self, tokens: &Tensor, start: usize) -> Result<Tensor> {
        let mut x = self.embedding.forward(tokens)?;
        for layer in &mut self.layers {
            x = layer.forward(&x, &self.rotary, start)?;
        }
        let x = self.norm.forward(&x)?;
        self.output.forward(&x.i((.., tokens.dim(1)? - 1, ..))?)
    }

    pub fn reset(&mut self) {
        self.layers.iter_mut().for_each(|layer| layer.cache.reset());
    }
}

impl Rotary {
    fn new(d: usize, base: f32, tokens: usize) -> Result<Self> {
        let frequencies: Vec<f32> = (0..d).step_by(2).map(|i| 1.0 / base.powf(i as f32 / d as f32)).collect();
        let angles = (0..tokens).flat_map(|pos| frequencies.iter().map(move |f| pos as f32 * f));
        let angles = Tensor::from_vec(angles.collect::<Vec<f32>>(), (tokens, d / 2), &Device::Cpu)?;
        Ok(Self { cos: angles.cos()?, sin: angles.sin()? })
    }

    fn rotate(&self, x: &Tensor, start: usize) -> Result<Tensor> {
        let n = x.dim(2)?;
        rope_i(&x.contiguous()?, &self.cos.narrow(0, start, n)?, &self.sin.narrow(0, start, n)?)
    }
}

impl Layer {
    fn forward(&mut self, x: &Tensor, rotary: &Rotary, start: usize) -> Result<Tensor> {
        let (b, n, hidden) = x.dims3()?;
        let d = hidden / self.heads;
        let normed = self.attention_norm.forward(x)?;
        let project = |by: &QMatMul, heads| by.forward(&normed)?.reshape((b, n, heads, d))?.transpose(1, 2);
        let q = rotary.rotate(&project(&self.query, self.heads)?, start)?;
        let k = rotary.rotate(&project(&self.key, self.kv_heads)?, start)?;
        let v = project(&self.value, self.kv_heads)?;
        let y = self.cache.attend(&q, &k, &v, &Options::new().causal())?;
        let x = (self.output.forward(&y.transpose(1, 2)?.reshape((b, n, hidden))?)? + x)?;

        let normed = self.mlp_norm.forward(&x)?;
        let y = (self.gate.forward(&normed)?.silu()? * self.up.forward(&normed)?)?;
        self.down.forward(&y)? + x
    }
}
