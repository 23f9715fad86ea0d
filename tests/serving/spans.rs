//! From one kernel to the other, and spans of keys: what decides by sizes must not show.

use headwise::{Position, Terms, reference};
use rayon::ThreadPoolBuilder;

use crate::*;

/// 1 to 70 rows on a key/value head, as any number of heads with any number of queries: without positions a
/// row is a row, and the reference computes them once.
#[test]
fn any_number_of_rows() {
    let (most, d, dv) = (70, 40, 24);
    for lk in [100, 1100] {
        let (q, k, v) = (uniform(1, most * d), uniform(2, lk * d), uniform(3, lk * dv));
        let (k, v) = (bhld(&k, [1, 1, lk, d]), bhld(&v, [1, 1, lk, dv]));
        let all = bhld(&q, [1, 1, most, d]);
        let causal = Terms { causal: true, left: Some(60), position: Position::TopLeft, ..Terms::default() };
        let want = [Terms::default(), causal].map(|terms| reference::attention(all, k, v, &terms).unwrap());
        for level in levels() {
            let mut kernels = [0; 2];
            for rows in 1..=most {
                for heads in (1..=rows).filter(|heads| rows % heads == 0) {
                    let q = bhld(&q[..rows * d], [1, heads, rows / heads, d]);
                    kernels[usize::from(plan(Terms::default(), level, q, k, v).contains("decode"))] += 1;
                    // With several heads the tokens start again.
                    let kinds = [Terms::default(), causal];
                    for (terms, want) in kinds.into_iter().zip(&want).take(if heads == 1 { 2 } else { 1 }) {
                        let got = run(terms, level, q, k, v);
                        let want = [&want.out[..rows * dv], &want.lse[..rows]];
                        near(&format!("{level}, {heads} heads of {rows} rows, {lk} keys"), &got, want);
                    }
                }
            }
            assert!(kernels.iter().all(|&n| n > 0), "{level}: {kernels:?}");
        }
    }
}

/// Four queries at the end of a cache, all at once and one after the other.
#[test]
fn speculation_is_like_single_steps() {
    let (steps, d) = (4, 64);
    for lk in [5, 33, 1026, 2100] {
        for group in [1, 2, 4, 8] {
            let (q, k, v) = (uniform(1, group * steps * d), uniform(2, lk * d), uniform(3, lk * d));
            let (k, v) = (bhld(&k, [1, 1, lk, d]), bhld(&v, [1, 1, lk, d]));
            let all = bhld(&q, [1, group, steps, d]);
            for level in levels() {
                let causal = Terms { causal: true, ..Terms::default() };
                let got = run(causal, level, all, k, v);
                for step in 0..steps {
                    let q =
                        View::new(&q, step * d, [1, group, 1, d], [0, (steps * d) as isize, 0, 1]).unwrap();
                    let lens = [lk - steps + 1 + step];
                    let want = run(Terms { kv_lens: Some(&lens), ..causal }, level, q, k, v);
                    let rows = (0..group).map(|head| head * steps + step);
                    let out = rows.clone().flat_map(|row| got.0[row * d..][..d].to_vec()).collect();
                    let got = (out, rows.map(|row| got.1[row]).collect());
                    let [out, lse] =
                        [&want.0, &want.1].map(|x| x.iter().map(|&x| x.into()).collect::<Vec<_>>());
                    near(&format!("{level}, {lk} keys, {group} heads, step {step}"), &got, [&out, &lse]);
                }
            }
        }
    }
}

