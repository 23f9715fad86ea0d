//! The shapes of `headwise bench`, and what the tuning constants were chosen by, in criterion's statistics.
//! One thread, the level of `HEADWISE_LEVEL` or the best of this machine. Each result is checked before it is
//! timed: some of its rows against the reference.
//!
//! `cargo bench --bench attention -- classic` runs the shapes with that in their names.

use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use headwise::{Attention, Position, Terms, View, ViewMut, reference};

#[path = "../cli/src/bench/named.rs"]
#[allow(dead_code, reason = "the command parses their names")]
mod named;

use named::{SHAPES, Shape};

/// What the tuning constants were chosen by.
#[rustfmt::skip]
const TUNING: [Shape; 4] = [
    Shape { name: "one-head-d64",   b: 1, hq: 1, hk: 1, lq: 2048, lk: 2048, d: 64,  causal: false },
    Shape { name: "one-head-d128",  b: 1, hq: 1, hk: 1, lq: 2048, lk: 2048, d: 128, causal: false },
    Shape { name: "causal-d64",     b: 1, hq: 1, hk: 1, lq: 2048, lk: 2048, d: 64,  causal: true },
    Shape { name: "grouped-causal", b: 1, hq: 8, hk: 2, lq: 2048, lk: 2048, d: 128, causal: true },
];

fn attention(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attention");
    for shape in SHAPES.into_iter().chain(TUNING) {
        let Shape { name, b, hq, lq, d, .. } = shape;
        // Long calls: few samples.
        let long = shape.flop() > 1e10;
        group.sample_size(if long { 10 } else { 20 });
        group.measurement_time(Duration::from_secs(if long { 10 } else { 5 }));
        group.throughput(match shape.is_reading() {
            true => Throughput::Bytes((2 * shape.keys() * size_of::<f32>()) as u64),
            false => Throughput::Elements(shape.flop() as u64),
        });
        // Made, and checked, only for the shapes that are asked for.
        let mut data = None;
        group.bench_function(name, |bencher| {
            let (inputs, out) = data.get_or_insert_with(|| {
                let rows = b * hq * lq * d;
                let inputs =
                    [(rows, 1), (shape.keys(), 7), (shape.keys(), 13)].map(|(n, seed)| fill(n, seed));
                let mut out = vec![0.0; rows];
                call(&shape, &inputs, &mut out).expect("a valid call");
                check(&shape, &inputs, &out).expect("a valid call");
                (inputs, out)
            });
            bencher.iter(|| call(&shape, inputs, out));
        });
    }
    group.finish();

    fn call(shape: &Shape, [q, k, v]: &[Vec<f32>; 3], out: &mut [f32]) -> Result<(), headwise::Error> {
        let Shape { b, hq, hk, lq, lk, d, causal, .. } = *shape;
        let attention = Attention::new().sequential();
        let attention = if causal { attention.causal() } else { attention };
        let (q, out) = (View::bhld(q, [b, hq, lq, d])?, ViewMut::bhld(out, [b, hq, lq, d])?);
        attention.run(q, View::bhld(k, [b, hk, lk, d])?, View::bhld(v, [b, hk, lk, d])?, out)
    }
}

/// A hash of the index (Knuth's multiplicative), in [-1, 1): no two rows alike.
fn fill(n: usize, seed: u32) -> Vec<f32> {
    let hash = |i: u32| i.wrapping_add(seed).wrapping_mul(2_654_435_761) as i32;
    (0..n as u32).map(|i| hash(i) as f32 / 2f32.powi(31)).collect()
}

/// The first row, the last one and six between them, within the error budget.
fn check(shape: &Shape, [q, k, v]: &[Vec<f32>; 3], out: &[f32]) -> Result<(), headwise::Error> {
    let Shape { name, b, hq, hk, lq, lk, d, causal } = *shape;
    for sample in 0..8 {
        let row = sample * (b * hq * lq - 1) / 7;
        let (batch, head, token) = (row / (hq * lq), row / lq % hq, row % lq);
        let keys = (batch * hk + head / (hq / hk)) * lk * d;
        let position = Position::At(token as i64 + lk as i64 - lq as i64);
        let terms = Terms { causal, position, ..Terms::default() };
        let [k, v] = [k, v].map(|x| View::bhld(&x[keys..][..lk * d], [1, 1, lk, d]));
        let want = reference::attention(View::bhld(&q[row * d..][..d], [1, 1, 1, d])?, k?, v?, &terms)?;
        for (got, want) in out[row * d..].iter().zip(want.out) {
            assert!((f64::from(*got) - want).abs() <= 2e-6, "{name}, row {row}: {got} is not {want}");
        }
    }
    Ok(())
}

criterion_group!(benches, attention);
criterion_main!(benches);
