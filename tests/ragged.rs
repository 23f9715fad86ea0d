//! Every pair of ragged lengths at every level, and the error budget: 2e-6 for inputs in [-1, 1], and never
//! worse than twice a plain f32 softmax in three passes.

mod common;

use common::fill;
use headwise::{Attention, Level, Position, Terms, View, ViewMut, reference};

const LENGTHS: [usize; 14] = [0, 1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 129, 200, 257];

/// For each level the worst errors of output and LSE against the reference, and that of the plain softmax.
fn errors(
    [b, hq, hk]: [usize; 3],
    [lq, lk]: [usize; 2],
    [d, dv]: [usize; 2],
    terms: &Terms<'_>,
) -> Vec<(Level, f64, f64, f64)> {
    let (q, k, v) = (fill(b * hq * lq * d, 1), fill(b * hk * lk * d, 2), fill(b * hk * lk * dv, 3));
    let [vq, vk, vv] = [(&q, [b, hq, lq, d]), (&k, [b, hk, lk, d]), (&v, [b, hk, lk, dv])]
        .map(|(data, shape)| View::bhld(data, shape).unwrap());
    let want = reference::attention(vq, vk, vv, terms).unwrap();
    let worst = |got: &[f32], want: &[f64]| {
        let error = |(got, want): (&f32, &f64)| {
            if *got as f64 == *want { 0.0 } else { (*got as f64 - want).abs() }
        };
        got.iter()
            .zip(want)
            .map(error)
            .fold(0.0, |worst: f64, x| if x > worst || x.is_nan() { x } else { worst })
    };
    let scale = terms.scale.unwrap_or(1.0 / (d as f32).sqrt());
    let plain = worst(&three_passes([&q, &k, &v], [b * hq, hq / hk, lq, lk, d, dv], scale), &want.out);
    let run = |level| {
        let (mut out, mut lse) = (vec![f32::NAN; b * hq * lq * dv], vec![f32::NAN; b * hq * lq]);
        let to = ViewMut::bhld(&mut out, [b, hq, lq, dv]).unwrap();
        Attention::with_terms(*terms).level(level).run_with_lse(vq, vk, vv, to, &mut lse).unwrap();
        (level, worst(&out, &want.out), worst(&lse, &want.lse), plain)
    };
    Level::available().map(run).collect()
}

/// Scores, softmax, values, one after the other, in f32: what the budget compares with.
fn three_passes([q, k, v]: [&[f32]; 3], [heads, group, lq, lk, d, dv]: [usize; 6], scale: f32) -> Vec<f32> {
    let mut out = vec![0.0; heads * lq * dv];
    for row in 0..heads * lq {
        let kv_head = row / lq / group;
        let q = &q[row * d..][..d];
        let key = |j: usize| &k[(kv_head * lk + j) * d..][..d];
        let dot = |j: usize| q.iter().zip(key(j)).map(|(q, k)| q * k).sum::<f32>() * scale;
        let scores: Vec<f32> = (0..lk).map(dot).collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f32 = weights.iter().sum();
        for (j, weight) in weights.iter().enumerate() {
            let value = &v[(kv_head * lk + j) * dv..][..dv];
            let out = &mut out[row * dv..][..dv];
            out.iter_mut().zip(value).for_each(|(out, v)| *out += weight / sum * v);
        }
    }
    out
}

#[test]
fn every_pair_of_lengths() {
    let positions = [
        Position::TopLeft,
        Position::BottomRight,
        Position::At(-3),
        Position::At(5),
        Position::Each(&[-1, 2]),
    ];
    let mut turn = 0;
    for lq in LENGTHS {
        for lk in LENGTHS {
            // All of 1 to 257 come up for D and for Dv, with every group and position.
            turn += 1;
            let [d, dv] = [turn * 37 % 257 + 1, turn * 91 % 257 + 1];
            let [hk, group] = [1 + turn % 2, [1, 2, 3][turn % 3]];
            let lens = [lk - lk / 3, lk];
            let terms = Terms {
                causal: turn % 4 < 2,
                position: positions[turn % 5],
                kv_lens: (turn % 6 == 5).then_some(&lens),
                ..Terms::default()
            };
            for (level, out, lse, _) in errors([2, hk * group, hk], [lq, lk], [d, dv], &terms) {
                let what = format!("{level}: {lq} x {lk}, D {d}, Dv {dv}, {hk} x {group} heads, {terms:?}");
                assert!(out <= 2e-6, "{what}: out is off by {out:e}");
                assert!(lse <= 4e-6, "{what}: lse is off by {lse:e}");
            }
        }
    }
}

#[test]
fn within_the_error_budget() {
    for (lengths, features) in [
        ([64, 64], [32, 32]),
        ([128, 128], [64, 64]),
        ([33, 1000], [128, 128]),
        ([8, 8192], [64, 64]),
        ([16, 512], [256, 256]),
        ([40, 77], [40, 40]),
    ] {
        for (level, out, _, plain) in errors([1, 2, 1], lengths, features, &Terms::default()) {
            println!("{level}: {lengths:?} D {features:?}: {out:.2e}, three passes {plain:.2e}");
            assert!(
                out <= 2e-6 && out <= 2.0 * plain,
                "{level}: {lengths:?}: {out:e}, three passes {plain:e}"
            );
        }
    }
}
