//! The layer against the layer in f64: sizes, biases, norms, rotary positions, options, even and ragged
//! batches.

use headwise::layer::{
    AttentionBlock, CostShape, MultiHead, MultiHeadConfig, Norm, NormOrder, Pairing, Rotary, Tokens,
    Workspace, reference,
};
use headwise::{Attention, Error, Level, View};
use rayon::ThreadPoolBuilder;

use crate::*;

fn configs() -> Vec<(MultiHead, &'static str)> {
    let plain = MultiHeadConfig::new(48, 4);
    let grouped = MultiHeadConfig { kv_heads: 2, d_k: 10, d_v: 7, d_out: 31, ..MultiHeadConfig::new(33, 6) };
    let multi_query = MultiHeadConfig { kv_heads: 1, ..MultiHeadConfig::new(64, 8) };
    let rotary = |width, pairing| Rotary::new(width, pairing, 1000.0).unwrap();
    let (weight, bias) = (noise(70, 60), noise(71, 60));
    let head = |eps| Norm::rms(&weight[..10], eps).unwrap();
    let whole = Norm::layer(&weight, Some(&bias), 1e-5).unwrap();
    vec![
        (layer(plain, [false; 4]), "plain"),
        (layer(plain, [true; 4]).with_scale(0.5), "biases"),
        (layer(plain, [true, false, true, true]).with_rotary(rotary(12, Pairing::Halves)).unwrap(), "rotary"),
        (layer(grouped, [true; 4]), "grouped"),
        (
            layer(grouped, [false, true, false, false])
                .with_norms(Some(head(1e-6)), Some(head(1e-3)))
                .and_then(|layer| layer.with_rotary(rotary(6, Pairing::Interleaved)))
                .unwrap(),
            "head norms and some rotary",
        ),
        (layer(grouped, [true; 4]).with_norms(Some(whole), None).unwrap(), "a norm over all heads"),
        (layer(multi_query, [false; 4]).with_rotary(rotary(8, Pairing::Halves)).unwrap(), "one key head"),
        (layer(MultiHeadConfig::new(1, 1), [true; 4]), "one of everything"),
    ]
}

