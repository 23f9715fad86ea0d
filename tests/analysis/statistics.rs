//! Statistics of rows, heads and keys.

use headwise::analysis::reference::{self, StatisticsReference};
use headwise::{
    Attention, Element, Error, Level, Position, RowStatistics, Statistic, Statistics, StatisticsOptions,
    Terms, View, ViewMut,
};
use rayon::ThreadPoolBuilder;

use crate::common::fill;
use crate::{cases, largest, near, views};

/// Runs with everything asked for, and returns the output too.
fn run<'a, T: Element>(
    attention: Attention<'a>,
    [q, k, v]: [View<'a, T>; 3],
    special: &[bool],
) -> (Statistics, Vec<T>) {
    let ([b, h, l, _], dv) = (q.shape(), v.shape()[3]);
    let mut out = vec![T::from_f32(f32::NAN); b * h * l * dv];
    let to = ViewMut::bhld(&mut out, [b, h, l, dv]).unwrap();
    let options = StatisticsOptions::new().special(special).rows().received();
    (attention.run_with_statistics(q, k, v, to, &options).unwrap(), out)
}

fn flags(n: usize) -> Vec<bool> {
    (0..n).map(|j| j % 7 == 3 || j % 11 == 0).collect()
}

/// Holds statistics against the reference. `rounding` is that of a weight of 1.
fn check(got: &Statistics, want: &StatisticsReference, [h, lq, lk]: [usize; 3], rounding: f64, what: &str) {
    let rows = got.rows().unwrap();
    assert_eq!(rows.len(), want.rows.len(), "{what}");
    let norm = want.rows.iter().map(|row| row.numbers[Statistic::Norm as usize]).fold(0.0, f64::max);
    for (at, (row, reference)) in rows.iter().zip(&want.rows).enumerate() {
        let what = format!("{what}: row {at}");
        assert_eq!(row.keys as usize, reference.keys, "{what}: visible keys");
        for (statistic, want) in Statistic::ALL.into_iter().zip(reference.numbers) {
            let limit = match statistic {
                Statistic::Entropy => rounding * (reference.keys.max(2) as f64).ln().max(1.0),
                Statistic::Distance | Statistic::AbsoluteDistance => {
                    rounding * reference.numbers[Statistic::AbsoluteDistance as usize].max(1.0)
                }
                Statistic::Norm => rounding * norm.max(1.0),
                _ => rounding,
            };
            near(f64::from(statistic.of(row)), want, limit, &format!("{what}: {statistic}"));
        }
        if reference.keys > 0 {
            let weights = &want.attention.weights[at * lk..][..lk];
            let [got, best] = [row.largest_key as usize, reference.largest_key].map(|key| weights[key]);
            near(got, best, rounding, &format!("{what}: the heaviest key"));
        }
    }
    for (got, want) in got.received().unwrap().iter().zip(&want.received) {
        near(f64::from(*got), *want, rounding * want.max(1.0), what);
    }
    // Heads are the sums of their rows.
    for (head, entry) in got.entries().iter().enumerate() {
        let rows = &want.rows[head * lq..][..lq];
        let seeing = rows.iter().filter(|row| row.keys > 0);
        assert_eq!(entry.rows(Statistic::Entropy), seeing.clone().count() as u64, "{what}");
        let sum: f64 = seeing.map(|row| row.numbers[Statistic::Largest as usize]).sum();
        match entry.mean(Statistic::Largest) {
            Some(mean) => {
                let rows = entry.rows(Statistic::Largest) as f64;
                near(mean, sum / rows, rounding, &format!("{what}: head {}", head % h));
            }
            None => assert_eq!(sum, 0.0, "{what}"),
        }
    }
}

#[test]
fn random_problems() {
    let mut checked = 0;
    for (seed, case) in cases(0..800) {
        let ([q, k, v], terms) = views(&case);
        let ([b, h, lq, _], lk) = (q.shape(), k.shape()[2]);
        if [b, h, lq].contains(&0) {
            continue;
        }
        let special = flags(b * lk);
        let want = reference::statistics(q, k, v, &terms, Some(&special)).unwrap();
        let rounding = 4e-6 + 1e-6 * largest(&want.attention.biased);
        for level in Level::available() {
            let attention = Attention::with_terms(terms).level(level);
            let (got, _) = run(attention, [q, k, v], &special);
            check(&got, &want, [h, lq, lk], rounding, &format!("{level}: seed {seed}: {terms:?}"));
        }
        checked += 1;
    }
    assert!(checked > 60, "only {checked} problems");
}

