//! `headwise bench`: this machine's peaks and the named shapes, measured in the same rounds.
//!
//! ```text
//! every shape, level, number of threads, implementation: one call on fresh threads; memory, check, estimate
//! each round: peaks, then all of them in turn             so that load on the machine hits all alike
//!     warm up, peak, calls in turn with reads, peak       each yardstick right beside what it measures
//! report: medians over the rounds of medians over the calls
//! ```
//!
//! - Peak: multiply-adds in registers for 0.3 ms on all of the job's threads, at the clock that the job runs at:
//!   of f32, or dot products where the kernel computes in those (prefill of bf16 at levels `avx512bf16` and `neonbf16`);
//!   products in tiles (level `amx`) can exceed it. `peak_percent` is of the mean of the two, round by round.
//! - Reads, for shapes with few queries: K and V from end to end by as many threads, over and over as the
//!   calls do, with and without prefetching. `read_percent` is of the faster way, round by round.
//! - Inputs, output and the baseline's scores lie on large pages where the system has them.
//!
//! Calls that take long run in some of the rounds only. Nothing is timed whose result is wrong. With
//! `--profile` it is the parts of a call that are timed: see `profile.rs`.

mod buffer;
mod machine;
mod named;
mod profile;
mod report;
mod shapes;

use std::time::Instant;

use headwise::{Attention, DType, Level};
use indicatif::{ProgressBar, ProgressStyle};
use peak_alloc::PeakAlloc;

use crate::Failure;
use crate::baseline::Baseline;
use machine::{Machine, on_fresh_threads};
use named::SHAPES;
use shapes::{Case, cases};

pub(crate) use buffer::Buffer;
pub(crate) use named::Shape;

/// Measures the named shapes against this machine's peak and against gemm + softmax + gemm.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON, one object a line, instead of a table.
    #[arg(long)]
    json: bool,
    /// A shape by its name; repeatable [default: all].
    #[arg(long, value_name = "NAME", value_parser = Shape::parse)]
    shape: Vec<Shape>,
    /// The element type of the inputs: f32, f16, bf16, or i8 for keys and values beside f32 queries.
    #[arg(long = "type", value_name = "TYPE", default_value = "f32", value_parser = dtype)]
    dtype: DType,
    /// A number of threads; repeatable [default: 1 and all cores].
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Vec<usize>,
    /// A level by its name; repeatable [default: that of HEADWISE_LEVEL, or the best of this processor].
    #[arg(long, value_name = "NAME")]
    level: Vec<Level>,
    /// Print where the time of a call goes, in percent, instead of how long it takes.
    #[arg(long)]
    profile: bool,
    /// Rounds; calls that take long run in fewer.
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = rounds)]
    rounds: usize,
}

fn dtype(name: &str) -> Result<DType, String> {
    let types = [DType::F32, DType::F16, DType::Bf16, DType::I8];
    types
        .into_iter()
        .find(|dtype| dtype.name() == name)
        .ok_or("the types are f32, f16, bf16 and i8".to_string())
}

pub(crate) fn threads(text: &str) -> Result<usize, String> {
    up_to(crate::options::MAX_THREADS, text)
}

fn rounds(text: &str) -> Result<usize, String> {
    up_to(1000, text)
}

fn up_to(max: usize, text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|n| (1..=max).contains(n));
    number.ok_or_else(|| format!("must be 1 to {max}"))
}

/// Who computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
enum By {
    Headwise,
    Gemm,
}

/// One thing to time.
struct Job {
    /// Index into the cases.
    case: usize,
    /// Index into [`Machine::levels`].
    level: usize,
    /// Index into [`Machine::threads`].
    threads: usize,
    by: By,
    /// Seconds of a call, as first seen.
    estimate: f64,
    /// Rounds that it takes part in.
    rounds: usize,
    samples: Vec<Sample>,
    extra_bytes: usize,
    max_error: f64,
}

/// One round of a job.
struct Sample {
    /// Of a call, the median.
    seconds: f64,
    /// GFLOP/s of multiply-adds alone, the mean of just before and just after the calls.
    peak: f64,
    /// GB/s of reading K and V alone, call by call in turn; NaN for shapes with many queries.
    read: f64,
}

/// Seconds of a round that one job may take, on average over the rounds.
const SHARE: f64 = 1.0 / 6.0;

/// Seconds over which short calls are repeated in a round.
const REPEAT: f64 = 0.01;

