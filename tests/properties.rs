//! What must hold for any problem: attention against itself, said in another way.
//!
//! Two kinds of problems: a `Case` of the differential suite, drawn from numbers that proptest chooses and
//! shrinks, and small problems made here for what needs its tensors taken apart.

#[allow(dead_code, reason = "the other tests use the rest")]
#[path = "../cli/src/case.rs"]
mod case;

use std::fmt;

use case::{Case, Draw, Tensor};
use headwise::{Attention, Level, Partial, Position, Terms, View, ViewMut, merge, reference};
use proptest::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

type Answer = (Vec<f32>, Vec<f32>);

fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(64);
    ProptestConfig { failure_persistence: None, max_shrink_time: 5_000, ..ProptestConfig::with_cases(cases) }
}

/// A case, shown as the numbers it was drawn from.
struct Drawn {
    numbers: Vec<u32>,
    case: Case,
}

impl fmt::Debug for Drawn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (terms, [b, hq, l, s]) = (self.case.terms(), views(&self.case).1);
        write!(f, "{b} x {hq} x {l} x {s}, {terms:?}, from {:?}", self.numbers)
    }
}

/// A case from the numbers given, used again and again, each time turned to look like others (0 stays 0).
fn cases() -> impl Strategy<Value = Drawn> {
    prop::collection::vec(any::<u32>(), 0..300).prop_map(|numbers| {
        let mut drawn = 0;
        let case = Case::draw(&mut Draw(&mut || {
            let (at, turn) = (drawn % numbers.len().max(1), (drawn / numbers.len().max(1)) as u32);
            drawn += 1;
            let number = numbers.get(at).copied().unwrap_or(0);
            number.rotate_left(turn * 7).wrapping_mul(turn.wrapping_mul(0x9e37_79b8) | 1)
        }));
        Drawn { numbers, case }
    })
}

fn levels() -> Vec<Level> {
    Level::available().collect()
}

fn run<'a>(level: Level, q: View<'a, f32>, k: View<'a, f32>, v: View<'a, f32>, terms: &Terms<'a>) -> Answer {
    let ([b, h, l, _], dv) = (q.shape(), v.shape()[3]);
    let (mut out, mut lse) = (vec![f32::NAN; b * h * l * dv], vec![f32::NAN; b * h * l]);
    let view = ViewMut::bhld(&mut out, [b, h, l, dv]).expect("compact");
    let attention = Attention::with_terms(*terms).level(level);
    attention.run_with_lse(q, k, v, view, &mut lse).expect("a valid problem");
    (out, lse)
}

/// The same bits; any NaN is like any other.
fn same(got: &Answer, want: &Answer) -> Result<(), TestCaseError> {
    for (name, got, want) in [("out", &got.0, &want.0), ("lse", &got.1, &want.1)] {
        prop_assert_eq!(got.len(), want.len());
        let differ = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
        if let Some(at) = got.iter().zip(want).position(differ) {
            return Err(TestCaseError::fail(format!("{name}[{at}] is {:e}, not {:e}", got[at], want[at])));
        }
    }
    Ok(())
}

/// The same but for rounding; the values are in [-1, 1].
fn near(got: &Answer, want: &Answer, limit: f32) -> Result<(), TestCaseError> {
    for (name, got, want) in [("out", &got.0, &want.0), ("lse", &got.1, &want.1)] {
        prop_assert_eq!(got.len(), want.len());
        let close = |(a, b): (&f32, &f32)| a == b || (a - b).abs() <= limit * b.abs().max(1.0);
        if let Some(at) = got.iter().zip(want).position(|pair| !close(pair)) {
            return Err(TestCaseError::fail(format!("{name}[{at}] is {:e}, not {:e}", got[at], want[at])));
        }
    }
    Ok(())
}

fn each<T: Copy>(x: View<'_, T>, shape: [usize; 4], f: impl Fn([usize; 4]) -> [usize; 4]) -> Vec<T> {
    let [_, h, l, d] = shape;
    let index = |at: usize| [at / (h * l * d), at / (l * d) % h, at / d % l, at % d];
    (0..shape.iter().product()).map(|at| x.get(f(index(at))).expect("inside")).collect()
}

