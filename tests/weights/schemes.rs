//! One layer, written as each family of models writes it, by loops of the test's own.

use headwise::layer::torch::{TorchCall, TorchWeights};
use headwise::layer::{Checkpoint, LayerOptions, TensorError, Tokens, WeightLayout, WeightsError, Workspace};
use headwise::{Attention, Linear, MultiHead, MultiHeadConfig};
use safetensors::Dtype;

use crate::{File, numbers};

/// Features in, and of a head; not equal to anything else.
const WIDTH: usize = 10;
const D: usize = 3;

/// The layer's maps, `[out, in]`, with biases.
struct Plain {
    heads: usize,
    kv_heads: usize,
    /// Queries, keys, values, result.
    weights: [Vec<f32>; 4],
    biases: [Vec<f32>; 4],
}

impl Plain {
    fn new(heads: usize, kv_heads: usize) -> Self {
        let outputs = [heads * D, kv_heads * D, kv_heads * D];
        let [q, k, v] = [0, 1, 2].map(|part| numbers(part as u32, outputs[part] * WIDTH));
        let [bq, bk, bv] = [0, 1, 2].map(|part| numbers(10 + part as u32, outputs[part]));
        let weights = [q, k, v, numbers(3, WIDTH * heads * D)];
        Self { heads, kv_heads, weights, biases: [bq, bk, bv, numbers(13, WIDTH)] }
    }

    fn shape(&self, part: usize) -> [usize; 2] {
        match part {
            0 => [self.heads * D, WIDTH],
            3 => [WIDTH, self.heads * D],
            _ => [self.kv_heads * D, WIDTH],
        }
    }

    fn options(&self) -> LayerOptions {
        LayerOptions { kv_heads: self.kv_heads, ..LayerOptions::new(self.heads) }
    }

    /// A tensor a map, with biases for those that `biased` says.
    fn apart(&self, names: [&str; 4], biased: [bool; 4]) -> File {
        let mut file = File::default();
        for (part, name) in names.into_iter().enumerate() {
            file = file.with(&format!("{name}.weight"), &self.shape(part), &self.weights[part]);
            if biased[part] {
                let bias = &self.biases[part];
                file = file.with(&format!("{name}.bias"), &[bias.len()], bias);
            }
        }
        file
    }

    /// Queries, keys and values in one matrix, and its bias.
    fn stacked(&self) -> (Vec<f32>, Vec<f32>) {
        (self.weights[..3].concat(), self.biases[..3].concat())
    }

    /// For each key/value head its queries, its key, its value.
    fn grouped(&self) -> (Vec<f32>, Vec<f32>) {
        let group = self.heads / self.kv_heads;
        let (mut weights, mut biases) = (Vec::new(), Vec::new());
        for kv in 0..self.kv_heads {
            let queries = (0..group).map(|i| (0, kv * group + i));
            for (part, head) in queries.chain([(1, kv), (2, kv)]) {
                weights.extend_from_slice(&self.weights[part][head * D * WIDTH..(head + 1) * D * WIDTH]);
                biases.extend_from_slice(&self.biases[part][head * D..(head + 1) * D]);
            }
        }
        (weights, biases)
    }

    /// One matrix of all three, and the result's.
    fn joined(&self, (weights, biases): (Vec<f32>, Vec<f32>), [qkv, bias, out]: [&str; 3]) -> File {
        let outputs = (self.heads + 2 * self.kv_heads) * D;
        File::default()
            .with(qkv, &[outputs, WIDTH], &weights)
            .with(bias, &[outputs], &biases)
            .with(&format!("{out}.weight"), &self.shape(3), &self.weights[3])
            .with(&format!("{out}.bias"), &[WIDTH], &self.biases[3])
    }

