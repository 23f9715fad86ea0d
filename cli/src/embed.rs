//! `headwise embed`: the embeddings of texts, or how similar they are, by a sentence model.
//!
//! Texts are packed in batches of about [`BATCH`] tokens, in their order, without padding.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, IsTerminal, Write};
use std::ops::Range;
use std::path::PathBuf;

use headwise::layer::Checkpoint;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::Failure;
use crate::encoder::{Batch, Encoder, Memory};
use crate::model::{Model, ModelError};

/// Prints how similar texts are, or their embeddings as JSON, by a sentence model (BERT: all-MiniLM-L6-v2,
/// bge, ...).
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model's directory: config.json, tokenizer.json, model.safetensors.
    #[arg(long)]
    model: PathBuf,
    /// The texts [default: the lines of standard input].
    #[arg(value_name = "TEXT")]
    texts: Vec<String>,
    /// Take the lines of a file as texts.
    #[arg(long, conflicts_with = "texts")]
    file: Option<PathBuf>,
    /// Print JSON, one object a text, instead of the table of cosine similarities.
    #[arg(long)]
    json: bool,
    /// Threads [default: all cores].
    #[arg(long, value_name = "N", value_parser = crate::bench::threads)]
    threads: Option<usize>,
}

/// Why texts were refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbedError {
    /// The model was.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The texts cannot be read.
    #[error("cannot read {from}: {source}")]
    Read {
        /// The file.
        from: String,
        /// What the system says.
        source: io::Error,
    },
    /// There are none.
    #[error("no texts: give some as arguments, by --file or on standard input")]
    Nothing,
    /// A text has nothing but white space.
    #[error("text {0} is empty")]
    Empty(usize),
    /// A text has more tokens than the model has positions.
    #[error("text {text} has {tokens} tokens, more than the model's {positions} positions")]
    Long {
        /// Which, from 1.
        text: usize,
        /// Its tokens.
        tokens: usize,
        /// The model's positions.
        positions: usize,
    },
    /// Tokens and weights belong to different models.
    #[error("the tokenizer has token {id}, but the model's vocabulary is {vocabulary}")]
    Vocabulary {
        /// The token.
        id: u32,
        /// Tokens that the model knows.
        vocabulary: usize,
    },
    /// More texts than a table can show.
    #[error("a table of {0} texts is too wide to read, the limit is {MAX_TABLE}; use --json")]
    Wide(usize),
    /// The tokenizer failed.
    #[error("text {text}: {why}")]
    Tokens {
        /// Which, from 1.
        text: usize,
        /// What it says.
        why: String,
    },
    /// The weights give numbers beyond f32 or none at all.
    #[error("the embedding of text {0} is not finite")]
    NotFinite(usize),
    /// The threads cannot be started.
    #[error("threads: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// The computation was refused.
    #[error("{0}")]
    Attention(#[from] headwise::Error),
    /// The result cannot be written.
    #[error("cannot write the result: {0}")]
    Write(io::Error),
}

/// Texts of a table.
const MAX_TABLE: usize = 50;

/// Tokens of a batch: enough rows for the projections to run at full speed, few enough that what lies between
/// two steps stays in the second-level cache. `headwise embed` on 256 texts of 5 to 120 tokens chose it.
pub const BATCH: usize = 512;

impl Args {
    /// Runs the command.
    ///
    /// # Errors
    /// Status 2 for whatever is wrong.
    pub fn execute(&self) -> Result<(), Failure> {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(self.threads.unwrap_or(0)).build();
        threads.map_err(EmbedError::from).and_then(|pool| pool.install(|| self.run())).map_err(Failure::usage)
    }

    fn run(&self) -> Result<(), EmbedError> {
        let model = Model::open(&self.model)?;
        let checkpoint = Checkpoint::new([model.weights()]).map_err(|error| model.refused(error))?;
        let encoder =
            Encoder::load(&checkpoint, &model.config, model.pooling).map_err(|error| model.refused(error))?;
        let texts = self.texts()?;
        if !self.json && texts.len() > MAX_TABLE {
            return Err(EmbedError::Wide(texts.len()));
        }
        let ids = tokens(&model, &encoder, &texts)?;
        let mut out = BufWriter::new(io::stdout().lock());
        let mut all = Vec::new();
        // JSON on the same terminal shows how far it is.
        let bar = match self.json && io::stdout().is_terminal() {
            true => ProgressBar::hidden(),
            false => ProgressBar::new(ids.len() as u64),
        };
        embed(&encoder, &ids, &bar, |text, embedding| {
            if self.json {
                let line = Line { text: &texts[text], tokens: ids[text].len(), embedding };
                serde_json::to_writer(&mut out, &line).map_err(io::Error::from)?;
                return writeln!(out);
            }
            all.extend_from_slice(embedding);
            Ok(())
        })?;
        if !self.json {
            table(&mut out, &texts, &all, encoder.hidden()).map_err(EmbedError::Write)?;
        }
        out.flush().map_err(EmbedError::Write)
    }

