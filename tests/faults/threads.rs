//! Lengths and threads: many keys, any number of threads.

use headwise::{Attention, Level, Plan};
use rayon::ThreadPoolBuilder;

use crate::*;

/// pytorch/pytorch #163588: sums over many keys drifted.
#[test]
fn means_over_many_keys_do_not_drift() {
    for s in [4096, 65536] {
        let (q, k) = ([0.0; 8], vec![0.0; s * 8]);
        let v: Vec<f32> = (0..s).map(|j| 1.0 + (j % 2) as f32 / 128.0).collect();
        let (q, k, v) = (bhld(&q, [1, 1, 1, 8]), bhld(&k, [1, 1, s, 8]), bhld(&v, [1, 1, s, 1]));
        let seen = [s * 58 / 100 / 2 * 2];
        for attention in [Attention::new(), Attention::new().kv_lens(&seen)] {
            for level in levels() {
                let out = run(attention, level, q, k, v).0[0];
                assert!((f64::from(out) - 1.00390625).abs() <= 2e-6, "{level}, {s} keys: {out}");
            }
        }
    }
}

/// pytorch/pytorch #176091: wrong numbers as soon as the work was shared: 32 rows fine, 33 wrong.
#[test]
fn any_number_of_threads_gives_the_same_bits() {
    // The last one is large enough to be shared, whatever the plan thinks of small ones.
    for [h, l, s] in [[1, 31, 31], [1, 32, 32], [1, 33, 33], [1, 64, 64], [1, 65, 65], [3, 150, 400]] {
        let d = 64;
        let (q, k, v) = (wave(0.37, 0.1, h * l * d), wave(0.23, 0.2, h * s * d), wave(0.31, 0.3, h * s * d));
        let (q, k, v) = (bhld(&q, [1, h, l, d]), bhld(&k, [1, h, s, d]), bhld(&v, [1, h, s, d]));
        let reference = reference::attention(q, k, v, Attention::new().terms()).unwrap();
        for level in levels() {
            let want = run(Attention::new().sequential(), level, q, k, v);
            let out: Vec<f64> = want.0.iter().map(|&x| x.into()).collect();
            near(level.name(), &out, &reference.out, 1e-5);
            for threads in [1, 2, 3, 4, 8] {
                let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let what = format!("{level}, {l} rows, {threads} threads");
                for _ in 0..20 {
                    same(&what, &pool.install(|| run(Attention::new(), level, q, k, v)), &want);
                }
                // Inside another pool, with other calls beside it.
                let outer = ThreadPoolBuilder::new().num_threads(2).build().unwrap();
                let inside = || pool.install(|| run(Attention::new(), level, q, k, v));
                let (one, other) = outer.install(|| rayon::join(inside, inside));
                same(&what, &one, &want);
                same(&what, &other, &want);
            }
        }
    }
}

/// The same kind: with three query heads on a key/value head the work is cut at other places for other
/// numbers of threads, and NaN behind the causal edge has some rows computed once more.
#[test]
fn rows_computed_twice_do_not_depend_on_threads() {
    let [h, l, d] = [3, 300, 32];
    let (q, k) = (wave(0.37, 0.1, h * l * d), wave(0.23, 0.2, l * d));
    let (q, k) = (bhld(&q, [1, h, l, d]), bhld(&k, [1, 1, l, d]));
    for level in levels() {
        for bad in (1..l).step_by(37) {
            let mut v = wave(0.31, 0.3, l * d);
            v[bad * d] = f32::NAN;
            let v = bhld(&v, [1, 1, l, d]);
            let want = run(Attention::new().causal().sequential(), level, q, k, v);
            for threads in [2, 3, 8] {
                let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let got = pool.install(|| run(Attention::new().causal(), level, q, k, v));
                same(format!("{level}, {threads} threads, NaN in key {bad}"), &got, &want);
            }
        }
    }
}

/// The plan says how many threads there are, so that the test above knows that it tests something.
#[test]
fn large_calls_are_shared() {
    let x = vec![0.0; 3 * 400 * 64];
    let x = bhld(&x, [1, 3, 400, 64]);
    let pool = ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let plan = |attention: Attention<'_>| -> Plan { pool.install(|| attention.plan(x, x, x)).unwrap() };
    assert!(plan(Attention::new()).describe().contains("on 3 threads"));
    assert!(plan(Attention::new().sequential()).describe().contains("on 1 threads"));
    assert_eq!(plan(Attention::new().level(Level::Scalar)).level(), Level::Scalar);
}
