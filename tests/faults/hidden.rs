//! Keys that must not be seen, whatever they hold; rows that see nothing.

use headwise::{Attention, Position, Stage, Terms, View};

use crate::*;

/// openvinotoolkit/openvino #35959: a boolean mask that hid every key of a query gave NaN for that query.
#[test]
fn a_row_that_a_mask_hides_entirely_is_zero() {
    let (q, k, v) = (wave(0.7, 0.1, 12), wave(0.5, 0.4, 16), wave(0.3, 0.9, 16));
    let (q, k, v) = (bhld(&q, [1, 1, 3, 4]), bhld(&k, [1, 1, 4, 4]), bhld(&v, [1, 1, 4, 4]));
    let mask = [true, false, true, true, false, false, false, false, true, true, true, true];
    let attention = Attention::new().mask(compact(&mask, &[3, 4]));
    let want = [
        [-0.055646373829162765, -0.007321960973710628, 0.04165650084888406, 0.0869139115141721],
        [0.0; 4],
        [-0.03414829092642763, -0.04150740000876907, -0.045158776667791445, -0.044776254301261476],
    ];
    gives(attention, q, k, v, want.as_flattened());
    for level in levels() {
        let (out, lse) = run(attention, level, q, k, v);
        assert_eq!(out[4..8], [0.0; 4], "{level}");
        assert_eq!(lse[1], f32::NEG_INFINITY, "{level}");
    }
}

/// The same kind: whatever hides all keys of every third row, alone or together with other rules, leaves
/// zeros and an LSE of -inf (the sink, where there is one) there and the right numbers in the rows between.
#[test]
fn a_row_that_anything_hides_entirely_is_zero() {
    for (l, s) in [(1, 1), (3, 4), (17, 130), (35, 65), (70, 300)] {
        let (q, k, v) = (wave(0.7, 0.1, l * 8), wave(0.5, 0.4, s * 8), wave(0.3, 0.9, s * 5));
        let (q, k, v) = (bhld(&q, [1, 1, l, 8]), bhld(&k, [1, 1, s, 8]), bhld(&v, [1, 1, s, 5]));
        let third = keep(l, s, |i, _| i % 3 != 0);
        let later = keep(l, s, |i, j| i % 3 != 0 || j > i);
        let last = keep(l, s, |_, j| j + 1 == s);
        let minus_inf = |keep: &[bool]| -> Vec<f32> {
            keep.iter().map(|&keep| if keep { 0.0 } else { f32::NEG_INFINITY }).collect()
        };
        let (third_bias, later_bias) = (minus_inf(&third), minus_inf(&later));
        let mask = |mask| Some(compact(mask, &[l, s]));
        let bias = |bias| Some(compact(bias, &[l, s]));
        let (plain, top_left) = (Terms::default(), Position::TopLeft);
        let hidden: [Terms<'_>; 11] = [
            Terms { mask: mask(&third), ..plain },
            Terms { bias: bias(&third_bias), ..plain },
            Terms { mask: mask(&third), bias: bias(&later_bias), ..plain },
            Terms { mask: mask(&later), causal: true, position: top_left, ..plain },
            Terms { bias: bias(&later_bias), right: Some(0), position: top_left, ..plain },
            Terms { mask: mask(&last), left: Some(0), right: Some(0), position: top_left, ..plain },
            Terms { kv_lens: Some(&[0]), ..plain },
            Terms { causal: true, position: Position::At(-2), ..plain },
            Terms { causal: true, position: Position::At(i64::MIN), ..plain },
            Terms { left: Some(1), position: Position::At(s as i64), ..plain },
            Terms { left: Some(1), position: Position::At(i64::MAX), ..plain },
        ];
        for (kind, terms) in hidden.into_iter().enumerate() {
            for sinks in [None, Some(&[0.25f32][..]), Some(&[-1e30][..])] {
                let attention = Attention::with_terms(Terms { sinks, ..terms });
                let want = reference::attention(q, k, v, attention.terms()).unwrap();
                gives_lse(attention, q, k, v, &want.out, &want.lse);
                let empty = sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[0]);
                for level in levels() {
                    let (out, lse) = run(attention, level, q, k, v);
                    for row in (0..l).filter(|row| want.weights[row * s..][..s].iter().all(|&w| w == 0.0)) {
                        assert_eq!(out[row * 5..][..5], [0.0; 5], "{level}, {l} x {s}, kind {kind}");
                        assert_eq!(lse[row], empty, "{level}, {l} x {s}, kind {kind}");
                    }
                }
            }
        }
    }
}

