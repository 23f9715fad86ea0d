//! `headwise heads` from the outside: a small model made here, held against BERT's formula in f64; weights
//! without training, of which nothing is claimed; whatever is wrong with model, text or files, told in one
//! line with exit status 2; and all-MiniLM-L6-v2 itself, where it is.

#[path = "../common/mod.rs"]
mod common;
mod computed;
mod labels;
mod minilm;
mod refused;
mod written;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::*;
use serde_json::Value;

/// Sentences of the small model, and their tokens.
const TEXT: &str = "The river bank was closed.\nThe bank\nwalked. River!\n\nThe the river was the bank.\n";
const IDS: [&[usize]; 4] =
    [&[1, 4, 5, 6, 9, 10, 11, 2], &[1, 4, 6, 7, 8, 11, 2], &[1, 5, 3, 2], &[1, 4, 4, 5, 9, 4, 6, 11, 2]];

/// A file with a text, in a model's directory.
fn text(folder: &Path, text: impl AsRef<[u8]>) -> PathBuf {
    let file = folder.join("text.txt");
    fs::write(&file, text).expect("the text is written");
    file
}

/// `headwise heads --model FOLDER --text FILE ARGUMENTS...`
fn heads(folder: &Path, text: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_headwise"));
    command.args(["heads", "--model"]).arg(folder).arg("--text").arg(text).args(arguments);
    command.output().expect("the command runs")
}

/// What it prints.
fn printed(folder: &Path, text: &Path, arguments: &[&str]) -> String {
    let output = heads(folder, text, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn report(folder: &Path, text: &Path) -> Value {
    serde_json::from_str(&printed(folder, text, &["--json"])).expect("JSON")
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {value}"))
}

fn list<'v>(value: &'v Value, key: &str) -> &'v [Value] {
    value[key].as_array().unwrap_or_else(|| panic!("no list {key}"))
}