    fn texts(&self) -> Result<Vec<String>, EmbedError> {
        let lines = |from: String, lines: &mut dyn BufRead| {
            lines.lines().collect::<io::Result<_>>().map_err(|source| EmbedError::Read { from, source })
        };
        let texts: Vec<String> = match &self.file {
            Some(path) => {
                let from = format!("{path:?}");
                let file =
                    File::open(path).map_err(|source| EmbedError::Read { from: from.clone(), source })?;
                lines(from, &mut BufReader::new(file))?
            }
            None if self.texts.is_empty() => lines("standard input".to_string(), &mut io::stdin().lock())?,
            None => self.texts.clone(),
        };
        match texts.iter().position(|text| text.trim().is_empty()) {
            Some(index) => Err(EmbedError::Empty(index + 1)),
            None if texts.is_empty() => Err(EmbedError::Nothing),
            None => Ok(texts),
        }
    }
}

/// The token ids of each text, all of them checked before anything is computed.
fn tokens(model: &Model, encoder: &Encoder<'_>, texts: &[String]) -> Result<Vec<Vec<u32>>, EmbedError> {
    let (positions, vocabulary) = (encoder.positions(), encoder.vocabulary());
    let ids = |(index, text): (usize, &String)| {
        let encoding = model.tokenizer.encode(text.as_str(), true);
        let encoding =
            encoding.map_err(|error| EmbedError::Tokens { text: index + 1, why: error.to_string() })?;
        let ids = encoding.get_ids().to_vec();
        match ids.iter().find(|&&id| id as usize >= vocabulary) {
            _ if ids.is_empty() => Err(EmbedError::Empty(index + 1)),
            _ if ids.len() > positions => {
                Err(EmbedError::Long { text: index + 1, tokens: ids.len(), positions })
            }
            Some(&id) => Err(EmbedError::Vocabulary { id, vocabulary }),
            None => Ok(ids),
        }
    };
    texts.iter().enumerate().map(ids).collect()
}

/// Cuts texts, by their token ids and in their order, into batches of about [`BATCH`] tokens.
pub fn batches(ids: &[Vec<u32>]) -> impl Iterator<Item = Range<usize>> {
    let mut first = 0;
    std::iter::from_fn(move || {
        let mut rows = 0;
        let fitting = ids[first..].iter().take_while(|ids| {
            rows += ids.len();
            rows <= BATCH
        });
        let some = first..ids.len().min(first + fitting.count().max(1));
        first = some.end;
        (!some.is_empty()).then_some(some)
    })
}

/// Hands each text's embedding to `each`, in order.
fn embed(
    encoder: &Encoder<'_>,
    ids: &[Vec<u32>],
    bar: &ProgressBar,
    mut each: impl FnMut(usize, &[f32]) -> io::Result<()>,
) -> Result<(), EmbedError> {
    bar.set_style(
        ProgressStyle::with_template("{wide_bar} {pos}/{len} texts, {eta} left").expect("a valid style"),
    );
    let mut memory = Memory::default();
    for some in batches(ids) {
        let batch = Batch::new(ids[some.clone()].iter().map(Vec::as_slice));
        let embeddings = encoder.forward(&batch, &mut memory)?;
        for (text, embedding) in some.clone().zip(embeddings.chunks_exact(encoder.hidden())) {
            if !embedding.iter().all(|x| x.is_finite()) {
                return Err(EmbedError::NotFinite(text + 1));
            }
            each(text, embedding).map_err(EmbedError::Write)?;
        }
        bar.set_position(some.end as u64);
    }
    bar.finish_and_clear();
    Ok(())
}

/// A text as JSON.
#[derive(Serialize)]
struct Line<'a> {
    text: &'a str,
    tokens: usize,
    embedding: &'a [f32],
}

/// The texts by number, and the cosine of each two: their embeddings have length 1.
fn table(out: &mut impl Write, texts: &[String], embeddings: &[f32], hidden: usize) -> io::Result<()> {
    for (text, number) in texts.iter().zip(1..) {
        writeln!(out, "{number:>3}  {}", text.replace(char::is_control, " "))?;
    }
    write!(out, "\n   ")?;
    for number in 1..=texts.len() {
        write!(out, " {number:>6}")?;
    }
    writeln!(out)?;
    for (a, number) in embeddings.chunks_exact(hidden).zip(1..) {
        write!(out, "{number:>3}")?;
        for b in embeddings.chunks_exact(hidden) {
            let cosine: f64 = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            write!(out, " {:>6.3}", cosine + 0.0)?;
        }
        writeln!(out)?;
    }
    Ok(())
}