/// Longer than a block of keys and than the rows that share one, and for decoding; the output is that of the
/// plain call, to the bit where the kernel is the same.
#[test]
fn long_rows() {
    for ([lq, lk, group], causal) in [
        ([300, 300, 1], true),
        ([70, 700, 2], false),
        ([1, 2500, 4], true),
        ([5, 1300, 1], false),
        ([257, 65, 3], true),
    ] {
        let (b, hk, d) = (2, 2, 24);
        let (q, k, v) =
            (fill(b * hk * group * lq * d, 1), fill(b * hk * lk * d, 2), fill(b * hk * lk * d, 3));
        let [q, k, v] = [(&q, hk * group, lq), (&k, hk, lk), (&v, hk, lk)]
            .map(|(x, h, l): (&Vec<f32>, _, _)| View::bhld(x, [b, h, l, d]).unwrap());
        let terms = Terms { causal, left: Some(500), ..Terms::default() };
        let special = flags(b * lk);
        let want = reference::statistics(q, k, v, &terms, Some(&special)).unwrap();
        for level in Level::available().filter(|&level| level == level.exact()) {
            let attention = Attention::with_terms(terms).level(level);
            let (got, out) = run(attention, [q, k, v], &special);
            check(&got, &want, [hk * group, lq, lk], 4e-6, &format!("{level}: {lq} x {lk}"));
            let mut plain = vec![f32::NAN; out.len()];
            let to = ViewMut::bhld(&mut plain, [b, hk * group, lq, d]).unwrap();
            attention.run(q, k, v, to).unwrap();
            let whole_rows = group * lq > 64;
            for (got, plain) in out.iter().zip(&plain) {
                let same =
                    if whole_rows { got.to_bits() == plain.to_bits() } else { (got - plain).abs() < 1e-6 };
                assert!(same, "{level}: {lq} x {lk}: {got} is not {plain}");
            }
        }
    }
}

#[test]
fn half_precision() {
    half_precision_of::<half::f16>();
    half_precision_of::<half::bf16>();
}

fn half_precision_of<T: Element>() {
    let (b, h, lq, lk, d) = (1, 2, 70, 130, 32);
    let (q, k, v) =
        (fill::<T>(b * h * lq * d, 1), fill::<T>(b * h * lk * d, 2), fill::<T>(b * h * lk * d, 3));
    let [q, k, v] = [(&q, lq), (&k, lk), (&v, lk)].map(|(x, l)| View::bhld(x, [b, h, l, d]).unwrap());
    let (terms, special) = (Terms { causal: true, ..Terms::default() }, flags(b * lk));
    let want = reference::statistics(q, k, v, &terms, Some(&special)).unwrap();
    for level in Level::available() {
        let (got, _) = run(Attention::with_terms(terms).level(level), [q, k, v], &special);
        check(&got, &want, [h, lq, lk], 4e-6, &format!("{level}: {}", T::DTYPE));
    }
}

#[test]
fn the_same_bits_on_any_number_of_threads() {
    let (b, h, l, d) = (2, 3, 400, 16);
    let x: Vec<f32> = fill(b * h * l * d, 5);
    let x = View::bhld(&x, [b, h, l, d]).unwrap();
    let special = flags(b * l);
    let on = |threads| {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run(Attention::new().causal(), [x, x, x], &special))
    };
    let one = on(1);
    for threads in [2, 5] {
        assert!(on(threads) == one, "{threads} threads");
    }
}

