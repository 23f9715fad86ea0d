//! The cache: what it hands to a call is what was appended, whatever its layout, and a model that keeps one
//! computes what it would without.

use headwise::{
    Attention, CacheLayout, CacheShape, Error, KvCache, Partial, Position, View, ViewMut, WhenFull, merge,
    reference,
};

const SHAPE: CacheShape = CacheShape { batch: 2, heads: 3, capacity: 80, d: 8, dv: 5 };
const LAYOUTS: [CacheLayout; 2] = [CacheLayout::HeadMajor, CacheLayout::TokenMajor];

fn wave(from: usize, n: usize) -> Vec<f32> {
    (from..from + n).map(|at| ((at * at) as f32 * 0.37).sin()).collect()
}

/// Keys and values of the tokens of one step, `[B, Hk, n, D]`, token `t` of it being number `first + t`.
fn tokens(shape: CacheShape, first: usize, n: usize) -> [Vec<f32>; 2] {
    [(0, shape.d), (1, shape.dv)].map(|(which, features)| {
        let CacheShape { batch, heads, .. } = shape;
        let row = |row: usize| {
            let (bh, t) = (row / n, first + row % n);
            wave(((bh * 1000 + t) * 2 + which) * 64, features)
        };
        (0..batch * heads * n).flat_map(row).collect()
    })
}

fn bhld(data: &[f32], shape: [usize; 4]) -> View<'_, f32> {
    View::bhld(data, shape).unwrap()
}

fn append(cache: &mut KvCache<f32>, first: usize, n: usize) -> Result<(), Error> {
    let CacheShape { batch, heads, d, dv, .. } = cache.shape();
    let [k, v] = tokens(cache.shape(), first, n);
    cache.append(bhld(&k, [batch, heads, n, d]), bhld(&v, [batch, heads, n, dv]))
}

/// The token numbers that a sequence holds, in order, as its keys tell.
fn held(cache: &KvCache<f32>, b: usize) -> Vec<usize> {
    let CacheShape { heads, d, dv, .. } = cache.shape();
    let number = |at: usize| {
        let find = |t: &usize| {
            (0..heads).all(|h| {
                let [k, v] = [(0, d), (1, dv)]
                    .map(|(which, features)| wave((((b * heads + h) * 1000 + t) * 2 + which) * 64, features));
                (0..d).all(|c| cache.keys().get([b, h, at, c]) == Some(k[c]))
                    && (0..dv).all(|c| cache.values().get([b, h, at, c]) == Some(v[c]))
            })
        };
        (0..300).find(find).expect("a token that was appended")
    };
    (0..cache.lens()[b]).map(number).collect()
}

/// Causal attention of `n` queries at the end of the cache, on `group` query heads a head, and its reference.
fn attend(cache: &KvCache<f32>, first: usize, n: usize, group: usize) -> (Vec<f32>, Vec<f64>) {
    let CacheShape { batch, heads, d, dv, .. } = cache.shape();
    let hq = heads * group;
    // Query number `first + t` of each head, whatever the step it is part of.
    let row = |row: usize| wave(500_000 + (row / n * 1000 + first + row % n) * 64, d);
    let q: Vec<f32> = (0..batch * hq * n).flat_map(row).collect();
    let (q, attention) = (bhld(&q, [batch, hq, n, d]), Attention::new().causal());
    let mut out = vec![f32::NAN; batch * hq * n * dv];
    let view = ViewMut::bhld(&mut out, [batch, hq, n, dv]).unwrap();
    attention.run(q, cache.keys(), cache.values(), view).unwrap();
    let want = reference::attention(q, cache.keys(), cache.values(), attention.terms()).unwrap();
    (out, want.out)
}

fn near(got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (at, (&got, want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(got) - want).abs() <= 1e-6, "[{at}] is {got:e}, not {want:e}");
    }
}

#[test]
fn what_is_appended_is_what_is_held() {
    for layout in LAYOUTS {
        let mut cache = KvCache::with(SHAPE, layout, WhenFull::Refuse).unwrap();
        for (first, n) in [(0, 1), (1, 1), (2, 30), (32, 0), (32, 48)] {
            append(&mut cache, first, n).unwrap();
        }
        assert_eq!(cache.lens(), [80, 80]);
        assert_eq!([held(&cache, 0), held(&cache, 1)], [0, 1].map(|_| (0..80).collect::<Vec<_>>()));
        assert_eq!(cache.bytes(), 2 * 3 * 80 * (8 + 5) * 4);
    }
}

