//! A layer with fewer heads: pruned, against the whole layer in f64 with gates of 0; pooled, against weights
//! that were averaged here.

use headwise::layer::reference;
use headwise::layer::{
    CostShape, HeadGroup, MultiHead, MultiHeadConfig, Norm, Pairing, Rotary, Tokens, Workspace,
};
use headwise::{Attention, CacheShape, Error, KvCache, Stored, View};

use crate::*;

/// Which heads go first, and which after them.
type Steps<'a> = &'a [&'a [usize]];

fn pruned(layer: &MultiHead, steps: Steps<'_>) -> MultiHead {
    let mut layer = layer.clone();
    steps.iter().for_each(|heads| layer.prune(heads).unwrap());
    layer
}

/// 0 for heads that go.
fn gates(heads: usize, steps: Steps<'_>) -> Vec<f32> {
    (0..heads).map(|h| if steps.iter().any(|step| step.contains(&h)) { 0.0 } else { 1.0 }).collect()
}

/// Six query heads on three key/value heads, with all that a layer can have.
fn grouped() -> MultiHead {
    let config = MultiHeadConfig { kv_heads: 3, d_k: 6, d_v: 7, d_out: 19, ..MultiHeadConfig::new(20, 6) };
    let norm = |seed| Norm::rms(&noise(seed, 6), 1e-5).unwrap();
    layer(config, [true; 4])
        .with_norms(Some(norm(50)), Some(norm(51)))
        .and_then(|layer| layer.with_rotary(Rotary::new(4, Pairing::Halves, 100.0).unwrap()))
        .unwrap()
}

const STEPS: &[Steps<'static>] = &[
    &[],
    &[&[2, 3], &[]],
    &[&[0, 1], &[4, 5]],
    &[&[0, 2, 4], &[0]],
    &[&[1]],
    &[&[3], &[4, 5]],
    &[&[5], &[5, 2], &[0, 1]],
    &[&[0, 1, 2, 3, 4, 5]],
];

#[test]
fn pruned_is_like_gated() {
    let full = grouped();
    for starts in [&[0, 11][..], &[0, 3, 3, 40]] {
        let (rows, longest) =
            (starts[starts.len() - 1], starts.windows(2).map(|s| s[1] - s[0]).max().unwrap());
        let data = noise(3, rows * 20);
        let x = Tokens::ragged(&data, starts).unwrap();
        let (slopes, sinks) = (noise(4, 6), noise(5, 6));
        let bias = noise(6, 6 * longest * longest);
        let mask: Vec<bool> = noise(7, 6 * longest).iter().map(|&x| x > -0.5).collect();
        for steps in STEPS {
            let gates = gates(6, steps);
            let all = Attention::new()
                .slopes(&slopes)
                .sinks(&sinks)
                .gates(&gates)
                .bias(View::compact(&bias, &[6, longest, longest]).unwrap())
                .mask(View::compact(&mask, &[6, 1, longest]).unwrap());
            let want = reference::forward(&full, [x; 3], &all).unwrap();
            let small = pruned(&full, steps);
            let n = small.kept().len();
            let (slopes, sinks) = (small.select(&slopes).unwrap(), small.select(&sinks).unwrap());
            let (bias, mask) = (small.select(&bias).unwrap(), small.select(&mask).unwrap());
            let left = Attention::new()
                .slopes(&slopes)
                .sinks(&sinks)
                .bias(View::compact(&bias, &[n, longest, longest]).unwrap())
                .mask(View::compact(&mask, &[n, 1, longest]).unwrap());
            let in_f64 = reference::forward(&small, [x; 3], &left).unwrap();
            let narrow: Vec<f32> = in_f64.iter().map(|&x| x as f32).collect();
            near(&narrow, &want, 1e-6, format!("the reference, {steps:?}"));
            for level in levels() {
                let mut out = vec![f32::NAN; rows * 19];
                small.forward(x, &left.level(level), &mut Workspace::new(), &mut out).unwrap();
                near(&out, &want, 3e-6, format!("{level}, {starts:?}, {steps:?}"));
            }
        }
    }
}

#[test]
fn numbers_do_not_move_and_groups_are_told() {
    let (mut layer, group) = (grouped(), |heads, kv_heads| HeadGroup { heads, kv_heads });
    let told = |layer: &MultiHead| layer.groups().collect::<Vec<_>>();
    assert_eq!(told(&layer), [group(0..6, 0..3)]);
    layer.prune(&[1]).unwrap();
    assert_eq!(
        (layer.kept(), told(&layer)),
        (&[0, 2, 3, 4, 5][..], vec![group(0..1, 0..1), group(1..5, 1..3)])
    );
    layer.prune(&[1, 3]).unwrap(); // 1 is gone already
    assert_eq!((layer.kept(), layer.config().kv_heads), (&[0, 2, 4, 5][..], 3));
    assert_eq!(told(&layer), [group(0..2, 0..2), group(2..4, 2..3)]);
    layer.prune(&[0]).unwrap(); // the last on its key/value head
    assert_eq!((layer.kept(), told(&layer)), (&[2, 4, 5][..], vec![group(0..1, 0..1), group(1..3, 1..2)]));
    assert_eq!(layer.select(&[0, 1, 2, 3, 4, 5]).unwrap(), [2, 4, 5]);
    let [q, k, v, out] = layer.linears();
    let sizes = [q, k, v, out].map(|linear| [linear.inputs(), linear.outputs()]);
    assert_eq!(sizes, [[20, 3 * 6], [20, 2 * 6], [20, 2 * 7], [3 * 7, 19]]);
    let norms = 2 * 6;
    assert_eq!(layer.parameters(), 21 * 18 + 21 * 12 + 21 * 14 + 21 * 19 + 19 + norms);
    let beyond = Error::BeyondAxis { argument: "heads", index: 1, got: 6, axis: 6 };
    assert_eq!(layer.prune(&[0, 6]), Err(beyond));
    assert!(layer.select(&[1.0; 7]).is_err());
    layer.prune(&[5, 4, 2]).unwrap();
    assert_eq!((layer.kept(), told(&layer), layer.config().kv_heads), (&[][..], vec![], 0));
    let mut out = vec![f32::NAN; 2 * 19];
    layer
        .forward(Tokens::even(&[0.5; 40], 1, 2), &Attention::new(), &mut Workspace::new(), &mut out)
        .unwrap();
    assert_eq!(&out[19..], layer.linears()[3].bias().unwrap()); // no heads at all
}

/// What is given for each head must be for the heads that are left, also where each group is a call.
#[test]
fn data_for_the_heads_before_are_refused() {
    let layer = pruned(&grouped(), &[&[1]]);
    let (data, bias) = (noise(8, 5 * 20), noise(9, 6 * 25));
    let x = Tokens::even(&data, 1, 5);
    let mut out = vec![7.0; 5 * 19];
    let mut run = |attention: &Attention<'_>| {
        let result = layer.forward(x, attention, &mut Workspace::new(), &mut out);
        assert!(out.iter().all(|&x| x == 7.0));
        result.unwrap_err()
    };
    for wrong in [1, 4, 6] {
        let each = vec![0.5; wrong];
        let error = |argument| Error::Length { argument, got: wrong, expected: 5 };
        assert_eq!(run(&Attention::new().slopes(&each)), error("slopes"));
        assert_eq!(run(&Attention::new().sinks(&each)), error("sinks"));
        assert_eq!(run(&Attention::new().gates(&each)), error("gates"));
    }
    for wrong in [4, 6] {
        let bias = View::compact(&bias[..wrong * 25], &[wrong, 5, 5]).unwrap();
        let error = Error::Broadcast { argument: "bias", got: [1, wrong, 5, 5], to: [1, 5, 5, 5] };
        assert_eq!(run(&Attention::new().bias(bias)), error);
    }
}