/// A view of a tensor written out in full.
fn bhld<T>(data: &[T], shape: [usize; 4]) -> View<'_, T> {
    View::bhld(data, shape).expect("compact")
}

/// The tensor of a view that broadcasts to `shape`, written out in full.
fn in_full<T: Copy>(x: View<'_, T>, shape: [usize; 4]) -> Vec<T> {
    each(x.broadcast(shape).expect("checked"), shape, |index| index)
}

/// Offset of each batch entry.
fn offsets(terms: &Terms<'_>, [b, _, l, s]: [usize; 4]) -> Vec<i64> {
    let offset = |b: usize| match terms.position {
        Position::TopLeft => 0,
        Position::At(offset) => offset,
        Position::Each(offsets) => offsets[b],
        _ => terms.kv_lens.map_or(s, |lens| lens[b]) as i64 - terms.q_lens.map_or(l, |lens| lens[b]) as i64,
    };
    (0..b).map(offset).collect()
}

/// The views of a case, and `[B, Hq, Lq, Lk]`.
fn views(case: &Case) -> ([View<'_, f32>; 3], [usize; 4]) {
    let [q, k, v] = [&case.q, &case.k, &case.v].map(Tensor::view);
    let ([b, hq, l, _], s) = (q.shape(), k.shape()[2]);
    ([q, k, v], [b, hq, l, s])
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_level_is_near_the_reference(Drawn { case, .. } in cases()) {
        case.check(&levels()).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn threads_change_no_bit(Drawn { case, .. } in cases()) {
        for level in levels() {
            let want = case.run(level).unwrap();
            for pool in pools() {
                same(&pool.install(|| case.run(level).unwrap()), &want)?;
            }
        }
    }

    /// Causal, window, lengths and -inf in the bias, all written into one mask.
    #[test]
    fn visibility_is_like_a_mask(Drawn { case, .. } in cases()) {
        let ([q, k, v], shape) = views(&case);
        let (terms, offsets) = (case.terms(), offsets(&case.terms(), shape));
        let seen = reference::attention(q, k, v, &Terms { gates: None, ..terms }).unwrap().biased;
        let mask: Vec<bool> = seen.iter().map(|&x| x != f64::NEG_INFINITY).collect();
        let explicit = Terms {
            causal: false,
            left: None,
            right: None,
            position: Position::Each(&offsets),
            mask: Some(bhld(&mask, shape)),
            kv_lens: None,
            ..terms
        };
        // Scores that are -inf without being hidden say nothing of a mask.
        prop_assume!(case.values == case::Values::Unit || case.values == case::Values::Large);
        for level in levels() {
            same(&run(level, q, k, v, &explicit), &run(level, q, k, v, &terms))?;
        }
    }

    #[test]
    fn stretched_masks_and_biases_are_like_full_ones(Drawn { case, .. } in cases()) {
        let ([q, k, v], shape) = views(&case);
        let terms = case.terms();
        let (mask, bias) = (terms.mask.map(|x| in_full(x, shape)), terms.bias.map(|x| in_full(x, shape)));
        let full = Terms {
            mask: mask.as_ref().map(|x| bhld(x, shape)),
            bias: bias.as_ref().map(|x| bhld(x, shape)),
            ..terms
        };
        for level in levels() {
            same(&run(level, q, k, v, &terms), &run(level, q, k, v, &full))?;
        }
    }

    /// To the bit where the same kernel computes both.
    #[test]
    fn grouped_heads_are_like_repeated_ones(Drawn { case, .. } in cases()) {
        let ([q, k, v], [b, hq, l, s]) = views(&case);
        let group = hq / k.shape()[1];
        let repeated = |x: View<'_, f32>| {
            each(x, [b, hq, s, x.shape()[3]], |[b, h, j, c]| [b, h / group, j, c])
        };
        let (all_k, all_v) = (repeated(k), repeated(v));
        let all_k = bhld(&all_k, [b, hq, s, k.shape()[3]]);
        let all_v = bhld(&all_v, [b, hq, s, v.shape()[3]]);
        let few = |level: Level, rows| rows <= level.few_rows().unwrap();
        let lens = case.terms().q_lens.map_or(vec![l], <[usize]>::to_vec);
        let alike = |level: &Level| lens.iter().all(|&l| few(*level, l) == few(*level, group * l));
        for level in levels().into_iter().filter(alike) {
            same(&run(level, q, k, v, &case.terms()), &run(level, q, all_k, all_v, &case.terms()))?;
        }
    }

    #[test]
    fn a_head_with_gate_zero_is_absent(Drawn { case, .. } in cases(), closed in any::<u64>()) {
        let ([q, k, v], [_, hq, l, _]) = views(&case);
        let dv = v.shape()[3];
        let terms = case.terms();
        let mut gates: Vec<f32> = terms.gates.map_or(vec![1.0; hq], <[f32]>::to_vec);
        let closed = |h: usize| closed >> h & 1 == 1;
        (0..hq).filter(|&h| closed(h)).for_each(|h| gates[h] = 0.0);
        for level in levels() {
            let (mut out, mut lse) = run(level, q, k, v, &terms);
            for (row, lse) in lse.iter_mut().enumerate().filter(|(row, _)| closed(row / l % hq)) {
                out[row * dv..][..dv].fill(0.0);
                *lse = f32::NEG_INFINITY;
            }
            same(&run(level, q, k, v, &Terms { gates: Some(&gates), ..terms }), &(out, lse))?;
        }
    }
}

fn pools() -> &'static [ThreadPool] {
    static POOLS: std::sync::OnceLock<Vec<ThreadPool>> = std::sync::OnceLock::new();
    let pool = |threads| ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
    POOLS.get_or_init(|| [1, 2, 3, 8].map(pool).into())
}