fn check(layer: &MultiHead, parts: [Tokens<'_>; 3], attention: Attention<'_>, what: &str) {
    let want = reference::forward(layer, parts, &attention).unwrap();
    for level in levels() {
        let attention = attention.level(level).sequential();
        let mut out = vec![f32::NAN; want.len()];
        let [x, keys, values] = parts;
        layer.forward_cross(x, keys, values, &attention, &mut Workspace::new(), &mut out).unwrap();
        near(&out, &want, 3e-6, format!("{level}, {what}"));
    }
}

#[test]
fn self_attention() {
    for (layer, name) in configs() {
        let d = layer.config().d_model;
        let heads = layer.config().heads;
        for (batch, tokens) in [(1, 1), (2, 3), (3, 17), (1, 70)] {
            let x = noise(11, batch * tokens * d);
            let x = Tokens::even(&x, batch, tokens);
            let what = |option: &str| format!("{name}, {batch} x {tokens}, {option}");
            check(&layer, [x; 3], Attention::new(), &what("no options"));
            check(&layer, [x; 3], Attention::new().causal().window(Some(4), None), &what("window"));
            let mask: Vec<bool> = (0..tokens * tokens).map(|i| i % 5 != 2).collect();
            let bias = noise(12, heads * tokens * tokens);
            let (slopes, sinks, gates) = (noise(13, heads), noise(14, heads), noise(15, heads));
            let attention = Attention::new()
                .mask(View::compact(&mask, &[tokens, tokens]).unwrap())
                .bias(View::compact(&bias, &[heads, tokens, tokens]).unwrap())
                .slopes(&slopes)
                .sinks(&sinks)
                .gates(&gates)
                .softcap(3.0)
                .scale(0.7);
            check(&layer, [x; 3], attention, &what("all options"));
            let lens: Vec<usize> = (0..batch).map(|b| tokens - b.min(tokens)).collect();
            check(&layer, [x; 3], Attention::new().kv_lens(&lens), &what("lengths"));
        }
        for starts in [&[0, 0][..], &[0, 3, 3, 20, 21], &[0, 65, 70]] {
            let rows = starts[starts.len() - 1];
            let x = noise(16, rows * d);
            let positions: Vec<usize> = (0..rows).map(|row| (row * 37) % 5000).collect();
            let x = Tokens::ragged(&x, starts).unwrap();
            check(&layer, [x; 3], Attention::new().causal(), &format!("{name}, {starts:?}"));
            let placed = x.positions(&positions);
            check(&layer, [placed; 3], Attention::new(), &format!("{name}, {starts:?}, positions"));
        }
    }
}

#[test]
fn cross_attention() {
    let config = MultiHeadConfig {
        key_width: 20,
        value_width: 35,
        kv_heads: 2,
        d_v: 9,
        ..MultiHeadConfig::new(24, 4)
    };
    let layer = layer(config, [true, false, true, true]);
    for (l, s) in [(1, 1), (5, 40), (40, 5), (3, 0)] {
        let (x, keys, values) = (noise(1, 2 * l * 24), noise(2, 2 * s * 20), noise(3, 2 * s * 35));
        let parts = [Tokens::even(&x, 2, l), Tokens::even(&keys, 2, s), Tokens::even(&values, 2, s)];
        check(&layer, parts, Attention::new(), &format!("{l} on {s}"));
        let (q_starts, k_starts) = ([0, 0, 2 * l], [0, s, 2 * s]);
        let parts = [
            Tokens::ragged(&x, &q_starts).unwrap(),
            Tokens::ragged(&keys, &k_starts).unwrap(),
            Tokens::ragged(&values, &k_starts).unwrap(),
        ];
        check(&layer, parts, Attention::new(), &format!("{l} on {s}, ragged"));
    }
    let (x, keys) = (noise(1, 24), noise(2, 20));
    let (x, keys) = (Tokens::even(&x, 1, 1), Tokens::even(&keys, 1, 1));
    let mut out = [0.0; 24];
    let wrong = layer.forward_cross(x, keys, keys, &Attention::new(), &mut Workspace::new(), &mut out);
    assert_eq!(wrong, Err(Error::Length { argument: "values", got: 20, expected: 35 }));
    let wrong = layer.forward(x, &Attention::new(), &mut Workspace::new(), &mut out);
    assert_eq!(wrong, Err(Error::Length { argument: "keys", got: 24, expected: 20 }));
}

/// Sequences side by side give the same bits as each by itself, and the same for any number of threads.
#[test]
fn ragged_is_like_alone_and_threads_change_nothing() {
    let (layer, _) = configs().swap_remove(4);
    let (d, d_out) = (layer.config().d_model, layer.config().d_out);
    let starts = [0, 40, 41, 41, 300, 317];
    let x = noise(8, 317 * d);
    let tokens = Tokens::ragged(&x, &starts).unwrap();
    let attention = Attention::new().causal();
    let mut all = vec![0.0; 317 * d_out];
    layer.forward(tokens, &attention.sequential(), &mut Workspace::new(), &mut all).unwrap();
    for pair in starts.windows(2) {
        let (rows, n) = (pair[0]..pair[1], pair[1] - pair[0]);
        let mut out = vec![0.0; n * d_out];
        let alone = Tokens::even(&x[rows.start * d..rows.end * d], 1, n);
        layer.forward(alone, &attention, &mut Workspace::new(), &mut out).unwrap();
        assert_eq!(out, all[rows.start * d_out..rows.end * d_out], "{pair:?}");
    }
    for threads in [1, 2, 3, 8] {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut out = vec![0.0; 317 * d_out];
        pool.install(|| layer.forward(tokens, &attention, &mut Workspace::new(), &mut out)).unwrap();
        assert_eq!(out, all, "{threads} threads");
    }
}

#[test]
fn blocks() {
    for (norm, name) in [
        (Norm::layer(&noise(1, 48), Some(&noise(2, 48)), 1e-5).unwrap(), "layer"),
        (Norm::rms(&noise(1, 48), 1e-6).unwrap(), "rms"),
    ] {
        let layer = layer(MultiHeadConfig::new(48, 4), [true; 4]);
        let x = noise(3, 19 * 48);
        let starts = [0, 5, 19];
        let tokens = Tokens::ragged(&x, &starts).unwrap();
        let wide: Vec<f64> = x.iter().map(|&x| x as f64).collect();
        for order in [NormOrder::Pre, NormOrder::Post] {
            let block = AttentionBlock::new(layer.clone(), norm.clone(), order).unwrap();
            let add = |y: Vec<f64>| -> Vec<f64> { y.iter().zip(&wide).map(|(y, x)| y + x).collect() };
            let want = match order {
                NormOrder::Pre => {
                    let normed: Vec<f32> = reference::norm(&norm, &wide).iter().map(|&x| x as f32).collect();
                    let normed = tokens.with_data(&normed);
                    add(reference::forward(&layer, [normed; 3], &Attention::new()).unwrap())
                }
                NormOrder::Post => {
                    let y = reference::forward(&layer, [tokens; 3], &Attention::new()).unwrap();
                    reference::norm(&norm, &add(y))
                }
            };
            for level in levels() {
                let mut out = vec![f32::NAN; x.len()];
                let attention = Attention::new().level(level);
                block.forward(tokens, &attention, &mut Workspace::new(), &mut out).unwrap();
                near(&out, &want, 5e-6, format!("{level}, {name}, {order:?}"));
                block.forward_cross(tokens, tokens, &attention, &mut Workspace::new(), &mut out).unwrap();
                if order == NormOrder::Post {
                    near(&out, &want, 5e-6, format!("{level}, {name}, cross"));
                }
            }
        }
        let narrow = Norm::rms(&[1.0; 47], 0.0).unwrap();
        assert!(AttentionBlock::new(layer, narrow, NormOrder::Pre).is_err());
    }
}

/// Heads split the width, they do not multiply it.
#[test]
fn what_a_layer_costs() {
    for heads in [1, 2, 8, 64] {
        let of = |biases| layer(MultiHeadConfig::new(512, heads), biases);
        let plain = of([false; 4]);
        assert_eq!(plain.parameters(), 4 * 512 * 512, "{heads} heads");
        assert_eq!(of([true; 4]).parameters(), 4 * 512 * 512 + 4 * 512);
        let shape = CostShape { batch: 3, queries: 10, keys: 10, new_keys: 10 };
        assert_eq!(plain.flops(shape), 2 * 3 * (4 * 10 * 512 * 512 + 2 * 10 * 10 * 512));
        let memory = plain.memory(shape);
        assert_eq!(memory.cache, 3 * 10 * 2 * 512 * 4);
        assert_eq!(memory.weights, 4 * 512 * 512 * 4);
        let x = noise(1, 30 * 512);
        let (mut workspace, mut out) = (Workspace::new(), vec![0.0; 30 * 512]);
        plain.forward(Tokens::even(&x, 3, 10), &Attention::new(), &mut workspace, &mut out).unwrap();
        // Beside it lies the scratch of the threads.
        let scratch = workspace.bytes().checked_sub(memory.workspace).expect("no less");
        assert!(scratch <= rayon::current_num_threads() << 20, "{scratch}");
    }
    let grouped = MultiHeadConfig { kv_heads: 2, d_k: 16, d_v: 8, ..MultiHeadConfig::new(64, 8) };
    let shape = CostShape { batch: 1, queries: 1, keys: 1000, new_keys: 1 };
    let layer = layer(grouped, [false; 4]);
    assert_eq!(layer.memory(shape).cache, 1000 * 2 * (16 + 8) * 4);
    let projections = 64 * (8 * 16 + 2 * 16 + 2 * 8) + 8 * 8 * 64;
    assert_eq!(layer.flops(shape), 2 * (projections + 8 * 1000 * (16 + 8)));
    let most = usize::MAX;
    let shape = CostShape { batch: most, queries: most, keys: most, new_keys: most };
    assert_eq!((layer.flops(shape), layer.memory(shape).cache), (most, most));
}

#[test]
fn what_does_not_fit_is_refused() {
    let config = MultiHeadConfig::new(8, 2);
    let good = || linear(1, 8, 8, None);
    let new = |config, q, out| MultiHead::new(config, q, good(), good(), out).map(|_| ()).unwrap_err();
    let heads = MultiHeadConfig { kv_heads: 0, ..config };
    assert_eq!(new(heads, good(), good()), Error::Heads { query: 2, key: 0 });
    let heads = MultiHeadConfig { heads: 3, ..config };
    assert_eq!(new(heads, good(), good()), Error::Heads { query: 3, key: 2 });
    let shape = |argument, got, expected| Error::Shape { argument, got, expected };
    assert_eq!(new(config, linear(1, 7, 8, None), good()), shape("q", [1, 1, 7, 8], [1, 1, 8, 8]));
    assert_eq!(new(config, good(), linear(1, 8, 9, None)), shape("out", [1, 1, 8, 9], [1, 1, 8, 8]));
    let layer = layer(config, [false; 4]);
    let norm = |n: usize| Some(Norm::rms(&vec![1.0; n], 0.0).unwrap());
    assert!(layer.clone().with_norms(norm(4), norm(8)).is_ok());
    assert!(layer.clone().with_norms(norm(5), None).is_err());

    let x = [0.0; 24];
    let mut out = [7.0; 24];
    let mut call = |x: Tokens<'_>, n: usize| {
        layer.forward(x, &Attention::new(), &mut Workspace::new(), &mut out[..n]).unwrap_err()
    };
    let length = |argument, got, expected| Error::Length { argument, got, expected };
    assert_eq!(call(Tokens::even(&x, 1, 2), 16), length("x", 24, 16));
    assert_eq!(call(Tokens::even(&x, 1, 3), 16), length("out", 16, 24));
    assert_eq!(call(Tokens::even(&x, 1, 3).positions(&[1, 2]), 24), length("positions", 2, 3));
    assert!(matches!(call(Tokens::even(&x, usize::MAX, 3), 24), Error::TooLarge { .. }));
    for starts in [&[][..], &[1, 3], &[0, 3, 2]] {
        assert!(matches!(Tokens::ragged(&x, starts), Err(Error::Range { argument: "starts", .. })));
    }
    let unavailable = Level::ALL.into_iter().find(|level| !level.is_available()).unwrap();
    let attention = Attention::new().level(unavailable);
    let x = Tokens::even(&x, 1, 3);
    let refused = layer.forward(x, &attention, &mut Workspace::new(), &mut out);
    assert_eq!(refused, Err(Error::LevelUnavailable { level: unavailable }));
}
