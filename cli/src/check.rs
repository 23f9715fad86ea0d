//! `headwise check`: random cases, each at every level, held against the reference and against each other,
//! and computed again on several threads, which must not change a bit.
//!
//! A case is its seed: what a failure prints replays it on any machine that has the level.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant, SystemTime};

use headwise::Level;
use indicatif::{ProgressBar, ProgressStyle};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::Failure;
use crate::case::Case;

/// Checks every level of this processor against the f64 reference on random cases.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// For how long [default: 10, or with --cases until they are through].
    #[arg(long, value_name = "N")]
    seconds: Option<u64>,
    /// The seed of the first case; each case after it has the next one [default: out of the clock].
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// How many cases, at most.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    cases: Option<u64>,
    /// A level by its name; repeatable [default: all of this processor].
    #[arg(long, value_name = "NAME")]
    level: Vec<Level>,
}

/// Numbers of threads that must give the same bits.
const THREADS: [usize; 3] = [1, 2, 5];

impl Args {
    /// Runs the command.
    ///
    /// # Errors
    /// Status 1 for a wrong result, 2 for a level that this processor does not have.
    pub fn execute(&self) -> Result<(), Failure> {
        if let Some(&level) = self.level.iter().find(|level| !level.is_available()) {
            return Err(Failure::usage(headwise::Error::LevelUnavailable { level }));
        }
        let levels = if self.level.is_empty() { Level::available().collect() } else { self.level.clone() };
        let pool = |threads| ThreadPoolBuilder::new().num_threads(threads).build();
        let pools: Vec<_> =
            THREADS.into_iter().map(pool).collect::<Result<_, _>>().map_err(Failure::usage)?;
        let seed = self.seed.unwrap_or_else(from_clock);
        if self.seed.is_none() {
            writeln!(std::io::stderr(), "seed {seed}").map_err(Failure::usage)?; // should the process die
        }
        let start = Instant::now();
        let cases = self.each(seed, |seed| check(seed, &levels, &pools))?;
        let names: Vec<&str> = levels.iter().map(|level| level.name()).collect();
        let (names, seconds) = (names.join(", "), start.elapsed().as_secs_f64());
        let line = format!("{cases} cases from seed {seed} agree at {names} and on {THREADS:?} threads");
        writeln!(std::io::stdout(), "{line}: {seconds:.1} s").map_err(Failure::usage)
    }

    /// Calls `check` with one seed after the other until it fails or time or cases are through, and says how
    /// many there were.
    fn each(&self, first: u64, check: impl Fn(u64) -> Result<(), String>) -> Result<u64, Failure> {
        let seconds = self.seconds.unwrap_or(if self.cases.is_some() { u64::MAX } else { 10 });
        let limit = Duration::from_secs(seconds);
        let cases = self.cases.unwrap_or(u64::MAX);
        let progress = progress(self.cases.unwrap_or(seconds.saturating_mul(1000)));
        let (start, mut done) = (Instant::now(), 0);
        while done < cases && start.elapsed() < limit {
            let seed = first.wrapping_add(done);
            let result = catch_unwind(AssertUnwindSafe(|| check(seed)));
            if let Err(what) = result.unwrap_or_else(|_| Err("panic".into())) {
                progress.finish_and_clear();
                let replay = format!("headwise check --seed {seed} --cases 1");
                return Err(Failure::wrong(format!("{what}; replay with: {replay}")));
            }
            done += 1;
            progress.set_position(self.cases.map_or(start.elapsed().as_millis() as u64, |_| done));
            progress.set_message(format!("{done} cases"));
        }
        progress.finish_and_clear();
        Ok(done)
    }
}

/// The case of a seed: right at every level, the same on any number of threads.
fn check(seed: u64, levels: &[Level], pools: &[ThreadPool]) -> Result<(), String> {
    let case = Case::from_seed(seed);
    case.check(levels)?;
    for &level in levels {
        let run = || case.run(level).map_err(|error| format!("{level}: {error}"));
        let mut first = None;
        for pool in pools {
            let (out, lse) = pool.install(run)?;
            let bits: Vec<u32> = out.iter().chain(&lse).map(|x| x.to_bits()).collect();
            let first = first.get_or_insert_with(|| bits.clone());
            if let Some(at) = (0..bits.len()).find(|&at| bits[at] != first[at]) {
                let (one, other) = (f32::from_bits(first[at]), f32::from_bits(bits[at]));
                let (what, at) = if at < out.len() { ("out", at) } else { ("lse", at - out.len()) };
                let threads = pool.current_num_threads();
                return Err(format!(
                    "{level}: {what}[{at}] is {one:e} on one thread, {other:e} on {threads}"
                ));
            }
        }
    }
    Ok(())
}

/// A seed that differs from run to run: microseconds.
fn from_clock() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64)
}

/// Drawn on a terminal only.
fn progress(steps: u64) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{bar:40} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(steps).with_style(style)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_says_how_to_replay_it() {
        let args = Args { seconds: None, seed: None, cases: Some(9), level: Vec::new() };
        let wrong = |seed| if seed == 7 { Err("out[0] is 1, reference 2".to_string()) } else { Ok(()) };
        let failure = args.each(5, wrong).unwrap_err();
        let line = "out[0] is 1, reference 2; replay with: headwise check --seed 7 --cases 1";
        assert_eq!((failure.status, failure.line.as_str()), (1, line));
        let failure = args.each(5, |seed| if seed == 6 { panic!("on purpose") } else { Ok(()) }).unwrap_err();
        assert_eq!(failure.line, "panic; replay with: headwise check --seed 6 --cases 1");
        assert_eq!(args.each(8, wrong).unwrap(), 9);
    }

    #[test]
    fn time_ends_it_too() {
        let args = Args { seconds: Some(0), seed: None, cases: None, level: Vec::new() };
        assert_eq!(args.each(0, |_| Ok(())).unwrap(), 0);
    }
}
