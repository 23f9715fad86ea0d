//! The layer on a cache: a prompt, parts of one, one token at a time, batches of different lengths.

use headwise::layer::{
    AttentionBlock, Linear, MultiHead, MultiHeadConfig, Norm, NormOrder, Pairing, Rotary, Tokens,
    WeightLayout, Workspace, reference,
};
use headwise::{Attention, CacheLayout, CacheShape, Error, KvCache, WhenFull};

use crate::*;

fn grouped() -> MultiHead {
    let config = MultiHeadConfig { kv_heads: 2, d_k: 12, d_v: 6, ..MultiHeadConfig::new(40, 4) };
    let rotary = Rotary::new(8, Pairing::Halves, 500.0).unwrap();
    layer(config, [true; 4]).with_rotary(rotary).unwrap()
}

fn cache(layer: &MultiHead, batch: usize, capacity: usize) -> KvCache<f32> {
    let MultiHeadConfig { kv_heads, d_k, d_v, .. } = layer.config();
    KvCache::<f32>::new(CacheShape { batch, heads: kv_heads, capacity, d: d_k, dv: d_v }).unwrap()
}

/// Whatever the parts in which tokens come, all rows are those of the whole sequence.
#[test]
fn any_parts_are_like_the_whole() {
    let layer = grouped();
    let (batch, tokens) = (3, 90);
    let x = noise(1, batch * tokens * 40);
    let whole = Tokens::even(&x, batch, tokens);
    let want = reference::forward(&layer, [whole; 3], &Attention::new().causal()).unwrap();
    for parts in [&[90][..], &[1, 89], &[89, 1], &[64, 1, 1, 24], &[30, 30, 30]] {
        for layout in [CacheLayout::HeadMajor, CacheLayout::TokenMajor] {
            for level in levels() {
                let shape = cache(&layer, batch, tokens).shape();
                let mut cache = KvCache::<f32>::with(shape, layout, WhenFull::Refuse).unwrap();
                let (mut workspace, mut first) = (Workspace::new(), 0);
                for &n in parts {
                    let rows = |b: usize| (b * tokens + first) * 40..(b * tokens + first + n) * 40;
                    let part: Vec<f32> = (0..batch).flat_map(|b| x[rows(b)].to_vec()).collect();
                    let mut out = vec![f32::NAN; batch * n * 40];
                    let attention = Attention::new().causal().level(level);
                    let part = Tokens::even(&part, batch, n);
                    layer.forward_cached(part, &mut cache, &attention, &mut workspace, &mut out).unwrap();
                    for b in 0..batch {
                        let what = format!("{level}, {parts:?}, {layout:?}, from {first}, sequence {b}");
                        near(&out[b * n * 40..][..n * 40], &want[rows(b)], 3e-6, what);
                    }
                    first += n;
                }
                assert_eq!(cache.lens(), [tokens; 3]);
            }
        }
    }
}

/// Sequences of a server: each step brings some of them no tokens, one, or a part of a prompt.
#[test]
fn ragged_steps_are_like_each_sequence_alone() {
    let layer = grouped();
    let lens = [7usize, 40, 1];
    let x: Vec<Vec<f32>> = (0..3).map(|b| noise(20 + b as u32, lens[b] * 40)).collect();
    let mut cache = cache(&layer, 3, 64);
    let mut workspace = Workspace::new();
    let mut first = [0; 3];
    for step in [[3, 16, 0], [1, 0, 1], [0, 0, 0], [3, 24, 0]] {
        let mut part = Vec::new();
        let mut starts = vec![0];
        for b in 0..3 {
            part.extend_from_slice(&x[b][first[b] * 40..][..step[b] * 40]);
            starts.push(starts[b] + step[b]);
        }
        let mut out = vec![f32::NAN; part.len()];
        let tokens = Tokens::ragged(&part, &starts).unwrap();
        let attention = Attention::new().causal();
        layer.forward_cached(tokens, &mut cache, &attention, &mut workspace, &mut out).unwrap();
        for b in 0..3 {
            let end = first[b] + step[b];
            let alone = Tokens::even(&x[b][..end * 40], 1, end);
            let want = reference::forward(&layer, [alone; 3], &attention).unwrap();
            near(
                &out[starts[b] * 40..starts[b + 1] * 40],
                &want[first[b] * 40..],
                3e-6,
                format!("{step:?}, {b}"),
            );
            first[b] = end;
        }
    }
    assert_eq!(first, lens);
}

