//! Half precision: every level against the reference on the rounded inputs, within half a unit of the
//! output's last place and 2e-5, and where weights are rounded to bf16 within 2 units of the largest output;
//! rounding, subnormals, NaN, scores and sums beyond what a half can hold.

mod common;

use common::fill;
use half::{bf16, f16};
use headwise::{Attention, DType, Element, Level, Position, Precision, Terms, View, ViewMut, reference};

/// A type with the number of bits behind its leading one, and the exponent of its smallest number.
trait Half: Element {
    const BITS: i32;
    const LEAST: i32;
    /// What lies between two neighbours at `x`.
    fn ulp(x: f64) -> f64 {
        2f64.powi((x.abs().log2().floor() as i32).saturating_sub(Self::BITS).max(Self::LEAST))
    }
}

impl Half for f16 {
    const BITS: i32 = 10;
    const LEAST: i32 = -24;
}

impl Half for bf16 {
    const BITS: i32 = 7;
    const LEAST: i32 = -133;
}

/// One head: `lq` queries and some keys and values.
fn attend<T: Element>(attention: Attention<'_>, q: &[T], k: &[T], v: &[T], lq: usize, lk: usize) -> Vec<T> {
    let (d, dv) = (q.len() / lq, v.len() / lk);
    let mut out = vec![T::from_f32(f32::NAN); lq * dv];
    let (q, k) = (View::bhld(q, [1, 1, lq, d]).unwrap(), View::bhld(k, [1, 1, lk, d]).unwrap());
    let v = View::bhld(v, [1, 1, lk, dv]).unwrap();
    attention.run(q, k, v, ViewMut::bhld(&mut out, [1, 1, lq, dv]).unwrap()).unwrap();
    out
}

fn every_pair_of_lengths<T: Half>(precision: Precision) {
    let lengths = [0, 1, 2, 15, 17, 33, 64, 65, 130, 257];
    let mut turn = 0;
    for lq in lengths {
        for lk in lengths {
            turn += 1;
            let [d, dv] = [turn * 37 % 130 + 1, turn * 91 % 130 + 1];
            let [hk, group] = [1 + turn % 2, [1, 2, 3][turn % 3]];
            let (b, hq, lens) = (2, hk * group, [lk - lk / 3, lk]);
            let terms = Terms {
                causal: turn % 4 < 2,
                position: [Position::TopLeft, Position::BottomRight, Position::At(-3)][turn % 3],
                kv_lens: (turn % 6 == 5).then_some(&lens),
                ..Terms::default()
            };
            let (q, k, v) = (
                fill::<T>(b * hq * lq * d, 1),
                fill::<T>(b * hk * lk * d, 2),
                fill::<T>(b * hk * lk * dv, 3),
            );
            let q = View::bhld(&q, [b, hq, lq, d]).unwrap();
            let k = View::blhd(&k, [b, lk, hk, d]).unwrap();
            let v = View::bhld(&v, [b, hk, lk, dv]).unwrap();
            let want = reference::attention(q, k, v, &terms).unwrap();
            for level in Level::available() {
                let (mut out, mut lse) =
                    (vec![T::from_f32(f32::NAN); b * hq * lq * dv], vec![f32::NAN; b * hq * lq]);
                let to = ViewMut::bhld(&mut out, [b, hq, lq, dv]).unwrap();
                let attention = Attention::with_terms(terms).level(level).precision(precision);
                attention.run_with_lse(q, k, v, to, &mut lse).unwrap();
                let what = format!("{level}-{}: {lq} x {lk}, D {d}, Dv {dv}, {terms:?}", T::DTYPE);
                let fast = level != level.exact() && precision == Precision::Fast && T::DTYPE == DType::Bf16;
                let largest = want.out.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
                for (got, &want) in out.iter().zip(&want.out) {
                    let limit = if fast { 2.0 * T::ulp(largest) } else { T::ulp(want) / 2.0 + 2e-5 };
                    let got = got.to_f32() as f64;
                    assert!((got - want).abs() <= limit, "{what}: {got} instead of {want}");
                }
                for (&got, &want) in lse.iter().zip(&want.lse) {
                    assert!(got as f64 == want || (got as f64 - want).abs() <= 4e-6, "{what}: {got} {want}");
                }
            }
        }
    }
}

#[test]
fn f16_every_pair_of_lengths() {
    every_pair_of_lengths::<f16>(Precision::Fast);
}

#[test]
fn bf16_every_pair_of_lengths() {
    every_pair_of_lengths::<bf16>(Precision::Exact);
    every_pair_of_lengths::<bf16>(Precision::Fast);
}

