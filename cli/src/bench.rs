//! `headwise bench`: this machine's peaks and the named shapes, measured in the same rounds.
//!
//! ```text
//! every shape, level, number of threads, implementation: one call on fresh threads; memory, check, estimate
//! each round: peaks, then all of them once                so that load on the machine hits all alike
//! report: medians over the rounds
//! ```
//!
//! Calls that take long run in some of the rounds only. Nothing is timed whose result is wrong.

mod machine;
mod report;
mod shapes;

use std::time::Instant;

use headwise::Level;
use indicatif::{ProgressBar, ProgressStyle};
use peak_alloc::PeakAlloc;

use crate::Failure;
use crate::baseline::Baseline;
use machine::{Machine, on_fresh_threads};
use shapes::{Case, SHAPES};

pub(crate) use shapes::Shape;

/// Measures the named shapes against this machine's peak and against gemm + softmax + gemm.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON, one object a line, instead of a table.
    #[arg(long)]
    json: bool,
    /// A shape by its name; repeatable [default: all].
    #[arg(long, value_name = "NAME", value_parser = Shape::parse)]
    shape: Vec<Shape>,
    /// The element type of the inputs.
    #[arg(long = "type", value_name = "TYPE", default_value = "f32", value_parser = element_type)]
    element: String,
    /// A number of threads; repeatable [default: 1 and all cores].
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Vec<usize>,
    /// A level by its name; repeatable [default: the best of this processor].
    #[arg(long, value_name = "NAME")]
    level: Vec<Level>,
    /// Rounds; calls that take long run in fewer.
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = rounds)]
    rounds: usize,
}

fn element_type(name: &str) -> Result<String, String> {
    match name {
        "f32" => Ok(name.to_string()),
        "f16" | "bf16" => Err(format!("{name} is not supported yet")),
        _ => Err("the types are f32, f16 and bf16".to_string()),
    }
}

fn threads(text: &str) -> Result<usize, String> {
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
    /// Seconds of a call, in every round.
    seconds: Vec<f64>,
    extra_bytes: usize,
    max_error: f64,
}

/// The largest error that a result may have (f32, inputs in [-1, 1]).
const MAX_ERROR: f64 = 2e-6;

/// Seconds of a round that one job may take, on average over the rounds.
const SHARE: f64 = 1.0 / 6.0;

/// Seconds over which short calls are repeated in a round.
const REPEAT: f64 = 0.01;