#[test]
fn equal_weights() {
    let (b, h, l, d) = (1, 2, 100, 4);
    let (zero, v) = (vec![0.0; b * h * l * d], fill::<f32>(b * h * l * d, 3));
    let [q, v] = [&zero, &v].map(|x| View::bhld(x, [b, h, l, d]).unwrap());
    let (got, _) = run(Attention::new().causal(), [q, q, v], &vec![true; b * l]);
    for (i, row) in got.rows().unwrap()[..l].iter().enumerate() {
        let n = (i + 1) as f64;
        let what = format!("row {i}");
        near(f64::from(row.entropy), n.ln(), 1e-6 * n.ln().max(1.0), &what);
        near(f64::from(row.normalised_entropy), if i == 0 { 0.0 } else { 1.0 }, 1e-6, &what);
        near(f64::from(row.distance), i as f64 / 2.0, 1e-5 * n, &what);
        near(f64::from(row.special), 1.0, 1e-6, &what);
        assert_eq!((row.largest_key, row.keys), (0, i as u32 + 1), "the first of equals");
    }
    let head = got.entries()[1];
    assert_eq!((head.rows(Statistic::Entropy), head.rows(Statistic::NormalisedEntropy)), (100, 99));
    assert_eq!((head.rows(Statistic::Previous), head.rows(Statistic::Next)), (99, 99));
    assert_eq!(head.mean(Statistic::Next), Some(0.0), "causal");
    let received: f32 = got.received().unwrap()[..l].iter().sum();
    near(f64::from(received), l as f64, 1e-4, "all weights are received");
}

#[test]
fn batches_add_up() {
    let (b, h, l, d) = (3, 2, 40, 8);
    let x: Vec<f32> = fill(b * h * l * d, 7);
    let lens = [40, 0, 13];
    let view = View::bhld(&x, [b, h, l, d]).unwrap();
    let attention = Attention::new().kv_lens(&lens).q_lens(&lens);
    let (whole, _) = run(attention, [view; 3], &vec![false; b * l]);
    for (head, got) in whole.heads().iter().enumerate() {
        let mut sum = whole.entries()[head];
        sum.add(&whole.entries()[h + head]);
        sum.add(&whole.entries()[2 * h + head]);
        assert_eq!(*got, sum);
        assert_eq!(got.rows(Statistic::Distance), 53, "padding does not count");
        // Each on its own, without padding.
        let mut alone = headwise::HeadStatistics::default();
        for (b, len) in lens.into_iter().enumerate() {
            let x = View::bhld(&x[b * h * l * d..][..h * l * d], [1, h, l, d]).unwrap();
            let lens = [len];
            let attention = Attention::new().kv_lens(&lens).q_lens(&lens);
            alone.add(&run(attention, [x; 3], &vec![false; l]).0.entries()[head]);
        }
        for statistic in Statistic::ALL {
            assert_eq!(got.rows(statistic), alone.rows(statistic));
            near(got.mean(statistic).unwrap(), alone.mean(statistic).unwrap(), 1e-9, statistic.name());
        }
    }
}

#[test]
fn rows_that_see_nothing_do_not_count() {
    let x: Vec<f32> = fill(6 * 4, 1);
    let x = View::bhld(&x, [1, 1, 6, 4]).unwrap();
    let mask: Vec<bool> = (0..36).map(|at| at / 6 % 2 == 0).collect();
    let mask = View::compact(&mask, &[6, 6]).unwrap();
    for sinks in [None, Some([0.5].as_slice())] {
        let terms = Terms { mask: Some(mask), sinks, ..Terms::default() };
        let (got, _) = run(Attention::with_terms(terms), [x, x, x], &[false; 6]);
        assert_eq!(got.entries()[0].rows(Statistic::Entropy), 3);
        assert_eq!(got.rows().unwrap()[1], RowStatistics::default());
        let closed = Attention::with_terms(terms).gates(&[0.0]);
        let (got, _) = run(closed, [x, x, x], &[false; 6]);
        assert_eq!(got.entries()[0].mean(Statistic::Entropy), None);
        assert_eq!(got.received().unwrap(), [0.0; 6]);
    }
}

/// Keys or values of 90 tokens with 8 features, without and with NaN in token 70.
fn with_nan() -> [Vec<f32>; 2] {
    let clean: Vec<f32> = fill(90 * 8, 2);
    let mut dirty = clean.clone();
    dirty[70 * 8..71 * 8].fill(f32::NAN);
    [clean, dirty]
}

/// NaN behind the mask changes nothing; a NaN that is seen is told.
#[test]
fn nan() {
    let data = with_nan();
    let [clean, dirty] = [&data[0], &data[1]].map(|x| View::bhld(x, [1, 1, 90, 8]).unwrap());
    let (q, special) = (clean, [false; 90]);
    for level in Level::available() {
        let attention = Attention::new().causal().level(level);
        let (got, _) = run(attention, [q, dirty, dirty], &special);
        let (want, _) = run(attention, [q, clean, clean], &special);
        let (got, want) = (got.rows().unwrap(), want.rows().unwrap());
        assert_eq!(got[..70], want[..70], "{level}");
        assert!(got[70..].iter().all(|row| row.norm.is_nan() && row.entropy.is_nan()), "{level}");
    }
}

