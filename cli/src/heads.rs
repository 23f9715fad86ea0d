//! `headwise heads`: what the heads of an encoder do on a text, as a table, JSON or CSV, as a page, as
//! pictures.
//!
//! | file | idea |
//! |---|---|
//! | `measure.rs` | runs the encoder on the sentences and looks at its heads |
//! | `prune.rs` | removes heads, the least important first, and looks at what is left |
//! | `label.rs` | what a head's figures say of it, and when they say nothing |
//! | `report.rs` | what was found, as a table, JSON and CSV |
//! | `svg.rs`, `plot.rs` | pictures: their parts, and each of them |
//! | `page.rs`, `page.html` | all of it as one page that needs no network |

mod label;
mod measure;
mod page;
mod plot;
mod prune;
mod report;
mod svg;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use headwise::layer::Checkpoint;
use indicatif::{ProgressBar, ProgressStyle};

use crate::Failure;
use crate::encoder::Encoder;
use crate::files::NewFile;
use crate::model::{self, Model, ModelError};
use crate::text::{self, Sentence};

pub use label::{Chance, Figures, Label, labels};
pub use report::{Head, Pruned, Report, Similarity};

/// Shows what the heads of an encoder do on a text: entropy, weight on named tokens, similarity, importance.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model's directory: config.json, tokenizer.json, model.safetensors.
    #[arg(long)]
    model: PathBuf,
    /// The text: it is cut into sentences.
    #[arg(long)]
    text: PathBuf,
    /// Write a page with plots; it needs no network.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write each plot as an SVG file into a directory.
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,
    /// Print JSON instead of the table.
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print CSV instead of the table: a line for each head.
    #[arg(long)]
    csv: bool,
    /// The layer of the attention map, from 0 [default: that of the head with the heaviest pattern].
    #[arg(long, value_name = "N")]
    layer: Option<usize>,
    /// The head of the attention map, from 0 [default: the one with the heaviest pattern].
    #[arg(long, value_name = "N")]
    head: Option<usize>,
    /// The sentence of the attention map, from 1.
    #[arg(long, value_name = "N", default_value_t = 1)]
    sentence: usize,
    /// Threads [default: all cores].
    #[arg(long, value_name = "N", value_parser = crate::bench::threads)]
    threads: Option<usize>,
}

/// Why an analysis was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HeadsError {
    /// The model was.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The text cannot be read.
    #[error("cannot read {path:?}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {path:?}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The result cannot be printed.
    #[error("cannot write the result: {0}")]
    Print(io::Error),
    /// There are no words in the text.
    #[error("{0:?} is empty: no sentences")]
    Empty(PathBuf),
    /// The tokenizer failed.
    #[error("the tokenizer: {0}")]
    Tokens(String),
    /// Tokens and weights belong to different models.
    #[error("the tokenizer has token {id}, but the model's vocabulary is {vocabulary}")]
    Vocabulary {
        /// The token.
        id: u32,
        /// Tokens that the model knows.
        vocabulary: usize,
    },
    /// A layer, head or sentence that is not there.
    #[error("there is no {what} {got}: they are numbered {first} to {last}")]
    Number {
        /// Layer, head or sentence.
        what: &'static str,
        /// The number asked for.
        got: usize,
        /// The smallest there is.
        first: usize,
        /// The largest there is.
        last: usize,
    },
    /// The weights give numbers beyond f32 or none at all.
    #[error("the numbers of layer {0} are not finite")]
    NotFinite(usize),
    /// The model has nothing to look at.
    #[error("the model has no layers")]
    NoLayers,
    /// The threads cannot be started.
    #[error("threads: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// The computation was refused.
    #[error("{0}")]
    Attention(#[from] headwise::Error),
}

/// Which attention map is shown.
#[derive(Debug, Clone, Copy)]
struct Choice {
    layer: usize,
    head: usize,
    /// From 0.
    sentence: usize,
}

impl Args {
    /// Runs the command.
    ///
    /// # Errors
    /// Status 2 for whatever is wrong; no file is written then.
    pub fn execute(&self) -> Result<(), Failure> {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(self.threads.unwrap_or(0)).build();
        threads.map_err(HeadsError::from).and_then(|pool| pool.install(|| self.run())).map_err(Failure::usage)
    }