    /// What was loaded is this layer to the bit, its biases where `biased` says.
    fn assert_is(&self, what: &str, layer: &MultiHead, biased: [bool; 4]) {
        let config = layer.config();
        let want = MultiHeadConfig {
            kv_heads: self.kv_heads,
            d_k: D,
            d_v: D,
            ..MultiHeadConfig::new(WIDTH, self.heads)
        };
        assert_eq!(config, want, "{what}");
        for (part, linear) in layer.linears().into_iter().enumerate() {
            assert_eq!(linear.weights(WeightLayout::OutIn), self.weights[part], "{what}: part {part}");
            let bias = biased[part].then_some(&self.biases[part][..]);
            assert_eq!(linear.bias(), bias, "{what}: bias of part {part}");
        }
    }
}

fn transposed(data: &[f32], [rows, columns]: [usize; 2]) -> Vec<f32> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| data[row * columns + column])).collect()
}

/// Every scheme: its name, the layer, the file, and which maps have a bias.
fn all() -> Vec<(&'static str, Plain, File, [bool; 4])> {
    let (full, few, one) = (|| Plain::new(4, 4), || Plain::new(4, 2), || Plain::new(4, 1));
    let (all, none) = ([true; 4], [false; 4]);
    let torch = full().joined(full().stacked(), ["in_proj_weight", "in_proj_bias", "out_proj"]);
    let mut widths = full().joined(full().stacked(), ["in_proj_weight", "in_proj_bias", "out_proj"]);
    widths = widths.without("in_proj_weight");
    for (part, name) in ["q_proj_weight", "k_proj_weight", "v_proj_weight"].into_iter().enumerate() {
        widths = widths.with(name, &full().shape(part), &full().weights[part]);
    }
    let (stacked, bias) = full().stacked();
    let gpt2 = File::default()
        .with("c_attn.weight", &[WIDTH, 12 * D], &transposed(&stacked, [12 * D, WIDTH]))
        .with("c_attn.bias", &[12 * D], &bias)
        .with("c_proj.weight", &[4 * D, WIDTH], &transposed(&full().weights[3], [WIDTH, 4 * D]))
        .with("c_proj.bias", &[WIDTH], &full().biases[3])
        .with("bias", &[1, 1, 2, 2], &[1.0, 0.0, 1.0, 1.0]); // GPT-2's mask is no bias
    let projections = ["q_proj", "k_proj", "v_proj", "o_proj"];
    let out = ["q_proj", "k_proj", "v_proj", "out_proj"];
    let whisper = [true, false, true, true];
    let qwen = [true, true, true, false];
    let bert = ["self.query", "self.key", "self.value", "output.dense"];
    let vit = ["attention.query", "attention.key", "attention.value", "output.dense"];
    let timm = ["qkv.weight", "qkv.bias", "proj"];
    let neox = ["query_key_value.weight", "query_key_value.bias", "dense"];
    let phi = few().joined(few().stacked(), ["qkv_proj.weight", "qkv_proj.bias", "o_proj"]);
    let phi = phi.without("qkv_proj.bias").without("o_proj.bias");
    vec![
        ("torch", full(), torch, all),
        ("torch-widths", full(), widths, all),
        ("bert", full(), full().apart(bert, all), all),
        ("distilbert", full(), full().apart(["q_lin", "k_lin", "v_lin", "out_lin"], all), all),
        ("gpt2", full(), gpt2, all),
        ("llama", few(), few().apart(projections, none), none),
        ("llama", few(), few().apart(projections, qwen), qwen),
        ("phi3", few(), phi, none),
        ("neox", full(), full().joined(full().grouped(), neox), all),
        ("neox", few(), few().joined(few().grouped(), neox), all), // Falcon 40B
        ("neox", one(), one().joined(one().stacked(), neox), all), // Falcon 7B: one group is the stack
        ("vit", full(), full().apart(vit, all), all),
        ("timm", full(), full().joined(full().stacked(), timm), all),
        ("clip", full(), full().apart(out, all), all),
        ("clip", full(), full().apart(out, whisper), whisper),
        ("t5", full(), full().apart(["q", "k", "v", "o"], none), none),
    ]
}

