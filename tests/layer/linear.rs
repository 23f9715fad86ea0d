//! Projections and norms by themselves.

use headwise::layer::{Activation, Linear, Norm, Then, Weight, WeightLayout, Weights, reference};
use headwise::{Error, Run, Threads};
use rayon::ThreadPoolBuilder;

use crate::*;

/// Inputs, outputs, rows: around the sizes of tiles (1 to 6 rows, 64 outputs, 256 inputs, 192 rows), and
/// none.
const SHAPES: [[usize; 3]; 22] = [
    [1, 1, 1],
    [3, 5, 7],
    [16, 64, 1],
    [17, 63, 2],
    [31, 65, 3],
    [64, 128, 4],
    [127, 129, 5],
    [128, 200, 6],
    [255, 64, 7],
    [256, 16, 8],
    [257, 72, 9],
    [511, 33, 11],
    [600, 100, 12],
    [40, 30, 13],
    [24, 65, 191],
    [24, 65, 192],
    [24, 65, 193],
    [300, 70, 400],
    [0, 5, 3],
    [5, 0, 3],
    [5, 3, 0],
    [513, 1, 25],
];

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| x as f64).collect()
}

#[test]
fn every_shape_layout_and_ending() {
    for [inputs, outputs, rows] in SHAPES {
        let x = noise(5, rows * inputs);
        let residual = noise(6, rows * outputs);
        for seed in [1, 2] {
            for bias in [None, Some(9)] {
                let linear = linear(seed, inputs, outputs, bias);
                let mut plain = reference::project(&linear, &wide(&x));
                if inputs == 0 {
                    let row = wide(linear.bias().unwrap_or(&vec![0.0; outputs]));
                    plain = (0..rows).flat_map(|_| row.clone()).collect();
                }
                let sum: Vec<f64> = plain.iter().zip(&residual).map(|(x, &r)| x + r as f64).collect();
                for level in levels() {
                    let what = format!("{level}, {rows} x {inputs} x {outputs}, bias {bias:?}");
                    let mut out = vec![f32::NAN; rows * outputs];
                    linear.forward(&x, Then::Store, at(level), &mut out).unwrap();
                    near(&out, &plain, 4e-6, &what);
                    linear.forward(&x, Then::Add(&residual), at(level), &mut out).unwrap();
                    near(&out, &sum, 4e-6, &what);
                    out.copy_from_slice(&residual);
                    linear.forward(&x, Then::Accumulate, at(level), &mut out).unwrap();
                    near(&out, &sum, 4e-6, &what);
                }
            }
        }
    }
}

/// The error function by its series and continued fraction's limit: enough for five digits more than needed.
fn erf(x: f64) -> f64 {
    let a = x.abs();
    if a > 5.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (a, a, 0.0);
    while term.abs() > 1e-18 {
        n += 1.0;
        term *= -a * a / n;
        sum += term / (2.0 * n + 1.0);
    }
    x.signum() * sum * 2.0 / std::f64::consts::PI.sqrt()
}

#[test]
fn activations() {
    let x: Vec<f32> =
        (-4000..4000).map(|i| i as f32 / 250.0).chain([-1e30, -200.0, 0.0, 200.0, 1e30]).collect();
    let one = Linear::new(&[1.0], WeightLayout::InOut, [1, 1], None).unwrap();
    type Function = fn(f64) -> f64;
    let all: [(Activation, Function); 4] = [
        (Activation::Relu, |x| x.max(0.0)),
        (Activation::Gelu, |x| 0.5 * x * (1.0 + erf(x / 2f64.sqrt()))),
        (Activation::GeluTanh, |x| {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }),
        (Activation::Silu, |x| x / (1.0 + (-x).exp())),
    ];
    assert!((erf(0.5) - 0.520_499_877_813_046_5).abs() < 1e-15);
    for (activation, f) in all {
        for level in levels() {
            let mut out = vec![f32::NAN; x.len()];
            one.forward(&x, Then::Activate(activation), at(level), &mut out).unwrap();
            for (x, y) in x.iter().zip(&out) {
                let want = f(*x as f64);
                let within = 1e-6 * want.abs().max(1.0);
                assert!((*y as f64 - want).abs() <= within, "{activation:?} {level} of {x}: {y}, not {want}");
            }
        }
    }
}