/// Seconds of a call that warms itself up: shorter ones run once before they are timed.
const LONG: f64 = 0.1;

impl Args {
    /// Runs the command.
    ///
    /// # Errors
    /// Status 1 for a wrong result, 2 for what this machine or version cannot do.
    pub fn execute(&self) -> Result<(), Failure> {
        let levels = match &self.level[..] {
            [] => vec![Attention::default_level().map_err(Failure::usage)?],
            asked => or_default(asked, &[]),
        };
        if let Some(&level) = levels.iter().find(|level| !level.is_available()) {
            return Err(Failure::usage(headwise::Error::LevelUnavailable { level }));
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = or_default(&self.threads, &[1, cores]);
        let mut machine = Machine::new(&levels, &threads, self.dtype)?;
        let shapes = or_default(&self.shape, &SHAPES);
        let mut cases = cases(&shapes, self.dtype)?;
        if self.profile {
            let rows = profile::profile(&mut cases, &machine, levels.len(), self.dtype)?;
            let text = match self.json {
                true => profile::json(&rows).map_err(Failure::usage)?,
                false => profile::table(&rows),
            };
            return report::print(&text);
        }

        let mut jobs = jobs(cases.len(), levels.len(), &machine, self.dtype);
        let rounds = self.rounds;
        let baseline = Baseline::default();
        let progress = progress(jobs.len() + rounds);
        for job in &mut jobs {
            progress.set_message(cases[job.case].shape().name);
            job.prepare(&mut *cases[job.case], &machine, &baseline, rounds)?;
            progress.inc(1);
        }
        for round in 0..rounds {
            progress.set_message(format!("round {}", round + 1));
            machine.measure()?;
            for job in jobs.iter_mut().filter(|job| job.takes_part(round, rounds)) {
                job.time(&mut *cases[job.case], &machine, &baseline)?;
            }
            progress.inc(1);
        }
        progress.finish_and_clear();
        let rows: Vec<report::Row> =
            jobs.iter().map(|job| job.report(&*cases[job.case], &machine, self.dtype)).collect();
        let text = match self.json {
            true => report::json(&machine, cores, &rows).map_err(Failure::usage)?,
            false => report::table(&machine, cores, &rows),
        };
        report::print(&text)
    }
}

/// What was asked for, each once, or else the default.
fn or_default<T: Copy + PartialEq>(asked: &[T], default: &[T]) -> Vec<T> {
    let mut all: Vec<T> = Vec::new();
    for &x in if asked.is_empty() { default } else { asked } {
        if !all.contains(&x) {
            all.push(x);
        }
    }
    all
}

/// The library at every level asked for (they are the machine's first), the baseline, which is f32, at the
/// best one: gemm chooses its instructions itself.
fn jobs(cases: usize, levels: usize, machine: &Machine, dtype: DType) -> Vec<Job> {
    let best = machine.levels.iter().position(|&level| level == Level::detect()).unwrap_or(0);
    let mut jobs = Vec::new();
    for case in 0..cases {
        for threads in 0..machine.threads.len() {
            let library = (0..levels).map(|level| (level, By::Headwise));
            let baseline = (dtype == DType::F32).then_some((best, By::Gemm));
            for (level, by) in library.chain(baseline) {
                let (estimate, samples, max_error) = (0.0, Vec::new(), 0.0);
                jobs.push(Job {
                    case,
                    level,
                    threads,
                    by,
                    estimate,
                    rounds: 0,
                    samples,
                    extra_bytes: 0,
                    max_error,
                });
            }
        }
    }
    jobs
}

/// The median of the seconds that `call` returns, over as many calls as take [`REPEAT`] together: a call that
/// was interrupted does not count, as the peak is too short to be interrupted often.
fn repeated(mut call: impl FnMut() -> Result<f64, Failure>) -> Result<f64, Failure> {
    let mut seconds = Vec::new();
    while seconds.iter().sum::<f64>() < REPEAT {
        seconds.push(call()?);
    }
    Ok(machine::median(&seconds))
}

/// Drawn on a terminal only.
fn progress(steps: usize) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{bar:40} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(steps as u64).with_style(style)
}

impl Job {
    /// One call.
    fn run(&self, case: &mut dyn Case, level: Level, baseline: &Baseline) -> Result<(), Failure> {
        match self.by {
            By::Headwise => case.attention(level, None).map_err(Failure::usage),
            By::Gemm => {
                let shape = case.shape();
                case.parts().map_or(Ok(()), |(inputs, out)| baseline.run(&shape, level, inputs, out))
            }
        }
    }

