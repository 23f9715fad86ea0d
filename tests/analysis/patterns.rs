//! Patterns of tokens, and a circuit built to have them.

use headwise::analysis::reference;
use headwise::layer::{Linear, MultiHead, MultiHeadConfig, Tokens, WeightLayout, Workspace};
use headwise::patterns::{Pair, pairs, tokens};
use headwise::{Attention, Error, Level, Statistic, StatisticsOptions, View, ViewMut};

use crate::common::fill;
use crate::{cases, largest, near, noise_layer, views};

#[test]
fn random_problems() {
    let mut counted = 0;
    for (seed, case) in cases(1000..1300) {
        let ([q, k, v], terms) = views(&case);
        let ([b, h, lq, _], lk) = (q.shape(), k.shape()[2]);
        if [b, h, lq, lk].contains(&0) {
            continue;
        }
        let ids: Vec<u32> = (0..b * lk).map(|j| (j as u32).wrapping_mul(2_654_435_761) >> 28).collect();
        let want = reference::statistics(q, k, v, &terms, None).unwrap();
        let rounding = 4e-6 + 1e-6 * largest(&want.attention.biased);
        let attention = Attention::with_terms(terms);
        let got = tokens(&attention, q, k, &ids).unwrap();
        let offset = |b: usize| match terms.position {
            headwise::Position::TopLeft => 0,
            headwise::Position::At(offset) => offset,
            headwise::Position::Each(offsets) => offsets[b],
            _ => {
                let len = |lens: Option<&[usize]>, axis: usize| lens.map_or(axis, |lens| lens[b]) as i64;
                len(terms.kv_lens, lk) - len(terms.q_lens, lq)
            }
        };
        let mut sums = vec![[0.0; 2]; h];
        let mut rows = vec![0; h];
        for (at, row) in want.rows.iter().enumerate().filter(|(_, row)| row.keys > 0) {
            let (b, head, i) = (at / (h * lq), at / lq % h, at % lq);
            let (p, ids) = (&want.attention.weights[at * lk..][..lk], &ids[b * lk..][..lk]);
            let pos = (i as i64).saturating_add(offset(b));
            let valid = terms.kv_lens.map_or(lk, |lens| lens[b]) as i64;
            if pos < 0 || pos >= valid {
                continue;
            }
            let pos = pos as usize;
            let copies: Vec<usize> = (0..pos).filter(|&j| ids[j] == ids[pos]).collect();
            // A weight that underflows in f32 makes no difference here: scores of this size do not.
            if !copies.is_empty() {
                assert!(row.keys > 0);
                rows[head] += 1;
                sums[head][0] += copies.iter().map(|j| p[j + 1]).sum::<f64>();
                sums[head][1] += copies.iter().map(|&j| p[j]).sum::<f64>();
            }
        }
        for (head, got) in got.iter().enumerate() {
            let what = format!("seed {seed}: head {head}: {terms:?}");
            assert_eq!([got.induction.rows(), got.duplicate.rows()], [rows[head]; 2], "{what}");
            for (got, sum) in [got.induction, got.duplicate].iter().zip(sums[head]) {
                if let Some(mean) = got.mean() {
                    near(mean, sum / rows[head] as f64, rounding, &what);
                    counted += 1;
                }
            }
        }
        // Annotated pairs: the heaviest key of every third row, and a wrong one of the others.
        let rows = |head: usize| {
            want.rows.iter().enumerate().filter(move |&(at, row)| row.keys > 0 && at / lq % h == head)
        };
        let annotated: Vec<Pair> = rows(0)
            .map(|(at, row)| {
                let key = if at % 3 == 0 { row.largest_key } else { (row.largest_key + 1) % lk };
                Pair { b: at / (h * lq), query: at % lq, key }
            })
            .collect();
        let got = pairs(&attention, q, k, &annotated).unwrap();
        let distinct = |p: &[f64], key: usize| {
            p.iter().enumerate().all(|(j, &x)| j == key || p[key] - x > 4.0 * rounding * p[key])
        };
        if rows(0).all(|(at, row)| distinct(&want.attention.weights[at * lk..][..lk], row.largest_key)) {
            let hits = rows(0).filter(|(at, _)| at % 3 == 0 || lk == 1).count() as u64;
            assert_eq!((got[0].hits, got[0].rows), (hits, annotated.len() as u64), "seed {seed}: {terms:?}");
        }
    }
    assert!(counted > 50, "only {counted} scores");
}

