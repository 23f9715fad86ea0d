//! `headwise bench --profile`: where the time of a call goes.
//!
//! Calls that keep the time of their parts (`Workspace::timed`: the processor's counter is read after each
//! part) take turns with calls that do not, so that what the reading costs shows: `overhead`. The shares are
//! those of one call, the median one, of the time of all its threads. What is in no part is `unaccounted`: the
//! threads' start and end, waiting, finding the keys of each block, loops.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Instant;

use headwise::{DType, Part, Workspace};
use headwise_kernels::ticks;

use super::machine::{Machine, median};
use super::report::digits;
use super::shapes::Case;
use crate::Failure;

/// One line: a shape, type, level and number of threads.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Row {
    shape: &'static str,
    #[serde(rename = "type")]
    element: &'static str,
    level: &'static str,
    threads: usize,
    calls: usize,
    /// Of a call that does not keep the time.
    median_ms: f64,
    /// By how much one that does takes longer.
    overhead_percent: f64,
    /// Of the time, by the name of the part.
    percent: BTreeMap<&'static str, f64>,
}

/// Seconds that a shape may take, beyond the calls that are needed at least.
const SECONDS: f64 = 1.0;

/// Calls of each kind, at least and at most.
const CALLS: [usize; 2] = [5, 200];

const UNACCOUNTED: &str = "unaccounted";

/// Every case at every level and number of threads asked for.
///
/// # Errors
/// As for the bench itself.
pub(crate) fn profile(
    cases: &mut [Box<dyn Case>],
    machine: &Machine,
    levels: usize,
    dtype: DType,
) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    for case in cases {
        for threads in &machine.threads {
            for &level in &machine.levels[..levels] {
                let [plain, timed] = [Workspace::new(), Workspace::timed()];
                let mut call = |workspace: &Workspace| -> Result<f64, Failure> {
                    let start = Instant::now();
                    case.attention(level, Some(workspace)).map_err(Failure::usage)?;
                    Ok(start.elapsed().as_secs_f64())
                };
                let (mut untimed, mut calls) = (Vec::new(), Vec::new());
                threads.pool.install(|| -> Result<(), Failure> {
                    for workspace in [&plain, &timed] {
                        call(workspace)?; // caches and page tables as in steady use
                    }
                    let start = Instant::now();
                    while untimed.len() < CALLS[0]
                        || (untimed.len() < CALLS[1] && start.elapsed().as_secs_f64() < SECONDS)
                    {
                        untimed.push(call(&plain)?);
                        let (times, start) = (timed.times(), ticks());
                        let seconds = call(&timed)?;
                        let all = (ticks() - start) as f64 * threads.count as f64;
                        let now = timed.times();
                        let share = |part: usize| (now[part] - times[part]) as f64 / all;
                        calls.push((seconds, std::array::from_fn::<_, { Part::ALL.len() }, _>(share)));
                    }
                    Ok(())
                })?;
                case.check(&format!("{level}, {} threads", threads.count))?;
                calls.sort_by(|a, b| a.0.total_cmp(&b.0));
                let (seconds, shares) = calls[calls.len() / 2];
                let named = Part::ALL.iter().map(|part| part.name()).zip(shares);
                let rest = 1.0 - shares.iter().sum::<f64>();
                let percent = named.chain([(UNACCOUNTED, rest)]);
                rows.push(Row {
                    shape: case.shape().name,
                    element: dtype.name(),
                    level: level.name(),
                    threads: threads.count,
                    calls: calls.len(),
                    median_ms: digits(1e3 * median(&untimed)),
                    overhead_percent: digits(100.0 * (seconds / median(&untimed) - 1.0)),
                    percent: percent.map(|(name, share)| (name, digits(100.0 * share))).collect(),
                });
            }
        }
    }
    Ok(rows)
}

/// One object a line.
pub(crate) fn json(rows: &[Row]) -> Result<String, serde_json::Error> {
    rows.iter().map(|row| Ok(serde_json::to_string(row)? + "\n")).collect()
}

/// Shares in percent.
pub(crate) fn table(rows: &[Row]) -> String {
    let names: Vec<_> = Part::ALL.iter().map(|part| part.name()).chain([UNACCOUNTED]).collect();
    let mut text = format!("{:13}{:5}{:8}{:>7}{:>10}", "shape", "type", "level", "threads", "ms");
    for name in &names {
        _ = write!(text, "{name:>width$}", width = name.len().max(7) + 2);
    }
    _ = writeln!(text, "{:>10}", "overhead");
    for row in rows {
        _ = write!(
            text,
            "{:13}{:5}{:8}{:>7}{:>10.3}",
            row.shape, row.element, row.level, row.threads, row.median_ms
        );
        for name in &names {
            _ = write!(text, "{:>width$.1}", row.percent[name], width = name.len().max(7) + 2);
        }
        _ = writeln!(text, "{:>10.1}", row.overhead_percent);
    }
    text
}
