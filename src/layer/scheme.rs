//! Attention weights by their names: what models call the projections of a layer, as a table.
//!
//! ```text
//! apart    q [H D, in]   k [Hk D, in]   v [Hk Dv, in]
//! stacked  [q | k | v]: the outputs of all queries, of all keys, of all values
//! grouped  for each key/value head [its queries | its key | its value]
//! ```
//!
//! A bias is named as its weight, `weight` replaced by `bias`, and need not be there. What names and shapes do
//! not tell (the numbers of heads, rotary positions, masks) is in a model's configuration: the caller says it.

use std::ops::Range;

use headwise_kernels::{Error, WeightLayout};

use super::heads::{MultiHead, MultiHeadConfig};
use super::linear::Linear;
use super::norm::Norm;
use super::relative::{Distances, RelativeBias};
use super::weights::{Checkpoint, Tensor, TensorError, WeightsError};

/// How a family of models names the weights of an attention layer, behind the layer's own prefix.
#[derive(Debug, PartialEq)]
pub struct Scheme {
    name: &'static str,
    qkv: Qkv,
    out: &'static str,
    layout: WeightLayout,
    /// One bias for queries, keys and values, where it is not named as its weight.
    bias: Option<&'static str>,
    /// RMSNorms of queries and keys.
    norms: Option<[&'static str; 2]>,
    scale: Option<f32>,
    /// Tensors that change what is computed, and that [`MultiHead`] has no place for.
    unsupported: &'static [&'static str],
}

#[derive(Debug, PartialEq)]
enum Qkv {
    Apart([&'static str; 3]),
    Stacked(&'static str),
    Grouped(&'static str),
}

/// What most schemes have in common.
const PLAIN: Scheme = Scheme {
    name: "",
    qkv: Qkv::Stacked(""),
    out: "",
    layout: WeightLayout::OutIn,
    bias: None,
    norms: None,
    scale: None,
    unsupported: &[],
};

impl Scheme {
    /// Every scheme.
    pub const ALL: &'static [Scheme] = &[
        Scheme {
            name: "torch", // nn.MultiheadAttention
            qkv: Qkv::Stacked("in_proj_weight"),
            out: "out_proj.weight",
            unsupported: &["bias_k", "bias_v"],
            ..PLAIN
        },
        Scheme {
            name: "torch-widths", // the same with kdim or vdim
            qkv: Qkv::Apart(["q_proj_weight", "k_proj_weight", "v_proj_weight"]),
            out: "out_proj.weight",
            bias: Some("in_proj_bias"),
            unsupported: &["bias_k", "bias_v"],
            ..PLAIN
        },
        Scheme {
            name: "bert", // RoBERTa, MPNet's cousins, ELECTRA
            qkv: Qkv::Apart(["self.query.weight", "self.key.weight", "self.value.weight"]),
            out: "output.dense.weight",
            unsupported: &["self.distance_embedding.weight", "self.relative_position_bias_table"],
            ..PLAIN
        },
        Scheme {
            name: "distilbert",
            qkv: Qkv::Apart(["q_lin.weight", "k_lin.weight", "v_lin.weight"]),
            out: "out_lin.weight",
            ..PLAIN
        },
        Scheme {
            name: "gpt2", // Conv1D: [in, out]
            qkv: Qkv::Stacked("c_attn.weight"),
            out: "c_proj.weight",
            layout: WeightLayout::InOut,
            ..PLAIN
        },
        Scheme {
            name: "llama", // Mistral, Qwen 2 (biases), Qwen 3 (norms)
            qkv: Qkv::Apart(["q_proj.weight", "k_proj.weight", "v_proj.weight"]),
            out: "o_proj.weight",
            norms: Some(["q_norm.weight", "k_norm.weight"]),
            unsupported: &["sinks"],
            ..PLAIN
        },
        Scheme { name: "phi3", qkv: Qkv::Stacked("qkv_proj.weight"), out: "o_proj.weight", ..PLAIN },
        Scheme {
            name: "neox", // Falcon, BLOOM
            qkv: Qkv::Grouped("query_key_value.weight"),
            out: "dense.weight",
            ..PLAIN
        },
        Scheme {
            name: "vit", // DINOv2
            qkv: Qkv::Apart(["attention.query.weight", "attention.key.weight", "attention.value.weight"]),
            out: "output.dense.weight",
            unsupported: &["attention.relative_position_bias.relative_position_bias_table"],
            ..PLAIN
        },
        Scheme {
            name: "timm", // vision models of that library, DINO
            qkv: Qkv::Stacked("qkv.weight"),
            out: "proj.weight",
            unsupported: &["relative_position_bias_table", "q_norm.weight", "k_norm.weight"],
            ..PLAIN
        },
        Scheme {
            name: "clip", // Whisper (no bias of k), BART, OPT
            qkv: Qkv::Apart(["q_proj.weight", "k_proj.weight", "v_proj.weight"]),
            out: "out_proj.weight",
            ..PLAIN
        },
        Scheme {
            name: "t5", // the scale is in the weights
            qkv: Qkv::Apart(["q.weight", "k.weight", "v.weight"]),
            out: "o.weight",
            scale: Some(1.0),
            ..PLAIN
        },
    ];

    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The names of the weights, behind the prefix: queries, keys and values in one tensor or three; the output.
    pub fn weights(&self) -> impl Iterator<Item = &'static str> {
        let qkv = match &self.qkv {
            Qkv::Apart(names) => &names[..],
            Qkv::Stacked(name) | Qkv::Grouped(name) => core::slice::from_ref(name),
        };
        qkv.iter().copied().chain([self.out])
    }
}

/// What names and shapes do not tell of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerOptions {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Added to the mean square by norms of queries and keys, if the layer has them.
    pub norm_eps: f32,
}

impl LayerOptions {
    /// `heads` heads, each with a key/value head of its own; 1e-6.
    pub fn new(heads: usize) -> Self {
        Self { heads, kv_heads: heads, norm_eps: 1e-6 }
    }
}

impl Checkpoint<'_> {
    /// The prefixes of all attention layers and their schemes, numbers in their order (`h.2` before `h.10`).
    pub fn attention_layers(&self) -> Vec<(String, &'static Scheme)> {
        let firsts: Vec<&str> = Scheme::ALL.iter().filter_map(|scheme| scheme.weights().next()).collect();
        let prefix = |name: &str| {
            firsts.iter().find_map(|first| {
                let prefix = name.strip_suffix(first)?;
                if prefix.is_empty() {
                    Some(String::new())
                } else {
                    prefix.strip_suffix('.').map(String::from)
                }
            })
        };
        let mut prefixes: Vec<String> = self.names().filter_map(prefix).collect();
        prefixes.sort_unstable_by_key(|prefix| (padded(prefix), prefix.clone()));
        prefixes.dedup();
        prefixes
            .into_iter()
            .filter_map(|prefix| self.scheme(&prefix).map(|scheme| (prefix, scheme)))
            .collect()
    }

