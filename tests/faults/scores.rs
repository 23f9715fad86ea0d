//! Scale, cap, bias and sink: the terms of the score and their order.

use headwise::{Attention, Stage};

use crate::*;

/// onnx/onnx #7865: capping behind the mask turned -inf into -cap and gave hidden keys weight.
#[test]
fn the_cap_comes_before_bias_and_mask() {
    let (q, k, v) = ([1.0], [1.0, 2.0, 3.0], [10.0, 20.0, 1000.0]);
    let (q, k, v) = (bhld(&q, [1, 1, 1, 1]), bhld(&k, [1, 1, 3, 1]), bhld(&v, [1, 1, 3, 1]));
    let capped = Attention::new().scale(1.0).softcap(2.0);
    let (mask, bias) = ([true, true, false], [0.0, 0.0, f32::NEG_INFINITY]);
    let cap = |x: f64| 2.0 * (x / 2.0).tanh();
    for attention in [capped.mask(compact(&mask, &[3])), capped.bias(compact(&bias, &[3]))] {
        gives(attention, q, k, v, &[16.454169608694084]);
        for level in levels() {
            let scores = |stage| {
                let mut out = [f32::NAN; 3];
                attention.level(level).scores(stage, q, k, 0..1, 0..1, &mut out).unwrap();
                out.map(f64::from)
            };
            let hidden = f64::NEG_INFINITY;
            near("scaled", &scores(Stage::Scaled), &[1.0, 2.0, hidden], 1e-6);
            near("capped", &scores(Stage::Capped), &[cap(1.0), cap(2.0), hidden], 1e-6);
            near("biased", &scores(Stage::Biased), &[cap(1.0), cap(2.0), hidden], 1e-6);
            near("weights", &scores(Stage::Weights), &[0.3545830391305917, 0.6454169608694084, 0.0], 1e-6);
        }
    }
    // A finite bias is added to the capped score, and so may lie far outside the cap.
    let bias = [0.0, 5.0, 0.0];
    let weights = [cap(1.0).exp(), (cap(2.0) + 5.0).exp(), cap(3.0).exp()];
    let mean = (10.0 * weights[0] + 20.0 * weights[1] + 1000.0 * weights[2]) / weights.iter().sum::<f64>();
    gives(capped.bias(compact(&bias, &[3])), q, k, v, &[mean]);
}

/// vllm-project/vllm #56578: tanh as a ratio of exponentials became inf/inf for large scores.
#[test]
fn the_cap_of_large_scores_is_the_cap() {
    let (q, v) = ([1.0], [2.0, 4.0, 1000.0]);
    let (q, v) = (bhld(&q, [1, 1, 1, 1]), bhld(&v, [1, 1, 3, 1]));
    let capped = Attention::new().scale(1.0).softcap(50.0);
    for k in [[6000.0, 5000.0, -6000.0], [4400.0, 1e5, -3e38], [3e38, 1e30, -1e30]] {
        gives(capped, q, bhld(&k, [1, 1, 3, 1]), v, &[3.0]);
    }
}

/// The same kind: small and large caps over all sizes of scores, each score by itself seen in the LSE.
#[test]
fn caps_of_every_size() {
    let (q, v) = ([1.0], [1.0]);
    let (q, v) = (bhld(&q, [1, 1, 1, 1]), bhld(&v, [1, 1, 1, 1]));
    for cap in [1e-3, 0.5, 1.0, 30.0, 50.0, 1e4, 1e30] {
        for x in [0.0, 1e-30, 1e-6, 1e-3, 0.1, 0.4, 0.7, 1.0, 3.0, 9.0, 12.0, 50.0, 89.0, 1e4, 1e20, 3e38] {
            for x in [x, -x] {
                let k = [x];
                let want = cap as f64 * (x as f64 / cap as f64).tanh();
                for level in levels() {
                    let attention = Attention::new().scale(1.0).softcap(cap);
                    let (out, lse) = run(attention, level, q, bhld(&k, [1, 1, 1, 1]), v);
                    assert_eq!(out[0], 1.0, "{level}, cap {cap} of {x}");
                    let limit = 1e-6 * want.abs().max(1e-6);
                    assert!((lse[0] as f64 - want).abs() <= limit, "{level}, cap {cap} of {x}: {}", lse[0]);
                }
            }
        }
    }
}