#[test]
fn a_block_keeps_its_cache() {
    let layer = grouped();
    let norm = Norm::rms(&noise(1, 40), 1e-6).unwrap();
    let block = AttentionBlock::new(layer.clone(), norm, NormOrder::Pre).unwrap();
    let x = noise(2, 9 * 40);
    let attention = Attention::new().causal();
    let (mut whole, mut step) = (vec![0.0; 9 * 40], vec![0.0; 40]);
    block.forward(Tokens::even(&x, 1, 9), &attention, &mut Workspace::new(), &mut whole).unwrap();
    let mut cache = cache(&layer, 1, 9);
    for i in 0..9 {
        let x = Tokens::even(&x[i * 40..][..40], 1, 1);
        block.forward_cached(x, &mut cache, &attention, &mut Workspace::new(), &mut step).unwrap();
        let want: Vec<f64> = whole[i * 40..][..40].iter().map(|&x| x as f64).collect();
        near(&step, &want, 3e-6, i);
    }
}

/// skyzh/tiny-llm #46: after the prompt the offset grew twice, so that later tokens turned too far.
#[test]
fn positions_go_on_where_the_cache_ends() {
    // One head of 4 features, values of 2: the token is its query, key and value side by side.
    let (q, k, v) = (wave(0.7, 0.3, 16), wave(0.5, 0.1, 16), wave(0.9, 0.2, 8));
    let x: Vec<f32> =
        (0..4).flat_map(|i| [&q[i * 4..][..4], &k[i * 4..][..4], &v[i * 2..][..2]].concat()).collect();
    let pick = |first: usize, n: usize| {
        let weights: Vec<f32> = (0..n * 10).map(|i| f32::from(i % 10 == first + i / 10)).collect();
        Linear::new(&weights, WeightLayout::OutIn, [10, n], None).unwrap()
    };
    let out = Linear::new(&identity(2), WeightLayout::OutIn, [2, 2], None).unwrap();
    let config = MultiHeadConfig { d_k: 4, d_v: 2, d_out: 2, ..MultiHeadConfig::new(10, 1) };
    let layer = MultiHead::new(config, pick(0, 4), pick(4, 4), pick(8, 2), out).unwrap();
    let layer = layer.with_rotary(Rotary::new(4, Pairing::Halves, 10_000.0).unwrap()).unwrap();
    let want = [
        [0.19866933079506122, 0.8912073600614354],
        [0.693185125596806, 0.437519213472848],
        [0.20584667087568562, 0.33205639004746595],
        [0.1875319570327147, 0.09627876521505505],
    ];
    for parts in [&[3, 1][..], &[1, 1, 1, 1], &[2, 2], &[4]] {
        let mut cache = cache(&layer, 1, 4);
        let mut first = 0;
        for &n in parts {
            let mut out = vec![0.0; n * 2];
            let x = Tokens::even(&x[first * 10..][..n * 10], 1, n);
            let attention = Attention::new().causal();
            layer.forward_cached(x, &mut cache, &attention, &mut Workspace::new(), &mut out).unwrap();
            near(&out, want[first..first + n].as_flattened(), 1e-6, format!("{parts:?}"));
            first += n;
        }
    }
}

/// A call that is refused leaves the cache as it was.
#[test]
fn a_refused_call_keeps_the_cache() {
    let layer = grouped();
    let x = noise(3, 2 * 3 * 40);
    let (mut cache, mut workspace) = (cache(&layer, 2, 4), Workspace::new());
    let mut out = vec![0.0; 2 * 3 * 40];
    let tokens = Tokens::even(&x, 2, 3);
    let plain = Attention::new().causal();
    layer.forward_cached(tokens, &mut cache, &plain, &mut workspace, &mut out).unwrap();
    let before = out.clone();
    let full = layer.forward_cached(tokens, &mut cache, &plain, &mut workspace, &mut out);
    assert_eq!(full, Err(Error::Full { b: 0, len: 3, more: 3, capacity: 4 }));
    let one = Tokens::even(&x[..80], 2, 1);
    let wrong = layer.forward_cached(one, &mut cache, &plain.gates(&[1.0]), &mut workspace, &mut out[..80]);
    assert_eq!(wrong, Err(Error::Length { argument: "gates", got: 1, expected: 4 }));
    let short = layer.forward_cached(one, &mut cache, &plain, &mut workspace, &mut out[..40]);
    assert_eq!(short, Err(Error::Length { argument: "out", got: 40, expected: 80 }));
    let other = Tokens::even(&x, 1, 6);
    assert!(layer.forward_cached(other, &mut cache, &plain, &mut workspace, &mut out).is_err());
    assert_eq!((cache.lens(), cache.appended()), (&[3, 3][..], &[3, 3][..]));
    assert_eq!(out, before);
}
