//! The shapes of `headwise bench` on candle tensors: headwise beside candle's CPU flash attention, both on
//! `(B, S, H, D)`, and beside matrix product, softmax and matrix product as candle's models write them, both
//! on `(B, H, S, D)`.
//!
//! ```sh
//! RAYON_NUM_THREADS=2 cargo bench -p headwise-candle [-- NAME...]
//! ```
//!
//! A round calls all four in turn, short calls over and over for 20 ms; medians of calls, then of rounds.
//! What takes long runs in fewer rounds. Nothing is timed that does not agree. On Linux set
//! `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`, or all of them measure page faults.

use std::time::Instant;

use candle_core::{Device, Result, Tensor, bail};
use candle_nn::attention as candle;
use candle_transformers::utils::{build_causal_mask, repeat_kv};
use headwise_candle::{AttnMask, Options, flash_attn, sdpa};

/// Name, `[B, Hq, Hk, Lq, Lk, D]`, causal.
const SHAPES: [(&str, [usize; 6], bool); 15] = [
    ("bert", [8, 12, 12, 128, 128, 64], false),
    ("classic", [1, 8, 8, 512, 512, 64], false),
    ("prefill", [1, 32, 8, 2048, 2048, 128], true),
    ("long", [1, 8, 8, 8192, 8192, 64], false),
    ("long-causal", [1, 8, 8, 8192, 8192, 64], true),
    ("vit", [4, 12, 12, 197, 197, 64], false),
    ("minilm", [16, 12, 12, 64, 64, 32], false),
    ("cross", [1, 8, 8, 77, 4096, 40], false),
    ("decode", [1, 32, 8, 1, 4096, 128], true),
    ("decode-batch", [16, 32, 8, 1, 1024, 128], true),
    ("decode-long", [1, 32, 8, 1, 65536, 128], true),
    ("decode-mha", [1, 32, 32, 1, 4096, 128], true),
    ("decode-mqa", [1, 32, 1, 1, 16384, 128], true),
    ("decode-short", [1, 32, 8, 1, 512, 128], true),
    ("speculate", [1, 32, 8, 4, 4096, 128], true),
];

const ROUNDS: usize = 9;
/// Seconds of a round over which short calls are repeated.
const REPEAT: f64 = 0.02;
/// Seconds that one way to compute one shape may take in all rounds together.
const SHARE: f64 = 8.0;
/// The largest difference between two ways.
const LIMIT: f32 = 1e-4;

fn main() -> Result<()> {
    let names: Vec<String> = std::env::args().skip(1).filter(|name| !name.starts_with('-')).collect();
    println!("{} threads; milliseconds", rayon::current_num_threads());
    println!(
        "{:13}{:>10}{:>10}{:>8}{:>12}{:>10}{:>8}",
        "shape", "headwise", "flash", "x", "headwise", "matmul", "x"
    );
    for (name, sizes, causal) in SHAPES {
        if names.is_empty() || names.iter().any(|asked| asked == name) {
            let [flash, ours_flash, matmul, ours] = measure(sizes, causal)?;
            println!(
                "{name:13}{:>10.3}{:>10.3}{:>8.2}{:>12.3}{:>10.3}{:>8.2}",
                1e3 * ours_flash,
                1e3 * flash,
                flash / ours_flash,
                1e3 * ours,
                1e3 * matmul,
                matmul / ours
            );
        }
    }
    Ok(())
}

/// Seconds of candle's flash attention, of headwise in its place, of the three steps and of headwise in
/// theirs.
fn measure([b, hq, hk, lq, lk, d]: [usize; 6], causal: bool) -> Result<[f64; 4]> {
    let uniform = |h, l| Tensor::rand(-1f32, 1., (b, l, h, d), &Device::Cpu);
    let [fq, fk, fv] = [uniform(hq, lq)?, uniform(hk, lk)?, uniform(hk, lk)?];
    let swapped = |x: &Tensor| x.transpose(1, 2)?.contiguous();
    let [q, k, v] = [swapped(&fq)?, swapped(&fk)?, swapped(&fv)?];
    let (scale, kv_offset) = (1.0 / (d as f32).sqrt(), lk - lq);
    let hidden = if causal && lq > 1 { Some(build_causal_mask(lq, kv_offset, &Device::Cpu)?) } else { None };
    let infinity = Tensor::new(f32::NEG_INFINITY, &Device::Cpu)?;

    let flash = || {
        let mask = if causal { candle::AttnMask::Causal { kv_offset } } else { candle::AttnMask::None };
        candle::flash_attn::<f32>(&fq, &fk, &fv, scale, mask, None, None)
    };
    let ours_flash = || {
        let mask = if causal { AttnMask::Causal { kv_offset } } else { AttnMask::None };
        flash_attn::<f32>(&fq, &fk, &fv, scale, mask, None, None)
    };
    let matmul = || {
        let (k, v) = (repeat_kv(k.clone(), hq / hk)?, repeat_kv(v.clone(), hq / hk)?);
        let scores = (q.matmul(&k.t()?)? * f64::from(scale))?;
        let scores = match &hidden {
            Some(hidden) => {
                let shape = scores.dims();
                hidden.broadcast_as(shape)?.where_cond(&infinity.broadcast_as(shape)?, &scores)?
            }
            None => scores,
        };
        candle_nn::ops::softmax_last_dim(&scores)?.matmul(&v)
    };
    let options = if causal { Options::new().causal() } else { Options::new() };
    let ours = || sdpa(&q, &k, &v, &options);

    let ways: [&dyn Fn() -> Result<Tensor>; 4] = [&flash, &ours_flash, &matmul, &ours];
    let expected = ours()?;
    let mut rounds = [ROUNDS; 4];
    for (way, rounds) in ways.iter().zip(&mut rounds) {
        let start = Instant::now();
        let out = way()?;
        let seconds = start.elapsed().as_secs_f64();
        let difference = (out - &expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
        if difference.is_nan() || difference > LIMIT {
            bail!("results differ by {difference}");
        }
        *rounds = ((SHARE / seconds.max(REPEAT)) as usize).clamp(1, ROUNDS);
    }
    let mut samples = [const { Vec::new() }; 4];
    for round in 0..ROUNDS {
        for ((way, samples), rounds) in ways.iter().zip(&mut samples).zip(rounds) {
            if round * rounds / ROUNDS != (round + 1) * rounds / ROUNDS {
                samples.push(sample(way)?);
            }
        }
    }
    Ok(samples.map(median))
}

/// The median over the calls of a round.
fn sample(way: &dyn Fn() -> Result<Tensor>) -> Result<f64> {
    let mut seconds = Vec::new();
    while seconds.iter().sum::<f64>() < REPEAT {
        let start = Instant::now();
        let out = way()?;
        seconds.push(start.elapsed().as_secs_f64());
        drop(out);
    }
    Ok(median(seconds))
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