/// A small problem whose tensors can be taken apart: one batch entry, scores of a few units.
#[derive(Debug, Clone)]
struct Small {
    /// Hq, Hk, Lq, Lk, D, Dv.
    sizes: [usize; 6],
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    mask: Vec<bool>,
    bias: Vec<f32>,
    softcap: Option<f32>,
    sinks: Option<Vec<f32>>,
}

fn smalls() -> impl Strategy<Value = Small> {
    let sizes = (1..3usize, 1..4usize, 1..40usize, 0..200usize, 1..20usize, 1..20usize);
    sizes.prop_flat_map(|(hk, group, l, s, d, dv)| {
        let hq = hk * group;
        let numbers = |n: usize| prop::collection::vec(-1.0f32..1.0, n);
        let biases = prop_oneof![9 => -3.0f32..3.0, 1 => Just(f32::NEG_INFINITY)];
        (
            (numbers(hq * l * d), numbers(hk * s * d), numbers(hk * s * dv)),
            prop::collection::vec(prop::bool::weighted(0.8), l * s),
            prop::collection::vec(biases, hq * l * s),
            prop::option::of(0.5f32..10.0),
            prop::option::of(numbers(hq)),
        )
            .prop_map(move |((q, k, v), mask, bias, softcap, sinks)| {
                let sizes = [hq, hk, l, s, d, dv];
                Small { sizes, q, k, v, mask, bias, softcap, sinks }
            })
    })
}

