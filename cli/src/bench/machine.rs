//! What the machine can do: multiply-add peak of every level and read rate, at every number of threads.
//!
//! Measured again in every round, between the shapes, so that load on the machine hits all alike.

use std::time::Instant;

use headwise::Level;
use headwise_kernels::{fma, read};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::Failure;

/// One number of threads: its pool, and what was measured with it.
pub(crate) struct Threads {
    pub count: usize,
    pub pool: ThreadPool,
    /// GFLOP/s, in the order of [`Machine::levels`].
    peaks: Vec<Vec<f64>>,
    /// GB/s.
    reads: Vec<f64>,
}

pub(crate) struct Machine {
    /// The levels in question, the best of this processor among them.
    pub levels: Vec<Level>,
    pub threads: Vec<Threads>,
    /// Steps of `fma` that take about [`PEAK_SECONDS`].
    steps: Vec<usize>,
    memory: Vec<f32>,
}

/// Long enough for the clock to settle where it stays under such work.
const PEAK_SECONDS: f64 = 0.05;

/// Beyond what the caches of most machines hold.
const READ_BYTES: usize = 256 << 20;

/// Calls `f` in a pool of new threads, all of them up before and gone, with what they held, after.
pub(crate) fn on_fresh_threads<R: Send>(count: usize, f: impl FnOnce() -> R + Send) -> Result<R, Failure> {
    let mut handles = Vec::new();
    let builder = ThreadPoolBuilder::new().num_threads(count).spawn_handler(|thread| {
        handles.push(std::thread::Builder::new().spawn(|| thread.run())?);
        Ok(())
    });
    let pool = builder.build().map_err(Failure::usage)?;
    pool.broadcast(|_| ());
    let result = pool.install(f);
    drop(pool);
    handles.into_iter().for_each(|handle| _ = handle.join()); // a panic has come out of `install` already
    Ok(result)
}

impl Machine {
    pub fn new(levels: &[Level], threads: &[usize]) -> Result<Self, Failure> {
        let mut levels = levels.to_vec();
        if !levels.contains(&Level::detect()) {
            levels.push(Level::detect());
        }
        let steps = levels.iter().map(|&level| calibrate(level)).collect::<Result<_, _>>()?;
        let count = levels.len();
        let threads = threads.iter().map(|&threads| {
            let (peaks, reads) = (vec![Vec::new(); count], Vec::new());
            let pool = ThreadPoolBuilder::new().num_threads(threads).build().map_err(Failure::usage)?;
            Ok(Threads { count: threads, pool, peaks, reads })
        });
        let threads = threads.collect::<Result<_, Failure>>()?;
        let memory = (0..READ_BYTES / size_of::<f32>()).map(|i| i as f32).collect();
        Ok(Self { levels, threads, steps, memory })
    }

    /// One round.
    pub fn measure(&mut self) -> Result<(), Failure> {
        for threads in &mut self.threads {
            for ((&level, &steps), peaks) in self.levels.iter().zip(&self.steps).zip(&mut threads.peaks) {
                let start = Instant::now();
                let flop: f64 = sum(threads.pool.broadcast(|_| fma(level, steps)))?;
                peaks.push(flop / start.elapsed().as_secs_f64() / 1e9);
            }
            let part = self.memory.len().div_ceil(threads.count);
            let start = Instant::now();
            let sums = threads.pool.broadcast(|thread| {
                let mine = self.memory.chunks(part).nth(thread.index()).unwrap_or_default();
                read(Level::detect(), mine).map(f64::from)
            });
            std::hint::black_box(sum(sums)?);
            threads.reads.push(READ_BYTES as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
        Ok(())
    }
}

impl Threads {
    /// GFLOP/s of the level at this place in [`Machine::levels`]; the median over the rounds.
    pub fn peak(&self, level: usize) -> f64 {
        median(&self.peaks[level])
    }

    /// GB/s, the median over the rounds.
    pub fn read_rate(&self) -> f64 {
        median(&self.reads)
    }
}

fn sum(parts: Vec<Result<f64, headwise::Error>>) -> Result<f64, Failure> {
    parts.into_iter().sum::<Result<f64, _>>().map_err(Failure::usage)
}

/// The number of steps for [`PEAK_SECONDS`].
fn calibrate(level: Level) -> Result<usize, Failure> {
    const STEPS: usize = 20_000;
    fma(level, STEPS).map_err(Failure::usage)?; // wakes the vector units
    let start = Instant::now();
    fma(level, STEPS).map_err(Failure::usage)?;
    Ok((STEPS as f64 * PEAK_SECONDS / start.elapsed().as_secs_f64().max(1e-6)) as usize + 1)
}

/// The middle one, or the mean of the two in the middle.
pub(crate) fn median(x: &[f64]) -> f64 {
    let mut x = x.to_vec();
    x.sort_unstable_by(f64::total_cmp);
    match x.len() {
        0 => f64::NAN,
        n => (x[(n - 1) / 2] + x[n / 2]) / 2.0,
    }
}

/// The processor's name where the system tells it, else its architecture.
pub(crate) fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("model name"));
    let name = line.and_then(|line| Some(line.split_once(':')?.1.trim().to_string()));
    name.unwrap_or_else(|| std::env::consts::ARCH.to_string())
}