/// Heads and keys are told of the rows that NaN does not reach what they are told without it; rows that it may
/// have leaked into are computed twice and count once.
#[test]
fn nan_stays_with_its_rows() {
    let data = with_nan();
    let [clean, dirty] = [&data[0], &data[1]].map(|x| View::bhld(x, [1, 1, 90, 8]).unwrap());
    for level in Level::available() {
        let before = Attention::new().causal().q_lens(&[70]).level(level);
        let (got, _) = run(before.position(Position::TopLeft), [clean, dirty, dirty], &[false; 90]);
        let (want, _) = run(before.position(Position::TopLeft), [clean, clean, clean], &[false; 90]);
        for statistic in Statistic::ALL {
            assert_eq!(got.entries()[0].rows(statistic), want.entries()[0].rows(statistic), "{level}");
            let [got, want] = [&got, &want].map(|of| of.entries()[0].mean(statistic));
            got.zip(want).inspect(|&(got, want)| near(got, want, 1e-6, &format!("{level}: {statistic}")));
        }
        for (got, want) in got.received().unwrap().iter().zip(want.received().unwrap()) {
            near(f64::from(*got), f64::from(*want), 1e-5, &format!("{level}: received"));
        }
        // Rows 70 to 75 see it, and with it keys 65 to 75.
        let window = Attention::new().causal().window(Some(5), None).level(level);
        let (got, _) = run(window, [clean, dirty, dirty], &[false; 90]);
        let (want, _) = run(window, [clean, clean, clean], &[false; 90]);
        for (key, (got, want)) in got.received().unwrap().iter().zip(want.received().unwrap()).enumerate() {
            if (65..=75).contains(&key) {
                assert!(got.is_nan(), "{level}: key {key}");
            } else {
                near(f64::from(*got), f64::from(*want), 1e-5, &format!("{level}: key {key}"));
            }
        }
    }
}

/// Heads that share a task, without what makes each one of its own, give what they give alone.
#[test]
fn groups() {
    let (b, hk, group, l, d) = (2, 2, 3, 90, 8);
    let (q, k): (Vec<f32>, Vec<f32>) = (fill(b * hk * group * l * d, 1), fill(b * hk * l * d, 2));
    let shape = [b, hk * group, l, d];
    let (q, k) = (View::bhld(&q, shape).unwrap(), View::bhld(&k, [b, hk, l, d]).unwrap());
    let (lens, special, mut out) = ([90, 33], flags(b * l), vec![0.0; b * hk * group * l * d]);
    for level in Level::available() {
        let attention = Attention::new().causal().q_lens(&lens).kv_lens(&lens).level(level);
        let mut run = |options: StatisticsOptions<'_>| {
            let to = ViewMut::bhld(&mut out, shape).unwrap();
            attention.run_with_statistics(q, k, k, to, &options.special(&special)).unwrap()
        };
        let (together, apart) =
            (run(StatisticsOptions::new()), run(StatisticsOptions::new().received().rows()));
        for (head, (got, want)) in together.entries().iter().zip(apart.entries()).enumerate() {
            for statistic in Statistic::ALL {
                assert_eq!(got.rows(statistic), want.rows(statistic), "{level}: head {head}: {statistic}");
                let [got, want] = [got, want].map(|of| of.mean(statistic).unwrap());
                near(got, want, 1e-6 * want.abs().max(1.0), &format!("{level}: head {head}: {statistic}"));
            }
        }
    }
}

/// So many rows that those of a task are more than usual, for its parts to be few.
#[test]
fn many_rows() {
    let (lq, lk, d) = (9000, 70, 4);
    let (q, k): (Vec<f32>, Vec<f32>) = (fill(lq * d, 1), fill(lk * d, 2));
    let (q, k) = (View::bhld(&q, [1, 1, lq, d]).unwrap(), View::bhld(&k, [1, 1, lk, d]).unwrap());
    let special = flags(lk);
    let want = reference::statistics(q, k, k, &Terms::default(), Some(&special)).unwrap();
    let (got, _) = run(Attention::new(), [q, k, k], &special);
    check(&got, &want, [1, lq, lk], 4e-6, "many rows");
}