/// flashinfer-ai/flashinfer #4267: the running maximum started at a finite number, so that rows whose scores
/// all lay below it came out as zeros.
#[test]
fn scores_of_any_size_make_the_same_weights() {
    let v = [1.0, 0.0, 0.0, 1.0, 2.0, 2.0];
    let v = bhld(&v, [1, 1, 3, 2]);
    let q = [1000.0, 1.0];
    for first in [-80.0, -5.0, -20.0, -60.0, -300.0, -8000.0] {
        let k = [first, 0.0, first, -1.0, first, -2.0];
        let (q, k) = (bhld(&q, [1, 1, 1, 2]), bhld(&k, [1, 1, 3, 2]));
        let attention = Attention::new().scale(1.0);
        gives(attention, q, k, v, &[0.8453021021155827, 0.42478961739555854]);
        let bias = [f32::NEG_INFINITY, 0.0, 0.0];
        let (one, two) = (0.7310585786300049, 0.2689414213699951);
        gives(attention.bias(compact(&bias, &[3])), q, k, v, &[2.0 * two, one + 2.0 * two]);
    }
}

/// Dao-AILab/flash-attention #1745: cache places behind the valid length held NaN, and 0 * NaN reached the
/// output.
#[test]
fn what_lies_behind_the_valid_length_is_not_read() {
    let q = wave(0.7, 0.2, 3);
    let (mut k, mut v) = (wave(0.5, 0.1, 15), wave(0.9, 0.3, 15));
    k[9..].copy_from_slice(&[f32::NAN, f32::NAN, f32::NAN, f32::INFINITY, f32::INFINITY, f32::INFINITY]);
    v[9..].copy_from_slice(&k[9..].iter().map(|x| -x).collect::<Vec<_>>());
    let (q, k, v) = (bhld(&q, [1, 1, 1, 3]), bhld(&k, [1, 1, 5, 3]), bhld(&v, [1, 1, 5, 3]));
    let want = [0.13753758834762067, 0.1340840137959418, 0.029158330774976773];
    gives(Attention::new().kv_lens(&[3]), q, k, v, &want);
    let nan = [f32::NAN; 15];
    let nan = bhld(&nan, [1, 1, 5, 3]);
    gives(Attention::new().kv_lens(&[0]), q, nan, nan, &[0.0; 3]);
}

/// The same kind: any length of any cache, one a batch entry, is the same to the bit as a cache of that
/// length.
#[test]
fn a_valid_length_is_like_a_shorter_cache() {
    let (d, dv, l) = (7, 5, 3);
    for s in [1, 2, 16, 33, 64, 65, 129, 257] {
        for len in [0, 1, s / 2, s - 1, s] {
            let q = wave(0.7, 0.2, 2 * l * d);
            let (mut k, mut v) = (wave(0.5, 0.1, 2 * s * d), wave(0.9, 0.3, 2 * s * dv));
            let (short_k, short_v) = (k.clone(), v.clone());
            k[(s + len) * d..].fill(f32::NAN); // the second entry is the short one
            v[(s + len) * dv..].fill(f32::INFINITY);
            let lens = [s, len];
            let all = Attention::new().kv_lens(&lens).causal();
            let (q, k, v) = (bhld(&q, [2, 1, l, d]), bhld(&k, [2, 1, s, d]), bhld(&v, [2, 1, s, dv]));
            for level in levels() {
                let (out, lse) = run(all, level, q, k, v);
                let (k, v) = (&short_k[s * d..][..len * d], &short_v[s * dv..][..len * dv]);
                let q: Vec<f32> = (0..l * d).map(|at| q.get([1, 0, at / d, at % d]).unwrap()).collect();
                let (k, v) = (bhld(k, [1, 1, len, d]), bhld(v, [1, 1, len, dv]));
                let want = run(Attention::new().causal(), level, bhld(&q, [1, 1, l, d]), k, v);
                let got = (out[l * dv..].to_vec(), lse[l..].to_vec());
                same(format!("{level}, {len} of {s}"), &got, &want);
            }
        }
    }
}