    fn run(&self) -> Result<(), HeadsError> {
        let page = self.html.as_deref().map(|path| self.new_file(path)).transpose()?;
        if let Some(directory) = &self.svg {
            fs::create_dir_all(directory)
                .map_err(|source| HeadsError::Write { path: directory.clone(), source })?;
        }
        let model = Model::open(&self.model)?;
        let checkpoint = Checkpoint::new([model.weights()]).map_err(|error| model.refused(error))?;
        let load =
            || Encoder::load(&checkpoint, &model.config, model.pooling).map_err(|error| model.refused(error));
        let encoder = load()?;
        let sentences = self.sentences(&model, &encoder)?;
        self.check(&encoder, &sentences)?;

        let bar = ProgressBar::new(0);
        let style = ProgressStyle::with_template("{wide_bar} {msg}, {eta} left").expect("a valid style");
        bar.set_style(style);
        let mut report = measure::report(&encoder, &sentences, &bar)?;
        (report.model, report.text) = (name(&self.model), name(&self.text));
        report.pruning = prune::curve(&encoder, load()?, &sentences, &report.heads, &bar)?;
        let choice = self.choose(&report);
        bar.finish_and_clear();

        if self.html.is_some() || self.svg.is_some() {
            let maps = measure::maps(&encoder, &sentences, choice)?;
            if let Some(directory) = &self.svg {
                for (name, picture) in plot::all(&report, &maps, choice) {
                    let file = self.new_file(&directory.join(format!("{name}.svg")))?;
                    finish(file, picture.file().as_bytes())?;
                }
            }
            if let Some(page) = page {
                finish(page, page::html(&report, &maps, choice).as_bytes())?;
            }
        }
        let mut out = io::BufWriter::new(io::stdout().lock());
        let printed = match (self.json, self.csv) {
            (true, _) => report.json(&mut out),
            (_, true) => report.csv(&mut out),
            _ => report.table(&mut out),
        };
        printed.and_then(|()| out.flush()).map_err(HeadsError::Print)
    }

    fn sentences(&self, model: &Model, encoder: &Encoder<'_>) -> Result<Vec<Sentence>, HeadsError> {
        let text = fs::read_to_string(&self.text)
            .map_err(|source| HeadsError::Read { path: self.text.clone(), source })?;
        let sentences = text::sentences(&text, &model.tokenizer, encoder.positions());
        let sentences = sentences.map_err(HeadsError::Tokens)?;
        let vocabulary = encoder.vocabulary();
        let unknown = |&&id: &&u32| id as usize >= vocabulary;
        match sentences.iter().flat_map(|sentence| &sentence.ids).find(unknown) {
            _ if sentences.is_empty() => Err(HeadsError::Empty(self.text.clone())),
            Some(&id) => Err(HeadsError::Vocabulary { id, vocabulary }),
            None => Ok(sentences),
        }
    }

    fn check(&self, encoder: &Encoder<'_>, sentences: &[Sentence]) -> Result<(), HeadsError> {
        let layers = encoder.layers().len();
        let heads = encoder.layers().first().ok_or(HeadsError::NoLayers)?.attention.layer().config().heads;
        for (what, got, first, count) in [
            ("layer", self.layer, 0, layers),
            ("head", self.head, 0, heads),
            ("sentence", Some(self.sentence), 1, sentences.len()),
        ] {
            if let Some(got) = got.filter(|got| !(first..first + count).contains(got)) {
                return Err(HeadsError::Number { what, got, first, last: first + count - 1 });
            }
        }
        Ok(())
    }

    /// The head asked for; of those that fit, the one with the most weight on one of the named keys.
    fn choose(&self, report: &Report) -> Choice {
        let fits = |head: &&Head| {
            self.layer.is_none_or(|layer| layer == head.layer) && self.head.is_none_or(|n| n == head.head)
        };
        let heaviest = |head: &Head| {
            let Figures { previous, next, separators, first, .. } = head.figures;
            previous.max(next).max(separators).max(first)
        };
        let head = report.heads.iter().filter(fits).max_by(|a, b| heaviest(a).total_cmp(&heaviest(b)));
        let (layer, head) = head.map_or((0, 0), |head| (head.layer, head.head));
        Choice { layer, head, sentence: self.sentence - 1 }
    }

    fn new_file(&self, path: &Path) -> Result<NewFile, HeadsError> {
        let model = model::FILES.map(|name| self.model.join(name));
        let inputs = [self.text.as_path()].into_iter().chain(model.iter().map(PathBuf::as_path));
        NewFile::create(path, &inputs.collect::<Vec<_>>())
            .map_err(|source| HeadsError::Write { path: path.to_path_buf(), source })
    }
}

fn finish(file: NewFile, bytes: &[u8]) -> Result<(), HeadsError> {
    let path = file.path().to_path_buf();
    file.finish(bytes).map_err(|source| HeadsError::Write { path, source })
}

/// The last part of a path.
fn name(path: &Path) -> String {
    let name = path.canonicalize().ok().and_then(|path| path.file_name().map(|name| name.to_owned()));
    name.map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}