/// The same tensors behind a prefix.
fn prefixed(file: &File, prefix: &str) -> File {
    File(
        file.0
            .iter()
            .map(|(name, shape, data)| (format!("{prefix}.{name}"), shape.clone(), data.clone()))
            .collect(),
    )
}

#[test]
fn every_scheme_gives_the_same_layer() {
    for (index, (name, plain, file, biased)) in all().into_iter().enumerate() {
        for prefix in ["", "model.layers.3.attn"] {
            let what = format!("{index} {name} at {prefix:?}");
            let bytes = if prefix.is_empty() { file.bytes() } else { prefixed(&file, prefix).bytes() };
            let checkpoint = Checkpoint::new([&bytes[..]]).expect("a valid file");
            let found: Vec<_> = checkpoint
                .attention_layers()
                .into_iter()
                .map(|(prefix, scheme)| (prefix, scheme.name()))
                .collect();
            assert_eq!(found, [(prefix.to_string(), name)], "{what}");
            let layer = checkpoint.multi_head(prefix, plain.options()).expect(&what);
            plain.assert_is(&what, &layer, biased);
            assert_eq!(layer.scale(), (name == "t5").then_some(1.0), "{what}");
        }
    }
}

#[test]
fn half_types_stay_and_are_widened() {
    let (_, plain, file, biased) = all().swap_remove(9);
    let f16 = file.of_type(Dtype::F16, |x| half::f16::from_f32(x).to_le_bytes().to_vec());
    let bf16 = file.of_type(Dtype::BF16, |x| half::bf16::from_f32(x).to_le_bytes().to_vec());
    let load = |bytes: &[u8]| {
        let checkpoint = Checkpoint::new([bytes]).expect("a valid file");
        checkpoint.multi_head("", plain.options()).expect("a layer")
    };
    let weights = |layer: &MultiHead| -> usize {
        layer.linears().iter().map(|linear| linear.bytes() - linear.bias().map_or(0, size_of_val)).sum()
    };
    let whole = weights(&load(&file.bytes()));
    for bytes in [f16, bf16] {
        let layer = load(&bytes);
        plain.assert_is("half", &layer, biased);
        assert_eq!(2 * weights(&layer), whole);
    }
}

#[test]
fn other_widths_of_keys_and_values() {
    let (heads, widths) = (2, [6, 7, 8]);
    let mut file = File::default().with("out_proj.weight", &[6, 8], &numbers(9, 48));
    for (part, name) in ["q_proj_weight", "k_proj_weight", "v_proj_weight"].into_iter().enumerate() {
        let outputs = if part == 2 { 8 } else { 4 };
        file = file.with(name, &[outputs, widths[part]], &numbers(part as u32, outputs * widths[part]));
    }
    let bytes = file.bytes();
    let layer = Checkpoint::new([&bytes[..]]).and_then(|file| file.multi_head("", LayerOptions::new(heads)));
    let config = layer.expect("a layer").config();
    assert_eq!((config.d_k, config.d_v, config.key_width, config.value_width, config.d_out), (2, 4, 7, 8, 6));
}

#[test]
fn norms_of_queries_and_keys() {
    let plain = Plain::new(4, 2);
    let file = plain.apart(["q_proj", "k_proj", "v_proj", "o_proj"], [false; 4]);
    let (q, k) = (numbers(20, D), numbers(21, D));
    let file = file.with("q_norm.weight", &[D], &q).with("k_norm.weight", &[D], &k);
    let bytes = file.bytes();
    let checkpoint = Checkpoint::new([&bytes[..]]).expect("a valid file");
    let options = LayerOptions { norm_eps: 0.25, ..plain.options() };
    let layer = checkpoint.multi_head("", options).expect("a layer");
    let norms = layer.norms().map(|norm| norm.map(|norm| (norm.weight().to_vec(), norm.eps())));
    assert_eq!(norms, [Some((q, 0.25)), Some((k, 0.25))]);
}

