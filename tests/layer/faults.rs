//! Faults that users of other layers have met, each with its whole kind. Every test names the public report;
//! the inputs and the expected numbers are ours.

use headwise::layer::torch::{TorchCall, TorchMask, TorchMultihead, TorchWeights};
use headwise::layer::{MultiHeadConfig, Norm, Tokens, Workspace};
use headwise::{Attention, Error, Position, View};

use crate::*;

/// One head of one feature that sees all keys alike: the output is the mean of the visible values.
fn flat() -> TorchMultihead {
    let linear = |w: f32| Linear::new(&[w], WeightLayout::OutIn, [1, 1], None).unwrap();
    TorchMultihead::new(MultiHeadConfig::new(1, 1), linear(0.0), linear(0.0), linear(1.0), linear(1.0))
        .unwrap()
}

/// True above the diagonal: causal, said in PyTorch's way.
fn upper(n: usize) -> Vec<bool> {
    (0..n * n).map(|i| i % n > i / n).collect()
}

const X: [f32; 3] = [1.0, 2.0, 3.0];

fn call<'a>(mask: TorchMask<'a>, blocked_keys: Option<&'a [bool]>) -> TorchCall<'a> {
    TorchCall { query: &X, key: &X, value: &X, batch: 1, blocked_keys, mask }
}

#[track_caller]
fn gives(layer: &TorchMultihead, call: TorchCall<'_>, want: [f64; 3]) {
    for level in levels() {
        let mut out = [f32::NAN; 3];
        layer.forward(call, TorchWeights::None, at(level), &mut Default::default(), &mut out).unwrap();
        near(&out, &want, 1e-6, level);
    }
}

/// rasbt/LLMs-from-scratch #1061: a mask of what is blocked went to a call that takes what is attended to.
#[test]
fn blocked_and_attended_cannot_be_mixed_up() {
    let above = upper(3);
    gives(&flat(), call(TorchMask::Blocked(&above), None), [1.0, 1.5, 2.0]);
    // The same booleans as a mask of what is attended to: the last query sees nothing.
    let layer = flat().layer().clone();
    let attention = Attention::new().mask(View::compact(&above, &[3, 3]).unwrap());
    for level in levels() {
        let mut out = [f32::NAN; 3];
        let x = Tokens::even(&X, 1, 3);
        layer.forward(x, &attention.level(level), &mut Workspace::new(), &mut out).unwrap();
        near(&out, &[2.5, 3.0, 0.0], 1e-6, level);
    }
}

/// huggingface/transformers #17886: pruning took the slices of the projections but not those of the bias.
#[test]
fn pruned_heads_take_their_bias_with_them() {
    let (zero, one) = (vec![0.0; 16], identity(4));
    let full = square([&zero, &zero, &one, &one], MultiHeadConfig::new(4, 2), Some(&[0.1, 0.2, 0.3, 0.4]));
    let x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    let bias = [0.0, 3f32.ln(), 0.0, 0.0]; // [H, 1, S]
    let of = |layer: &MultiHead, attention: &Attention<'_>, want: [f64; 4]| {
        for level in levels() {
            let mut out = [f32::NAN; 4];
            let (q, keys) = (Tokens::even(&x[..4], 1, 1), Tokens::even(&x, 1, 2));
            let attention = attention.level(level);
            layer.forward_cross(q, keys, keys, &attention, &mut Workspace::new(), &mut out).unwrap();
            near(&out, &want, 1e-6, level);
        }
    };
    let all = Attention::new().bias(View::compact(&bias, &[2, 1, 2]).unwrap());
    of(&full, &all, [4.1, 5.2, 5.3, 6.4]);
    of(&full, &all.gates(&[0.0, 1.0]), [0.1, 0.2, 5.3, 6.4]);
    let mut pruned = full.clone();
    pruned.prune(&[0]).unwrap();
    assert_eq!((pruned.kept(), pruned.config().heads), (&[1][..], 1));
    assert_eq!(pruned.parameters(), 4 * 4 * 2 + 4);
    let left = pruned.select(&bias).unwrap();
    assert_eq!(left, [0.0, 0.0]);
    of(&pruned, &Attention::new().bias(View::compact(&left, &[1, 1, 2]).unwrap()), [0.1, 0.2, 5.3, 6.4]);
    // The whole bias is refused rather than met by the wrong head.
    let mut out = [0.0; 4];
    let (q, keys) = (Tokens::even(&x[..4], 1, 1), Tokens::even(&x, 1, 2));
    let wrong = pruned.forward_cross(q, keys, keys, &all, &mut Workspace::new(), &mut out);
    assert!(matches!(wrong, Err(Error::Broadcast { argument: "bias", .. })), "{wrong:?}");
}

/// huggingface/transformers #9853: the head mask met a tensor that was not used afterwards.
#[test]
fn gates_reach_the_result() {
    let (zero, one) = (vec![0.0; 16], identity(4));
    let sum = vec![1.0; 16];
    let layer = square([&zero, &zero, &one, &sum], MultiHeadConfig::new(4, 4), None);
    let x = [1.0, 10.0, 100.0, 1000.0];
    for level in levels() {
        let mut out = [f32::NAN; 4];
        let attention = Attention::new().gates(&[1.0, 0.5, 0.0, 2.0]).level(level);
        layer.forward(Tokens::even(&x, 1, 1), &attention, &mut Workspace::new(), &mut out).unwrap();
        assert_eq!(out, [2006.0; 4], "{level}");
    }
}