/// pytorch/pytorch #101967: a key hidden by a boolean mask poisoned the output where its K or V was NaN.
#[test]
fn a_masked_key_may_hold_nan() {
    let q = wave(0.6, 0.1, 4);
    let (mut k, mut v) = (wave(0.5, 0.7, 6), wave(0.9, 0.2, 6));
    k[2..4].copy_from_slice(&[f32::NAN, 0.0]);
    v[2..4].copy_from_slice(&[f32::INFINITY, f32::NAN]);
    let (q, k, v) = (bhld(&q, [1, 1, 2, 2]), bhld(&k, [1, 1, 3, 2]), bhld(&v, [1, 1, 3, 2]));
    let want = [-0.11374991823755737, 0.16226749038694782, -0.050804799373763476, 0.30913170212579805];
    gives(Attention::new().mask(compact(&[true, false, true], &[3])), q, k, v, &want);
    gives(Attention::new().bias(compact(&[0.0, f32::NEG_INFINITY, 0.0], &[3])), q, k, v, &want);
}

/// The same kind: NaN and infinities in K and V, hidden by any rule, change nothing beyond rounding; visible,
/// they reach the rows that see them and no others.
#[test]
fn hidden_keys_may_hold_anything() {
    let (l, s, d, dv) = (20, 150, 8, 3);
    let (q, k, v) = (wave(0.7, 0.2, l * d), wave(0.5, 0.1, s * d), wave(0.9, 0.3, s * dv));
    let q = bhld(&q, [1, 1, l, d]);
    for bad in [0, 70, 100, s - 1] {
        let mask = keep(l, s, |_, j| j != bad);
        let some = keep(l, s, |i, j| j != bad || i % 7 == 3);
        let bias: Vec<f32> = mask.iter().map(|&keep| if keep { 1e4 } else { f32::NEG_INFINITY }).collect();
        let (plain, at) = (Terms::default(), Position::At(bad as i64));
        let rules: [Terms<'_>; 7] = [
            Terms { mask: Some(compact(&mask, &[l, s])), ..plain },
            Terms { bias: Some(compact(&bias, &[l, s])), ..plain },
            Terms { mask: Some(compact(&some, &[l, s])), ..plain },
            Terms { causal: true, position: Position::At(bad as i64 - l as i64 / 2), ..plain },
            Terms { left: Some(2), position: at, ..plain },
            Terms { right: Some(0), position: Position::At(bad as i64 - l as i64), ..plain },
            Terms { kv_lens: Some(&[bad]), ..plain },
        ];
        let (clean_k, clean_v) = (bhld(&k, [1, 1, s, d]), bhld(&v, [1, 1, s, dv]));
        for (rule, terms) in rules.into_iter().enumerate() {
            let weights = reference::attention(q, clean_k, clean_v, &terms).unwrap().biased;
            let sees = |row: usize| weights[row * s + bad] != f64::NEG_INFINITY;
            for (in_k, in_v) in [(f32::NAN, 0.0), (f32::INFINITY, f32::NAN), (0.0, f32::INFINITY)] {
                let (mut k, mut v) = (k.clone(), v.clone());
                k[bad * d + 1] = in_k;
                v[bad * dv + 2] = in_v;
                let (k, v) = (bhld(&k, [1, 1, s, d]), bhld(&v, [1, 1, s, dv]));
                for level in levels() {
                    let attention = Attention::with_terms(terms);
                    let (got, want) =
                        (run(attention, level, q, k, v), run(attention, level, q, clean_k, clean_v));
                    for i in 0..l {
                        let what = format!("{level}, rule {rule}, key {bad}, row {i}, {in_k} and {in_v}");
                        if sees(i) {
                            assert!(!got.0[i * dv + 2].is_finite(), "{what}");
                            continue;
                        }
                        let row = |x: &Answer| {
                            let out = x.0[i * dv..][..dv].iter().chain([&x.1[i]]);
                            out.map(|&x| f64::from(x)).collect::<Vec<_>>()
                        };
                        near(&what, &row(&got), &row(&want), 1e-5);
                    }
                }
            }
        }
    }
}