    /// The scheme that most of the names under `prefix` follow: at least half of its weights are there.
    pub fn scheme(&self, prefix: &str) -> Option<&'static Scheme> {
        let rated = Scheme::ALL.iter().map(|scheme| {
            let there = scheme.weights().filter(|name| self.has(&join(prefix, name))).count();
            (there, scheme.weights().count(), scheme)
        });
        // The first of the best.
        let best = rated.rev().max_by(|(a, all_a, _), (b, all_b, _)| (a * all_b).cmp(&(b * all_a)))?;
        (2 * best.0 >= best.1).then_some(best.2)
    }

    /// The attention layer whose weights are named `{prefix}.` and as a [`Scheme`] says; an empty prefix is none.
    /// Rotary positions are the caller's to add, and the rest of what a configuration says. Not for models whose
    /// norms of queries and keys are stored less one (Gemma 3): their names do not tell.
    ///
    /// # Errors
    /// [`WeightsError::NoScheme`]; [`WeightsError::Tensors`] with all that is missing or not as it must be;
    /// [`WeightsError::Layer`] if the parts do not make a layer.
    pub fn multi_head(&self, prefix: &str, options: LayerOptions) -> Result<MultiHead, WeightsError> {
        let scheme = self.scheme(prefix).ok_or_else(|| WeightsError::NoScheme(prefix.to_string()))?;
        let LayerOptions { heads, kv_heads, norm_eps } = options;
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(Error::Heads { query: heads, key: kv_heads }.into());
        }
        let mut reader = Reader { checkpoint: self, prefix, errors: Vec::new() };
        let parts = reader.parts(scheme, options);
        let out = reader.matrix(scheme.out, scheme.layout);
        if let (Some(parts), Some(out)) = (&parts, &out) {
            let joined = heads * parts.d[2];
            if out.inputs != joined {
                reader.errors.push(out.tensor.refused(format!("{joined} inputs wide")));
            }
        }
        let out = out.map(|matrix| {
            let bias = reader.bias(scheme.out, matrix.outputs);
            let all = [0..matrix.outputs];
            matrix.linear(&all, bias.as_ref(), &all)
        });
        let norms = scheme.norms.map(|names| names.map(|name| reader.norm(name)));
        for name in scheme.unsupported.iter().map(|name| join(prefix, name)) {
            if self.has(&name) {
                reader.errors.push(TensorError::Unsupported { name });
            }
        }
        let (Some(Parts { linears: [q, k, v], d: [d_k, _, d_v] }), Some(out), true) =
            (parts, out, reader.errors.is_empty())
        else {
            return Err(WeightsError::Tensors(reader.errors));
        };
        let (q, k, v, out) = (q?, k?, v?, out?);
        let config = MultiHeadConfig {
            d_model: q.inputs(),
            heads,
            kv_heads,
            d_k,
            d_v,
            key_width: k.inputs(),
            value_width: v.inputs(),
            d_out: out.outputs(),
        };
        let layer = MultiHead::new(config, q, k, v, out)?;
        let layer = match norms {
            Some(norms) => {
                let [q, k] =
                    norms.map(|norm| norm.map(|norm| Norm::rms(&norm.numbers(), norm_eps)).transpose());
                layer.with_norms(q?, k?)?
            }
            None => layer,
        };
        Ok(match scheme.scale {
            Some(scale) => layer.with_scale(scale),
            None => layer,
        })
    }

    /// The relative bias of a T5 layer, which the first block of a stack has for all of them, if it is there.
    ///
    /// # Errors
    /// [`WeightsError::Tensors`] unless it is a table `[buckets, heads]`; as [`RelativeBias::new`].
    pub fn relative_bias(
        &self,
        prefix: &str,
        distances: Distances,
        max_distance: usize,
    ) -> Result<Option<RelativeBias>, WeightsError> {
        let name = join(prefix, "relative_attention_bias.weight");
        if !self.has(&name) {
            return Ok(None);
        }
        let table = self.tensor(&name)?;
        let &[buckets, heads] = table.shape() else {
            return Err(table.refused("[buckets, heads]".to_string()).into());
        };
        Ok(Some(RelativeBias::new(&table.numbers(), [buckets, heads], distances, max_distance)?))
    }
}

