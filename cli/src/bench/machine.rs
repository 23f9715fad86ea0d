//! What the machine can do: multiply-add peak of every level, that of dot products of bf16, and read rate, at every
//! number of threads.
//!
//! Measured again in every round, between the shapes, so that load on the machine hits all alike; and beside
//! every job, for its percentages.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use headwise::{DType, Level};
use headwise_kernels::{dots, fma, read};
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::buffer::Buffer;
use super::repeated;
use crate::Failure;

/// One number of threads: its pool, and what was measured with it.
pub(crate) struct Threads {
    pub count: usize,
    pub pool: ThreadPool,
    /// GFLOP/s, in the order of [`Machine::levels`].
    peaks: Vec<Vec<f64>>,
    /// GFLOP/s of [`Machine::dots`].
    dots: Vec<f64>,
    /// GB/s.
    reads: Vec<f64>,
}

pub(crate) struct Machine {
    /// The levels in question, the best of this processor among them.
    pub levels: Vec<Level>,
    pub threads: Vec<Threads>,
    /// Steps of `fma` that take about [`PEAK_SECONDS`].
    steps: Vec<usize>,
    /// The level with dot products of bf16, and their steps.
    dots: Option<(Level, usize)>,
    /// Of the inputs.
    dtype: DType,
    memory: Buffer,
}

/// Long enough for the clock to settle where it stays under such work.
const PEAK_SECONDS: f64 = 0.05;

/// Beside a job: too short for the clock to leave what the job has made it.
const BURST_SECONDS: f64 = 0.0003;

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
    pub fn new(levels: &[Level], threads: &[usize], dtype: DType) -> Result<Self, Failure> {
        let mut levels = levels.to_vec();
        if !levels.contains(&Level::detect()) {
            levels.push(Level::detect());
        }
        let steps = levels.iter().map(|&level| calibrate(level, fma)).collect::<Result<_, _>>()?;
        let with_dots = Level::available().find(|&level| matches!(dots(level, 1), Ok(Some(_))));
        let dots = with_dots.map(|level| Ok((level, calibrate(level, dots)?))).transpose()?;
        let count = levels.len();
        let threads = threads.iter().map(|&threads| {
            let (peaks, dots, reads) = (vec![Vec::new(); count], Vec::new(), Vec::new());
            let pool = ThreadPoolBuilder::new().num_threads(threads).build().map_err(Failure::usage)?;
            Ok(Threads { count: threads, pool, peaks, dots, reads })
        });
        let threads = threads.collect::<Result<_, Failure>>()?;
        let memory = Buffer::new(READ_BYTES / size_of::<f32>(), |i| i as f32)?;
        Ok(Self { levels, threads, steps, dots, dtype, memory })
    }

    /// One round.
    pub fn measure(&mut self) -> Result<(), Failure> {
        for threads in &mut self.threads {
            for (at, (&level, &steps)) in self.levels.iter().zip(&self.steps).enumerate() {
                let gflops = threads.multiply_adds(level, steps)?;
                threads.peaks[at].push(gflops);
            }
            if let Some((level, steps)) = self.dots {
                let gflops = threads.dot_products(level, steps)?;
                threads.dots.push(gflops);
            }
            let gbps = threads.read_alone(bytemuck::cast_slice(&self.memory))?;
            threads.reads.push(gbps);
        }
        Ok(())
    }

    /// GFLOP/s at this moment, from [`BURST_SECONDS`] of what products of the inputs are made of, with few query
    /// rows or many; `level` and `threads` are indices.
    pub fn burst(&self, level: usize, threads: usize, few: bool) -> Result<f64, Failure> {
        let (threads, level, steps) = (&self.threads[threads], self.levels[level], self.steps[level]);
        let short = |steps: usize| (steps as f64 * BURST_SECONDS / PEAK_SECONDS) as usize + 1;
        match self.dots {
            Some((dots, steps)) if dots == level && self.dtype == DType::Bf16 && !few => {
                threads.dot_products(level, short(steps))
            }
            _ => threads.multiply_adds(level, short(steps)),
        }
    }
}