#[test]
fn packed_tokens_go_to_their_sequences() {
    let mut cache = KvCache::new(SHAPE).unwrap();
    let ([k, v], starts) = (tokens(CacheShape { batch: 1, ..SHAPE }, 0, 5), [0, 2, 5]);
    let k = bhld(&k, [1, 3, 5, 8]).packed(&starts).unwrap();
    let v = bhld(&v, [1, 3, 5, 5]).packed(&starts).unwrap();
    cache.append(k, v).unwrap();
    assert_eq!(cache.lens(), [2, 3]);
    assert_eq!(held(&cache, 0), [0, 1]);
    assert_eq!(cache.keys().get([1, 2, 2, 7]), k.get([1, 2, 2, 7]));
    assert_eq!(cache.keys().get([1, 2, 3, 0]), None);
}

#[test]
fn a_full_cache_refuses_and_loses_nothing() {
    let mut cache = KvCache::new(SHAPE).unwrap();
    append(&mut cache, 0, 79).unwrap();
    let error = Error::Full { b: 0, len: 79, more: 2, capacity: 80 };
    assert_eq!(append(&mut cache, 79, 2), Err(error));
    assert_eq!(held(&cache, 1), (0..79).collect::<Vec<_>>());
    append(&mut cache, 79, 1).unwrap();
    assert_eq!(held(&cache, 1), (0..80).collect::<Vec<_>>());
    let wrong = bhld(&[0.0; 48], [2, 3, 1, 8]);
    assert!(matches!(cache.append(wrong, wrong), Err(Error::Shape { argument: "v", .. })));
    assert!(matches!(cache.truncate(2, 0), Err(Error::BeyondAxis { argument: "b", .. })));
}

#[test]
fn a_growing_cache_moves() {
    for layout in LAYOUTS {
        let start = CacheShape { capacity: 0, ..SHAPE };
        let mut cache = KvCache::with(start, layout, WhenFull::Grow).unwrap();
        for step in 0..70 {
            append(&mut cache, step, 1).unwrap();
        }
        assert_eq!(held(&cache, 0), (0..70).collect::<Vec<_>>());
        assert_eq!(cache.shape().capacity, 128);
    }
}

#[test]
fn a_rolling_cache_keeps_the_first_and_the_last() {
    for (layout, keep) in [(LAYOUTS[0], 4), (LAYOUTS[1], 0), (LAYOUTS[0], 79), (LAYOUTS[1], 80)] {
        let mut cache = KvCache::with(SHAPE, layout, WhenFull::Roll { keep }).unwrap();
        let mut all = 0;
        for n in [1, 50, 40, 1, 1, 76, 7, 100] {
            append(&mut cache, all, n).unwrap();
            all += n;
            let last = all.saturating_sub(80 - keep).max(keep);
            let want: Vec<usize> = (0..all.min(keep)).chain(last..all.max(last)).collect();
            let want = if all <= 80 { (0..all).collect() } else { want };
            assert_eq!(held(&cache, 1), want, "keep {keep}, {all} appended");
            assert_eq!(cache.appended(), [all, all]);
            let (out, want) = attend(&cache, 0, 3, 2);
            near(&out, &want);
            let (out, want) = attend(&cache, 0, 40, 1); // the kernel for many rows
            near(&out, &want);
        }
        assert_eq!(cache.truncate(0, 3), Err(Error::Rolled { b: 0, len: 3 }));
        cache.clear();
        append(&mut cache, 0, 2).unwrap();
        assert_eq!(held(&cache, 0), [0, 1]);
    }
}

