//! What the bench prints: a table for people, or JSON, one object a line, for programs.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;

use headwise::Level;

use super::By;
use super::machine::{Machine, Threads, processor};
use crate::Failure;

/// One line: a shape, type, level, number of threads and implementation.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Row {
    pub shape: &'static str,
    #[serde(rename = "type")]
    pub element: &'static str,
    pub level: &'static str,
    pub threads: usize,
    pub by: By,
    pub median_ms: f64,
    pub min_ms: f64,
    pub rounds: usize,
    pub gflops: f64,
    /// K and V by the time, for shapes with few queries; in the table only.
    #[serde(skip)]
    pub gbps: Option<f64>,
    pub peak_percent: f64,
    pub read_percent: Option<f64>,
    pub extra_bytes: usize,
    pub max_error: f64,
}

/// Rounded to four digits.
pub(crate) fn digits(x: f64) -> f64 {
    format!("{x:.3e}").parse().unwrap_or(x)
}

/// Rates by number of threads.
type Rates = BTreeMap<usize, f64>;

/// The first line.
#[derive(serde::Serialize)]
struct Summary {
    processor: String,
    cores: usize,
    levels: Vec<&'static str>,
    /// Of the best level.
    fma_gflops: Rates,
    level_fma_gflops: BTreeMap<&'static str, Rates>,
    /// Of dot products. Not of tiles, which could do ten times what the softmax between the products lets any
    /// kernel reach.
    bf16_gflops: Option<Rates>,
    read_gbps: Rates,
}

/// The machine's line, then the rows.
pub(crate) fn json(machine: &Machine, cores: usize, rows: &[Row]) -> Result<String, serde_json::Error> {
    let by_threads = |rate: &dyn Fn(&Threads) -> f64| -> Rates {
        machine.threads.iter().map(|threads| (threads.count, digits(rate(threads)))).collect()
    };
    let levels = machine.levels.iter().enumerate();
    let peaks = |at: usize| by_threads(&|threads| threads.peak(at));
    let peaks: BTreeMap<_, _> = levels.map(|(at, level)| (level.name(), peaks(at))).collect();
    let dots = machine.threads.iter().map(|threads| Some((threads.count, digits(threads.dots()?)))).collect();
    let summary = Summary {
        processor: processor(),
        cores,
        levels: Level::available().map(Level::name).collect(),
        fma_gflops: peaks[Level::detect().name()].clone(),
        level_fma_gflops: peaks,
        bf16_gflops: dots,
        read_gbps: by_threads(&Threads::read_rate),
    };
    let mut text = serde_json::to_string(&BTreeMap::from([("machine", summary)]))? + "\n";
    for row in rows {
        text += &(serde_json::to_string(row)? + "\n");
    }
    Ok(text)
}

/// The machine, then a line for each of the library's rows, with the baseline beside it.
pub(crate) fn table(machine: &Machine, cores: usize, rows: &[Row]) -> String {
    let mut text = format!("{}, {cores} cores\n", processor());
    for threads in &machine.threads {
        let peaks = machine.levels.iter().enumerate();
        let peaks: Vec<_> = peaks.map(|(at, level)| format!("{level} {:.1}", threads.peak(at))).collect();
        let (peaks, reads) = (peaks.join(", "), threads.read_rate());
        let dots = threads.dots().map_or(String::new(), |rate| format!(", dots of bf16 {rate:.1}"));
        _ = writeln!(text, "threads {}: peak GFLOP/s {peaks}{dots}; read {reads:.1} GB/s", threads.count);
    }
    _ = writeln!(
        text,
        "\n{:13}{:5}{:8}{:>7}{:>10}{:>8}{:>7}{:>6}{:>7}{:>10}{:>9}{:>12}{:>8}",
        "shape",
        "type",
        "level",
        "threads",
        "ms",
        "GFLOP/s",
        "% peak",
        "GB/s",
        "% read",
        "gemm ms",
        "speed-up",
        "extra bytes",
        "error",
    );
    for row in rows.iter().filter(|row| row.by == By::Headwise) {
        let same =
            |other: &&Row| other.by == By::Gemm && (other.shape, other.threads) == (row.shape, row.threads);
        let gemm = rows.iter().find(same).map(|gemm| gemm.median_ms);
        let times = gemm.map_or("-".to_string(), |ms| format!("{:.2}", ms / row.median_ms));
        let gemm = gemm.map_or("-".to_string(), |ms| format!("{ms:.3}"));
        let or_dash = |x: Option<f64>| x.map_or("-".to_string(), |x| format!("{x:.1}"));
        let (rate, read) = (or_dash(row.gbps), or_dash(row.read_percent));
        _ = writeln!(
            text,
            "{:13}{:5}{:8}{:>7}{:>10.3}{:>8.1}{:>7.1}{rate:>6}{read:>7}{gemm:>10}{times:>9}{:>12}{:>8.1e}",
            row.shape,
            row.element,
            row.level,
            row.threads,
            row.median_ms,
            row.gflops,
            row.peak_percent,
            row.extra_bytes,
            row.max_error,
        );
    }
    text
}

/// Prints it. A reader that has gone, as `head` does, is no failure.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::usage(error)),
        _ => Ok(()),
    }
}
