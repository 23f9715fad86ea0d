//! `nn.MultiheadAttention`: orders, masks, widths, slots and weights, against the layer in f64 with its masks
//! said in the other way.

use headwise::layer::torch::{TokenOrder, TorchCall, TorchMask, TorchMultihead, TorchWeights};
use headwise::layer::{MultiHeadConfig, Tokens, reference};
use headwise::{Attention, Error, View};

use crate::*;

const B: usize = 3;
const H: usize = 2;
const L: usize = 5;
const S: usize = 7;
/// Widths of queries, keys and values.
const E: usize = 12;
const KEY: usize = 9;
const VALUE: usize = 10;

fn plain() -> (MultiHead, TorchMultihead) {
    let config = MultiHeadConfig { key_width: KEY, value_width: VALUE, ..MultiHeadConfig::new(E, H) };
    let layer = layer(config, [true; 4]);
    let [q, k, v, out] = layer.linears().map(Clone::clone);
    (layer, TorchMultihead::new(config, q, k, v, out).unwrap())
}

/// `[B, L, E]` as `[L, B, E]`.
fn tokens_first<T: Copy>(x: &[T], width: usize) -> Vec<T> {
    let tokens = x.len() / B / width;
    (0..tokens * B).flat_map(|row| x[(row % B * tokens + row / B) * width..][..width].to_vec()).collect()
}

#[test]
fn orders_and_masks() {
    let (layer, torch) = plain();
    let (query, key, value) = (noise(1, B * L * E), noise(2, B * S * KEY), noise(3, B * S * VALUE));
    let parts = [Tokens::even(&query, B, L), Tokens::even(&key, B, S), Tokens::even(&value, B, S)];
    let blocked_keys: Vec<bool> = (0..B * S).map(|i| i % 4 == 1).collect();
    let shared: Vec<bool> = (0..L * S).map(|i| i % 3 == 1).collect();
    let each: Vec<bool> = (0..B * H * L * S).map(|i| i % 5 == 3 || i / S == 4).collect();
    let (added, added_each) = (noise(4, L * S), noise(5, B * H * L * S));
    let masks = [
        (TorchMask::None, 1),
        (TorchMask::Blocked(&shared), 1),
        (TorchMask::Blocked(&each), B * H),
        (TorchMask::Added(&added), 1),
        (TorchMask::Added(&added_each), B * H),
    ];
    for (mask, maps) in masks {
        for blocked_keys in [None, Some(&blocked_keys[..])] {
            // All of it as one mask of what is attended to, and a bias.
            let at = |i: usize| i % (maps * L * S);
            let index = |i: usize| [i / (H * L * S), i % S];
            let shown: Vec<bool> = (0..B * H * L * S)
                .map(|i| {
                    let [b, j] = index(i);
                    !blocked_keys.is_some_and(|blocked| blocked[b * S + j])
                        && !matches!(mask, TorchMask::Blocked(mask) if mask[at(i)])
                })
                .collect();
            let bias: Vec<f32> = (0..B * H * L * S)
                .map(|i| if let TorchMask::Added(mask) = mask { mask[at(i)] } else { 0.0 })
                .collect();
            let attention = Attention::new()
                .mask(View::compact(&shown, &[B, H, L, S]).unwrap())
                .bias(View::compact(&bias, &[B, H, L, S]).unwrap());
            let want = reference::forward(&layer, parts, &attention).unwrap();
            for order in [TokenOrder::BatchFirst, TokenOrder::TokensFirst] {
                let torch = torch.clone().with_order(order);
                let (mut q, mut k, mut v, mut wanted) =
                    (query.clone(), key.clone(), value.clone(), want.clone());
                if order == TokenOrder::TokensFirst {
                    (q, k, v) = (tokens_first(&q, E), tokens_first(&k, KEY), tokens_first(&v, VALUE));
                    wanted = tokens_first(&wanted, E);
                }
                let call = TorchCall { query: &q, key: &k, value: &v, batch: B, blocked_keys, mask };
                for level in levels() {
                    let (mut out, mut weights) = (vec![f32::NAN; B * L * E], vec![f32::NAN; B * H * L * S]);
                    let (mut mean, workspace) = (vec![f32::NAN; B * L * S], &mut Default::default());
                    torch.forward(call, TorchWeights::None, crate::at(level), workspace, &mut out).unwrap();
                    near(&out, &wanted, 3e-6, format!("{level}, {order:?}, {mask:?}, {blocked_keys:?}"));
                    let all = TorchWeights::PerHead(&mut weights);
                    torch.forward(call, all, crate::at(level), workspace, &mut out).unwrap();
                    near(&out, &wanted, 3e-6, format!("{level}, {order:?}, with weights"));
                    let averaged = TorchWeights::Averaged(&mut mean);
                    torch.forward(call, averaged, crate::at(level), workspace, &mut out).unwrap();
                    for (row, weights) in weights.chunks(S).enumerate() {
                        let sum: f32 = weights.iter().sum();
                        let none = (0..S).all(|j| !shown[row * S + j]);
                        assert!((sum - if none { 0.0 } else { 1.0 }).abs() < 1e-6, "{sum}");
                        assert!((0..S).all(|j| shown[row * S + j] || weights[j] == 0.0));
                    }
                    for (i, mean) in mean.iter().enumerate() {
                        let [b, rest] = [i / (L * S), i % (L * S)];
                        let sum: f32 = (0..H).map(|h| weights[(b * H + h) * L * S + rest]).sum();
                        assert!((mean - sum / H as f32).abs() < 1e-6);
                    }
                }
            }
        }
    }
}