/// What is loaded computes what the same maps compute, made by hand.
#[test]
fn a_loaded_layer_computes() {
    let plain = Plain::new(4, 2);
    let neox = ["query_key_value.weight", "query_key_value.bias", "dense"];
    let bytes = plain.joined(plain.grouped(), neox).bytes();
    let loaded =
        Checkpoint::new([&bytes[..]]).and_then(|file| file.multi_head("", plain.options())).expect("a layer");
    let [q, k, v, out] = [0, 1, 2, 3].map(|part| {
        let [outputs, inputs] = plain.shape(part);
        let (weights, bias) = (&plain.weights[part], &plain.biases[part]);
        Linear::new(weights, WeightLayout::OutIn, [inputs, outputs], Some(bias)).expect("a map")
    });
    let made = MultiHead::new(loaded.config(), q, k, v, out).expect("a layer");
    let x = numbers(30, 7 * WIDTH);
    let [one, other] = [loaded, made].map(|layer| {
        let mut y = vec![0.0; x.len()];
        let tokens = Tokens::ragged(&x, &[0, 4, 7]).expect("two sequences");
        layer.forward(tokens, &Attention::new(), &mut Workspace::new(), &mut y).expect("it runs");
        y
    });
    assert_eq!(one, other);
}

#[test]
fn layers_of_a_model_in_order() {
    let plain = Plain::new(4, 4);
    let file = plain.apart(["q_proj", "k_proj", "v_proj", "out_proj"], [false; 4]);
    let names = [
        "decoder.layers.0.encoder_attn",
        "decoder.layers.0.self_attn",
        "encoder.layers.2",
        "encoder.layers.10",
    ];
    let parts: Vec<Vec<u8>> = names.iter().rev().map(|name| prefixed(&file, name).bytes()).collect();
    let checkpoint = Checkpoint::new(parts.iter().map(Vec::as_slice)).expect("valid files");
    let found: Vec<_> = checkpoint.attention_layers().into_iter().map(|(prefix, _)| prefix).collect();
    assert_eq!(found, names);
    for prefix in names {
        plain.assert_is(prefix, &checkpoint.multi_head(prefix, plain.options()).expect(prefix), [false; 4]);
    }
    let twice = Checkpoint::new([&parts[0][..], &parts[1], &parts[0]]).expect_err("two layers 10");
    assert_eq!(twice, WeightsError::Twice("encoder.layers.10.k_proj.weight".to_string()));
}

