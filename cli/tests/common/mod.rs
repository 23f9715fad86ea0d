//! A small encoder made here, whose every number is known, and the same in f64.

pub mod reference;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

pub use reference::WHOLE;

/// An encoder of 2 layers, 3 heads of 4 features, and 16 positions.
#[derive(Clone)]
pub struct Model {
    pub config: Value,
    pub tokenizer: Value,
    pub pooling: Option<Value>,
    pub tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

pub const HIDDEN: usize = 12;
pub const HEADS: usize = 3;
pub const INNER: usize = 20;
pub const LAYERS: usize = 2;
pub const POSITIONS: usize = 16;
pub const WORDS: [&str; 12] =
    ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "the", "river", "bank", "walk", "##ed", "was", "closed", "."];

impl Model {
    pub fn new() -> Self {
        let config = json!({
            "model_type": "bert", "hidden_size": HIDDEN, "num_attention_heads": HEADS,
            "num_hidden_layers": LAYERS,
            "intermediate_size": INNER, "max_position_embeddings": POSITIONS, "type_vocab_size": 2,
            "layer_norm_eps": 1e-12, "hidden_act": "gelu", "vocab_size": WORDS.len(),
        });
        let vocabulary: serde_json::Map<String, Value> =
            WORDS.iter().zip(0..).map(|(word, id): (_, usize)| (word.to_string(), id.into())).collect();
        // Limits and padding of a file are not a text's: they must be left out.
        let tokenizer = json!({
            "version": "1.0",
            "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
            "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
                        "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
            "added_tokens": [],
            "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                           "strip_accents": null, "lowercase": true},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]},
            "decoder": null,
            "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                      "max_input_chars_per_word": 100, "vocab": vocabulary},
        });
        let mut model = Self { config, tokenizer, pooling: None, tensors: BTreeMap::new() };
        model.random("embeddings.word_embeddings.weight", &[WORDS.len(), HIDDEN]);
        model.random("embeddings.position_embeddings.weight", &[POSITIONS, HIDDEN]);
        model.random("embeddings.token_type_embeddings.weight", &[2, HIDDEN]);
        model.both("embeddings.LayerNorm", &[HIDDEN]);
        for layer in 0..LAYERS {
            let name = |part: &str| format!("encoder.layer.{layer}.{part}");
            for part in ["self.query", "self.key", "self.value", "output.dense"] {
                model.both(&name(&format!("attention.{part}")), &[HIDDEN, HIDDEN]);
            }
            model.both(&name("attention.output.LayerNorm"), &[HIDDEN]);
            model.both(&name("intermediate.dense"), &[INNER, HIDDEN]);
            model.both(&name("output.dense"), &[HIDDEN, INNER]);
            model.both(&name("output.LayerNorm"), &[HIDDEN]);
        }
        model
    }

    /// Weight and bias.
    fn both(&mut self, name: &str, shape: &[usize]) {
        self.random(&format!("{name}.weight"), shape);
        self.random(&format!("{name}.bias"), &shape[..1]);
    }

    pub fn random(&mut self, name: &str, shape: &[usize]) {
        let mut state = name.bytes().fold(1u32, |x, byte| x.wrapping_mul(31).wrapping_add(byte.into()));
        let numbers = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        });
        self.tensors
            .insert(name.to_string(), (shape.to_vec(), numbers.take(shape.iter().product()).collect()));
    }

    fn weights(&self) -> Vec<u8> {
        let bytes: Vec<Vec<u8>> = self
            .tensors
            .values()
            .map(|(_, data)| data.iter().flat_map(|x| x.to_le_bytes()).collect())
            .collect();
        let views = self.tensors.iter().zip(&bytes).map(|((name, (shape, _)), bytes)| {
            (name, TensorView::new(Dtype::F32, shape.clone(), bytes).expect("the bytes fit the shape"))
        });
        safetensors::serialize(views, None).expect("a valid file")
    }

    /// Writes its files into a new folder.
    pub fn write(&self, name: &str) -> PathBuf {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(env!("CARGO_CRATE_NAME")).join(name);
        _ = fs::remove_dir_all(&folder); // what an earlier run has left
        fs::create_dir_all(folder.join("1_Pooling")).expect("a folder for the test");
        let write =
            |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).expect("the file is written");
        write("config.json", self.config.to_string().as_bytes());
        write("tokenizer.json", self.tokenizer.to_string().as_bytes());
        write("model.safetensors", &self.weights());
        if let Some(pooling) = &self.pooling {
            write("1_Pooling/config.json", pooling.to_string().as_bytes());
        }
        folder
    }
}