/// keras-team/keras #23038: asking for the weights lost the causal mask.
#[test]
fn asking_for_weights_changes_nothing() {
    let above = upper(3);
    let none = [false; 3];
    let third = 1.0 / 3.0;
    for blocked_keys in [None, Some(&none[..])] {
        let call = call(TorchMask::Blocked(&above), blocked_keys);
        gives(&flat(), call, [1.0, 1.5, 2.0]);
        for level in levels() {
            let (mut one, mut mean, mut out) = ([f32::NAN; 9], [f32::NAN; 9], [[f32::NAN; 3]; 2]);
            let workspace = &mut Default::default();
            flat().forward(call, TorchWeights::PerHead(&mut one), at(level), workspace, &mut out[0]).unwrap();
            flat()
                .forward(call, TorchWeights::Averaged(&mut mean), at(level), workspace, &mut out[1])
                .unwrap();
            assert_eq!(out, [[1.0, 1.5, 2.0]; 2], "{level}");
            assert_eq!(one, mean);
            near(&one, &[1.0, 0.0, 0.0, 0.5, 0.5, 0.0, third, third, third], 1e-6, level);
        }
    }
}

/// pytorch/pytorch #63271: padding joined with a mask for each head blanked the padded queries, too.
#[test]
fn padding_hides_keys_only() {
    let above = upper(3);
    let last = [false, false, true];
    gives(&flat(), call(TorchMask::Blocked(&above), Some(&last)), [1.0, 1.5, 1.5]);
    // pytorch/pytorch #27968: no key is left.
    gives(&flat(), call(TorchMask::None, Some(&[true; 3])), [0.0; 3]);
    gives(&flat(), call(TorchMask::Blocked(&[true; 9]), None), [0.0; 3]);
}

/// pytorch/pytorch #27461: the column of `add_zero_attn` shifted the causal mask, and queries saw the future.
#[test]
fn an_extra_slot_moves_no_mask() {
    let above = upper(3);
    let layer = flat().with_zero_attn();
    gives(&layer, call(TorchMask::Blocked(&above), None), [0.5, 1.0, 1.5]);
    for later in [7.0, -1e6, f32::NAN] {
        let value = [1.0, 2.0, later];
        let call = TorchCall { value: &value, ..call(TorchMask::Blocked(&above), None) };
        for level in levels() {
            let (mut out, mut weights) = ([f32::NAN; 3], [f32::NAN; 12]);
            let wanted = TorchWeights::PerHead(&mut weights);
            layer.forward(call, wanted, at(level), &mut Default::default(), &mut out).unwrap();
            near(&out[..2], &[0.5, 1.0], 1e-6, level);
            near(&weights[..4], &[0.5, 0.0, 0.0, 0.5], 1e-6, level);
            near(&weights[4..8], &[1.0 / 3.0, 1.0 / 3.0, 0.0, 1.0 / 3.0], 1e-6, level);
        }
    }
    // A learned slot of value 8 as well.
    let layer = layer.with_bias_kv(&[0.0], &[8.0]).unwrap();
    gives(&layer, call(TorchMask::Blocked(&above), None), [3.0, 11.0 / 4.0, 14.0 / 5.0]);
    gives(&layer, call(TorchMask::None, Some(&[true; 3])), [4.0; 3]);
}

/// tracel-ai/burn #5607: a variance in one pass lost all digits of rows with a large mean.
#[test]
fn a_large_mean_costs_no_digits() {
    let want = [
        -1.6269723085792303,
        -0.10846482057194869,
        1.4100426674353328,
        -0.5423241028597434,
        0.9761833851475381,
        -0.9761833851475381,
        0.5423241028597434,
        -1.4100426674353328,
        0.10846482057194869,
        1.6269723085792303,
        -0.3253944617158461,
        1.1931130262914356,
        -0.7592537440036408,
        0.7592537440036408,
        -1.1931130262914356,
        0.3253944617158461,
    ];
    let norm = Norm::layer(&[1.0; 16], Some(&[0.0; 16]), 1e-5).unwrap();
    for mean in [0.0, 2e3, 2e4, 2e5, -2e5] {
        for level in levels() {
            let mut x: Vec<f32> = (0..16).map(|i| mean + 0.25 * (7 * i % 16) as f32).collect();
            norm.in_place(&mut x, at(level)).unwrap();
            near(&x, &want, 1e-6, format!("{level}, mean {mean}"));
            assert!(x.iter().sum::<f32>().abs() < 1e-5);
        }
    }
    // Long rows, where the mean itself is summed.
    for n in [1000, 4096] {
        let norm = Norm::layer(&vec![1.0; n], None, 1e-5).unwrap();
        for level in levels() {
            let mut x: Vec<f32> = (0..n).map(|i| 2e5 + 0.25 * (7 * i % 16) as f32).collect();
            let values: Vec<f64> = x.iter().map(|&x| x as f64).collect();
            let want = headwise::layer::reference::norm(&norm, &values);
            norm.in_place(&mut x, at(level)).unwrap();
            near(&x, &want, 1e-5, format!("{level}, {n} features"));
        }
    }
}

/// pytorch/pytorch #124464: dropout stayed on in evaluation. Here a call has none: the same bits every time.
#[test]
fn the_same_call_gives_the_same_bits() {
    let layer = layer(MultiHeadConfig::new(32, 4), [true; 4]);
    let x = noise(9, 50 * 32);
    let attention = Attention::new().causal().position(Position::TopLeft);
    let run = || {
        let mut out = vec![0.0; 50 * 32];
        layer.forward(Tokens::even(&x, 2, 25), &attention, &mut Workspace::new(), &mut out).unwrap();
        out
    };
    let first = run();
    (0..20).for_each(|_| assert_eq!(run(), first));
}
