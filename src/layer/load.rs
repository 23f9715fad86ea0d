//! A layer out of a file: the tensors of a [`Scheme`], checked against each other, cut into queries, keys and
//! values, and packed in the type that the file has. All that is wrong is told at once.

use core::slice::from_ref;
use std::ops::Range;

use headwise_kernels::{Error, WeightLayout};

use super::heads::{MultiHead, MultiHeadConfig};
use super::linear::Linear;
use super::norm::Norm;
use super::relative::{Distances, RelativeBias};
use super::scheme::{Qkv, Scheme, join};
use super::torch::TorchMultihead;
use super::weights::{Checkpoint, Tensor, TensorError, WeightsError};

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
    /// The attention layer whose weights are named `{prefix}.` and as a [`Scheme`] says; an empty prefix is
    /// none. Rotary positions are the caller's to add, and the rest of what a configuration says. Not for
    /// models whose norms of queries and keys are stored less one (Gemma 3): their names do not tell.
    ///
    /// # Errors
    /// [`WeightsError::NoScheme`]; [`WeightsError::Tensors`] with all that is missing or not as it must be;
    /// [`WeightsError::Layer`] if the parts do not make a layer.
    pub fn multi_head(&self, prefix: &str, options: LayerOptions) -> Result<MultiHead, WeightsError> {
        self.load(prefix, options, &[])
    }

    /// As [`Checkpoint::multi_head`], with the extra key and value of `add_bias_kv`, if the file has them:
    /// `bias_k` and `bias_v`, `[1, 1, d_model]`.
    ///
    /// # Errors
    /// As [`Checkpoint::multi_head`] and [`TorchMultihead::with_bias_kv`].
    pub fn torch_multihead(
        &self,
        prefix: &str,
        options: LayerOptions,
    ) -> Result<TorchMultihead, WeightsError> {
        let names = ["bias_k", "bias_v"];
        let layer = self.load(prefix, options, &names)?;
        let [q, k, v, out] = layer.linears().map(Linear::clone);
        let torch = TorchMultihead::new(layer.config(), q, k, v, out)?;
        if !names.iter().any(|name| self.has(&join(prefix, name))) {
            return Ok(torch);
        }
        let [k, v] = names.map(|name| self.tensor(&join(prefix, name)));
        Ok(torch.with_bias_kv(&k?.numbers(), &v?.numbers())?)
    }

    /// `taken`: tensors that the caller takes, though [`MultiHead`] does not.
    fn load(&self, prefix: &str, options: LayerOptions, taken: &[&str]) -> Result<MultiHead, WeightsError> {
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
            let all = 0..matrix.outputs;
            matrix.linear(from_ref(&all), bias.as_ref(), from_ref(&all))
        });
        let norms = scheme.norms.map(|names| names.map(|name| reader.norm(name)));
        let unsupported = scheme.unsupported.iter().filter(|name| !taken.contains(name));
        for name in unsupported.map(|name| join(prefix, name)) {
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
            let (outputs, of_bias) = (0..widths[part], first..first + widths[part]);
            matrices[part].linear(from_ref(&outputs), biases[part].as_ref(), from_ref(&of_bias))
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
        let parts: Vec<_> = match self.layout {
            WeightLayout::OutIn => {
                outputs.iter().map(|some| some.start * self.inputs..some.end * self.inputs).collect()
            }
            WeightLayout::InOut => {
                let row = |input: usize| {
                    outputs
                        .iter()
                        .map(move |some| input * self.outputs + some.start..input * self.outputs + some.end)
                };
                (0..self.inputs).flat_map(row).collect()
            }
        };
        let weights = self.tensor.pack(&parts, self.layout, [self.inputs, count])?;
        let bias = bias.map(|bias| {
            let mut to = Vec::with_capacity(count);
            of_bias.iter().for_each(|some| bias.append(some.clone(), &mut to));
            to
        });
        Linear::with_weights(weights, bias.as_deref())
    }
}
