//! The layer against the same layer in f64, against itself said in other ways, against published cases, and
//! against faults that users of other layers have met.

mod cached;
mod differential;
mod faults;
mod linear;
mod prune;
mod rotary;
mod save;
mod torch;

use headwise::layer::{Linear, MultiHead, MultiHeadConfig, WeightLayout};
use headwise::{Level, Run, Threads};

fn levels() -> impl Iterator<Item = Level> {
    Level::available()
}

/// One thread, at a level.
fn at(level: Level) -> Run {
    Run { level: Some(level), threads: Threads::Calling }
}

/// `sin(a * i + b)` for i = 0, 1, ...
fn wave(a: f64, b: f64, n: usize) -> Vec<f32> {
    (0..n).map(|i| (a * i as f64 + b).sin() as f32).collect()
}

/// Numbers in [-1, 1), no two rows alike: a hash of the index (Knuth's multiplicative).
fn noise(seed: u32, n: usize) -> Vec<f32> {
    let hash = |i: u32| (i.wrapping_add(seed.wrapping_mul(77_777))).wrapping_mul(2_654_435_761) as i32;
    (0..n as u32).map(|i| hash(i ^ (i >> 7)) as f32 / 2f32.powi(31)).collect()
}

/// Weights that keep the size of what goes through, and a bias if asked for.
fn linear(seed: u32, inputs: usize, outputs: usize, bias: Option<u32>) -> Linear {
    let size = (3.0 / inputs.max(1) as f32).sqrt();
    let weights: Vec<f32> = noise(seed, inputs * outputs).iter().map(|x| x * size).collect();
    let bias = bias.map(|seed| noise(seed, outputs));
    let layout = if seed.is_multiple_of(2) { WeightLayout::OutIn } else { WeightLayout::InOut };
    Linear::new(&weights, layout, [inputs, outputs], bias.as_deref()).expect("sizes that fit")
}

/// A layer with noise for weights; `biases` says which of the four projections have one.
fn layer(config: MultiHeadConfig, biases: [bool; 4]) -> MultiHead {
    let MultiHeadConfig { d_model, heads, kv_heads, d_k, d_v, key_width, value_width, d_out } = config;
    let bias = |i: usize| biases[i].then_some(40 + i as u32);
    let (q, k) = (linear(1, d_model, heads * d_k, bias(0)), linear(2, key_width, kv_heads * d_k, bias(1)));
    let (v, out) = (linear(3, value_width, kv_heads * d_v, bias(2)), linear(4, heads * d_v, d_out, bias(3)));
    MultiHead::new(config, q, k, v, out).expect("sizes that fit")
}

/// The same matrix in all four places.
fn square(weights: [&[f32]; 4], config: MultiHeadConfig, out_bias: Option<&[f32]>) -> MultiHead {
    let n = config.d_model;
    let linear = |w: &[f32], bias| Linear::new(w, WeightLayout::OutIn, [n, n], bias).expect("a square");
    let [q, k, v, out] = weights;
    MultiHead::new(config, linear(q, None), linear(k, None), linear(v, None), linear(out, out_bias))
        .expect("sizes that fit")
}

fn identity(n: usize) -> Vec<f32> {
    (0..n * n).map(|i| if i / n == i % n { 1.0 } else { 0.0 }).collect()
}

#[track_caller]
fn near(got: &[f32], want: &[f64], within: f64, what: impl std::fmt::Display) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let wrong = (*got as f64 - want).abs();
        assert!(wrong <= within, "{what}: element {i} is {got}, not {want}: {wrong:e}");
    }
}