/// Tokens of a cache of any type: what the whole layer gives on its own cache with gates.
fn cached<C: Stored>() {
    let full = grouped();
    let (tokens, steps) = (17, &[&[1, 2, 3, 5][..]][..]);
    let gates = gates(6, steps);
    let small = pruned(&full, steps);
    let outputs = [(&full, Attention::new().causal().gates(&gates)), (&small, Attention::new().causal())]
        .map(|(layer, attention)| {
            let MultiHeadConfig { kv_heads, d_k, d_v, .. } = layer.config();
            let shape = CacheShape { batch: 2, heads: kv_heads, capacity: tokens, d: d_k, dv: d_v };
            let mut cache = KvCache::<C>::new(shape).unwrap();
            let mut all = Vec::new();
            for token in 0..tokens {
                let x = noise(token as u32, 2 * 20);
                let mut out = vec![f32::NAN; 2 * 19];
                let workspace = &mut Workspace::new();
                layer
                    .forward_cached(Tokens::even(&x, 2, 1), &mut cache, &attention, workspace, &mut out)
                    .unwrap();
                all.extend(out);
            }
            all
        });
    let want: Vec<f64> = outputs[0].iter().map(|&x| f64::from(x)).collect();
    near(&outputs[1], &want, 2e-6, C::DTYPE.name());
}

#[test]
fn caches_of_any_type() {
    cached::<f32>();
    cached::<half::bf16>();
    cached::<i8>();
}