impl Args {
    /// Runs the command.
    ///
    /// # Errors
    /// Status 1 for a wrong result, 2 for what this machine or version cannot do.
    pub fn execute(&self) -> Result<(), Failure> {
        let levels = or_default(&self.level, &[Level::detect()]);
        if let Some(&level) = levels.iter().find(|level| !level.is_available()) {
            return Err(Failure::usage(headwise::Error::LevelUnavailable { level }));
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = or_default(&self.threads, &[1, cores]);
        let mut machine = Machine::new(&levels, &threads)?;
        let shapes = or_default(&self.shape, &SHAPES);
        let mut cases: Vec<Case> = shapes.into_iter().map(Case::new).collect::<Result<_, _>>()?;

        let mut jobs = jobs(cases.len(), levels.len(), &machine);
        let rounds = self.rounds;
        let baseline = Baseline::default();
        let progress = progress(jobs.len() + rounds);
        for job in &mut jobs {
            progress.set_message(cases[job.case].shape.name);
            job.prepare(&mut cases[job.case], &machine, rounds)?;
            progress.inc(1);
        }
        for round in 0..rounds {
            progress.set_message(format!("round {}", round + 1));
            machine.measure()?;
            for job in jobs.iter_mut().filter(|job| job.takes_part(round, rounds)) {
                job.time(&mut cases[job.case], &machine, &baseline)?;
            }
            progress.inc(1);
        }
        progress.finish_and_clear();
        let rows: Vec<report::Row> = jobs.iter().map(|job| job.report(&cases[job.case], &machine)).collect();
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

/// The library at every level asked for (they are the machine's first), the baseline at the best one: gemm
/// chooses its instructions itself.
fn jobs(cases: usize, levels: usize, machine: &Machine) -> Vec<Job> {
    let best = machine.levels.iter().position(|&level| level == Level::detect()).unwrap_or(0);
    let mut jobs = Vec::new();
    for case in 0..cases {
        for threads in 0..machine.threads.len() {
            let library = (0..levels).map(|level| (level, By::Headwise));
            for (level, by) in library.chain([(best, By::Gemm)]) {
                let (estimate, seconds, max_error) = (0.0, Vec::new(), 0.0);
                jobs.push(Job {
                    case,
                    level,
                    threads,
                    by,
                    estimate,
                    rounds: 0,
                    seconds,
                    extra_bytes: 0,
                    max_error,
                });
            }
        }
    }
    jobs
}

/// Drawn on a terminal only.
fn progress(steps: usize) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{bar:40} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(steps as u64).with_style(style)
}

impl Job {
    /// One call.
    fn run(&self, case: &mut Case, level: Level, baseline: &Baseline) -> Result<(), headwise::Error> {
        match self.by {
            By::Headwise => case.attention(level),
            By::Gemm => {
                baseline.run(&case.shape, level, [&case.q, &case.k, &case.v], &mut case.out);
                Ok(())
            }
        }
    }

    /// Runs on fresh threads to see what memory it takes; checks the result; fixes the number of rounds.
    fn prepare(&mut self, case: &mut Case, machine: &Machine, rounds: usize) -> Result<(), Failure> {
        let (level, threads) = (machine.levels[self.level], machine.threads[self.threads].count);
        case.out.fill(f32::NAN);
        let baseline = Baseline::default();
        let first = on_fresh_threads(threads, || {
            PeakAlloc.reset_peak_usage();
            let (before, start) = (PeakAlloc.current_usage(), Instant::now());
            self.run(case, level, &baseline)?;
            Ok((start.elapsed().as_secs_f64(), PeakAlloc.peak_usage().saturating_sub(before)))
        })?;
        (self.estimate, self.extra_bytes) = first.map_err(|error: headwise::Error| Failure::usage(error))?;
        self.max_error = case.max_error();
        if self.max_error > MAX_ERROR {
            let (name, by, error) = (case.shape.name, self.by, self.max_error);
            return Err(Failure::wrong(format!(
                "{name} by {by:?}, {level}, {threads} threads: the error {error:.2e} exceeds {MAX_ERROR:.0e}"
            )));
        }
        let least = if self.by == By::Headwise { 3 } else { 1 };
        let affordable = (SHARE * rounds as f64 / self.estimate.max(REPEAT)) as usize;
        self.rounds = affordable.max(least).min(rounds);
        Ok(())
    }

    /// Whether round `round` of `rounds` is one of the job's, which lie evenly among them.
    fn takes_part(&self, round: usize, rounds: usize) -> bool {
        round * self.rounds / rounds != (round + 1) * self.rounds / rounds
    }

    fn time(&mut self, case: &mut Case, machine: &Machine, baseline: &Baseline) -> Result<(), Failure> {
        let (level, threads) = (machine.levels[self.level], &machine.threads[self.threads]);
        let calls = (REPEAT / self.estimate.max(1e-6)).ceil() as usize;
        let seconds = threads.pool.install(|| {
            if calls > 1 {
                self.run(case, level, baseline)?; // brings the inputs back into the caches
            }
            let start = Instant::now();
            for _ in 0..calls {
                self.run(case, level, baseline)?;
            }
            Ok(start.elapsed().as_secs_f64() / calls as f64)
        });
        self.seconds.push(seconds.map_err(|error: headwise::Error| Failure::usage(error))?);
        Ok(())
    }

    fn report(&self, case: &Case, machine: &Machine) -> report::Row {
        let threads = &machine.threads[self.threads];
        let median = machine::median(&self.seconds);
        let gflops = case.shape.flop() / median / 1e9;
        let percent = |part: f64, whole: f64| report::digits(100.0 * part / whole);
        report::Row {
            shape: case.shape.name,
            element: "f32",
            level: machine.levels[self.level].name(),
            threads: threads.count,
            by: self.by,
            median_ms: report::digits(1e3 * median),
            min_ms: report::digits(1e3 * self.seconds.iter().copied().fold(f64::INFINITY, f64::min)),
            rounds: self.seconds.len(),
            gflops: report::digits(gflops),
            peak_percent: percent(gflops, threads.peak(self.level)),
            read_percent: case.shape.bytes_to_read().map(|n| percent(n / median / 1e9, threads.read_rate())),
            extra_bytes: self.extra_bytes,
            max_error: report::digits(self.max_error),
        }
    }
}
