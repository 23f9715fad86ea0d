//! The kernel for few query rows against the reference: sizes, options, and what must not leak. The last two
//! for the other kernel over spans, too.

use headwise::{Level, Position, Terms, reference};

use crate::*;

/// Batch entries, query heads, key/value heads, queries, keys, features.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    b: usize,
    hq: usize,
    hk: usize,
    lq: usize,
    lk: usize,
    d: usize,
    dv: usize,
}

/// Queries, keys and values, and numbers for every term.
struct Problem {
    sizes: Sizes,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    mask: Vec<bool>,
    bias: Vec<f32>,
    slopes: Vec<f32>,
    sinks: Vec<f32>,
    gates: Vec<f32>,
    kv_lens: Vec<usize>,
}

impl Problem {
    fn new(sizes: Sizes) -> Self {
        let Sizes { b, hq, hk, lq, lk, d, dv } = sizes;
        let pairs = b * hq * lq * lk;
        let mut bias = uniform(5, pairs);
        for at in numbers(6, pairs / 4, pairs.max(1)) {
            bias[at] = f32::NEG_INFINITY;
        }
        Self {
            sizes,
            q: uniform(1, b * hq * lq * d),
            k: uniform(2, b * hk * lk * d),
            v: uniform(3, b * hk * lk * dv),
            mask: numbers(4, pairs, 3).into_iter().map(|x| x > 0).collect(),
            bias,
            slopes: headwise::alibi_slopes(hq),
            sinks: uniform(7, hq).into_iter().map(|x| 4.0 * x).collect(),
            gates: (0..hq).map(|h| [0.75, -1.0, 0.0, 0.5][h % 4]).collect(),
            kv_lens: (0..b).map(|b| if b % 2 == 0 { lk - lk / 5 } else { lk / 2 }).collect(),
        }
    }

    fn views(&self) -> [View<'_, f32>; 3] {
        let Sizes { b, hq, hk, lq, lk, d, dv } = self.sizes;
        let (q, k, v) = ([b, hq, lq, d], [b, hk, lk, d], [b, hk, lk, dv]);
        [bhld(&self.q, q), bhld(&self.k, k), bhld(&self.v, v)]
    }

    /// Every term by itself, some in other layouts, then all of them.
    fn kinds(&self) -> Vec<(&'static str, Terms<'_>)> {
        let Sizes { b, hq, lq, lk, .. } = self.sizes;
        let (plain, pairs) = (Terms::default(), [b, hq, lq, lk]);
        let (mask, bias) = (bhld(&self.mask, pairs), bhld(&self.bias, pairs));
        // Keys far apart, and the same for all queries: both are other paths to read them.
        let turned = |[b, h, l, s]: [usize; 4]| [b, h, s, l];
        let (turned_mask, turned_bias) = (
            bhld(&self.mask, turned(pairs)).swap_axes(2, 3),
            bhld(&self.bias, turned(pairs)).swap_axes(2, 3),
        );
        let padding = bhld(&self.mask[..lk], [1, 1, 1, lk]);
        let (slopes, sinks) = (Some(&self.slopes[..]), Some(&self.sinks[..]));
        let (gates, kv_lens) = (Some(&self.gates[..]), Some(&self.kv_lens[..]));
        let all = Terms {
            scale: None,
            softcap: Some(2.0),
            causal: true,
            left: Some(lk / 2 + 3),
            right: None,
            position: Position::BottomRight,
            mask: Some(mask),
            bias: Some(bias),
            kv_lens,
            q_lens: None,
            slopes,
            sinks,
            gates,
        };
        vec![
            ("plain", plain),
            ("scale", Terms { scale: Some(-0.3), ..plain }),
            ("softcap", Terms { softcap: Some(0.5), ..plain }),
            ("causal", Terms { causal: true, ..plain }),
            ("left", Terms { left: Some(lk / 3), ..plain }),
            (
                "window",
                Terms { left: Some(35), right: Some(2), position: Position::At(lk as i64 / 2), ..plain },
            ),
            ("mask", Terms { mask: Some(mask), ..plain }),
            ("mask, turned", Terms { mask: Some(turned_mask), ..plain }),
            ("padding", Terms { mask: Some(padding), ..plain }),
            ("bias", Terms { bias: Some(bias), ..plain }),
            ("bias, turned", Terms { bias: Some(turned_bias), ..plain }),
            ("slopes", Terms { slopes, ..plain }),
            ("sinks", Terms { sinks, ..plain }),
            ("gates", Terms { gates, ..plain }),
            ("kv_lens", Terms { kv_lens, ..plain }),
            ("all", all),
            ("all but causal and window", Terms { causal: false, left: None, ..all }),
        ]
    }
}