/// A row has the same bits whatever rows stand beside it, and for any number of threads.
#[test]
fn rows_do_not_depend_on_rows_or_threads() {
    let (inputs, outputs, rows) = (700, 330, 450);
    let (linear, x) = (linear(1, inputs, outputs, Some(2)), noise(3, rows * inputs));
    for level in levels() {
        let mut all = vec![0.0; rows * outputs];
        linear.forward(&x, Then::Store, at(level), &mut all).unwrap();
        let mut some = vec![0.0; 13 * outputs];
        for n in 1..=13 {
            let start = n * 17;
            let out = &mut some[..n * outputs];
            linear.forward(&x[start * inputs..][..n * inputs], Then::Store, at(level), out).unwrap();
            assert_eq!(out, &all[start * outputs..][..n * outputs], "{level}, {n} rows");
        }
        for threads in [1, 2, 3, 5, 8] {
            let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut out = vec![0.0; rows * outputs];
            let run = Run { level: Some(level), threads: Threads::Pool };
            pool.install(|| linear.forward(&x, Then::Store, run, &mut out)).unwrap();
            assert_eq!(out, all, "{level}, {threads} threads");
        }
    }
}

/// Weights in half precision give the same bits as the same numbers in f32, and come back as they were.
#[test]
fn half_weights_are_the_same_numbers() {
    fn check<T: Weight>(halve: fn(f32) -> T, widen: fn(T) -> f32, name: &str) {
        for [inputs, outputs, rows] in SHAPES {
            let mut numbers = noise(1, inputs * outputs);
            // Also those below the normal ones.
            numbers.iter_mut().step_by(9).for_each(|x| *x *= 1e-6);
            let half: Vec<T> = numbers.iter().map(|&x| halve(x)).collect();
            let wide: Vec<f32> = half.iter().map(|&x| widen(x)).collect();
            for layout in [WeightLayout::OutIn, WeightLayout::InOut] {
                let weights = Weights::pack(&half, layout, inputs, outputs).unwrap();
                assert_eq!(weights.unpack(layout), wide, "{name}");
                assert_eq!(weights.bytes(), 2 * inputs * outputs.next_multiple_of(64));
                let again = weights.pack_like(&wide, layout, inputs, outputs).unwrap();
                assert_eq!((again.unpack(layout), again.bytes()), (wide.clone(), weights.bytes()));
                let bias = noise(2, outputs);
                let half = Linear::with_weights(weights, Some(&bias)).unwrap();
                let full = Linear::new(&wide, layout, [inputs, outputs], Some(&bias)).unwrap();
                let x = noise(3, rows * inputs);
                for level in levels() {
                    let (mut got, mut want) = (vec![0.0; rows * outputs], vec![1.0; rows * outputs]);
                    half.forward(&x, Then::Store, at(level), &mut got).unwrap();
                    full.forward(&x, Then::Store, at(level), &mut want).unwrap();
                    assert_eq!(got, want, "{name}, {level}, {rows} x {inputs} x {outputs}");
                }
            }
        }
    }
    check(half::f16::from_f32, half::f16::to_f32, "f16");
    check(half::bf16::from_f32, half::bf16::to_f32, "bf16");
    let weights = Weights::pack(&[half::f16::ONE; 2], WeightLayout::OutIn, 1, 2).unwrap();
    assert!(Linear::with_weights(weights, Some(&[0.0])).is_err());
}