impl Small {
    fn q(&self) -> View<'_, f32> {
        let [hq, _, l, _, d, _] = self.sizes;
        bhld(&self.q, [1, hq, l, d])
    }

    fn k(&self) -> View<'_, f32> {
        let [_, hk, _, s, d, _] = self.sizes;
        bhld(&self.k, [1, hk, s, d])
    }

    fn v(&self) -> View<'_, f32> {
        let [_, hk, _, s, _, dv] = self.sizes;
        bhld(&self.v, [1, hk, s, dv])
    }

    fn terms(&self) -> Terms<'_> {
        let [hq, _, l, s, ..] = self.sizes;
        Terms {
            mask: Some(bhld(&self.mask, [1, 1, l, s])),
            bias: Some(bhld(&self.bias, [1, hq, l, s])),
            softcap: self.softcap,
            sinks: self.sinks.as_deref(),
            ..Terms::default()
        }
    }

    /// The part of a tensor that belongs to some keys (its axis 2, or 3), in place.
    fn part<T>(data: &[T], shape: [usize; 4], axis: usize, keys: [usize; 2]) -> View<'_, T> {
        let strides = [shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1].map(|n| n as isize);
        let mut part = shape;
        part[axis] = keys[1] - keys[0];
        View::new(data, keys[0] * strides[axis] as usize, part, strides).expect("inside")
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn the_order_of_the_keys_does_not_matter(small in smalls(), seed in any::<u64>()) {
        let [.., s, _, _] = small.sizes;
        let mut order: Vec<usize> = (0..s).collect();
        order.sort_by_key(|&j| (j as u64 + 1).wrapping_mul(seed | 1));
        let (terms, along_3) = (small.terms(), |[b, h, i, j]: [usize; 4]| [b, h, i, order[j]]);
        let along_2 = |[b, h, j, c]: [usize; 4]| [b, h, order[j], c];
        let k = each(small.k(), small.k().shape(), along_2);
        let v = each(small.v(), small.v().shape(), along_2);
        let (mask, bias) = (terms.mask.unwrap(), terms.bias.unwrap());
        let (some, added) = (each(mask, mask.shape(), along_3), each(bias, bias.shape(), along_3));
        let (k, v) = (bhld(&k, small.k().shape()), bhld(&v, small.v().shape()));
        let (mask, bias) = (Some(bhld(&some, mask.shape())), Some(bhld(&added, bias.shape())));
        for level in levels() {
            let want = run(level, small.q(), small.k(), small.v(), &terms);
            near(&run(level, small.q(), k, v, &Terms { mask, bias, ..terms }), &want, 3e-6)?;
        }
    }

    #[test]
    fn a_constant_on_a_row_does_not_matter(small in smalls(), shift in -20.0f32..20.0) {
        let [_, _, l, s, ..] = small.sizes;
        let shift: Vec<f32> = (0..l).map(|i| (shift * (1.0 + i as f32)) % 20.0).collect();
        let terms = Terms { sinks: None, ..small.terms() };
        let shifted: Vec<f32> = small.bias.iter().enumerate().map(|(at, x)| x + shift[at / s % l]).collect();
        let shape = terms.bias.unwrap().shape();
        for level in levels() {
            let mut want = run(level, small.q(), small.k(), small.v(), &terms);
            want.1.iter_mut().enumerate().for_each(|(row, lse)| *lse += shift[row % l]);
            let shifted = Terms { bias: Some(bhld(&shifted, shape)), ..terms };
            near(&run(level, small.q(), small.k(), small.v(), &shifted), &want, 2e-5)?;
        }
    }

    #[test]
    fn parts_of_the_keys_merge_to_the_whole(
        small in smalls(),
        causal in any::<bool>(),
        left in prop::option::of(0..100usize),
        slope in 0.0f32..0.1,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let [hq, hk, l, s, d, dv] = small.sizes;
        let slopes = vec![slope; hq];
        let terms = Terms { causal, left, slopes: Some(&slopes), ..small.terms() };
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.index(s + 1)).chain([0, s]).collect();
        cuts.sort_unstable();
        for level in levels() {
            let part = |keys: &[usize]| {
                let keys = [keys[0], keys[1]];
                let terms = Terms {
                    position: Position::At(s as i64 - l as i64 - keys[0] as i64),
                    mask: Some(Small::part(&small.mask, [1, 1, l, s], 3, keys)),
                    bias: Some(Small::part(&small.bias, [1, hq, l, s], 3, keys)),
                    ..terms
                };
                let k = Small::part(&small.k, [1, hk, s, d], 2, keys);
                let v = Small::part(&small.v, [1, hk, s, dv], 2, keys);
                run(level, small.q(), k, v, &Terms { sinks: None, ..terms })
            };
            let mut parts: Vec<Answer> = cuts.windows(2).map(part).collect();
            if let Some(sinks) = &small.sinks {
                let lse = (0..hq * l).map(|row| sinks[row / l]).collect(); // a sink alone, a part of its own
                parts.push((vec![0.0; hq * l * dv], lse));
            }
            let parts: Vec<_> = parts.iter().map(|(out, lse)| Partial { out, lse }).collect();
            let mut got = (vec![f32::NAN; hq * l * dv], vec![f32::NAN; hq * l]);
            merge(&parts, &mut got.0, &mut got.1).unwrap();
            near(&got, &run(level, small.q(), small.k(), small.v(), &terms), 5e-6)?;
        }
    }
}
