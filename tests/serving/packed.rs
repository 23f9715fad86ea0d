//! Sequences side by side are computed as if each were alone.

use headwise::{Attention, Position, Terms, reference};

use crate::*;

/// Queries and keys of each sequence: both kernels, one span and several, next to each other.
const MIXED: [[usize; 9]; 2] = [[1, 3, 7, 40, 33, 1, 0, 2, 100], [1100, 0, 7, 300, 33, 1, 5, 2100, 1500]];

fn tensors([q, k]: [&[usize]; 2], [hq, hk, d, dv]: [usize; 4], head_major: bool) -> [Tensor; 3] {
    let tensor = |seed, lens, heads, features| Tensor::new(seed, lens, heads, features, head_major);
    [tensor(1, q, hq, d), tensor(2, k, hk, d), tensor(3, k, hk, dv)]
}

/// Some terms with their numbers, for four query heads.
const SLOPES: [f32; 4] = [0.25, 0.01, 0.0, -0.002];
const SINKS: [f32; 4] = [0.5, -3.0, f32::NEG_INFINITY, 4.0];
const GATES: [f32; 4] = [0.5, 0.0, -1.0, 2.0];

fn kinds() -> [Terms<'static>; 9] {
    let (plain, causal) = (Terms::default(), Terms { causal: true, ..Terms::default() });
    let window = Terms { left: Some(70), right: Some(3), ..plain };
    let (slopes, sinks, gates) = (Some(&SLOPES[..]), Some(&SINKS[..]), Some(&GATES[..]));
    [
        plain,
        causal,
        window,
        Terms { position: Position::TopLeft, ..causal },
        Terms { position: Position::Each(&[1000, 5, -3, 0, 20, 0, 7, 1500, -50]), ..causal },
        Terms { slopes, ..plain },
        Terms { sinks, ..plain },
        Terms { gates, ..plain },
        Terms { left: Some(1200), softcap: Some(3.0), slopes, sinks, gates, ..causal },
    ]
}

/// Queries, keys and values packed; or the keys and values in pages.
#[test]
fn packed_sequences_are_like_single_ones() {
    for head_major in [false, true] {
        let [q, k, v] = &tensors(MIXED.each_ref().map(|lens| &lens[..]), [4, 2, 24, 20], head_major);
        let size = if head_major { 16 } else { 64 };
        let (paged_k, paged_v) = (Pool::new(k, size, !head_major), Pool::new(v, size, head_major));
        for (kind, terms) in kinds().into_iter().enumerate() {
            for level in levels() {
                let want = run_alone(&terms, level, [q, k, v]);
                on_threads(|threads| {
                    let what = format!("{level}, {threads}, kind {kind}, {head_major}");
                    let got = run_packed(terms, level, q, k.packed(), v.packed());
                    same_each(&what, &got, &want);
                    let got = run_packed(terms, level, q, paged_k.view(), paged_v.view());
                    same_each(&format!("{what}, paged"), &got, &want);
                });
            }
        }
        let plan =
            pools()[2].install(|| plan(kinds()[0], Level::detect(), q.packed(), k.packed(), v.packed()));
        for part in ["prefill kernel", "decode kernel", "3 threads"] {
            assert!(plan.contains(part), "{plan}");
        }
    }
}

/// Prompts of a batch: as many queries as keys.
#[test]
fn packed_prompts() {
    let lens = &[1, 0, 7, 300, 33, 1, 1500][..];
    let [q, k, v] = &tensors([lens, lens], [2, 1, 8, 12], false);
    let terms = Terms {
        causal: true,
        left: Some(400),
        slopes: Some(&SLOPES[..2]),
        sinks: Some(&SINKS[..2]),
        gates: Some(&[0.5, 2.0]),
        ..Terms::default()
    };
    for level in levels() {
        let want = run_alone(&terms, level, [q, k, v]);
        on_threads(|threads| {
            let what = format!("{level}, {threads}");
            same_each(&what, &run_packed(terms, level, q, k.packed(), v.packed()), &want);
        });
    }
}