/// The slots are keys like others: a layer that is given them as tokens, which its projections turn into the
/// learned key and value and into zeros, gives the same.
#[test]
fn slots_are_keys() {
    // Tokens of width 3; the last feature picks the learned slot.
    let config = MultiHeadConfig::new(3, 1);
    let (wq, wk) = (noise(1, 9), [0.3, -0.2, 0.9, 0.5, 0.1, -0.8, -0.4, 0.7, 0.6]);
    let (wv, one) = ([0.2, 0.4, -0.6, -0.9, 0.3, 0.5, 0.8, -0.1, 0.7], identity(3));
    let full = square([&wq, &wk, &wv, &one], config, None);
    let column = |w: &[f32; 9]| [w[2], w[5], w[8]];
    let s = 4;
    let mut x = noise(2, 2 * s * 3);
    x.iter_mut().skip(2).step_by(3).for_each(|x| *x = 0.0);
    let query = noise(3, 2 * L * 3);
    let added = noise(4, L * s);
    let [q, k, v, out] = full.linears().map(Clone::clone);
    let torch = TorchMultihead::new(config, q, k, v, out).unwrap().with_order(TokenOrder::BatchFirst);
    let torch = torch.with_bias_kv(&column(&wk), &column(&wv)).unwrap().with_zero_attn();
    assert_eq!(torch.slots(), 2);
    let mut keys = Vec::new();
    for x in x.chunks(s * 3) {
        keys.extend_from_slice(x);
        keys.extend_from_slice(&[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
    }
    let bias: Vec<f32> = added.chunks(s).flat_map(|row| [row, &[0.0; 2]].concat()).collect();
    let attention = Attention::new().bias(View::compact(&bias, &[L, s + 2]).unwrap());
    let parts = [Tokens::even(&query, 2, L), Tokens::even(&keys, 2, s + 2), Tokens::even(&keys, 2, s + 2)];
    let want = reference::forward(&full, parts, &attention).unwrap();
    for order in [TokenOrder::BatchFirst, TokenOrder::TokensFirst] {
        let first = |x: &[f32]| -> Vec<f32> {
            let tokens = x.len() / 6;
            (0..2 * tokens).flat_map(|row| x[(row % 2 * tokens + row / 2) * 3..][..3].to_vec()).collect()
        };
        let swap = |x: Vec<f32>| if order == TokenOrder::TokensFirst { first(&x) } else { x };
        let (query, x) = (swap(query.clone()), swap(x.clone()));
        let mask = TorchMask::Added(&added);
        let call = TorchCall { query: &query, key: &x, value: &x, batch: 2, blocked_keys: None, mask };
        let wanted: Vec<f32> = swap(want.iter().map(|&x| x as f32).collect());
        let wanted: Vec<f64> = wanted.iter().map(|&x| x as f64).collect();
        for level in levels() {
            let (mut out, mut weights) = (vec![f32::NAN; 2 * L * 3], vec![f32::NAN; 2 * L * (s + 2)]);
            let asked = TorchWeights::PerHead(&mut weights);
            let torch = torch.clone().with_order(order);
            torch.forward(call, asked, crate::at(level), &mut Default::default(), &mut out).unwrap();
            near(&out, &wanted, 2e-6, format!("{level}, {order:?}"));
            for row in weights.chunks(s + 2) {
                assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-6 && row.iter().all(|&w| w > 0.0));
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let (_, torch) = plain();
    let (query, key, value) = (noise(1, B * L * E), noise(2, B * S * KEY), noise(3, B * S * VALUE));
    let good = TorchCall { query: &query, key: &key, value: &value, batch: B, ..Default::default() };
    let mut out = vec![0.0; B * L * E];
    let mut call = |call: TorchCall<'_>, weights: &mut [f32]| {
        let weights = if weights.is_empty() { TorchWeights::None } else { TorchWeights::PerHead(weights) };
        torch.forward(call, weights, at(Level::Scalar), &mut Default::default(), &mut out)
    };
    let length = |argument, got, expected| Err(Error::Length { argument, got, expected });
    assert_eq!(call(good, &mut []), Ok(()));
    assert_eq!(call(TorchCall { key: &key[1..], ..good }, &mut []), length("key", 188, 162));
    assert_eq!(call(TorchCall { value: &value[1..], ..good }, &mut []), length("value", 209, 210));
    let blocked = [false; 3];
    assert_eq!(
        call(TorchCall { blocked_keys: Some(&blocked), ..good }, &mut []),
        length("blocked_keys", 3, 21)
    );
    let mask = TorchMask::Blocked(&blocked);
    assert_eq!(call(TorchCall { mask, ..good }, &mut []), length("mask", 3, 210));
    assert_eq!(call(good, &mut [0.0; 5]), length("weights", 5, 210));
    assert!(call(TorchCall { batch: 0, ..good }, &mut []).is_err());
    let (_, torch) = plain();
    assert!(torch.clone().with_bias_kv(&[0.0; 3], &[0.0; 12]).is_err());
    assert!(torch.with_bias_kv(&[0.0; 12], &[0.0; 3]).is_err());
}