    /// Runs on fresh threads to see what memory it takes; checks the result; fixes the number of rounds.
    fn prepare(
        &mut self,
        case: &mut dyn Case,
        machine: &Machine,
        baseline: &Baseline,
        rounds: usize,
    ) -> Result<(), Failure> {
        let (level, threads) = (machine.levels[self.level], machine.threads[self.threads].count);
        case.clear();
        let first = on_fresh_threads(threads, || {
            PeakAlloc.reset_peak_usage();
            let (before, start) = (PeakAlloc.current_usage(), Instant::now());
            self.run(case, level, baseline)?;
            Ok((start.elapsed().as_secs_f64(), PeakAlloc.peak_usage().saturating_sub(before)))
        })?;
        (self.estimate, self.extra_bytes) = first?;
        if self.by == By::Gemm {
            self.extra_bytes += Baseline::score_bytes(&case.shape(), threads);
        }
        case.check(&format!("{:?}, {level}, {threads} threads", self.by))?;
        self.max_error = case.max_error();
        let least = if self.by == By::Headwise { 3 } else { 1 };
        let affordable = (SHARE * rounds as f64 / self.estimate.max(REPEAT)) as usize;
        self.rounds = affordable.max(least).min(rounds);
        Ok(())
    }

    /// Whether round `round` of `rounds` is one of the job's, which lie evenly among them.
    fn takes_part(&self, round: usize, rounds: usize) -> bool {
        round * self.rounds / rounds != (round + 1) * self.rounds / rounds
    }

    fn time(&mut self, case: &mut dyn Case, machine: &Machine, baseline: &Baseline) -> Result<(), Failure> {
        let (level, threads) = (machine.levels[self.level], &machine.threads[self.threads]);
        let sample = threads.pool.install(|| {
            if self.estimate < LONG {
                self.run(case, level, baseline)?; // caches and page tables as in steady use
            }
            let few = case.shape().is_reading();
            let before = machine.burst(self.level, self.threads, few)?;
            // In turn: what the caches hold is the same for either.
            let mut reads = [const { Vec::new() }; 2];
            let seconds = repeated(|| {
                let start = Instant::now();
                self.run(case, level, baseline)?;
                let seconds = start.elapsed().as_secs_f64();
                if few {
                    for (reads, ahead) in reads.iter_mut().zip([false, true]) {
                        reads.push(threads.read(case.kv(), ahead)?);
                    }
                }
                Ok(seconds)
            })?;
            let peak = (before + machine.burst(self.level, self.threads, few)?) / 2.0;
            let bytes = case.kv().map(<[u8]>::len).iter().sum::<usize>() as f64;
            let [one, other] = reads.map(|reads| machine::median(&reads));
            let read = bytes / one.min(other) / 1e9;
            Ok(Sample { seconds, peak, read })
        })?;
        self.samples.push(sample);
        Ok(())
    }

    fn report(&self, case: &dyn Case, machine: &Machine, dtype: DType) -> report::Row {
        let median = |f: &dyn Fn(&Sample) -> f64| {
            report::digits(machine::median(&self.samples.iter().map(f).collect::<Vec<_>>()))
        };
        let (gflop, bytes) =
            (case.shape().flop() / 1e9, case.kv().map(<[u8]>::len).iter().sum::<usize>() as f64);
        let bytes = case.shape().is_reading().then_some(bytes);
        let seconds = self.samples.iter().map(|sample| sample.seconds);
        report::Row {
            shape: case.shape().name,
            element: dtype.name(),
            level: machine.levels[self.level].name(),
            threads: machine.threads[self.threads].count,
            by: self.by,
            median_ms: median(&|sample| 1e3 * sample.seconds),
            min_ms: report::digits(1e3 * seconds.fold(f64::INFINITY, f64::min)),
            rounds: self.samples.len(),
            gflops: median(&|sample| gflop / sample.seconds),
            gbps: bytes.map(|bytes| median(&|sample| bytes / 1e9 / sample.seconds)),
            peak_percent: median(&|sample| 100.0 * gflop / sample.seconds / sample.peak),
            read_percent: bytes.map(|bytes| median(&|sample| bytes / 1e7 / sample.seconds / sample.read)),
            extra_bytes: self.extra_bytes,
            max_error: report::digits(self.max_error),
        }
    }
}