/// Lengths given beside packed views count from the start of each sequence; what lies behind them is not
/// read, rows behind them are empty.
#[test]
fn lengths_beside_packed_views() {
    let [q, mut k, mut v] = tensors(MIXED.each_ref().map(|lens| &lens[..]), [4, 2, 24, 20], false);
    let (q_lens, kv_lens) = ([1, 1, 7, 9, 0, 1, 0, 2, 80], [1050, 0, 3, 0, 33, 1, 5, 2099, 1024]);
    for x in [&mut k, &mut v] {
        let token = x.heads * x.features;
        for (pair, len) in x.starts.windows(2).zip(kv_lens) {
            x.data[(pair[0] + len) * token..pair[1] * token].fill(f32::NAN);
        }
    }
    for terms in kinds() {
        let terms = Terms { q_lens: Some(&q_lens), kv_lens: Some(&kv_lens), ..terms };
        for level in levels() {
            let want = run_alone(&terms, level, [&q, &k, &v]);
            for (b, (out, lse)) in want.iter().enumerate() {
                assert!(out.iter().all(|x| x.is_finite()) && !lse.iter().any(|x| x.is_nan()));
                let len = q.lens()[b];
                for row in (0..4 * len).filter(|row| row % len >= q_lens[b]) {
                    assert_eq!((out[row * 20], lse[row]), (0.0, f32::NEG_INFINITY));
                }
            }
            on_threads(|threads| {
                let got = run_packed(terms, level, &q, k.packed(), v.packed());
                same_each(&format!("{level}, {threads}, {terms:?}"), &got, &want);
            });
        }
    }
}

/// Plain tensors padded to the longest sequence, with lengths: all padded, and only the keys and values.
#[test]
fn padded_sequences_are_like_packed_ones() {
    let [q, k, v] = &tensors(MIXED.each_ref().map(|lens| &lens[..]), [4, 2, 24, 20], true);
    let [padded_q, padded_k, padded_v] = [q, k, v].map(Tensor::padded);
    let (b, lq, lk) = (MIXED[0].len(), q.longest(), k.longest());
    let (all_k, all_v) = (bhld(&padded_k, [b, 2, lk, 24]), bhld(&padded_v, [b, 2, lk, 20]));
    let all_q = bhld(&padded_q, [b, 4, lq, 24]);
    for terms in kinds() {
        let (q_lens, kv_lens) = (Some(&MIXED[0][..]), Some(&MIXED[1][..]));
        for level in levels() {
            let want = run_packed(terms, level, q, k.packed(), v.packed());
            on_threads(|threads| {
                let what = format!("{level}, {threads}, {terms:?}");
                same_each(&what, &run_packed(Terms { kv_lens, ..terms }, level, q, all_k, all_v), &want);
                let all = run(Terms { q_lens, kv_lens, ..terms }, level, all_q, all_k, all_v);
                let rows = |b: usize| (0..4).flat_map(move |h| (0..lq).map(move |i| (b * 4 + h) * lq + i));
                for (b, want) in want.iter().enumerate() {
                    let (valid, behind): (Vec<_>, Vec<_>) = rows(b).partition(|row| row % lq < q.lens()[b]);
                    let out = valid.iter().flat_map(|row| &all.0[row * 20..][..20]).copied().collect();
                    let lse = valid.iter().map(|&row| all.1[row]).collect();
                    same(&format!("{what}, sequence {b}"), &(out, lse), want);
                    for row in behind {
                        assert_eq!(all.0[row * 20..][..20], [0.0; 20], "{what}, sequence {b}");
                        assert_eq!(all.1[row], f32::NEG_INFINITY, "{what}, sequence {b}");
                    }
                }
            });
        }
    }
}

/// Masks and biases stay padded: `[B, Hq, longest, longest]`.
#[test]
fn masks_beside_packed_views() {
    let [q, k, v] = &tensors(MIXED.each_ref().map(|lens| &lens[..]), [4, 2, 24, 20], false);
    let (b, lq, lk) = (MIXED[0].len(), q.longest(), k.longest());
    let mask: Vec<bool> = numbers(4, b * lq * lk, 3).into_iter().map(|x| x > 0).collect();
    let mut bias = uniform(5, 4 * lq * lk);
    bias.iter_mut().step_by(7).for_each(|x| *x = f32::NEG_INFINITY);
    let all = Terms {
        mask: Some(bhld(&mask, [b, 1, lq, lk])),
        bias: Some(bhld(&bias, [1, 4, lq, lk])),
        ..Terms::default()
    };
    let row = lk as isize;
    for level in levels() {
        let one = |b: usize| {
            let (l, s) = (MIXED[0][b], MIXED[1][b]);
            let mask = View::new(&mask, b * lq * lk, [1, 1, l, s], [0, 0, row, 1]).unwrap();
            let bias = View::new(&bias, 0, [1, 4, l, s], [0, lq as isize * row, row, 1]).unwrap();
            let terms = Terms { mask: Some(mask), bias: Some(bias), ..all };
            run(terms, level, q.one(b), k.one(b), v.one(b))
        };
        let want: Vec<Answer> = (0..b).map(one).collect();
        on_threads(|threads| {
            let got = run_packed(all, level, q, k.packed(), v.packed());
            same_each(&format!("{level}, {threads}"), &got, &want);
        });
    }
}