/// The answer of the kernel for few rows.
#[track_caller]
fn decoded<'a>(terms: Terms<'a>, level: Level, qkv: [View<'a, f32>; 3]) -> Answer {
    computed("decode", terms, level, qkv)
}

#[track_caller]
fn computed<'a>(kernel: &str, terms: Terms<'a>, level: Level, [q, k, v]: [View<'a, f32>; 3]) -> Answer {
    let plan = plan(terms, level, q, k, v);
    let named =
        ["decode", "prefill"].map(|name| plan.contains(&format!("{name} kernel")) == (name == kernel));
    assert_eq!(named, [true; 2], "{level}: {plan}");
    run(terms, level, q, k, v)
}

const KEYS: [usize; 12] = [0, 1, 31, 32, 33, 1023, 1024, 1025, 2047, 2048, 2049, 5000];

/// On both sides of chunks and spans, with head sizes that fill vectors and such that do not.
#[test]
fn sizes() {
    const FEATURES: [usize; 7] = [1, 8, 40, 64, 72, 128, 200];
    for (x, lk) in KEYS.into_iter().enumerate() {
        for (y, d) in FEATURES.into_iter().enumerate() {
            let dv = FEATURES[(x + 3 * y) % 7];
            let (group, lq) = [(1, 1), (4, 1), (1, 3), (2, 2), (3, 1)][(x + y) % 5];
            let (b, hk) = if lk < 100 { (2, 3) } else { (1, 1) };
            let problem = Problem::new(Sizes { b, hq: hk * group, hk, lq, lk, d, dv });
            let [q, k, v] = problem.views();
            let want = reference::attention(q, k, v, &Terms::default()).unwrap();
            for level in levels() {
                let got = decoded(Terms::default(), level, [q, k, v]);
                near(&format!("{level}, {:?}", problem.sizes), &got, parts(&want));
            }
        }
    }
}

#[test]
fn options_one_by_one_and_together() {
    let some = [(0, 8, 40), (1, 40, 8), (33, 64, 64), (200, 20, 9), (1025, 72, 16), (5000, 16, 24)];
    for (x, (lk, d, dv)) in some.into_iter().enumerate() {
        for (y, (group, lq)) in [(4, 1), (1, 4), (2, 2), (8, 2)].into_iter().enumerate() {
            if lk > 1000 && x % 2 == y % 2 {
                continue; // the reference takes its time
            }
            let kernel = if group == 8 { "prefill" } else { "decode" };
            let problem = Problem::new(Sizes { b: 2, hq: 2 * group, hk: 2, lq, lk, d, dv });
            let [q, k, v] = problem.views();
            for (kind, terms) in problem.kinds() {
                let want = reference::attention(q, k, v, &terms).unwrap();
                for level in levels() {
                    let got = computed(kernel, terms, level, [q, k, v]);
                    near(&format!("{level}, {kind}, {:?}", problem.sizes), &got, parts(&want));
                }
            }
        }
    }
}

/// NaN and infinities in K and V: where a rule hides them from a row, its bits stay; where a row sees them,
/// they reach it, those in V their feature only.
#[test]
fn bad_numbers_reach_the_rows_that_see_them() {
    const FEW: [usize; 5] = [0, 10, 31, 32, 44];
    const MANY: [usize; 5] = [0, 700, 1023, 1024, 1090];
    let kernels = [("decode", 45, FEW, 2), ("decode", 1100, MANY, 2), ("prefill", 1100, MANY, 8)];
    for (kernel, lk, keys, lq) in kernels {
        let (mut hidden, mut seen) = (0, 0);
        let problem = Problem::new(Sizes { b: 2, hq: 4, hk: 2, lq, lk, d: 20, dv: 12 });
        let [q, k, v] = problem.views();
        for (kind, terms) in problem.kinds() {
            let visible = reference::attention(q, k, v, &terms).unwrap().biased;
            for level in levels() {
                let want = computed(kernel, terms, level, [q, k, v]);
                for (&key, x, in_k) in places(&keys) {
                    let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][x];
                    let (mut bad_k, mut bad_v) = (problem.k.clone(), problem.v.clone());
                    for row in (0..4).map(|row| row * lk + key) {
                        *if in_k { &mut bad_k[row * 20 + 7] } else { &mut bad_v[row * 12 + x] } = bad;
                    }
                    let (k, v) = (bhld(&bad_k, k.shape()), bhld(&bad_v, v.shape()));
                    let got = computed(kernel, terms, level, [q, k, v]);
                    for row in 0..8 * lq {
                        let what = format!("{level}, {kernel}, {kind}, {bad} in key {key}, row {row}");
                        let of = |x: &Answer| (x.0[row * 12..][..12].to_vec(), vec![x.1[row]]);
                        let (mut got, want) = (of(&got), of(&want));
                        if visible[row * lk + key] == f64::NEG_INFINITY {
                            hidden += 1;
                        } else if in_k {
                            // An infinite score may be one that counts for nothing.
                            let all = got.0.iter().chain(&got.1).all(|x| x.is_nan());
                            assert!(all || !bad.is_nan(), "{what}: {got:?}");
                            continue;
                        } else {
                            seen += 1;
                            assert!(!got.0[x].is_finite(), "{what}: {got:?}");
                            got.0[x] = want.0[x];
                        }
                        same(&what, &got, &want);
                    }
                }
            }
        }
        assert!(hidden > 1000 && seen > 1000, "{hidden} hidden, {seen} seen");
    }
}