/// A level, a type and a precision, and the kernel that they name.
#[test]
fn products_of_bf16_are_for_bf16_in_haste() {
    fn kernel<T: Element>(level: Level, precision: Precision) -> String {
        let x = [T::default(); 64];
        let view = View::bhld(&x, [1, 1, 16, 4]).unwrap();
        Attention::new().level(level).precision(precision).plan(view, view, view).unwrap().kernel()
    }
    for (level, exact) in [(Level::Avx512Bf16, "avx512"), (Level::NeonBf16, "neon"), (Level::Amx, "avx512")] {
        if !level.is_available() {
            println!("left out: {level}, which this processor or its system lacks");
            continue;
        }
        assert_eq!(kernel::<bf16>(level, Precision::Fast), format!("{level}-bf16"));
        assert_eq!(kernel::<bf16>(level, Precision::Exact), format!("{exact}-bf16"));
        assert_eq!(kernel::<f16>(level, Precision::Fast), format!("{exact}-f16"));
        assert_eq!(kernel::<f32>(level, Precision::Fast), format!("{exact}-f32"));
    }
}

/// In haste weights are rounded to bf16: that the products are such shows in the output.
#[test]
fn weights_are_rounded_in_haste() {
    let [lq, lk, d] = [32, 100, 16];
    let (q, k, v) = (fill::<bf16>(lq * d, 1), fill::<bf16>(lk * d, 2), fill::<bf16>(lk * d, 3));
    for level in Level::available() {
        let run = |precision| attend(Attention::new().level(level).precision(precision), &q, &k, &v, lq, lk);
        let same = run(Precision::Fast) == run(Precision::Exact);
        assert_eq!(same, level == level.exact(), "{level}");
    }
}

/// A pair, or a tile, holds keys that a block of rows does not see: NaN there must not reach rows that all see
/// the same keys, as the heads of a large group do.
#[test]
fn values_do_not_leak_between_tokens_of_large_groups() {
    let [lq, lk, d] = [4, 12, 16];
    for group in [8, 16, 24, 40, 64, 71] {
        let (q, k) = (fill::<bf16>(group * lq * d, 1), fill::<bf16>(lk * d, 2));
        let terms = [
            Terms { causal: true, position: Position::TopLeft, ..Terms::default() },
            Terms { left: Some(1), right: Some(0), position: Position::At(1), ..Terms::default() },
        ];
        for (terms, key) in terms.iter().flat_map(|terms| (0..lk).map(move |key| (terms, key))) {
            let mut v = fill::<bf16>(lk * d, 3);
            v[key * d..][..d].fill(bf16::NAN);
            let q = View::bhld(&q, [1, group, lq, d]).unwrap();
            let k = View::bhld(&k, [1, 1, lk, d]).unwrap();
            let v = View::bhld(&v, [1, 1, lk, d]).unwrap();
            let want = reference::attention(q, k, v, terms).unwrap().out;
            for level in Level::available() {
                let mut out = vec![bf16::ZERO; group * lq * d];
                let to = ViewMut::bhld(&mut out, [1, group, lq, d]).unwrap();
                Attention::with_terms(*terms).level(level).run(q, k, v, to).unwrap();
                let differ = out.iter().zip(&want).position(|(got, want)| got.is_nan() != want.is_nan());
                assert_eq!(differ, None, "{level}: group {group}, NaN in value {key}, {terms:?}");
            }
        }
    }
}

/// Products that overflow until they are scaled, by 0 or by very little.
#[test]
fn scales_next_to_nothing() {
    let (lq, d) = (20, 16);
    let (q, k) = (vec![bf16::from_f32(1e25); lq * d], vec![bf16::from_f32(1e25); 2 * d]);
    let v: Vec<bf16> = (0..2 * d).map(|at| bf16::from_f32(if at < d { 1.0 } else { 3.0 })).collect();
    for scale in [0.0, -0.0, 1e-40, -1e-39, f32::MIN_POSITIVE] {
        for level in Level::available() {
            let out = attend(Attention::new().scale(scale).level(level), &q, &k, &v, lq, 2);
            assert!(out.iter().all(|x| x.to_f32() == 2.0), "{level}, scale {scale:e}: {out:?}");
        }
    }
}