fn join(prefix: &str, name: &str) -> String {
    if prefix.is_empty() { name.to_string() } else { format!("{prefix}.{name}") }
}

/// Numbers in front of which zeros make the order of texts that of the numbers.
fn padded(text: &str) -> String {
    let part = |part: &str| match part.bytes().all(|byte| byte.is_ascii_digit()) {
        true => format!("{part:0>8}."),
        false => format!("{part}."),
    };
    text.split('.').map(part).collect()
}

/// Reads the tensors of a layer and keeps what is wrong with them.
struct Reader<'r, 'a> {
    checkpoint: &'r Checkpoint<'a>,
    prefix: &'r str,
    errors: Vec<TensorError>,
}

/// Linear maps to queries, keys and values, and the features of a head of each.
struct Parts {
    linears: [Result<Linear, Error>; 3],
    d: [usize; 3],
}

impl<'a> Reader<'_, 'a> {
    fn keep<T>(&mut self, result: Result<T, TensorError>) -> Option<T> {
        result.map_err(|error| self.errors.push(error)).ok()
    }

    fn matrix(&mut self, name: &str, layout: WeightLayout) -> Option<Matrix<'a>> {
        let tensor = self.keep(self.checkpoint.tensor(&join(self.prefix, name)))?;
        let (inputs, outputs) = match (tensor.shape(), layout) {
            (&[outputs, inputs], WeightLayout::OutIn) => (inputs, outputs),
            (&[inputs, outputs], WeightLayout::InOut) => (inputs, outputs),
            _ => {
                self.errors.push(tensor.refused("a matrix".to_string()));
                return None;
            }
        };
        Some(Matrix { tensor, layout, inputs, outputs })
    }

    /// The bias of a weight.
    fn bias(&mut self, weight: &str, outputs: usize) -> Option<Tensor<'a>> {
        let stem = weight.strip_suffix("weight").unwrap_or(weight);
        self.vector(&format!("{stem}bias"), outputs)
    }

    fn vector(&mut self, name: &str, len: usize) -> Option<Tensor<'a>> {
        self.keep(self.checkpoint.optional(&join(self.prefix, name), &[len])).flatten()
    }

    /// The weight of a norm, of any length: the layer checks it.
    fn norm(&mut self, name: &str) -> Option<Tensor<'a>> {
        let name = join(self.prefix, name);
        if !self.checkpoint.has(&name) {
            return None;
        }
        let tensor = self.keep(self.checkpoint.tensor(&name))?;
        if tensor.shape().len() == 1 {
            return Some(tensor);
        }
        self.errors.push(tensor.refused("a vector".to_string()));
        None
    }

    fn parts(&mut self, scheme: &Scheme, options: LayerOptions) -> Option<Parts> {
        let LayerOptions { heads, kv_heads, .. } = options;
        let (name, grouped) = match scheme.qkv {
            Qkv::Apart(names) => return self.apart(scheme, names, [heads, kv_heads, kv_heads]),
            Qkv::Stacked(name) => (name, false),
            Qkv::Grouped(name) => (name, true),
        };
        let matrix = self.matrix(name, scheme.layout)?;
        let slices = kv_heads.checked_mul(2).and_then(|kv| kv.checked_add(heads))?;
        let d = matrix.outputs / slices;
        if d * slices != matrix.outputs {
            self.errors.push(matrix.tensor.refused(format!("a multiple of {slices} outputs wide")));
            return None;
        }
        let bias = self.bias(name, matrix.outputs);
        // Each head/value head or, where they are stacked, all of them: queries, then keys, then values.
        let (blocks, each) =
            if grouped { (kv_heads, [heads / kv_heads, 1, 1]) } else { (1, [heads, kv_heads, kv_heads]) };
        let starts = [0, each[0], each[0] + each[1]];
        let linears = [0, 1, 2].map(|part| {
            let first = |block: usize| (block * slices / blocks + starts[part]) * d;
            let outputs: Vec<_> = (0..blocks).map(|b| first(b)..first(b) + each[part] * d).collect();
            matrix.linear(&outputs, bias.as_ref(), &outputs)
        });
        Some(Parts { linears, d: [d; 3] })
    }

    fn apart(&mut self, scheme: &Scheme, names: [&str; 3], heads: [usize; 3]) -> Option<Parts> {
        let all = names.map(|name| self.matrix(name, scheme.layout));
        let [Some(q), Some(k), Some(v)] = all else { return None };
        let matrices = [q, k, v];
        let (mut d, before) = ([0; 3], self.errors.len());
        for ((matrix, heads), d) in matrices.iter().zip(heads).zip(&mut d) {
            *d = matrix.outputs / heads;
            if *d * heads != matrix.outputs || *d == 0 {
                self.errors.push(matrix.tensor.refused(format!("a multiple of {heads} outputs wide")));
            }
        }
        if d[0] != d[1] && self.errors.len() == before {
            self.errors.push(matrices[1].tensor.refused(format!("{} outputs wide", heads[1] * d[0])));
        }
        let widths = [0, 1, 2].map(|part| matrices[part].outputs);
        let shared = scheme.bias.and_then(|name| self.vector(name, widths.iter().sum()));
        let biases = [0, 1, 2].map(|part| match scheme.bias {
            Some(_) => shared.clone(),
            None => self.bias(names[part], widths[part]),
        });
        let linears = [0, 1, 2].map(|part| {
            let first = if shared.is_some() { widths[..part].iter().sum() } else { 0 };
            let outputs = first..first + widths[part];
            matrices[part].linear(&[0..widths[part]], biases[part].as_ref(), &[outputs])
        });
        Some(Parts { linears, d })
    }
}