#[test]
fn weights_come_back() {
    for [inputs, outputs] in [[1, 1], [3, 70], [70, 3], [64, 64], [0, 4], [4, 0]] {
        let weights = noise(1, inputs * outputs);
        let linear = Linear::new(&weights, WeightLayout::OutIn, [inputs, outputs], None).unwrap();
        assert_eq!(linear.weights(WeightLayout::OutIn), weights);
        let other = linear.weights(WeightLayout::InOut);
        let again = Linear::new(&other, WeightLayout::InOut, [inputs, outputs], None).unwrap();
        assert_eq!(again.weights(WeightLayout::OutIn), weights);
        assert_eq!(linear.parameters(), inputs * outputs);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let weights = [0.0; 6];
    let new = |layout, sizes, bias| Linear::new(&weights, layout, sizes, bias).map(|_| ()).unwrap_err();
    let length = |argument, got, expected| Error::Length { argument, got, expected };
    assert_eq!(new(WeightLayout::OutIn, [2, 2], None), length("weights", 6, 4));
    assert_eq!(new(WeightLayout::OutIn, [3, 2], Some(&[0.0][..])), length("bias", 1, 2));
    assert!(matches!(new(WeightLayout::InOut, [usize::MAX, 2], None), Error::TooLarge { .. }));
    assert!(matches!(new(WeightLayout::InOut, [1 << 40, 1 << 40], None), Error::TooLarge { .. }));
    let linear = Linear::new(&weights, WeightLayout::OutIn, [3, 2], None).unwrap();
    let mut out = [7.0; 4];
    let mut call =
        |x: &[f32], then, n: usize| linear.forward(x, then, Run::default(), &mut out[..n]).unwrap_err();
    assert_eq!(call(&[0.0; 5], Then::Store, 2), length("x", 5, 3));
    assert_eq!(call(&[0.0; 6], Then::Store, 3), length("out", 3, 4));
    assert_eq!(call(&[0.0; 6], Then::Add(&[0.0; 2]), 4), length("residual", 2, 4));
    assert_eq!(out, [7.0; 4]);
}

#[test]
fn norms() {
    for n in [1, 2, 15, 16, 17, 64, 100, 384, 1000] {
        let (weight, bias) = (noise(1, n), noise(2, n));
        let x: Vec<f32> = noise(3, 37 * n).iter().enumerate().map(|(i, x)| x + (i / n) as f32).collect();
        let norms = [
            Norm::layer(&weight, Some(&bias), 1e-5).unwrap(),
            Norm::layer(&weight, None, 1e-12).unwrap(),
            Norm::rms(&weight, 1e-6).unwrap(),
        ];
        for norm in norms {
            let want = reference::norm(&norm, &wide(&x));
            for level in levels() {
                let (mut out, mut place) = (vec![f32::NAN; x.len()], x.clone());
                norm.forward(&x, &mut out, at(level)).unwrap();
                norm.in_place(&mut place, at(level)).unwrap();
                assert_eq!(out, place, "{level}");
                // With eps near 0 a row of two may differ by little, and what it is divided by is less.
                let within = if n < 3 { 1e-3 } else { 4e-6 };
                near(&out, &want, within, format!("{level}, {n} features, {:?}", norm.kind()));
                let pool = ThreadPoolBuilder::new().num_threads(3).build().unwrap();
                let pooled = Run { level: Some(level), threads: Threads::Pool };
                pool.install(|| norm.forward(&x, &mut place, pooled)).unwrap();
                assert_eq!(out, place, "{level}");
            }
        }
    }
    assert!(Norm::layer(&[1.0], None, f32::NAN).is_err() && Norm::rms(&[1.0], -1.0).is_err());
    assert!(Norm::layer(&[1.0], Some(&[]), 0.0).is_err());
    let norm = Norm::rms(&[1.0; 4], 0.0).unwrap();
    assert!(norm.in_place(&mut [0.0; 6], Run::default()).is_err());
    assert!(norm.forward(&[0.0; 8], &mut [0.0; 4], Run::default()).is_err());
}