/// rasbt/LLMs-from-scratch #1061: a mask that marked the blocked pairs went where True means "attend".
#[test]
fn true_means_attend() {
    let above = keep(3, 3, |i, j| j > i);
    flat(
        Attention::new().mask(compact(&above, &[3, 3])),
        [1, 1, 1, 3, 3],
        &[1.0, 2.0, 3.0],
        &[2.5, 3.0, 0.0],
    );
}

/// huggingface/funes #160: exp clamped its argument, hidden keys kept the smallest normal weight.
#[test]
fn weights_that_underflow_are_exactly_zero() {
    for far in [-200.0, -1e30, f32::NEG_INFINITY, -88.0, -104.0, -1e5, f32::MIN] {
        let (q, k, v) = ([1.0], [0.0, 0.0], [1.0, 1e38]);
        let (q, k, v) = (bhld(&q, [1, 1, 1, 1]), bhld(&k, [1, 1, 2, 1]), bhld(&v, [1, 1, 2, 1]));
        for level in levels() {
            let bias = [0.0, far];
            let (out, lse) = run(Attention::new().bias(compact(&bias, &[2])), level, q, k, v);
            assert_eq!((out[0], lse[0]), (1.0, 0.0), "{level}, {far}");
            let k = [0.0, far.max(f32::MIN)];
            let (out, lse) = run(Attention::new().scale(1.0), level, q, bhld(&k, [1, 1, 2, 1]), v);
            assert_eq!((out[0], lse[0]), (1.0, 0.0), "{level}, {far}");
        }
    }
}

/// pytorch/pytorch #63271: joining the padding mask to a mask for each head hid the padded queries as well.
#[test]
fn padding_hides_keys_and_not_queries() {
    let causal = keep(3, 3, |i, j| j <= i);
    let both = keep(3, 3, |i, j| j <= i && j < 2);
    let (v, padding) = ([1.0, 2.0, 3.0], [true, true, false]);
    let cases = [
        Attention::new().causal().mask(compact(&padding, &[1, 1, 1, 3])),
        Attention::new().causal().position(Position::TopLeft).kv_lens(&[2]),
        Attention::new().mask(compact(&causal, &[1, 3, 3])).kv_lens(&[2]),
        Attention::new().mask(compact(&both, &[1, 3, 3])),
    ];
    cases.into_iter().for_each(|attention| flat(attention, [1, 1, 1, 3, 3], &v, &[1.0, 1.5, 1.5]));
    flat(cases[0].kv_lens(&[0]), [1, 1, 1, 3, 3], &v, &[0.0; 3]);
}

/// keras-team/keras #23038: asking for the scores left the fused path and lost the causal mask.
#[test]
fn asking_for_weights_changes_nothing() {
    let (zeros, v, all) = ([0.0; 3], [1.0, 2.0, 3.0], [true; 9]);
    let x: View<'_, f32> = bhld(&zeros, [1, 1, 3, 1]);
    let want = [1.0, 0.0, 0.0, 0.5, 0.5, 0.0, 1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0];
    for attention in [Attention::new().causal(), Attention::new().causal().mask(compact(&all, &[3, 3]))] {
        flat(attention, [1, 1, 1, 3, 3], &v, &[1.0, 1.5, 2.0]);
        for level in levels() {
            let mut weights = [f32::NAN; 9];
            attention.level(level).scores(Stage::Weights, x, x, 0..1, 0..3, &mut weights).unwrap();
            near(level.name(), &weights.map(f64::from), &want, 1e-6);
            flat(attention.level(level), [1, 1, 1, 3, 3], &v, &[1.0, 1.5, 2.0]);
        }
    }
}
