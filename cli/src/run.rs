//! `headwise run`: the attention of the tensors in a safetensors file.
//!
//! [`compute`] is all of it but the files: bytes in, bytes out, an error for whatever is not as it must be.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use half::{bf16, f16};
use headwise::analysis::reference::{StatisticsReference, statistics};
use headwise::analysis::{Statistic, StatisticsOptions};
use headwise::reference::{self, Reference};
use headwise::{Attention, DType, Element, Position, Terms, View, ViewMut};
use safetensors::{Dtype, SafeTensorError, SafeTensors};

use crate::Failure;
use crate::files::NewFile;
use crate::options::{Corner, Layout, Options, Position as Named, Precision, Stage};
use crate::tensors::{self, Float, Floats, Inputs, Tensor};

/// Computes the attention of a safetensors file with q, k, v and writes one with out.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The file with q, k, v and, if wanted, mask, bias, slopes, sinks, gates, kv_lens, q_lens and offsets.
    #[arg(long)]
    input: PathBuf,
    /// The file to write.
    #[arg(long)]
    output: PathBuf,
    /// A JSON file with options (docs/run.md); without it the input's metadata entry `options` is used.
    #[arg(long)]
    options: Option<PathBuf>,
}

/// Why a run was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// A file cannot be read.
    #[error("cannot read {path:?}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The output cannot be written.
    #[error("cannot write {path:?}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The bytes are not a safetensors file.
    #[error("the input is not a safetensors file: {0}")]
    Format(#[from] SafeTensorError),
    /// An option is unknown or has a value that it cannot have.
    #[error("options: {0}")]
    Options(String),
    /// `q`, `k` or `v` is missing.
    #[error("tensor {0:?} is missing")]
    MissingTensor(&'static str),
    /// A tensor by a name that means nothing here.
    #[error("tensor {0:?} is unknown")]
    UnknownTensor(String),
    /// A tensor has the wrong element type.
    #[error("{name} is {got:?}, must be {must}")]
    Type {
        /// The tensor.
        name: String,
        /// Its element type.
        got: Dtype,
        /// What it must be.
        must: &'static str,
    },
    /// A tensor has the wrong number of axes.
    #[error("{name} of shape {shape:?} has {} axes, must have {ranks}", shape.len())]
    Rank {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The numbers of axes that it may have.
        ranks: String,
    },
    /// A length is negative.
    #[error("{name}[{index}] is {value}, must not be negative")]
    Negative {
        /// The tensor.
        name: String,
        /// The entry.
        index: usize,
        /// Its value.
        value: i64,
    },
    /// The sizes ask for more than anybody can want of such a file.
    #[error("{what} is {got}, more than the {limit} allowed")]
    TooMuch {
        /// What there would be too much of.
        what: &'static str,
        /// How much.
        got: usize,
        /// How much is allowed.
        limit: usize,
    },
    /// The threads cannot be started.
    #[error("threads: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// The arguments do not fit each other.
    #[error("{0}")]
    Attention(#[from] headwise::Error),
}

/// The most scores held at once: the reference has four matrices of this many f64.
const MAX_PAIRS: usize = 1 << 24;

impl Args {
    /// Runs the command.
    ///
    /// # Errors
    /// Status 2 for whatever is wrong; nothing is written then.
    pub fn execute(&self) -> Result<(), Failure> {
        let summary = self.run().map_err(Failure::usage)?;
        _ = writeln!(std::io::stdout(), "{summary}"); // the file is there, whether or not somebody reads this
        Ok(())
    }

    fn run(&self) -> Result<String, RunError> {
        let unreadable = |path: &Path| {
            let path = path.to_path_buf();
            move |source| RunError::Read { path, source }
        };
        let input = fs::read(&self.input).map_err(unreadable(&self.input))?;
        let options = match &self.options {
            Some(path) => Some(fs::read_to_string(path).map_err(unreadable(path))?),
            None => None,
        };
        let inputs: Vec<&Path> =
            [&self.input].into_iter().chain(&self.options).map(PathBuf::as_path).collect();
        let unwritable = |source| RunError::Write { path: self.output.clone(), source };
        let file = NewFile::create(&self.output, &inputs).map_err(unwritable)?;
        let answer = answer(&input, options.as_deref())?;
        file.finish(&tensors::write(&answer.tensors)?).map_err(unwritable)?;
        Ok(answer.summary)
    }
}

/// The safetensors file that answers the safetensors file `input`; `options` is JSON and goes before the
/// options in the input's metadata.
///
/// # Errors
/// Anything that is not as the format asks; no input makes it panic.
pub fn compute(input: &[u8], options: Option<&str>) -> Result<Vec<u8>, RunError> {
    tensors::write(&answer(input, options)?.tensors)
}

struct Answer {
    tensors: Vec<(&'static str, Tensor<Floats>)>,
    /// The kernel, the shapes, the time: one line.
    summary: String,
}

fn answer(input: &[u8], options: Option<&str>) -> Result<Answer, RunError> {
    let file = SafeTensors::deserialize(input)?;
    let (_, header) = SafeTensors::read_metadata(input)?;
    let in_file = || header.metadata().as_ref()?.get("options").map(String::as_str);
    let options = options.or_else(in_file).map(Options::parse).transpose()?.unwrap_or_default();
    let inputs = Inputs::read(&file)?;
    match inputs.q.data {
        Floats::F32(_) => answer_as::<f32>(input.len(), &inputs, &options),
        Floats::F16(_) => answer_as::<f16>(input.len(), &inputs, &options),
        Floats::Bf16(_) => answer_as::<bf16>(input.len(), &inputs, &options),
    }
}

/// The answer, where Q, K and V are of type `T`.
fn answer_as<T: Float>(file: usize, inputs: &Inputs, options: &Options) -> Result<Answer, RunError> {
    if options.precision == Some(Precision::Fast) && T::DTYPE != DType::Bf16 {
        return Err(RunError::Options("precision: \"fast\" is for BF16 tensors".into()));
    }
    let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|tensor| view::<T>(tensor, options.layout));
    let problem = Problem { q: q?, k: k?, v: v?, terms: terms(inputs, options)?, layout: options.layout };
    problem.check_sizes(file)?;
    let (tensors, how, time) = match options.reference {
        true => problem.by_reference(options)?,
        false => problem.by_kernel(options)?,
    };
    let (q, k, v, out) = (&inputs.q.shape, &inputs.k.shape, &inputs.v.shape, problem.out_shape());
    let ms = time.as_secs_f64() * 1e3;
    Ok(Answer { tensors, summary: format!("{how}: q {q:?} k {k:?} v {v:?} -> out {out:?} in {ms:.3} ms") })
}

fn view<T: Float>(tensor: &Tensor<Floats>, layout: Layout) -> Result<View<'_, T>, RunError> {
    let shape = core::array::from_fn(|axis| tensor.shape[axis]); // q, k and v have four axes
    let data = T::of(&tensor.data).unwrap_or_default(); // all three are of this type
    Ok(match layout {
        Layout::Bhld => View::bhld(data, shape)?,
        Layout::Blhd => View::blhd(data, shape)?,
    })
}

fn terms<'a>(inputs: &'a Inputs, options: &Options) -> Result<Terms<'a>, RunError> {
    let [left, right] = options.window.unwrap_or_default();
    let position = match (&inputs.offsets, options.position) {
        (Some(offsets), _) => Position::Each(offsets),
        (None, Named::Corner(Corner::TopLeft)) => Position::TopLeft,
        (None, Named::Corner(Corner::BottomRight)) => Position::BottomRight,
        (None, Named::At(offset)) => Position::At(offset),
    };
    Ok(Terms {
        scale: options.scale,
        softcap: options.softcap,
        causal: options.causal,
        left,
        right,
        position,
        mask: inputs.mask.as_ref().map(|mask| View::compact(&mask.data, &mask.shape)).transpose()?,
        bias: inputs.bias.as_ref().map(|bias| View::compact(&bias.data, &bias.shape)).transpose()?,
        kv_lens: inputs.kv_lens.as_deref(),
        q_lens: inputs.q_lens.as_deref(),
        slopes: inputs.slopes.as_deref(),
        sinks: inputs.sinks.as_deref(),
        gates: inputs.gates.as_deref(),
    })
}