/// Maps block `from` of the input to the output: `factor` times the identity.
fn select(inputs: usize, from: usize, width: usize, outputs: usize, to: usize, factor: f32) -> Linear {
    let mut weights = vec![0.0; inputs * outputs];
    (0..width).for_each(|c| weights[(to + c) * inputs + from + c] = factor);
    Linear::new(&weights, WeightLayout::OutIn, [inputs, outputs], None).unwrap()
}

/// A previous-token head that feeds an induction head (Elhage et al. 2021): the residual stream holds token,
/// position and, behind the first layer, the token before, each one-hot. The tokens are random ones, without
/// repetition, and then the same again.
#[test]
fn an_induction_circuit() {
    (1..=5).for_each(induction_circuit);
}

fn induction_circuit(seed: u32) {
    let (vocabulary, half) = (40, 30);
    let length = 2 * half + 1;
    let keys: Vec<f32> = fill(vocabulary - 1, seed);
    let mut order: Vec<u32> = (1..vocabulary as u32).collect();
    order.sort_by(|&a, &b| keys[a as usize - 1].total_cmp(&keys[b as usize - 1]));
    let ids: Vec<u32> = [0].into_iter().chain(order[..half].repeat(2)).collect();
    let (d, before) = (2 * vocabulary + length, vocabulary + length);
    let mut stream = vec![0.0; length * d];
    for (i, id) in ids.iter().enumerate() {
        stream[i * d + *id as usize] = 1.0;
        stream[i * d + vocabulary + i] = 1.0;
    }
    let config = |d_k| MultiHeadConfig { d_k, d_v: vocabulary, ..MultiHeadConfig::new(d, 1) };
    // Position i - 1: the positions, moved by one.
    let mut back = vec![0.0; length * d];
    (1..length).for_each(|i| back[(i - 1) * d + vocabulary + i] = 30.0);
    let back = Linear::new(&back, WeightLayout::OutIn, [d, length], None).unwrap();
    let previous = MultiHead::new(
        config(length),
        back,
        select(d, vocabulary, length, length, 0, 1.0),
        select(d, 0, vocabulary, vocabulary, 0, 1.0),
        select(vocabulary, 0, vocabulary, d, before, 1.0),
    );
    let induction = MultiHead::new(
        config(vocabulary),
        select(d, 0, vocabulary, vocabulary, 0, 30.0),
        select(d, before, vocabulary, vocabulary, 0, 1.0),
        select(d, 0, vocabulary, vocabulary, 0, 1.0),
        select(vocabulary, 0, vocabulary, d, 0, 1.0),
    );
    let attention = Attention::new().causal();
    let run = |layer: MultiHead, stream: &mut Vec<f32>| {
        let (mut y, mut workspace) = (vec![0.0; stream.len()], Workspace::new());
        let x = Tokens::even(stream, 1, length);
        layer.forward(x, &attention, &mut workspace, &mut y).unwrap();
        let [q, k, v] = layer.projected(x, x, &workspace).unwrap();
        let attention = layer.attention(&attention);
        let mut out = vec![0.0; length * v.shape()[3]];
        let to = ViewMut::blhd(&mut out, [1, length, 1, v.shape()[3]]).unwrap();
        let statistics = attention.run_with_statistics(q, k, v, to, &StatisticsOptions::new()).unwrap();
        let patterns = tokens(&attention, q, k, &ids).unwrap();
        stream.iter_mut().zip(y).for_each(|(x, y)| *x += y);
        (statistics.heads()[0], patterns[0])
    };
    let (statistics, patterns) = run(previous.unwrap().with_scale(1.0), &mut stream);
    assert!(statistics.mean(Statistic::Previous).unwrap() > 0.999);
    assert!(patterns.induction.mean().unwrap() < 0.01);
    let (statistics, patterns) = run(induction.unwrap().with_scale(1.0), &mut stream);
    assert!(patterns.induction.mean().unwrap() > 0.999, "{patterns:?}");
    assert!(patterns.duplicate.mean().unwrap() < 0.001);
    assert_eq!(patterns.induction.rows(), half as u64);
    assert!(statistics.mean(Statistic::Previous).unwrap() < 0.1);
}

