//! A model's directory, as Hugging Face lays it out: `config.json`, `tokenizer.json`, `model.safetensors`,
//! and of a sentence model how it pools, in `1_Pooling/config.json`.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use headwise::layer::WeightsError;
use memmap2::Mmap;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::Tokenizer;

use crate::encoder::{Config, Pooling};

/// Why a model was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file cannot be read.
    #[error("cannot read {path:?}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file is not what it should be.
    #[error("{path:?}: {why}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The weights do not make the model.
    #[error("{path:?}: {source}")]
    Weights {
        /// The file.
        path: PathBuf,
        /// What is wrong with them.
        source: WeightsError,
    },
}

/// A model's files, read or mapped; its weights are bytes still.
#[derive(Debug)]
pub struct Model {
    /// Its sizes.
    pub config: Config,
    /// What makes tokens of texts: all of a text, whatever limits and padding its file asks for.
    pub tokenizer: Tokenizer,
    /// Which rows become an embedding.
    pub pooling: Pooling,
    weights: Mmap,
    path: PathBuf,
}

/// The files of a model's directory.
pub(crate) const FILES: [&str; 4] =
    ["config.json", "tokenizer.json", "1_Pooling/config.json", "model.safetensors"];

impl Model {
    /// The model in a directory.
    ///
    /// # Errors
    /// [`ModelError`] if a file is missing, broken, or of a model that is not an encoder as this command
    /// knows it.
    pub fn open(directory: &Path) -> Result<Self, ModelError> {
        let [of_config, of_tokenizer, of_pooling, path] = FILES.map(|name| directory.join(name));
        let config = config(&of_config)?;
        let tokenizer = tokenizer(&of_tokenizer)?;
        let pooling = pooling(&of_pooling)?;
        let weights = map(&path).map_err(|source| ModelError::Read { path: path.clone(), source })?;
        Ok(Self { config, tokenizer, pooling, weights, path })
    }

    /// The bytes of the weights.
    pub fn weights(&self) -> &[u8] {
        &self.weights
    }

    /// Says which file's weights were refused.
    pub fn refused(&self, source: WeightsError) -> ModelError {
        ModelError::Weights { path: self.path.clone(), source }
    }
}

/// Maps a file: its pages are read when they are needed, and a process that has them shares them.
#[allow(unsafe_code)]
fn map(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: the map is only read. That nobody changes the file meanwhile is asked of the user, as by every
    // program that maps its models: there is no way to hold others off.
    unsafe { Mmap::map(&file) }
}

fn json<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    let bytes = fs::read(path).map_err(|source| ModelError::Read { path: path.to_path_buf(), source })?;
    serde_json::from_slice(&bytes).map_err(|error| wrong(path, error))
}

fn wrong(path: &Path, why: impl ToString) -> ModelError {
    ModelError::File { path: path.to_path_buf(), why: why.to_string() }
}

fn config(path: &Path) -> Result<Config, ModelError> {
    let value: Value = json(path)?;
    match value.get("model_type").and_then(Value::as_str) {
        Some("bert") => {}
        Some(other) => return Err(wrong(path, format!("model_type is {other:?}, must be \"bert\""))),
        None => return Err(wrong(path, "model_type is missing")),
    }
    let config: Config = serde_json::from_value(value).map_err(|error| wrong(path, error))?;
    if config.is_decoder {
        return Err(wrong(path, "is_decoder is true: not an encoder"));
    }
    let Config { hidden_size, num_attention_heads, .. } = config;
    if num_attention_heads == 0 || !hidden_size.is_multiple_of(num_attention_heads) {
        let why = format!(
            "hidden_size {hidden_size} is not a multiple of num_attention_heads {num_attention_heads}"
        );
        return Err(wrong(path, why));
    }
    Ok(config)
}

fn tokenizer(path: &Path) -> Result<Tokenizer, ModelError> {
    let bytes = fs::read(path).map_err(|source| ModelError::Read { path: path.to_path_buf(), source })?;
    let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(|error| wrong(path, error))?;
    tokenizer.with_truncation(None).map_err(|error| wrong(path, error))?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

/// Of `1_Pooling/config.json`.
#[derive(Deserialize)]
struct Modes {
    #[serde(default)]
    pooling_mode_cls_token: bool,
    #[serde(default)]
    pooling_mode_mean_tokens: bool,
    #[serde(default)]
    pooling_mode_max_tokens: bool,
    #[serde(default)]
    pooling_mode_mean_sqrt_len_tokens: bool,
}

fn pooling(path: &Path) -> Result<Pooling, ModelError> {
    if !path.exists() {
        return Ok(Pooling::default());
    }
    let modes: Modes = json(path)?;
    let one = [
        modes.pooling_mode_cls_token,
        modes.pooling_mode_mean_tokens,
        modes.pooling_mode_max_tokens,
        modes.pooling_mode_mean_sqrt_len_tokens,
    ];
    match one {
        [true, false, false, false] => Ok(Pooling::First),
        // What is divided by more or less is the same when its length is 1.
        [false, true, false, false] | [false, false, false, true] => Ok(Pooling::Mean),
        _ => Err(wrong(path, "of the ways to pool, only the mean and the first token are supported")),
    }
}