struct Problem<'a, T> {
    q: View<'a, T>,
    k: View<'a, T>,
    v: View<'a, T>,
    terms: Terms<'a>,
    layout: Layout,
}

/// The output tensors, how they were computed, and in what time.
type Computed = (Vec<(&'static str, Tensor<Floats>)>, String, Duration);

impl<T: Float> Problem<'_, T> {
    /// A size of 0 beside others that are huge fits any small file and would take memory and time no end.
    /// Nothing else comes near these limits. They count a size of 0 as 1, so that no product of sizes
    /// overflows later.
    fn check_sizes(&self, file: usize) -> Result<(), RunError> {
        let product = |sizes: &[usize]| sizes.iter().fold(1usize, |n, &size| n.saturating_mul(size.max(1)));
        let limit = |least: usize, factor: usize| file.saturating_mul(factor).saturating_add(least);
        let (rows, keys) = (product(&self.q.shape()[..3]), product(&self.k.shape()[..3]));
        for (what, got, limit) in [
            ("the number of query rows", rows, limit(1 << 10, 16)),
            ("the number of keys", keys, limit(1 << 10, 16)),
            ("the number of output elements", product(&self.out_shape()), limit(1 << 20, 256)),
        ] {
            if got > limit {
                return Err(RunError::TooMuch { what, got, limit });
            }
        }
        Ok(())
    }

    /// `B * Hq * Lq * Lk`, where all of them are held at once.
    fn pairs(&self, what: &'static str) -> Result<usize, RunError> {
        let ([b, hq, lq, _], lk) = (self.q.shape(), self.k.shape()[2]);
        let got = [b, hq, lq, lk].iter().fold(1usize, |n, &size| n.saturating_mul(size));
        if got > MAX_PAIRS { Err(RunError::TooMuch { what, got, limit: MAX_PAIRS }) } else { Ok(got) }
    }

    /// In the layout of the files.
    fn out_shape(&self) -> [usize; 4] {
        let ([b, hq, lq, _], dv) = (self.q.shape(), self.v.shape()[3]);
        match self.layout {
            Layout::Bhld => [b, hq, lq, dv],
            Layout::Blhd => [b, lq, hq, dv],
        }
    }

    fn by_kernel(&self, options: &Options) -> Result<Computed, RunError> {
        let mut attention = Attention::with_terms(self.terms);
        if let Some(precision) = options.precision {
            attention = attention.precision(precision.into());
        }
        if let Some(level) = options.level()? {
            attention = attention.level(level);
        }
        let (q, k, v, shape) = (self.q, self.k, self.v, self.out_shape());
        let run = || -> Result<Computed, RunError> {
            let plan = attention.plan(q, k, v)?.describe();
            let mut out = vec![T::default(); shape.iter().product()];
            let mut lse = vec![0.0; q.shape()[..3].iter().product()];
            let to = match self.layout {
                Layout::Bhld => ViewMut::bhld(&mut out, shape)?,
                Layout::Blhd => ViewMut::blhd(&mut out, shape)?,
            };
            let start = Instant::now();
            match options.lse {
                true => attention.run_with_lse(q, k, v, to, &mut lse)?,
                false => attention.run(q, k, v, to)?,
            }
            let time = start.elapsed();
            let mut tensors = vec![("out", Tensor { shape: shape.to_vec(), data: T::wrap(out) })];
            if options.lse {
                tensors.push(("lse", Tensor { shape: q.shape()[..3].to_vec(), data: Floats::F32(lse) }));
            }
            if let Some(stage) = options.scores {
                let [b, hq, lq, _] = q.shape();
                let shape = [b, hq, lq, k.shape()[2]];
                let mut scores = vec![0.0; self.pairs("the number of scores")?];
                attention.scores(stage.into(), q, k, 0..hq, 0..lq, &mut scores)?;
                tensors.push(("scores", Tensor { shape: shape.to_vec(), data: Floats::F32(scores) }));
            }
            if options.stats {
                // Apart, so that `out` has the same bits whether or not they are asked for.
                let mut again = vec![T::default(); shape.iter().product()];
                let [b, hq, lq, _] = q.shape();
                let to = ViewMut::bhld(&mut again, [b, hq, lq, v.shape()[3]])?;
                let asked = StatisticsOptions::new().rows().received();
                let statistics = attention.run_with_statistics(q, k, v, to, &asked)?;
                let rows = statistics.rows().unwrap_or_default();
                let numbers = rows.iter().flat_map(|row| Statistic::ALL.map(|statistic| statistic.of(row)));
                let received = statistics.received().unwrap_or_default().to_vec();
                tensors.extend(self.statistics(numbers.collect(), received));
            }
            Ok((tensors, plan, time))
        };
        match options.threads {
            Some(threads) => rayon::ThreadPoolBuilder::new().num_threads(threads).build()?.install(run),
            None => run(),
        }
    }

    /// The statistics of the rows, and what the keys receive.
    fn statistics(&self, rows: Vec<f32>, received: Vec<f32>) -> [(&'static str, Tensor<Floats>); 2] {
        let ([b, hq, lq, _], lk) = (self.q.shape(), self.k.shape()[2]);
        let tensor = |shape: Vec<usize>, data| Tensor { shape, data: Floats::F32(data) };
        [
            ("stats", tensor(vec![b, hq, lq, Statistic::ALL.len()], rows)),
            ("received", tensor(vec![b, hq, lk], received)),
        ]
    }

    fn by_reference(&self, options: &Options) -> Result<Computed, RunError> {
        options.level()?; // no kernel runs, but a name that is none is still wrong
        let ([b, hq, lq, _], lk) = (self.q.shape(), self.k.shape()[2]);
        self.pairs("the number of query-key pairs of the reference")?;
        let start = Instant::now();
        let (reference, statistics) = if options.stats {
            let StatisticsReference { attention, rows, received } =
                statistics(self.q, self.k, self.v, &self.terms, None)?;
            (attention, Some((rows, received)))
        } else {
            (reference::attention(self.q, self.k, self.v, &self.terms)?, None)
        };
        let time = start.elapsed();
        let mut tensors = vec![(
            "out",
            Tensor { shape: self.out_shape().to_vec(), data: T::wrap(self.laid_out(&reference)) },
        )];
        if options.lse {
            tensors
                .push(("lse", Tensor { shape: vec![b, hq, lq], data: Floats::F32(round(&reference.lse)) }));
        }
        if let Some(stage) = options.scores {
            let scores = match stage {
                Stage::Scaled => &reference.scaled,
                Stage::Capped => &reference.capped,
                Stage::Biased => &reference.biased,
                Stage::Weights => &reference.weights,
            };
            tensors.push(("scores", Tensor { shape: vec![b, hq, lq, lk], data: Floats::F32(round(scores)) }));
        }
        if let Some((rows, received)) = statistics {
            let numbers = rows.iter().flat_map(|row| row.numbers.map(|number| number as f32));
            tensors.extend(self.statistics(numbers.collect(), round(&received)));
        }
        Ok((tensors, "f64 reference".into(), time))
    }

    /// The reference's output, rounded, in the layout of the files.
    fn laid_out(&self, reference: &Reference) -> Vec<T> {
        let ([b, hq, lq, _], dv) = (self.q.shape(), self.v.shape()[3]);
        match self.layout {
            Layout::Bhld => round(&reference.out),
            Layout::Blhd => (0..b * lq * hq)
                .map(|at| (at / (lq * hq), at / hq % lq, at % hq))
                .flat_map(|(b, i, h)| round(&reference.out[((b * hq + h) * lq + i) * dv..][..dv]))
                .collect(),
        }
    }
}

fn round<T: Element>(x: &[f64]) -> Vec<T> {
    x.iter().map(|&x| T::from_f32(x as f32)).collect()
}
