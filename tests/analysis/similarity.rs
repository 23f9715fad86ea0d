//! Distances between heads, cosines, clusters.

use headwise::analysis::reference::jensen_shannon_divergence;
use headwise::similarity::{HeadMatrix, JensenShannon, OutputCosine, cluster};
use headwise::{Attention, Error, View, reference};

use crate::common::fill;
use crate::{cases, largest, near, views};

#[test]
fn distances_of_random_problems() {
    let mut counted = 0;
    for (seed, case) in cases(2000..2200) {
        let ([q, k, v], terms) = views(&case);
        let ([b, h, lq, _], lk) = (q.shape(), k.shape()[2]);
        if [b, h, lq, lk].contains(&0) {
            continue;
        }
        let got = JensenShannon::new(&Attention::with_terms(terms), q, k).unwrap().distances();
        let want = reference::attention(q, k, v, &terms).unwrap();
        let row = |b: usize, head: usize, i: usize| &want.weights[((b * h + head) * lq + i) * lk..][..lk];
        // The square root of a small divergence loses half of the digits.
        let limit = (1e-6 + 1e-7 * largest(&want.biased)).sqrt();
        for (x, y) in (0..h).flat_map(|x| (0..h).map(move |y| (x, y))) {
            let rows = (0..b).flat_map(|b| (0..lq).map(move |i| (b, i)));
            let pairs = rows.map(|(b, i)| (row(b, x, i), row(b, y, i)));
            let seen = pairs.filter(|(p, q)| p.iter().any(|&p| p > 1e-38) && q.iter().any(|&q| q > 1e-38));
            let distances: Vec<f64> = seen
                .map(|(p, q)| (jensen_shannon_divergence(p, q).max(0.0) / std::f64::consts::LN_2).sqrt())
                .collect();
            let mean = distances.iter().sum::<f64>() / distances.len().max(1) as f64;
            near(got.get(x, y).unwrap(), mean, limit, &format!("seed {seed}: {x}, {y}: {terms:?}"));
            counted += usize::from(x != y && !distances.is_empty());
        }
    }
    assert!(counted > 30, "only {counted} pairs");
}

fn heads(order: &[usize]) -> (Vec<f32>, Vec<f32>, [usize; 4]) {
    let [b, h, l, d] = [2, order.len(), 70, 8];
    let part = |seed: u32| -> Vec<f32> {
        let x: Vec<f32> = fill(b * 5 * l * d, seed).iter().map(|x: &f32| 3.0 * x).collect();
        let head = |b: usize, head: usize| x[(b * 5 + head) * l * d..][..l * d].to_vec();
        (0..b).flat_map(|b| order.iter().flat_map(move |&h| head(b, h)).collect::<Vec<_>>()).collect()
    };
    (part(1), part(2), [b, h, l, d])
}

fn distances(order: &[usize]) -> HeadMatrix {
    let (q, k, shape) = heads(order);
    let (q, k) = (View::bhld(&q, shape).unwrap(), View::bhld(&k, shape).unwrap());
    JensenShannon::new(&Attention::new().causal(), q, k).unwrap().distances()
}

#[test]
fn a_metric_that_follows_its_heads() {
    let all = distances(&[0, 1, 2, 3, 4]);
    let order = [3, 0, 4, 1, 3];
    let moved = distances(&order);
    for (x, a) in order.into_iter().enumerate() {
        for (y, b) in order.into_iter().enumerate() {
            near(moved.get(x, y).unwrap(), all.get(a, b).unwrap(), 1e-12, "permuted");
            assert_eq!(moved.get(x, y), moved.get(y, x));
            assert!(a == b || moved.get(x, y) > Some(0.1));
        }
        assert_eq!(moved.get(x, x), Some(0.0));
    }
    assert_eq!(moved.get(0, 4), Some(0.0), "a head and its copy");
    for (a, b, c) in [(0, 1, 2), (1, 2, 3), (4, 0, 3)] {
        assert!(all.get(a, c).unwrap() <= all.get(a, b).unwrap() + all.get(b, c).unwrap() + 1e-12);
    }
}

