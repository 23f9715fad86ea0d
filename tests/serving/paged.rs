//! A cache in pages is like one in a piece.

use headwise::{Attention, Stage, Terms};

use crate::*;

const LENS: [usize; 6] = [130, 0, 1, 257, 64, 200];

/// Keys and values of sequences that begin alike: where a page is full of the same tokens, it is shared.
fn cache(heads: usize, [d, dv]: [usize; 2]) -> [Tensor; 2] {
    [(2, d), (3, dv)].map(|(seed, features)| {
        let mut tensor = Tensor::new(seed, &LENS, heads, features, false);
        let token = heads * features;
        for b in [3, 5] {
            tensor.data.copy_within(0..120 * token, tensor.starts[b] * token);
        }
        tensor
    })
}

/// Decoding, speculation and prefill against every size of pages, in both layouts.
#[test]
fn pages_of_every_size() {
    let (b, longest, d, dv) = (LENS.len(), 257, 24, 20);
    for (hq, hk) in [(1, 1), (4, 1), (8, 1), (4, 2)] {
        let [k, v] = &cache(hk, [d, dv]);
        let (flat_k, flat_v) = (k.padded(), v.padded());
        let (flat_k, flat_v) = (bhld(&flat_k, [b, hk, longest, d]), bhld(&flat_v, [b, hk, longest, dv]));
        let pools = [1, 3, 16, 64, 100].map(|size| [k, v].map(|x| Pool::new(x, size, size % 3 == 1)));
        let total: usize = LENS.iter().map(|len| len.div_ceil(3)).sum();
        assert!(pools[1][0].used < total, "some are shared");
        for lq in [1, 2, 3, 40] {
            let q = uniform(1, b * hq * lq * d);
            let q = bhld(&q, [b, hq, lq, d]);
            for causal in [false, true] {
                let terms = Terms { causal, left: causal.then_some(90), ..Terms::default() };
                for level in levels() {
                    let flat = Terms { kv_lens: Some(&LENS), ..terms };
                    let want = run(flat, level, q, flat_k, flat_v);
                    assert!(!want.0.iter().chain(&want.1).any(|x| x.is_nan()));
                    on_threads(|threads| {
                        for [k, v] in &pools {
                            let what = format!("{level}, {threads}, {hq} on {hk}, {lq}, {:?}", k.shape);
                            same(&what, &run(terms, level, q, k.view(), v.view()), &want);
                        }
                    });
                }
            }
        }
    }
}

/// Keys and values may lie in different ways, as long as their lengths agree; and lengths beside the pages
/// shorten them.
#[test]
fn pages_beside_other_layouts() {
    let (b, hq, lq, d, dv) = (LENS.len(), 4, 3, 24, 20);
    let [k, v] = &cache(2, [d, dv]);
    let q = uniform(1, b * hq * lq * d);
    let q = bhld(&q, [b, hq, lq, d]);
    // The token axes must be equally long: as long as the longest sequence.
    let fit = |x: &Tensor, size: usize| {
        let mut pool = Pool::new(x, size, true);
        let rows = pool.table.chunks(pool.table.len() / b);
        pool.table = rows.flat_map(|row| row[..257 / size].to_vec()).collect();
        pool
    };
    let (paged_k, paged_v) = (fit(k, 1), fit(v, 257));
    let shorter = [129, 0, 1, 200, 64, 0];
    for kv_lens in [&LENS, &shorter].map(|lens| Some(&lens[..])) {
        let terms = Terms { kv_lens, causal: true, ..Terms::default() };
        for level in levels() {
            let want = run(terms, level, q, k.packed(), v.packed());
            for (k, v) in
                [(paged_k.view(), v.packed()), (k.packed(), paged_v.view()), (paged_k.view(), paged_v.view())]
            {
                same(level.name(), &run(terms, level, q, k, v), &want);
            }
        }
    }
}

/// The scores over a paged cache, or of packed queries, at every stage.
#[test]
fn scores_over_pages() {
    let (b, hq, hk, lq, d) = (LENS.len(), 4, 2, 5, 24);
    let [k, _] = &cache(hk, [d, 1]);
    let q = &Tensor::new(1, &[5, 1, 2, 3, 0, 5], hq, d, false);
    let (flat_q, flat_k) = (q.padded(), k.padded());
    let (flat_q, flat_k) = (bhld(&flat_q, [b, hq, lq, d]), bhld(&flat_k, [b, hk, 257, d]));
    let (q_lens, paged) = (q.lens(), Pool::new(k, 64, true));
    let wide = paged.view().shape()[2];
    for level in levels() {
        for stage in [Stage::Scaled, Stage::Capped, Stage::Biased, Stage::Weights] {
            let attention = Attention::new().causal().softcap(2.0).level(level);
            let mut want = vec![f32::NAN; b * 3 * 4 * 257];
            let flat = attention.q_lens(&q_lens).kv_lens(&LENS);
            flat.scores(stage, flat_q, flat_k, 1..4, 1..5, &mut want).unwrap();
            let mut got = vec![f32::NAN; b * 3 * 4 * wide];
            attention.scores(stage, q.packed(), paged.view(), 1..4, 1..5, &mut got).unwrap();
            for (got, want) in got.chunks(wide).zip(want.chunks(257)) {
                assert_eq!(got[..257], *want, "{level}, {stage:?}");
                let empty = if stage == Stage::Weights { 0.0 } else { f32::NEG_INFINITY };
                assert!(got[257..].iter().all(|&x| x == empty), "{level}, {stage:?}");
            }
        }
    }
}

/// No pages, as before the first token.
#[test]
fn caches_without_pages() {
    let (table, lens) = ([u32::MAX; 4], [0, 0]);
    let empty = View::<f32>::bhld(&[], [0, 1, 16, 8]).unwrap().paged(&table, &lens).unwrap();
    let q = uniform(1, 2 * 3 * 8);
    let q = bhld(&q, [2, 1, 3, 8]);
    for level in levels() {
        let (out, lse) = run(Terms::default(), level, q, empty, empty);
        assert_eq!((out, lse), (vec![0.0; 48], vec![f32::NEG_INFINITY; 6]), "{level}");
        let none = View::<f32>::bhld(&[], [0, 1, 16, 8]).unwrap().paged(&[], &[]).unwrap();
        let q = View::<f32>::bhld(&[], [0, 1, 3, 8]).unwrap();
        assert!(run(Terms::default(), level, q, none, none).0.is_empty());
    }
}
