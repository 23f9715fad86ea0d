//! The `headwise` command as a library, for tests and the fuzz targets.
//!
//! | file | idea |
//! |---|---|
//! | `run.rs` | `headwise run`: bytes of a safetensors file in, bytes of one out |
//! | `options.rs` | the options of a run, as JSON |
//! | `tensors.rs` | the tensors of a run, out of and into safetensors |
//! | `embed.rs` | `headwise embed`: texts in, embeddings or their similarities out |
//! | `heads.rs`, `heads/` | `headwise heads`: what the heads of an encoder do on a text |
//! | `text.rs` | a text in sentences that fit a model |
//! | `files.rs` | files that are written whole or not at all |
//! | `model.rs` | a model's directory: configuration, tokenizer, weights as mapped memory |
//! | `encoder.rs` | BERT: embeddings, layers, pooling |
//! | `bench.rs`, `bench/` | `headwise bench`: the interleaved rounds; shapes, machine, memory, report |
//! | `check.rs` | `headwise check`: random cases at every level, held against the reference |
//! | `case.rs` | one random case: drawn from numbers, run, compared; tests and fuzz targets share it |
//! | `baseline.rs` | gemm + softmax + gemm, what the bench compares with |
#![deny(unsafe_code)]

mod baseline;
pub mod bench;
pub mod case;
pub mod check;
pub mod embed;
pub mod encoder;
mod files;
pub mod heads;
pub mod model;
mod options;
pub mod run;
mod tensors;
pub mod text;

/// Why a command failed: one line for standard error, and the exit status.
#[derive(Debug, thiserror::Error)]
#[error("{line}")]
pub struct Failure {
    /// What went wrong, in one line.
    pub line: String,
    /// 1: a result was wrong. 2: the command could not be carried out as it was given.
    pub status: u8,
}

impl Failure {
    /// The command could not be carried out as it was given: exit status 2.
    pub fn usage(error: impl std::fmt::Display) -> Self {
        let line = error.to_string().replace(char::is_control, " "); // names from a file may hold anything
        Self { line, status: 2 }
    }

    /// A result was wrong: exit status 1.
    pub fn wrong(line: String) -> Self {
        Self { line, status: 1 }
    }
}