/// Norms of outputs whose squares leave the range of f32.
#[test]
fn norms_of_any_size() {
    for size in [1e-38, 1e-25, 1.0, 1e25, 1e37] {
        let (zero, v) = (vec![0.0; 20 * 3], vec![size; 20 * 3]);
        let [q, v] = [&zero, &v].map(|x| View::bhld(x, [1, 1, 20, 3]).unwrap());
        for level in Level::available() {
            let (got, _) = run(Attention::new().level(level), [q, q, v], &[false; 20]);
            let (row, mean) = (got.rows().unwrap()[0].norm, got.entries()[0].mean(Statistic::Norm).unwrap());
            for norm in [f64::from(row), mean] {
                near(norm / (f64::from(size) * 3f64.sqrt()), 1.0, 1e-6, &format!("{level}: {size:e}"));
            }
        }
    }
}

/// Packed sequences give what each gives alone.
#[test]
fn packed() {
    let (h, d, starts) = (2, 8, [0, 30, 30, 101]);
    let x: Vec<f32> = fill(101 * h * d, 4);
    let view = View::blhd(&x, [1, 101, h, d]).unwrap().packed(&starts).unwrap();
    let mut out = vec![0.0; x.len()];
    let to = ViewMut::blhd(&mut out, [1, 101, h, d]).unwrap().packed(&starts).unwrap();
    let options = StatisticsOptions::new().rows().received();
    let got = Attention::new().causal().run_with_statistics(view, view, view, to, &options).unwrap();
    for (b, (start, end)) in [(0, 30), (30, 30), (30, 101)].into_iter().enumerate() {
        let x = View::blhd(&x[start * h * d..end * h * d], [1, end - start, h, d]).unwrap();
        let (alone, _) = run(Attention::new().causal(), [x; 3], &vec![false; end - start]);
        for head in 0..h {
            let rows = &got.rows().unwrap()[head * 101 + start..head * 101 + end];
            assert_eq!(rows, &alone.rows().unwrap()[head * (end - start)..][..end - start]);
            for statistic in Statistic::ALL.into_iter().filter(|&s| s != Statistic::Special) {
                assert_eq!(
                    got.entries()[b * h + head].mean(statistic),
                    alone.entries()[head].mean(statistic)
                );
            }
            let received = &got.received().unwrap()[(b * h + head) * 71..][..end - start];
            assert_eq!(received, &alone.received().unwrap()[head * (end - start)..][..end - start]);
        }
    }
}

#[test]
fn errors() {
    let x = [0.0; 12];
    let view = View::bhld(&x, [1, 1, 3, 4]).unwrap();
    let mut out = [0.0; 12];
    let mut run = |special: &[bool]| {
        let to = ViewMut::bhld(&mut out, [1, 1, 3, 4]).unwrap();
        let options = StatisticsOptions::new().special(special);
        Attention::new().run_with_statistics(view, view, view, to, &options)
    };
    assert!(run(&[false; 3]).is_ok());
    assert_eq!(run(&[false; 2]), Err(Error::Length { argument: "special", got: 2, expected: 3 }));
    // Nothing to compute, but more batch entries, or keys, than can be counted.
    for (b, lk) in [(usize::MAX, 3), (0, usize::MAX)] {
        let q = View::<f32>::bhld(&[], [b, 0, 5, 4]).unwrap();
        let k = View::<f32>::bhld(&[], [b, 0, lk, 4]).unwrap();
        let to = ViewMut::bhld(&mut [], [b, 0, 5, 4]).unwrap();
        let options = StatisticsOptions::new().received();
        assert!(Attention::new().run_with_statistics(q, k, k, to, &options).is_ok());
    }
    // Nothing to compute, but more heads than there is memory for.
    let empty = View::<f32>::bhld(&[], [1 << 40, 1 << 20, 0, 4]).unwrap();
    let to = ViewMut::bhld(&mut [], [1 << 40, 1 << 20, 0, 4]).unwrap();
    let got = Attention::new().run_with_statistics(empty, empty, empty, to, &StatisticsOptions::new());
    assert!(matches!(got, Err(Error::TooLarge { argument: "entries", .. })), "{got:?}");
}