/// SKaiNET-developers/SKaiNET #860: a scale of 0 that meant "default" was used as it is. Here 0 is 0 and the
/// default is asked for by leaving it out.
#[test]
fn scale_zero_is_not_the_default() {
    let q = [1.0, -1.0, 2.0, 0.5];
    let k: Vec<f32> = (0..12).map(|i| (2.0 * (0.9 * i as f64 + 0.3).sin()) as f32).collect();
    let v = [1.0, 4.0, 16.0];
    let (q, k, v) = (bhld(&q, [1, 1, 1, 4]), bhld(&k, [1, 1, 3, 4]), bhld(&v, [1, 1, 3, 1]));
    gives(Attention::new(), q, k, v, &[4.471245015204295]);
    gives(Attention::new().scale(0.5), q, k, v, &[4.471245015204295]);
    gives(Attention::new().scale(0.0), q, k, v, &[7.0]);
    gives(Attention::new().scale(-0.0), q, k, v, &[7.0]);
    gives(Attention::new().scale(1.0), q, k, v, &[2.3402616597985197]);
    let negative: Vec<f32> = (0..12).map(|i| -k.get([0, 0, i / 4, i % 4]).unwrap()).collect();
    gives(Attention::new().scale(-1.0), q, bhld(&negative, [1, 1, 3, 4]), v, &[2.3402616597985197]);
}

/// tenstorrent/tt-metal #42891: the scale was folded into the exponent and multiplied the bias as well.
#[test]
fn the_bias_is_not_scaled() {
    let (q, k, v, bias) = ([2.0], [1.0, 3.0, 0.0], [1.0, 2.0, 4.0], [0.0, -2.0, 1.0]);
    let (q, k, v) = (bhld(&q, [1, 1, 1, 1]), bhld(&k, [1, 1, 3, 1]), bhld(&v, [1, 1, 3, 1]));
    let biased = |scale| Attention::new().scale(scale).bias(compact(&bias, &[3]));
    gives(biased(0.25), q, k, v, &[2.761599814108268]);
    // Whatever the scale is: with scores of 0 the bias alone makes the weights.
    let zeros = [0.0; 3];
    let weights = bias.map(|x| f64::from(x).exp());
    let mean = (weights[0] + 2.0 * weights[1] + 4.0 * weights[2]) / weights.iter().sum::<f64>();
    for scale in [-3.0, 0.0, 1e-20, 0.25, 1.0, 1e20] {
        gives(biased(scale), q, bhld(&zeros, [1, 1, 3, 1]), v, &[mean]);
    }
}

/// Dao-AILab/flash-attention #2752: the sink stayed out of the running maximum; a large one made the LSE
/// infinite, and one without any keys NaN.
#[test]
fn sinks_take_part_in_the_maximum() {
    let (q, k, v) = ([1.0], [0.0, 1.0], [2.0, 6.0]);
    let (q, k, v) = (bhld(&q, [1, 1, 1, 1]), bhld(&k, [1, 1, 2, 1]), bhld(&v, [1, 1, 2, 1]));
    let plain = Attention::new().scale(1.0);
    gives_lse(plain, q, k, v, &[4.92423431452002], &[1.3132616875182228]);
    gives_lse(plain.sinks(&[f32::NEG_INFINITY]), q, k, v, &[4.92423431452002], &[1.3132616875182228]);
    gives_lse(plain.sinks(&[0.5]), q, k, v, &[3.4115297927856196], &[1.6802696706417346]);
    gives_lse(plain.sinks(&[-1e30]), q, k, v, &[4.92423431452002], &[1.3132616875182228]);
    let empty = bhld(&[], [1, 1, 0, 1]);
    for sink in [0.5f32, 100.0, -1e30, f32::NEG_INFINITY] {
        gives_lse(plain.sinks(&[sink]), q, empty, empty, &[0.0], &[sink.into()]);
    }
    for level in levels() {
        let (out, lse) = run(plain.sinks(&[100.0]), level, q, k, v);
        assert!((0.0..1e-42).contains(&out[0]), "{level}: {:e}", out[0]); // 6.8e-43, or 0 where it underflows
        assert_eq!(lse[0], 100.0, "{level}");
        let mut weights = [f32::NAN; 2];
        let sinks = plain.sinks(&[0.5]).level(level);
        sinks.scores(Stage::Weights, q, k, 0..1, 0..1, &mut weights).unwrap();
        near("weights", &weights.map(f64::from), &[0.18632372287106, 0.50648039104799], 1e-6);
    }
}

/// PaddlePaddle/Paddle #41933: the dot product overflowed before it was scaled. In f32: raw 5.76e38, scaled
/// 7.2e37.
#[test]
fn the_dot_product_may_overflow_if_the_score_does_not() {
    let (q, k, v) = ([3e18; 64], [3e18; 128], [0.0, 1.0]);
    let (q, k, v) = (bhld(&q, [1, 1, 1, 64]), bhld(&k, [1, 1, 2, 64]), bhld(&v, [1, 1, 2, 1]));
    gives(Attention::new(), q, k, v, &[0.5]);
    let minus = [-3e18; 64];
    gives(Attention::new(), bhld(&minus, [1, 1, 1, 64]), k, v, &[0.5]);
}