/// A matrix of weights in a file.
struct Matrix<'a> {
    tensor: Tensor<'a>,
    layout: WeightLayout,
    inputs: usize,
    outputs: usize,
}

impl Matrix<'_> {
    /// The map to some of the outputs, with some of a bias.
    fn linear(
        &self,
        outputs: &[Range<usize>],
        bias: Option<&Tensor<'_>>,
        of_bias: &[Range<usize>],
    ) -> Result<Linear, Error> {
        let count: usize = outputs.iter().map(ExactSizeIterator::len).sum();
        let mut weights = Vec::with_capacity(count * self.inputs);
        match self.layout {
            WeightLayout::OutIn => {
                for some in outputs {
                    self.tensor.append(some.start * self.inputs..some.end * self.inputs, &mut weights);
                }
            }
            WeightLayout::InOut => {
                for row in (0..self.inputs).map(|input| input * self.outputs) {
                    outputs
                        .iter()
                        .for_each(|some| self.tensor.append(row + some.start..row + some.end, &mut weights));
                }
            }
        }
        let bias = bias.map(|bias| {
            let mut to = Vec::with_capacity(count);
            of_bias.iter().for_each(|some| bias.append(some.clone(), &mut to));
            to
        });
        Linear::new(&weights, self.layout, [self.inputs, count], bias.as_deref())
    }
}
