//! Head analysis against the same definitions in f64 on whole attention maps, and against itself said in
//! other ways.

mod importance;
mod patterns;
mod similarity;
mod statistics;

#[allow(dead_code, reason = "the other tests use the rest")]
#[path = "../../cli/src/case.rs"]
mod case;
#[path = "../common/mod.rs"]
mod common;

use case::{Case, Values};
use headwise::layer::{Linear, MultiHead, MultiHeadConfig, WeightLayout};
use headwise::{Terms, View};

/// Random problems of every kind of shape, stride and term, with elements in [-1, 1].
fn cases(seeds: std::ops::Range<u64>) -> impl Iterator<Item = (u64, Case)> {
    seeds
        .map(|seed| (seed, Case::from_seed(seed)))
        .filter(|(_, case)| case.values == Values::Unit && case.dtypes == [headwise::DType::F32; 2])
}

/// What a case is about.
fn views(case: &Case) -> ([View<'_, f32>; 3], Terms<'_>) {
    ([case.q.view(), case.k.view(), case.v.view()], case.terms())
}

/// The largest finite magnitude: of scores, whose rounding is that of the weights.
fn largest(x: &[f64]) -> f64 {
    x.iter().filter(|x| x.is_finite()).fold(0.0, |largest: f64, x| largest.max(x.abs()))
}

#[track_caller]
fn near(got: f64, want: f64, limit: f64, what: &str) {
    assert!((got - want).abs() <= limit, "{what}: {got} is not {want}, within {limit:e}");
}

/// A layer with noise for weights.
fn noise_layer(config: MultiHeadConfig, seed: u32) -> MultiHead {
    let MultiHeadConfig { d_model, heads, kv_heads, d_k, d_v, d_out, .. } = config;
    let linear = |seed: u32, inputs: usize, outputs: usize| {
        let weights: Vec<f32> = common::fill(inputs * outputs, seed);
        let bias: Vec<f32> = common::fill(outputs, seed + 50);
        Linear::new(&weights, WeightLayout::OutIn, [inputs, outputs], Some(&bias)).unwrap()
    };
    MultiHead::new(
        config,
        linear(seed, d_model, heads * d_k),
        linear(seed + 1, d_model, kv_heads * d_k),
        linear(seed + 2, d_model, kv_heads * d_v),
        linear(seed + 3, heads * d_v, d_out),
    )
    .unwrap()
}
