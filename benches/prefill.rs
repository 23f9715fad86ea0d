//! The shapes of `headwise bench`, and what the tuning constants were chosen by, in criterion's statistics.
//! One thread, the level of `HEADWISE_LEVEL` or the best of this machine. Each result is checked before it is
//! timed.
//!
//! `cargo bench --bench prefill -- classic` runs the shapes with that in their names.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use headwise::{Attention, View, ViewMut, reference};

/// Name, `[B, Hq, Hk, Lq, Lk, D]`, causal.
const SHAPES: [(&str, [usize; 6], bool); 9] = [
    ("bert", [8, 12, 12, 128, 128, 64], false),
    ("classic", [1, 8, 8, 512, 512, 64], false),
    ("vit", [4, 12, 12, 197, 197, 64], false),
    ("minilm", [16, 12, 12, 64, 64, 32], false),
    ("cross", [1, 8, 8, 77, 4096, 40], false),
    ("one-head-d64", [1, 1, 1, 2048, 2048, 64], false),
    ("one-head-d128", [1, 1, 1, 2048, 2048, 128], false),
    ("causal-d64", [1, 1, 1, 2048, 2048, 64], true),
    ("grouped-causal", [1, 8, 2, 2048, 2048, 128], true),
];

fn prefill(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("prefill");
    group.sample_size(20);
    for (name, [b, hq, hk, lq, lk, d], causal) in SHAPES {
        // A hash of the index (Knuth's multiplicative), in [-1, 1): no two rows alike.
        let fill = |n: usize, seed: u32| -> Vec<f32> {
            let hash = |i: u32| i.wrapping_add(seed).wrapping_mul(2_654_435_761) as i32;
            (0..n as u32).map(|i| hash(i) as f32 / 2f32.powi(31)).collect()
        };
        let (q, k, v) = (fill(b * hq * lq * d, 1), fill(b * hk * lk * d, 7), fill(b * hk * lk * d, 13));
        let mut out = vec![0.0; b * hq * lq * d];
        let mut attention = Attention::new().sequential();
        if causal {
            attention = attention.causal();
        }
        let run = |out: &mut [f32]| {
            let out = ViewMut::bhld(out, [b, hq, lq, d]);
            let [q, k, v] =
                [(&q, hq, lq), (&k, hk, lk), (&v, hk, lk)].map(|(data, h, l)| View::bhld(data, [b, h, l, d]));
            attention.run(q?, k?, v?, out?)
        };
        run(&mut out).expect("a valid call");
        check(&attention, [&q, &k, &v], &out, [lq, lk, d]);
        group.throughput(Throughput::Elements((4 * b * hq * lq * lk * d) as u64));
        group.bench_function(name, |bencher| bencher.iter(|| run(&mut out)));
    }
    group.finish();
}

/// The last query of the first head against the reference, within the error budget.
fn check(attention: &Attention<'_>, [q, k, v]: [&[f32]; 3], out: &[f32], [lq, lk, d]: [usize; 3]) {
    let row = (lq - 1) * d..lq * d;
    let view = |data, l| View::bhld(data, [1, 1, l, d]).expect("inside");
    let (k, v) = (view(&k[..lk * d], lk), view(&v[..lk * d], lk));
    let want = reference::attention(view(&q[row.clone()], 1), k, v, attention.terms()).expect("a valid call");
    for (got, want) in out[row].iter().zip(want.out) {
        assert!((*got as f64 - want).abs() <= 2e-6, "{got} is not {want}");
    }
}

criterion_group!(benches, prefill);
criterion_main!(benches);
