//! `headwise embed` from the outside: a small model made here, held against BERT's formula in f64; whatever
//! is wrong with model or texts, told in one line with exit status 2; and all-MiniLM-L6-v2 itself, where it
//! is.

mod computed;
mod minilm;
mod reference;
mod refused;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

/// An encoder of 2 layers, 3 heads of 4 features, and 16 positions.
#[derive(Clone)]
struct Model {
    config: Value,
    tokenizer: Value,
    pooling: Option<Value>,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

const HIDDEN: usize = 12;
const HEADS: usize = 3;
const INNER: usize = 20;
const LAYERS: usize = 2;
const POSITIONS: usize = 16;
const WORDS: [&str; 12] =
    ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "the", "river", "bank", "walk", "##ed", "was", "closed", "."];

impl Model {
    fn new() -> Self {
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

    fn random(&mut self, name: &str, shape: &[usize]) {
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
    fn write(&self, name: &str) -> PathBuf {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("embed").join(name);
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

/// `headwise embed --model FOLDER ARGUMENTS...`, with something on standard input.
fn embed(folder: &Path, arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_headwise"));
    command.args(["embed", "--model"]).arg(folder).args(arguments);
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the command starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    let input = input.to_string();
    let writer = std::thread::spawn(move || {
        _ = stdin.write_all(input.as_bytes()); // a command that fails does not read it
    });
    let output = child.wait_with_output().expect("the command ends");
    writer.join().expect("written");
    output
}

/// What it prints with `--json`: the number of tokens and the embedding of each text.
fn embeddings(folder: &Path, arguments: &[&str], input: &str) -> Vec<(usize, Vec<f32>)> {
    let output = embed(folder, &[&["--json"], arguments].concat(), input);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let text = String::from_utf8(output.stdout).expect("text");
    let line = |line: &str| {
        let value: Value = serde_json::from_str(line).expect("an object a line");
        let numbers = value["embedding"].as_array().expect("a list of numbers");
        let numbers = numbers.iter().map(|x| x.as_f64().expect("a number") as f32).collect();
        (value["tokens"].as_u64().expect("a number") as usize, numbers)
    };
    text.lines().map(line).collect()
}
