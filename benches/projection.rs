//! Projections `X [rows, d] * W [d, d]`: the share of the multiply-add peak, beside the `gemm` crate with W
//! transposed once (`Yt = W Xt`, its best way: it packs W at every call); and for one row the share of the
//! rate at which the weights can be read. For weights in half precision, how many times faster, and the share
//! of the rate at which half of the bytes can be read. Everything is timed in turns, in one run; medians.
//!
//! `cargo bench --bench projection -- 2048` takes widths, then rows after a comma: `2048,1,8`.
#![allow(unsafe_code, reason = "gemm takes pointers")]

use std::hint::black_box;
use std::time::Instant;

use headwise::layer::{Linear, Then, WeightLayout, Weights};
use headwise::{Level, Run, Threads};
use headwise_kernels::{fma, read};
use rayon::prelude::*;

const ROWS: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 512, 2048];

fn main() {
    let level = Level::detect();
    println!("{:>6} {:>6} {:>7} | {:>9} {:>6} {:>6}", "width", "rows", "threads", "us", "ours", "gemm");
    let arguments: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let arguments = if arguments.is_empty() { vec!["384".into(), "2048".into()] } else { arguments };
    for argument in arguments {
        let numbers: Vec<usize> = argument.split(',').filter_map(|n| n.parse().ok()).collect();
        let Some((&d, rows)) = numbers.split_first() else { continue };
        let rows = if rows.is_empty() { &ROWS[..] } else { rows };
        for &rows in rows {
            for threads in [1, 2] {
                measure(level, d, rows, threads);
            }
        }
    }
}

fn measure(level: Level, d: usize, rows: usize, threads: usize) {
    let wave = |n: usize, f: f32| (0..n).map(|i| (i as f32 * f).sin()).collect::<Vec<f32>>();
    let (x, w) = (wave(rows * d, 0.37), wave(d * d, 0.11));
    let (mut y, mut z) = (vec![0.0; rows * d], vec![0.0; rows * d]);
    let linear = Linear::new(&w, WeightLayout::InOut, [d, d], None).expect("sizes that fit");
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
    let threads_of = if threads == 1 { Threads::Calling } else { Threads::Pool };
    let run = Run { level: Some(level), threads: threads_of };
    let work = 2.0 * (rows * d * d) as f64;
    let rounds = (4e9 / (work + 20.0 * (d * d) as f64)).clamp(5.0, 60.0) as usize;
    let half: Vec<half::f16> = w.iter().map(|&x| half::f16::from_f32(x)).collect();
    let half = Weights::pack(&half, WeightLayout::InOut, d, d).and_then(|w| Linear::with_weights(w, None));
    let brain: Vec<half::bf16> = w.iter().map(|&x| half::bf16::from_f32(x)).collect();
    let brain = Weights::pack(&brain, WeightLayout::InOut, d, d).and_then(|w| Linear::with_weights(w, None));
    let (half, brain) = (half.expect("sizes that fit"), brain.expect("sizes that fit"));
    let mut spare = vec![0.0; rows * d];
    let mut times: [Vec<f64>; 6] = Default::default();
    let mut flops = 0.0;
    pool.install(|| {
        for round in 0..rounds + 2 {
            let ours = time(|| linear.forward(&x, Then::Store, run, &mut y).expect("sizes that fit"));
            let gemm = time(|| by_gemm(&w, &x, &mut z, d, threads));
            let peak = time(|| flops = fma(level, 20_000).expect("a level of this machine"));
            let reading = time(|| {
                let part = (d * d).div_ceil(4 * threads).next_multiple_of(1024);
                w.par_chunks(part).with_max_len(1).for_each(|w| {
                    black_box(read(level, w, true).expect("a level of this machine"));
                });
            });
            let [half, brain] = [&half, &brain].map(|linear| {
                time(|| linear.forward(&x, Then::Store, run, &mut spare).expect("sizes that fit"))
            });
            if round >= 2 {
                times
                    .iter_mut()
                    .zip([ours, gemm, peak, reading, half, brain])
                    .for_each(|(all, t)| all.push(t));
            }
        }
    });
    let worst = y.iter().zip(&z).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-3, "{worst}");
    let [ours, gemm, peak, reading, half, brain] = times.map(|mut all| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    });
    let percent = |t: f64| 100.0 * work / t / (flops / peak) / threads as f64;
    println!(
        "{d:>6} {rows:>6} {threads:>7} | {:>9.1} {:>5.1}% {:>5.1}%  of read {:>5.1}%  \
         f16 {:>4.2}x {:>5.1}%  bf16 {:>4.2}x {:>5.1}%",
        ours * 1e6,
        percent(ours),
        percent(gemm),
        100.0 * reading / ours,
        ours / half,
        50.0 * reading / half,
        ours / brain,
        50.0 * reading / brain
    );
}

fn time(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

/// `Yt [d, rows] = Wt [d, d] * Xt [d, rows]`.
fn by_gemm(w: &[f32], x: &[f32], y: &mut [f32], d: usize, threads: usize) {
    let rows = x.len() / d;
    assert!(w.len() == d * d && x.len() == rows * d && y.len() == rows * d);
    let parallelism = if threads == 1 { gemm::Parallelism::None } else { gemm::Parallelism::Rayon(threads) };
    let d_stride = d as isize;
    // SAFETY: the strides reach exactly the elements of the slices, whose lengths are checked above.
    unsafe {
        gemm::gemm(
            d,
            rows,
            d,
            y.as_mut_ptr(),
            d_stride,
            1,
            false,
            w.as_ptr(),
            d_stride,
            1,
            x.as_ptr(),
            d_stride,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}