#[test]
fn no_key_in_common_is_1_and_batches_add_up() {
    // Head 0 looks at key 0 only, head 1 at key 1 only.
    let k = [900.0, -900.0, -900.0, 900.0];
    let (q, k) = (View::bhld(&[1.0, 1.0], [1, 2, 1, 1]).unwrap(), View::bhld(&k, [1, 2, 2, 1]).unwrap());
    let mut far = JensenShannon::new(&Attention::new(), q, k).unwrap();
    near(far.distances().get(0, 1).unwrap(), 1.0, 1e-6, "disjoint");
    let zero = View::bhld(&[0.0, 0.0], [1, 2, 1, 1]).unwrap();
    far.add(&JensenShannon::new(&Attention::new(), zero, k).unwrap()).unwrap();
    near(far.distances().get(0, 1).unwrap(), 0.5, 1e-6, "the mean of 1 and 0");
    let one = View::bhld(&[0.0], [1, 1, 1, 1]).unwrap();
    let one = JensenShannon::new(&Attention::new(), one, one).unwrap();
    assert_eq!(far.add(&one), Err(Error::Length { argument: "heads", got: 1, expected: 2 }));
}

#[test]
fn cosines() {
    let (b, h, l, d) = (2, 3, 17, 5);
    let out: Vec<f32> = fill(b * h * l * d, 8);
    let got = OutputCosine::new(View::bhld(&out, [b, h, l, d]).unwrap()).cosines();
    let head = |head: usize| -> Vec<f64> {
        (0..b).flat_map(|b| out[(b * h + head) * l * d..][..l * d].iter().map(|&x| f64::from(x))).collect()
    };
    let dot = |x: usize, y: usize| head(x).iter().zip(head(y)).map(|(x, y)| x * y).sum::<f64>();
    for (x, y) in (0..h).flat_map(|x| (0..h).map(move |y| (x, y))) {
        near(got.get(x, y).unwrap(), dot(x, y) / (dot(x, x) * dot(y, y)).sqrt(), 1e-12, "cosine");
    }
    let one =
        |b: usize| OutputCosine::new(View::bhld(&out[b * h * l * d..][..h * l * d], [1, h, l, d]).unwrap());
    let mut sum = one(0);
    sum.add(&one(1)).unwrap();
    near(sum.cosines().get(0, 2).unwrap(), got.get(0, 2).unwrap(), 1e-12, "sum");
    let empty = OutputCosine::new(View::<f32>::bhld(&[], [2, 3, 0, 4]).unwrap()).cosines();
    assert_eq!(empty.values(), [0.0; 9]);
}

/// Average linkage by its definition: mean distances between all heads of two groups, over and over.
#[test]
fn clusters() {
    for seed in 0..20 {
        let n = 1 + seed as usize % 9;
        let noise: Vec<f32> = fill(n * n, seed);
        let distance = |a: usize, b: usize| match a.cmp(&b) {
            std::cmp::Ordering::Equal => 0.0,
            _ => f64::from(noise[a.min(b) * n + a.max(b)]) + 1.0,
        };
        let values = (0..n * n).map(|at| distance(at / n, at % n)).collect();
        let got = cluster(&HeadMatrix::new(n, values).unwrap());
        let mut groups: Vec<(usize, Vec<usize>)> = (0..n).map(|head| (head, vec![head])).collect();
        for (step, merge) in got.merges.iter().enumerate() {
            let mean = |a: &[usize], b: &[usize]| {
                let pairs = a.iter().flat_map(|&a| b.iter().map(move |&b| distance(a, b)));
                pairs.sum::<f64>() / (a.len() * b.len()) as f64
            };
            let all = (0..groups.len()).flat_map(|a| (a + 1..groups.len()).map(move |b| (a, b)));
            let best = all
                .map(|(a, b)| (mean(&groups[a].1, &groups[b].1), a, b))
                .min_by(|x, y| x.0.total_cmp(&y.0))
                .unwrap();
            let (_, more) = groups.remove(best.2);
            let number = merge.groups.map(|group| group);
            assert_eq!(groups[best.1].0, number[0]);
            groups[best.1].1.extend(more);
            groups[best.1].0 = n + step;
            near(merge.distance, best.0, 1e-12, "the smallest mean distance");
            assert_eq!(merge.size, groups[best.1].1.len());
        }
        assert_eq!(groups.len(), 1);
        assert_eq!(got.order, groups[0].1);
    }
    assert!(cluster(&HeadMatrix::new(0, vec![]).unwrap()).order.is_empty());
    let wrong = HeadMatrix::new(2, vec![0.0; 3]);
    assert_eq!(wrong, Err(Error::Length { argument: "values", got: 3, expected: 4 }));
}
