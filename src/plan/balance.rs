//! How evenly tasks fill threads: each free thread takes the next ones, as in a call, and the time of a task is
//! that of its pairs and rows. The measure is the busiest thread's share against the mean.

use headwise_kernels::{Call, Level, Scratch, Terms, View, ViewMut};
use rayon::ThreadPoolBuilder;

use super::{Plan, SIZES, Threads};

/// `[B, Hq, Hk, Lq, Lk]`
type Shape = [usize; 5];

/// The busiest thread's pairs against the mean, if all took the same time for a pair.
fn unevenness([b, hq, hk, lq, lk]: Shape, terms: &Terms<'_>, threads: usize) -> Option<f64> {
    // No features: sizes without memory.
    let nothing: [f32; 0] = [];
    let view = |h, l| View::bhld(&nothing, [b, h, l, 0]).unwrap();
    let call = Call::new(view(hq, lq), view(hk, lk), view(hk, lk), terms).unwrap();
    let plan = Plan::new(&call, Level::Scalar, Threads::Pool).unwrap();
    if plan.why_threads != "the current rayon pool" {
        return None;
    }
    let (mut none, mut parts) = ([0.0f32; 0], Scratch::new());
    let out = ViewMut::bhld(&mut none, [b, hq, lq, 0]).unwrap();
    let tasks = call.split(plan.split, out, None, &mut parts).unwrap();
    assert_eq!(tasks.count(), plan.tasks);
    let mut busy = vec![0; threads];
    for start in (0..tasks.count()).step_by(plan.split.run) {
        let lot: usize =
            (start..tasks.count().min(start + plan.split.run)).map(|number| tasks.pairs(number)).sum();
        *busy.iter_mut().min().unwrap() += lot;
    }
    let (sum, most) = (busy.iter().sum::<usize>(), *busy.iter().max().unwrap());
    let all: usize = (0..b).map(|b| hk * call.pairs(b, 0, call.q_len(b))).sum();
    assert!(sum.abs_diff(all) <= all / 100 + tasks.count(), "{sum} of {all} pairs in tasks");
    Some((most * threads) as f64 / sum as f64)
}

#[test]
fn threads_are_busy_alike() {
    let smallest = SIZES[SIZES.len() - 1].0;
    for threads in [2, 3, 4, 6, 8, 12, 16, 32] {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut all = Vec::new();
        for (heads, group) in [1, 2, 3, 5, 8, 12, 32].into_iter().flat_map(|h| [(h, 1), (h, 4)]) {
            for (b, lq) in [(1, 64), (1, 77), (1, 197), (1, 257), (1, 1000), (1, 4096), (3, 128), (3, 700)] {
                for causal in [false, true] {
                    let terms = Terms { scale: Some(1.0), causal, ..Terms::default() };
                    let shape = [b, heads * group, heads, lq, lq];
                    let Some(uneven) = pool.install(|| unevenness(shape, &terms, threads)) else { continue };
                    // As many rows for each thread as make it sixteen small tasks.
                    let ample = b * heads * group * lq >= 16 * smallest * threads;
                    let what = format!("{shape:?}, causal {causal}, {threads} threads: {uneven:.3}");
                    assert!(!ample || uneven < 1.3, "{what}");
                    all.push(uneven);
                }
            }
        }
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        assert!(mean < 1.0 + 0.012 * threads as f64, "{mean:.3} on {threads} threads");
        println!("{threads} threads, {} shapes: {mean:.3} of the mean on average", all.len());
    }
}

/// Sequences of different lengths in a batch, also few queries on long caches.
#[test]
fn ragged_batches_fill_threads() {
    for threads in [2, 4, 8] {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        for causal in [false, true] {
            let (q_lens, kv_lens) = ([10, 20, 4096, 30], [10, 20, 4096, 30]);
            let terms = Terms { scale: Some(1.0), causal, ..Terms::default() };
            let ragged = Terms { q_lens: Some(&q_lens), kv_lens: Some(&kv_lens), ..terms };
            let uneven = pool.install(|| unevenness([4, 4, 4, 4096, 4096], &ragged, threads)).unwrap();
            assert!(uneven < 1.1, "{uneven} on {threads} threads, causal {causal}");
            let uneven = pool.install(|| unevenness([1, 8, 2, 4, 65536], &terms, threads)).unwrap();
            assert!(uneven < 1.1, "{uneven} on {threads} threads, decoding, causal {causal}");
        }
    }
}
