//! Attention weights by their names: what models call the projections of a layer, as a table.
//!
//! ```text
//! apart    q [H D, in]   k [Hk D, in]   v [Hk Dv, in]
//! stacked  [q | k | v]: the outputs of all queries, of all keys, of all values
//! grouped  for each key/value head [its queries | its key | its value]
//! ```
//!
//! A bias is named as its weight, `weight` replaced by `bias`, and need not be there. What names and shapes
//! do not tell (the numbers of heads, rotary positions, masks) is in a model's configuration: the caller says
//! it.

use headwise_kernels::WeightLayout;

use super::weights::Checkpoint;

/// How a family of models names the weights of an attention layer, behind the layer's own prefix.
#[derive(Debug, PartialEq)]
pub struct Scheme {
    name: &'static str,
    pub(super) qkv: Qkv,
    pub(super) out: &'static str,
    pub(super) layout: WeightLayout,
    /// One bias for queries, keys and values, where it is not named as its weight.
    pub(super) bias: Option<&'static str>,
    /// RMSNorms of queries and keys.
    pub(super) norms: Option<[&'static str; 2]>,
    pub(super) scale: Option<f32>,
    /// Tensors that change what is computed, and that [`MultiHead`](super::MultiHead) has no place for.
    pub(super) unsupported: &'static [&'static str],
}

#[derive(Debug, PartialEq)]
pub(super) enum Qkv {
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

    /// The names of the weights, behind the prefix: queries, keys and values in one tensor or three; the
    /// output.
    pub fn weights(&self) -> impl Iterator<Item = &'static str> {
        let qkv = match &self.qkv {
            Qkv::Apart(names) => &names[..],
            Qkv::Stacked(name) | Qkv::Grouped(name) => core::slice::from_ref(name),
        };
        qkv.iter().copied().chain([self.out])
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
}

pub(super) fn join(prefix: &str, name: &str) -> String {
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