/// Tokens before the first sequence and behind the last one are neither read nor written.
#[test]
fn sequences_may_lie_anywhere() {
    let (starts, total, [hq, d, dv]) = ([3, 5, 5, 25], 30, [2, 8, 8]);
    let (mut q, k, v) = (uniform(1, total * hq * d), uniform(2, total * d), uniform(3, total * dv));
    for token in (0..3).chain(25..30) {
        q[token * hq * d..][..hq * d].fill(f32::NAN);
    }
    let (k, v) = (bhld(&k, [1, 1, total, d]), bhld(&v, [1, 1, total, dv]));
    let (k, v) = (k.packed(&starts).unwrap(), v.packed(&starts).unwrap());
    let (q, inside) = (View::blhd(&q, [1, total, hq, d]).unwrap(), 3..25);
    for level in levels() {
        let (mut out, mut lse) = (vec![7.0; total * hq * dv], vec![7.0; hq * 25]);
        let view = ViewMut::blhd(&mut out, [1, total, hq, dv]).unwrap().packed(&starts).unwrap();
        let attention = Attention::new().causal().level(level);
        attention.run_with_lse(q.packed(&starts).unwrap(), k, v, view, &mut lse).unwrap();
        for (at, &x) in out.iter().enumerate() {
            assert_eq!(x != 7.0, inside.contains(&(at / (hq * dv))), "{level}: out[{at}] is {x}");
        }
        for (at, &x) in lse.iter().enumerate() {
            assert_eq!(x != 7.0, inside.contains(&(at % 25)), "{level}: lse[{at}] is {x}");
        }
    }
}

/// The reference reads packed and paged views, too; its rows are padded.
#[test]
fn the_reference_of_packed_sequences() {
    let [q, k, v] = &tensors([&[2, 0, 3, 1], &[5, 4, 0, 9]], [4, 2, 8, 6], false);
    let (paged_k, paged_v) = (Pool::new(k, 2, false), Pool::new(v, 2, true));
    let terms = Terms { sinks: Some(&SINKS), ..Terms::default() };
    for (k_view, v_view) in [(k.packed(), v.packed()), (paged_k.view(), paged_v.view())] {
        let all = reference::attention(q.packed(), k_view, v_view, &terms).unwrap();
        assert_eq!(all.lse.len(), 4 * 4 * 3);
        for row in 0..4 * 4 * 3 {
            let (b, h, i) = (row / 12, row / 3 % 4, row % 3);
            let (out, lse) = (&all.out[row * 6..][..6], all.lse[row]);
            if i >= q.lens()[b] {
                assert_eq!((out, lse), (&[0.0; 6][..], f64::NEG_INFINITY));
                continue;
            }
            let one = reference::attention(q.one(b), k.one(b), v.one(b), &terms).unwrap();
            let row = h * q.lens()[b] + i;
            assert_eq!((out, lse), (&one.out[row * 6..][..6], one.lse[row]), "{b}, {h}, {i}");
        }
    }
}

/// No sequences, or none with a token.
#[test]
fn nothing_is_packed() {
    for lens in [&[][..], &[0], &[0, 0, 0]] {
        let [q, k, v] = &tensors([lens, lens], [4, 2, 8, 8], false);
        for level in levels() {
            let got = run_packed(Terms::default(), level, q, k.packed(), v.packed());
            assert!(got.len() == lens.len() && got.iter().all(|(out, lse)| out.is_empty() && lse.is_empty()));
        }
    }
}