#[test]
fn random_weights_are_near_chance() {
    let (length, d) = (120, 32);
    let ids: Vec<u32> = (0..length as u32).map(|i| i % 60).collect();
    let embedding: Vec<f32> = fill(60 * d, 9);
    let x: Vec<f32> = ids.iter().flat_map(|&id| embedding[id as usize * d..][..d].to_vec()).collect();
    let layer = noise_layer(MultiHeadConfig::new(d, 4), 20);
    let (mut y, mut workspace) = (vec![0.0; length * d], Workspace::new());
    let (x, attention) = (Tokens::even(&x, 1, length), Attention::new().causal().scale(0.02));
    layer.forward(x, &attention, &mut workspace, &mut y).unwrap();
    let [q, k, _] = layer.projected(x, x, &workspace).unwrap();
    for patterns in tokens(&attention, q, k, &ids).unwrap() {
        for score in [patterns.induction, patterns.duplicate] {
            let (mean, chance) = (score.mean().unwrap(), score.chance().unwrap());
            near(chance, (61..121).map(|n| 1.0 / f64::from(n)).sum::<f64>() / 60.0, 1e-9, "chance");
            assert!(mean < 3.0 * chance && mean > chance / 3.0, "{mean} beside {chance}");
        }
    }
}

#[test]
fn scores_add_up_and_levels_agree() {
    let (l, d) = (50, 8);
    let x: Vec<f32> = fill(2 * l * d, 3);
    let ids: Vec<u32> = (0..2 * l as u32).map(|i| i * i % 13).collect();
    let both = View::bhld(&x, [2, 1, l, d]).unwrap();
    for level in Level::available() {
        let attention = Attention::new().causal().level(level);
        let whole = tokens(&attention, both, both, &ids).unwrap()[0];
        let one = |b: usize| {
            let x = View::bhld(&x[b * l * d..][..l * d], [1, 1, l, d]).unwrap();
            tokens(&attention, x, x, &ids[b * l..][..l]).unwrap()[0]
        };
        let mut sum = one(0);
        sum.add(&one(1));
        assert_eq!(sum.induction.rows(), whole.induction.rows());
        near(sum.induction.mean().unwrap(), whole.induction.mean().unwrap(), 1e-6, level.name());
        near(sum.duplicate.chance().unwrap(), whole.duplicate.chance().unwrap(), 1e-12, level.name());
    }
}

#[test]
fn several_keys_of_a_query_are_one_row() {
    // Query 0 looks at key 2.
    let (q, k) = ([1.0; 2], [0.0, 0.0, 9.0]);
    let (q, k) = (View::bhld(&q, [1, 1, 2, 1]).unwrap(), View::bhld(&k, [1, 1, 3, 1]).unwrap());
    let pair = |query, key| Pair { b: 0, query, key };
    let score = pairs(&Attention::new(), q, k, &[pair(0, 1), pair(1, 0), pair(0, 2)]).unwrap()[0];
    assert_eq!((score.hits, score.rows, score.share()), (1, 2, Some(0.5)));
    let wrong = pairs(&Attention::new(), q, k, &[pair(0, 1), pair(1, 3)]);
    assert_eq!(wrong, Err(Error::BeyondAxis { argument: "pairs.key", index: 1, got: 3, axis: 3 }));
    let wrong = tokens(&Attention::new(), q, k, &[1, 2]);
    assert_eq!(wrong, Err(Error::Length { argument: "tokens", got: 2, expected: 3 }));
}