/// Keys to spoil; the number of the spoiler, and of the spoiled feature of V; whether in K, else in V.
fn places(keys: &[usize]) -> impl Iterator<Item = (&usize, usize, bool)> {
    keys.iter().flat_map(|key| (0..6).map(move |n| (key, n / 2, n % 2 == 0)))
}

/// Rows behind `q_lens`, and axes of size 0.
#[test]
fn empty_rows_and_axes() {
    let sizes = Sizes { b: 3, hq: 2, hk: 1, lq: 2, lk: 1100, d: 8, dv: 8 };
    let problem = Problem::new(sizes);
    let terms = Terms { q_lens: Some(&[1, 0, 2]), sinks: Some(&[0.5, -1.0]), ..Terms::default() };
    let [q, k, v] = problem.views();
    let want = reference::attention(q, k, v, &terms).unwrap();
    for level in levels() {
        let got = decoded(terms, level, [q, k, v]);
        near(level.name(), &got, parts(&want));
        for row in [1, 3, 4, 5, 6, 7] {
            assert_eq!((got.1[row], &got.0[row * 8..][..8]), (f32::NEG_INFINITY, &[0.0; 8][..]), "{level}");
        }
        let [q, k, v] =
            [bhld(&problem.q, [0, 2, 2, 8]), bhld(&problem.k, [0, 1, 9, 8]), bhld(&problem.v, [0, 1, 9, 0])];
        assert_eq!(run(Terms::default(), level, q, k, v), (vec![], vec![]), "{level}");
    }
    for (lq, lk, dv) in [(0, 5, 4), (2, 0, 4), (2, 5, 0), (1, 1100, 0)] {
        let problem = Problem::new(Sizes { lq, lk, dv, ..sizes });
        let [q, k, v] = problem.views();
        let terms = Terms { sinks: Some(&[0.5, -1.0]), ..Terms::default() };
        let want = reference::attention(q, k, v, &terms).unwrap();
        for level in levels() {
            near(level.name(), &run(terms, level, q, k, v), parts(&want));
        }
    }
}

/// Found by fuzzing: a visible NaN shows even where all visible scores are -inf, as in the other kernel.
#[test]
fn nan_shows_where_every_score_is_minus_infinity() {
    let (q, k, v) = ([1.0; 20], [f32::NEG_INFINITY; 3], [1.0, f32::NAN, 2.0]);
    let (k, v) = (bhld(&k, [1, 1, 3, 1]), bhld(&v, [1, 1, 3, 1]));
    for level in levels() {
        for rows in [1, 3, 20] {
            let (out, lse) = run(Terms::default(), level, bhld(&q[..rows], [1, 1, rows, 1]), k, v);
            assert!(out.iter().all(|x| x.is_nan()), "{level}: {out:?}");
            assert!(lse.iter().all(|&x| x == f32::NEG_INFINITY), "{level}: {lse:?}");
        }
    }
}

/// A sum of 1 to which a thousand weights of 1.3e-4 are added, all of which would be rounded to one side.
#[test]
fn many_small_weights_beside_a_large_one() {
    let (sinks, v) = ([8.927_736], uniform(1, 1000));
    let terms = Terms { scale: Some(1.0), sinks: Some(&sinks), ..Terms::default() };
    for lq in [1, 4] {
        let qkv = [bhld(&[], [1, 1, lq, 0]), bhld(&[], [1, 1, 1000, 0]), bhld(&v, [1, 1, 1000, 1])];
        let want = reference::attention(qkv[0], qkv[1], qkv[2], &terms).unwrap();
        for level in levels() {
            let (_, lse) = run(terms, level, qkv[0], qkv[1], qkv[2]);
            for (got, want) in lse.iter().zip(&want.lse) {
                assert!((f64::from(*got) - want).abs() < 3e-6, "{level}: {got} is not {want}");
            }
        }
    }
}