#[test]
fn everything_wrong_is_told_at_once() {
    let plain = Plain::new(4, 2);
    let names = ["self.query", "self.key", "self.value", "output.dense"];
    let file = prefixed(&plain.apart(names, [true; 4]), "a");
    let load = |file: &File, options| {
        let bytes = file.bytes();
        Checkpoint::new([&bytes[..]]).and_then(|file| file.multi_head("a", options)).map(|_| ())
    };
    let wrong = file
        .clone()
        .without("a.self.key.weight")
        .with("a.output.dense.weight", &[WIDTH], &[0.0; WIDTH])
        .with("a.self.distance_embedding.weight", &[1], &[0.0]);
    let shape = TensorError::Shape {
        name: "a.output.dense.weight".to_string(),
        got: vec![WIDTH],
        must: "a matrix".to_string(),
    };
    let errors = vec![
        TensorError::Missing { name: "a.self.key.weight".to_string() },
        shape,
        TensorError::Unsupported { name: "a.self.distance_embedding.weight".to_string() },
    ];
    assert_eq!(load(&wrong, plain.options()), Err(WeightsError::Tensors(errors)));

    let table: &[(&str, File, &str)] = &[
        (
            "bias",
            file.clone().with("a.self.query.bias", &[11], &[0.0; 11]),
            "a.self.query.bias has shape [11], must be [12]",
        ),
        (
            "key",
            file.clone().with("a.self.key.weight", &[4, WIDTH], &[0.0; 40]),
            "a.self.key.weight has shape [4, 10], must be 6 outputs wide",
        ),
        (
            "query",
            file.clone().with("a.self.query.weight", &[13, WIDTH], &[0.0; 130]),
            "must be a multiple of 4 outputs wide",
        ),
        (
            "out",
            file.clone().with("a.output.dense.weight", &[WIDTH, 11], &[0.0; 110]),
            "must be 12 inputs wide",
        ),
        (
            "empty",
            file.clone().with("a.self.key.weight", &[6, 0], &[]),
            "a.self.key.weight has shape [6, 0], must be above 0",
        ),
        ("none", File::default(), "no attention weights at \"a\""),
    ];
    for (what, file, part) in table {
        let error = load(file, plain.options()).expect_err(what).to_string();
        assert!(error.contains(part), "{what}: {part:?} is not in: {error}");
    }
    for (heads, kv_heads) in [(0, 0), (4, 0), (4, 3), (usize::MAX, usize::MAX)] {
        load(&file, LayerOptions { heads, kv_heads, norm_eps: 0.0 }).expect_err("head counts");
    }
    let integers = file.of_type(Dtype::I32, |x| (x as i32).to_le_bytes().to_vec());
    let error = Checkpoint::new([&integers[..]]).and_then(|file| file.multi_head("a", plain.options()));
    let error = error.map(|_| ()).expect_err("integers").to_string();
    assert!(error.starts_with("a.self.query.weight is I32, must be F32, F16 or BF16; "), "{error}");
}

/// `add_bias_kv` is for PyTorch's layer alone.
#[test]
fn an_extra_key_and_value_is_torch_s() {
    let plain = Plain::new(4, 4);
    let file = plain.joined(plain.stacked(), ["in_proj_weight", "in_proj_bias", "out_proj"]);
    let load = |file: &File| {
        let bytes = file.bytes();
        let checkpoint = Checkpoint::new([&bytes[..]]).expect("a valid file");
        let (torch, layer) =
            (checkpoint.torch_multihead("", plain.options()), checkpoint.multi_head("", plain.options()));
        let x = numbers(40, 3 * WIDTH);
        let torch = torch.map(|torch| {
            let mut out = vec![0.0; x.len()];
            let call = TorchCall { query: &x, key: &x, value: &x, batch: 1, ..Default::default() };
            torch
                .forward(call, TorchWeights::None, Default::default(), &mut Default::default(), &mut out)
                .expect("it runs");
            out
        });
        let layer = layer.map(|layer| {
            let mut out = vec![0.0; x.len()];
            let tokens = Tokens::even(&x, 1, 3);
            layer.forward(tokens, &Attention::new(), &mut Workspace::new(), &mut out).expect("it runs");
            out
        });
        (torch, layer)
    };
    let (torch, layer) = load(&file);
    let without = torch.expect("a layer");
    assert_eq!(layer.as_ref(), Ok(&without));
    let slot = numbers(41, 4 * D);
    let both = file.clone().with("bias_k", &[1, 1, 4 * D], &slot).with("bias_v", &[1, 1, 4 * D], &slot);
    let (torch, layer) = load(&both);
    assert_ne!(torch.expect("a layer"), without);
    let unsupported = ["bias_k", "bias_v"].map(|name| TensorError::Unsupported { name: name.to_string() });
    assert_eq!(layer, Err(WeightsError::Tensors(unsupported.to_vec())));
    let missing = WeightsError::from(TensorError::Missing { name: "bias_v".to_string() });
    assert_eq!(load(&both.without("bias_v")).0, Err(missing));
    let (torch, _) = load(&file.with("bias_k", &[2], &[0.0; 2]).with("bias_v", &[2], &[0.0; 2]));
    assert!(matches!(torch, Err(WeightsError::Layer(_))), "{torch:?}");
}
