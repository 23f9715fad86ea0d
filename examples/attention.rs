//! Attention in fifteen lines: 8 query heads on 2 key/value heads, causal, and what was computed how.
//!
//! `cargo run --release --example attention`

use headwise::{Attention, View, ViewMut};

fn main() -> Result<(), headwise::Error> {
    let (b, l, hq, hk, d) = (1, 128, 8, 2, 64); // batch, tokens, query heads, key/value heads, features
    let numbers = |n: usize| (0..n).map(|i| (i as f32 * 0.7).sin()).collect::<Vec<f32>>();
    let (q, k, v) = (numbers(b * l * hq * d), numbers(b * l * hk * d), numbers(b * l * hk * d));
    let mut out = vec![0.0; b * l * hq * d];

    let attention = Attention::new().causal();
    let (q, k) = (View::blhd(&q, [b, l, hq, d])?, View::blhd(&k, [b, l, hk, d])?);
    let v_view = View::blhd(&v, [b, l, hk, d])?;
    attention.run(q, k, v_view, ViewMut::blhd(&mut out, [b, l, hq, d])?)?;
    println!("{}", attention.plan(q, k, v_view)?.describe());

    // The first token sees itself only: each of its 8 heads has the value of its key/value head.
    for head in 0..hq {
        let value = &v[head / 4 * d..][..d];
        assert_eq!(out[head * d..][..d], *value);
    }
    Ok(())
}
