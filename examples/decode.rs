//! A model that generates: the prompt in one call, then a token at a time over a cache in half precision. The
//! result is that of one causal call over all tokens, but for what the cache rounds.
//!
//! `cargo run --release --example decode`

use half::f16;
use headwise::{Attention, CacheShape, Error, KvCache, View, ViewMut};

const QUERY_HEADS: usize = 8;
const HEADS: usize = 2;
const D: usize = 64;

/// The queries, keys and values of some tokens, `[tokens, heads, D]`: a model would project them.
struct Step {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

fn step(tokens: std::ops::Range<usize>) -> Step {
    let numbers = |heads: usize, seed: f32| {
        let (from, to) = (tokens.start * heads * D, tokens.end * heads * D);
        (from..to).map(|i| (i as f32 * seed).sin()).collect()
    };
    Step { q: numbers(QUERY_HEADS, 0.7), k: numbers(HEADS, 1.1), v: numbers(HEADS, 1.3) }
}

fn main() -> Result<(), Error> {
    let (prompt, tokens) = (20, 36);
    let shape = CacheShape { batch: 1, heads: HEADS, capacity: tokens, d: D, dv: D };
    let mut cache = KvCache::<f16>::new(shape)?;
    let mut generated = Vec::new();
    let steps = std::iter::once(0..prompt).chain((prompt..tokens).map(|token| token..token + 1));
    for new in steps {
        let (n, Step { q, k, v }) = (new.len(), step(new));
        cache.append(View::blhd(&k, [1, n, HEADS, D])?, View::blhd(&v, [1, n, HEADS, D])?)?;
        let mut out = vec![0.0; n * QUERY_HEADS * D];
        Attention::new().causal().run(
            View::blhd(&q, [1, n, QUERY_HEADS, D])?,
            cache.keys(),
            cache.values(),
            ViewMut::blhd(&mut out, [1, n, QUERY_HEADS, D])?,
        )?;
        generated.extend(out);
    }
    println!("{} tokens in a cache of {} bytes", cache.lens()[0], cache.bytes());

    let Step { q, k, v } = step(0..tokens);
    let mut whole = vec![0.0; tokens * QUERY_HEADS * D];
    Attention::new().causal().run(
        View::blhd(&q, [1, tokens, QUERY_HEADS, D])?,
        View::blhd(&k, [1, tokens, HEADS, D])?,
        View::blhd(&v, [1, tokens, HEADS, D])?,
        ViewMut::blhd(&mut whole, [1, tokens, QUERY_HEADS, D])?,
    )?;
    let error = generated.iter().zip(&whole).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("largest difference from one causal call in f32: {error:.1e}");
    assert!(generated.len() == whole.len() && error < 1e-3);
    Ok(())
}