/// Few heads over long caches: on many threads the spans are tasks of their own, on one they are not.
#[test]
fn spans_apart_are_like_spans_together() {
    const LENS: [usize; 4] = [5000, 1, 0, 2100];
    let (hk, d, dv) = (1, 72, 40);
    let [k, v] = [(2, d), (3, dv)].map(|(seed, features)| Tensor::new(seed, &LENS, hk, features, true));
    let (paged_k, paged_v) = (Pool::new(&k, 16, true), Pool::new(&v, 16, false));
    let many = [2, 8].map(|threads| ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
    // Rows of the one kernel, of the other with spans, and without; and each batch entry with its own.
    for (group, lens) in [(4, [1; 4]), (16, [1; 4]), (4, [16, 0, 3, 1]), (3, [33, 1, 5, 21])] {
        let q = &Tensor::new(1, &lens, hk * group, d, false);
        let slopes = vec![0.01; group];
        let sinks = uniform(5, group);
        let gates: Vec<f32> = (0..group).map(|h| h as f32 - 1.0).collect();
        let causal = Terms { causal: true, ..Terms::default() };
        let kinds = [
            Terms::default(),
            Terms { left: Some(2500), ..causal },
            Terms {
                softcap: Some(3.0),
                slopes: Some(&slopes),
                sinks: Some(&sinks),
                gates: Some(&gates),
                ..causal
            },
            Terms { kv_lens: Some(&[4500, 1, 0, 1025]), ..causal },
        ];
        for terms in kinds {
            for level in levels() {
                let packed = || run_packed(terms, level, q, k.packed(), v.packed());
                let want = pools()[0].install(packed);
                same_each(level.name(), &run_alone(&terms, level, [q, &k, &v]), &want);
                for pool in &many {
                    let what = format!("{level}, {group} x {lens:?}, {} threads", pool.current_num_threads());
                    let plan = pool.install(|| plan(terms, level, q.packed(), k.packed(), v.packed()));
                    assert!(plan.contains("span of keys on"), "{what}: {plan}");
                    same_each(&what, &pool.install(packed), &want);
                    let paged = || run_packed(terms, level, q, paged_k.view(), paged_v.view());
                    same_each(&what, &pool.install(paged), &want);
                    // With another call beside it.
                    let (one, other) = pool.install(|| rayon::join(packed, paged));
                    same_each(&what, &one, &want);
                    same_each(&what, &other, &want);
                }
                let alone = pools()[0].install(|| plan(terms, level, q.packed(), k.packed(), v.packed()));
                assert!(!alone.contains("span"), "{alone}");
            }
        }
    }
}

/// Plain views, whose batch entries have the same lengths, and padded ones.
#[test]
fn plain_caches_on_any_number_of_threads() {
    let (lk, d) = (5000, 64);
    let (k, v) = (uniform(2, 2 * lk * d), uniform(3, 2 * lk * d));
    let (k, v) = (bhld(&k, [2, 1, lk, d]), bhld(&v, [2, 1, lk, d]));
    for (group, lq) in [(1, 4), (8, 1), (8, 5), (1, 64), (1, 65), (5, 13)] {
        let q = uniform(1, 2 * group * lq * d);
        let q = bhld(&q, [2, group, lq, d]);
        let lens = [lq, lq / 2];
        for terms in [
            Terms::default(),
            Terms { q_lens: Some(&lens), kv_lens: Some(&[5000, 3000]), causal: true, ..Terms::default() },
        ] {
            for level in levels() {
                let want = pools()[0].install(|| run(terms, level, q, k, v));
                on_threads(|threads| {
                    let what = format!("{level}, {group} x {lq}, {threads}");
                    same(&what, &run(terms, level, q, k, v), &want);
                });
            }
        }
    }
}

/// Spans grow where there are very many keys: it is the valid ones that count, not their axis.
#[test]
fn the_axis_moves_no_span() {
    let (lk, d, lens) = (40_000, 8, [40_000, 2000]);
    let (k, v) = (uniform(2, 2 * lk * d), uniform(3, 2 * lk * d));
    for group in [2, 20] {
        let q = uniform(1, 2 * group * d);
        let terms = Terms { kv_lens: Some(&lens), ..Terms::default() };
        let all = [bhld(&k, [2, 1, lk, d]), bhld(&v, [2, 1, lk, d])];
        let one = |b: usize| {
            let from = b * lk * d..(b * lk + lens[b]) * d;
            [bhld(&k[from.clone()], [1, 1, lens[b], d]), bhld(&v[from], [1, 1, lens[b], d])]
        };
        for level in levels() {
            let got = run(terms, level, bhld(&q, [2, group, 1, d]), all[0], all[1]);
            for (b, (out, lse)) in got.0.chunks(group * d).zip(got.1.chunks(group)).enumerate() {
                let ([k, v], q) = (one(b), bhld(&q[b * group * d..][..group * d], [1, group, 1, d]));
                let what = format!("{level}, {group} rows, {} keys", lens[b]);
                let got = (out.to_vec(), lse.to_vec());
                same(&what, &got, &run(Terms::default(), level, q, k, v));
                if level == Level::detect() {
                    near(&what, &got, parts(&reference::attention(q, k, v, &Terms::default()).unwrap()));
                }
            }
        }
    }
}