/// Chunks, single steps and rejected speculation come to what one pass over all tokens gives.
#[test]
fn steps_are_like_one_pass() {
    let n = 70;
    for (layout, group) in [(LAYOUTS[0], 1), (LAYOUTS[1], 4)] {
        let shape = CacheShape { capacity: 72, ..SHAPE };
        let mut whole = KvCache::with(shape, layout, WhenFull::Refuse).unwrap();
        append(&mut whole, 0, n).unwrap();
        let (want, exact) = attend(&whole, 0, n, group);
        near(&want, &exact);

        let mut cache = KvCache::with(shape, layout, WhenFull::Refuse).unwrap();
        let mut first = 0;
        for (step, speculated) in [(33, 0), (17, 2), (1, 0), (1, 4), (1, 1), (17, 0)] {
            append(&mut cache, first, step + speculated).unwrap();
            for b in 0..2 {
                cache.truncate(b, first + step).unwrap();
                cache.truncate(b, 1000).unwrap(); // no less than it has: as it was
            }
            let (out, _) = attend(&cache, first, step, group);
            let row = |x: &[f32], bh: usize, t: usize, n: usize| x[(bh * n + t) * 5..][..5].to_vec();
            for bh in 0..2 * 3 * group {
                for t in 0..step {
                    let want: Vec<f64> = row(&want, bh, first + t, n).into_iter().map(f64::from).collect();
                    near(&row(&out, bh, t, step), &want);
                }
            }
            first += step;
        }
        assert_eq!(first, n);
    }
}

#[test]
fn positions_can_be_given() {
    let mut cache = KvCache::new(SHAPE).unwrap();
    append(&mut cache, 0, 10).unwrap();
    let (q, mut out) = (vec![0.0; 2 * 3 * 8], vec![0.0; 2 * 3 * 5]);
    let attention = Attention::new().causal().position(Position::At(0)); // the query sees the first key only
    let view = ViewMut::bhld(&mut out, [2, 3, 1, 5]).unwrap();
    attention.run(bhld(&q, [2, 3, 1, 8]), cache.keys(), cache.values(), view).unwrap();
    let first = cache.values();
    assert_eq!(out[..5], [0, 1, 2, 3, 4].map(|c| first.get([0, 0, 0, c]).unwrap()));
}

/// Many sequences with one prefix: its keys with all queries at once, each sequence's own apart, then joined.
#[test]
fn a_shared_prefix_is_one_part() {
    let [b, hq, hk, prefix, own, d] = [5, 8, 2, 1100, 3, 16];
    let (q, own_k, shared) = (wave(0, b * hq * d), wave(7, b * hk * own * d), wave(90_000, hk * prefix * d));
    let mut whole = vec![0.0; b * hk * (prefix + own) * d];
    for (bh, whole) in whole.chunks_mut((prefix + own) * d).enumerate() {
        whole[..prefix * d].copy_from_slice(&shared[bh % hk * prefix * d..][..prefix * d]);
        whole[prefix * d..].copy_from_slice(&own_k[bh * own * d..][..own * d]);
    }
    let whole = bhld(&whole, [b, hk, prefix + own, d]);
    let all = Attention::new();
    let want = reference::attention(bhld(&q, [b, hq, 1, d]), whole, whole, all.terms()).unwrap();

    let [mut first, mut second, mut out] = [0; 3].map(|_| vec![0.0; b * hq * d]);
    let [mut by_head, mut lse_first, mut lse_second, mut lse] = [0; 4].map(|_| vec![0.0; b * hq]);
    let (shared, own_k) = (bhld(&shared, [1, hk, prefix, d]), bhld(&own_k, [b, hk, own, d]));
    let into = ViewMut::blhd(&mut first, [1, b, hq, d]).unwrap();
    let tokens = View::blhd(&q, [1, b, hq, d]).unwrap();
    all.run_with_lse(tokens, shared, shared, into, &mut by_head).unwrap();
    (0..b * hq).for_each(|row| lse_first[row] = by_head[row % hq * b + row / hq]);
    let into = ViewMut::bhld(&mut second, [b, hq, 1, d]).unwrap();
    all.run_with_lse(bhld(&q, [b, hq, 1, d]), own_k, own_k, into, &mut lse_second).unwrap();
    let parts = [(&first, &lse_first), (&second, &lse_second)].map(|(out, lse)| Partial { out, lse });
    merge(&parts, &mut out, &mut lse).unwrap();
    near(&out, &want.out);
    near(&lse, &want.lse);
}