/// All of it in proportion: a third of the heads is a third of numbers, bytes and operations.
#[test]
fn smaller_in_proportion() {
    let shape = CostShape { batch: 2, queries: 30, keys: 30, new_keys: 30 };
    for kv_heads in [6, 3] {
        let full =
            layer(MultiHeadConfig { kv_heads, d_k: 64, d_v: 64, ..MultiHeadConfig::new(64, 6) }, [false; 4]);
        let small = pruned(&full, &[&[2], &[0, 1, 3]]);
        assert_eq!(small.parameters() * 3, full.parameters());
        assert_eq!(small.flops(shape) * 3, full.flops(shape));
        let (small, full) = (small.memory(shape), full.memory(shape));
        assert_eq!(small.weights * 3, full.weights);
        assert_eq!(small.cache * 3, full.cache);
        assert_eq!(small.workspace * 3, full.workspace);
    }
}

#[test]
fn pooled_heads_are_the_mean() {
    let config = MultiHeadConfig { d_k: 5, d_v: 3, ..MultiHeadConfig::new(12, 6) };
    let full = layer(config, [true; 4]);
    let data = noise(10, 9 * 12);
    let x = Tokens::even(&data, 1, 9);
    for kv_heads in [6, 3, 2, 1] {
        let mut pooled = full.clone();
        pooled.mean_pool_kv(kv_heads).unwrap();
        assert_eq!((pooled.config().heads, pooled.config().kv_heads), (6, kv_heads));
        // The same, with every query head's key and value the mean over its group.
        let n = 6 / kv_heads;
        let mean = |linear: &Linear, d: usize| {
            let (inputs, weights) = (linear.inputs(), linear.weights(WeightLayout::OutIn));
            let at = |h: usize, c: usize, i: usize| f64::from(weights[(h * d + c) * inputs + i]);
            let of = |h: usize, value: &dyn Fn(usize) -> f64| {
                let first = h / n * n;
                ((first..first + n).map(value).sum::<f64>() / n as f64) as f32
            };
            let rows = (0..6 * d).flat_map(|row| (0..inputs).map(move |i| (row / d, row % d, i)));
            let weights: Vec<f32> = rows.map(|(h, c, i)| of(h, &|h| at(h, c, i))).collect();
            let bias = linear.bias().unwrap();
            let bias: Vec<f32> =
                (0..6 * d).map(|row| of(row / d, &|h| f64::from(bias[h * d + row % d]))).collect();
            Linear::new(&weights, WeightLayout::OutIn, [inputs, 6 * d], Some(&bias)).unwrap()
        };
        let [q, k, v, out] = full.linears();
        let want = MultiHead::new(config, q.clone(), mean(k, 5), mean(v, 3), out.clone()).unwrap();
        let want = reference::forward(&want, [x; 3], &Attention::new()).unwrap();
        for level in levels() {
            let mut out = vec![f32::NAN; want.len()];
            pooled.forward(x, &Attention::new().level(level), &mut Workspace::new(), &mut out).unwrap();
            near(&out, &want, 3e-6, format!("{level}, {kv_heads} key/value heads"));
        }
    }
}

#[test]
fn pooling_goes_with_pruning_and_says_what_it_cannot() {
    let mut layer = layer(MultiHeadConfig::new(24, 6), [true; 4]);
    let must = "above 0 and a divisor of the layer's key/value heads";
    for wrong in [0, 4, 12] {
        let error = Error::Value { argument: "kv_heads", got: wrong as f32, must };
        assert_eq!(layer.mean_pool_kv(wrong), Err(error));
    }
    layer.mean_pool_kv(3).unwrap();
    layer.prune(&[1, 3]).unwrap(); // groups of 1, 1, 2
    assert!(layer.mean_pool_kv(2).is_err());
    layer.mean_pool_kv(1).unwrap();
    assert_eq!(layer.kept(), [0, 2, 4, 5]);
    assert_eq!(layer.groups().collect::<Vec<_>>(), [HeadGroup { heads: 0..4, kv_heads: 0..1 }]);
    let data = noise(11, 7 * 24);
    let x = Tokens::even(&data, 1, 7);
    let want = reference::forward(&layer, [x; 3], &Attention::new()).unwrap();
    let mut out = vec![f32::NAN; want.len()];
    layer.forward(x, &Attention::new(), &mut Workspace::new(), &mut out).unwrap();
    near(&out, &want, 3e-6, "pooled and pruned");
    let whole = crate::layer(MultiHeadConfig::new(24, 6), [false; 4]);
    let norm = Norm::rms(&[1.0; 24], 1e-5).unwrap();
    let mut whole = whole.with_norms(None, Some(norm)).unwrap();
    let error = Error::Length { argument: "k_norm", got: 24, expected: 4 };
    assert_eq!(whole.mean_pool_kv(3), Err(error.clone()));
    assert_eq!(whole.prune(&[0]), Err(error));
    assert_eq!((whole.kept().len(), whole.config().kv_heads), (6, 6));
}