impl Threads {
    /// GFLOP/s of the level at this place in [`Machine::levels`]; the median over the rounds.
    pub fn peak(&self, level: usize) -> f64 {
        median(&self.peaks[level])
    }

    /// GFLOP/s of dot products of bf16, if there are such.
    pub fn dots(&self) -> Option<f64> {
        (!self.dots.is_empty()).then(|| median(&self.dots))
    }

    /// GB/s, the median over the rounds.
    pub fn read_rate(&self) -> f64 {
        median(&self.reads)
    }

    fn multiply_adds(&self, level: Level, steps: usize) -> Result<f64, Failure> {
        let (flop, seconds) = self.at_once(|_| fma(level, steps))?;
        Ok(flop / seconds / 1e9)
    }

    fn dot_products(&self, level: Level, steps: usize) -> Result<f64, Failure> {
        let (flop, seconds) = self.at_once(|_| Ok(dots(level, steps)?.unwrap_or(f64::NAN)))?;
        Ok(flop / seconds / 1e9)
    }

    /// GB/s of reading `data`: the faster one of the two ways to read.
    fn read_alone(&self, data: &[u8]) -> Result<f64, Failure> {
        let mut best = 0.0;
        for ahead in [false, true] {
            let seconds = repeated(|| self.read([data, &[]], ahead))?;
            best = f64::max(best, data.len() as f64 / seconds / 1e9);
        }
        Ok(best)
    }

    /// Seconds of reading both, each thread its part of each, in one way or the other.
    pub fn read(&self, data: [&[u8]; 2], ahead: bool) -> Result<f64, Failure> {
        let data: [&[f32]; 2] =
            data.map(|bytes| if bytes.is_empty() { &[] } else { bytemuck::cast_slice(bytes) });
        let (sum, seconds) = self.at_once(|thread| {
            let sums = data.iter().map(|data| {
                let part = data.len().div_ceil(self.count).max(1);
                let mine = data.chunks(part).nth(thread).unwrap_or_default();
                read(Level::detect(), mine, ahead).map(f64::from)
            });
            sums.sum()
        })?;
        std::hint::black_box(sum);
        Ok(seconds)
    }

    /// What `work` returns, summed over the threads, and the seconds from the first one's start to the last
    /// one's end. They wait for each other first: to wake up may take as long as the work.
    fn at_once(
        &self,
        work: impl Fn(usize) -> Result<f64, headwise::Error> + Sync,
    ) -> Result<(f64, f64), Failure> {
        let missing = AtomicUsize::new(self.count);
        let parts = self.pool.broadcast(|thread| {
            missing.fetch_sub(1, Ordering::Relaxed);
            while missing.load(Ordering::Relaxed) > 0 {
                std::thread::yield_now();
            }
            let start = Instant::now();
            Ok((work(thread.index())?, start, Instant::now()))
        });
        let parts: Vec<_> =
            parts.into_iter().collect::<Result<_, headwise::Error>>().map_err(Failure::usage)?;
        let first = parts.iter().map(|part| part.1).min();
        let last = parts.iter().map(|part| part.2).max();
        let seconds = last.zip(first).map_or(0.0, |(last, first)| (last - first).as_secs_f64());
        Ok((parts.iter().map(|part| part.0).sum(), seconds))
    }
}

/// The number of steps of `work` for [`PEAK_SECONDS`].
fn calibrate<T>(
    level: Level,
    work: impl Fn(Level, usize) -> Result<T, headwise::Error>,
) -> Result<usize, Failure> {
    const STEPS: usize = 20_000;
    work(level, STEPS).map_err(Failure::usage)?; // wakes the vector units
    let start = Instant::now();
    work(level, STEPS).map_err(Failure::usage)?;
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