/// Rows without features may begin at any address, also at 0: nothing is made of it. (Found by fuzzing.)
#[test]
fn rows_without_features_may_lie_anywhere() {
    fn check<T: Element>() {
        let ones = [T::from_f32(1.0); 3];
        for level in Level::available() {
            for lq in [1, 20] {
                let q = View::new(&[], 0, [1, 1, lq, 0], [0, 0, 0, 1]).unwrap();
                let k = View::<T>::new(&[], 0, [1, 1, 3, 0], [0, 0, -1, 1]).unwrap();
                let mut out = vec![T::default(); lq];
                let to = ViewMut::bhld(&mut out, [1, 1, lq, 1]).unwrap();
                let v = View::bhld(&ones, [1, 1, 3, 1]).unwrap();
                Attention::new().scale(1.0).level(level).run::<T, T>(q, k, v, to).unwrap();
                assert!(out.iter().all(|x| x.to_f32() == 1.0), "{level}-{}: {out:?}", T::DTYPE);
            }
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

/// One key, so that the output is the value: through widening and narrowing at every level and in both
/// kernels. `lq` queries read `dv` values each.
fn values_survive<T: Element>(values: &[T], lq: usize, same: impl Fn(T, T) -> bool) {
    let (q, k) = (vec![T::default(); lq], [T::default()]);
    for level in Level::available() {
        for (chunk, values) in values.chunks(1024).enumerate() {
            let out = attend(Attention::new().level(level), &q, &k, values, lq, 1);
            for (at, &got) in out.iter().enumerate() {
                let want = values[at % values.len()];
                // Products of bf16 take subnormal numbers for 0.
                let flushed = level != level.exact() && want.to_f32().abs() < f32::MIN_POSITIVE;
                assert!(
                    same(got, want) || (flushed && got.to_f32() == 0.0),
                    "{level}-{}: {:?} became {got:?}",
                    T::DTYPE,
                    (chunk, want)
                );
            }
        }
    }
}

/// All 65536 of each type: subnormals too, NaN stays NaN, and -0 may come out as 0.
#[test]
fn every_number_survives() {
    for lq in [1, 20] {
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        values_survive(&all, lq, |got, want| got == want || (got.is_nan() && want.is_nan()));
        let all: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        values_survive(&all, lq, |got, want| got == want || (got.is_nan() && want.is_nan()));
    }
}

/// Two keys of equal weight: the mean of neighbours lies half way and goes to the even one.
fn halves_go_to_even<T: Element>(from_bits: impl Fn(u16) -> T, to_bits: impl Fn(T) -> u16, normal: u16) {
    let bits: Vec<u16> = (normal..normal + 100).collect();
    let v: Vec<T> = bits.iter().copied().chain(bits.iter().map(|bits| bits + 1)).map(from_bits).collect();
    for lq in [1, 20] {
        let (q, k) = (vec![T::default(); lq], [T::default(); 2]);
        for level in Level::available() {
            let out = attend(Attention::new().level(level), &q, &k, &v, lq, 2);
            for (at, &got) in out.iter().enumerate() {
                let even = (bits[at % 100] + 1) & !1;
                assert_eq!(to_bits(got), even, "{level}-{}: {got:?}", T::DTYPE);
            }
        }
    }
}

#[test]
fn rounding_is_to_nearest_even() {
    halves_go_to_even(f16::from_bits, f16::to_bits, 0x3c00);
    halves_go_to_even(bf16::from_bits, bf16::to_bits, 0x3f80);
}

/// Many equal weights: each is 2^-16, their sum is 1, and so are the values that they weigh.
#[test]
fn long_sums_lose_nothing() {
    let (lk, d) = (65536, 8);
    for lq in [1, 16] {
        let (q, k, v) = (vec![f16::ZERO; lq * d], vec![f16::ONE; lk * d], vec![f16::ONE; lk * d]);
        for level in Level::available() {
            let out = attend(Attention::new().level(level), &q, &k, &v, lq, lk);
            assert_eq!(out, vec![f16::ONE; lq * d], "{level}");
        }
    }
}

/// Scores of 128 * 100 * 100 / sqrt(128), beyond 65504, and their differences.
#[test]
fn scores_beyond_what_a_half_holds() {
    let d = 128;
    let q = vec![f16::from_f32(100.0); d];
    let k: Vec<f16> = (0..2 * d).map(|at| f16::from_f32(if at < d { 100.0 } else { 50.0 })).collect();
    let v: Vec<f16> = (0..2 * d).map(|at| f16::from_f32(if at < d { 1.0 } else { 2.0 })).collect();
    for lq in [1, 20] {
        let q = q.repeat(lq);
        for level in Level::available() {
            let (mut out, mut lse) = (vec![f16::NAN; lq * d], vec![0.0; lq]);
            Attention::new()
                .level(level)
                .run_with_lse(
                    View::bhld(&q, [1, 1, lq, d]).unwrap(),
                    View::bhld(&k, [1, 1, 2, d]).unwrap(),
                    View::bhld(&v, [1, 1, 2, d]).unwrap(),
                    ViewMut::bhld(&mut out, [1, 1, lq, d]).unwrap(),
                    &mut lse,
                )
                .unwrap();
            assert_eq!(out, vec![f16::ONE; lq * d], "{level}");
            let want = 1e4 * (d as f32).sqrt();
            assert!(lse.iter().all(|lse| (lse - want).abs() < 2e-6 * want), "{level}: {lse:?}, not {want}");
        }
    }
}
