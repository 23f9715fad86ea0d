//! `headwise embed` from the outside: a small model made here, held against BERT's formula in f64; whatever
//! is wrong with model or texts, told in one line with exit status 2; and all-MiniLM-L6-v2 itself, where it
//! is.

#[path = "../common/mod.rs"]
mod common;
mod computed;
mod minilm;
mod refused;

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::*;
use serde_json::Value;

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
