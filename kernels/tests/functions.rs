//! exp, powers of 4, tanh and ln in units in the last place, over their whole range, and divergences, at every
//! level of this machine.

use headwise_kernels::{Level, divergence, exp, ln, power_of_4, tanh};

/// Distance in units in the last place of the f32 nearest to `want`.
fn ulp(got: f32, want: f64) -> f64 {
    let nearest = (want as f32).abs().max(f32::MIN_POSITIVE);
    let unit = f32::from_bits(nearest.to_bits() + 1) as f64 - nearest as f64;
    (got as f64 - want).abs() / unit
}

/// Applies `f` to the floats of these bits and returns the worst error in ulp and where.
fn worst(
    f: fn(Level, &mut [f32]) -> Result<(), headwise_kernels::Error>,
    exact: fn(f64) -> f64,
    level: Level,
    bits: impl Iterator<Item = u32>,
) -> (f64, f32) {
    let inputs: Vec<f32> = bits.map(f32::from_bits).collect();
    let mut outputs = inputs.clone();
    f(level, &mut outputs).unwrap();
    let mut worst = (0.0, 0.0);
    for (x, y) in inputs.iter().zip(&outputs) {
        let error = ulp(*y, exact(*x as f64));
        if error > worst.0 || error.is_nan() {
            worst = (error, *x);
        }
    }
    worst
}

/// Every how many floats: all of them with `HEADWISE_EXHAUSTIVE=1` (a minute a level).
fn step() -> usize {
    if std::env::var_os("HEADWISE_EXHAUSTIVE").is_some() { 1 } else { 997 }
}

const UNDERFLOW: f32 = -87.336_54;
const SIGN: u32 = 1 << 31;

#[test]
fn exp_within_2_ulp() {
    for level in Level::available() {
        let negative = (0..=UNDERFLOW.abs().to_bits()).step_by(step()).map(|x| x | SIGN);
        let positive = (0..=88f32.to_bits()).step_by(step());
        let (error, at) = worst(exp, f64::exp, level, negative.chain(positive));
        println!("{level}: exp {error:.3} ulp at {at:e}");
        assert!(error <= 2.0, "{level}: {error} ulp at {at:e}");
    }
}

#[test]
fn exp_corners() {
    for level in Level::available() {
        let mut x =
            [0.0, -0.0, f32::NEG_INFINITY, -1e30, -88.0, -87.34, f32::from_bits(UNDERFLOW.to_bits() + 1)];
        exp(level, &mut x).unwrap();
        assert_eq!(x[..2], [1.0, 1.0], "{level}");
        assert_eq!(x[2..].map_bits(), [0; 5], "{level}: {x:?}");
        let mut x = vec![f32::NAN; 40];
        x.extend([f32::from_bits(0x7fc0_0001), f32::from_bits(0xffff_ffff)]);
        exp(level, &mut x).unwrap();
        assert!(x.iter().all(|x| x.is_nan()), "{level}");
        // Normal or zero, nothing between.
        let mut x: Vec<f32> = (0..2000).map(|i| -87.4 + i as f32 * 1e-4).collect();
        exp(level, &mut x).unwrap();
        assert!(x.iter().all(|x| *x == 0.0 || x.is_normal()), "{level}");
    }
}

#[test]
fn power_of_4_within_2_ulp() {
    for level in Level::available() {
        let negative = (0..=63f32.to_bits()).step_by(step()).map(|x| x | SIGN);
        let positive = (0..=63f32.to_bits()).step_by(step());
        let (error, at) = worst(power_of_4, |x| (2.0 * x).exp2(), level, negative.chain(positive));
        println!("{level}: 4^x {error:.3} ulp at {at:e}");
        assert!(error <= 2.0, "{level}: {error} ulp at {at:e}");

        let below = -f32::from_bits(63f32.to_bits() + 1);
        let mut x = [0.0, -0.0, f32::NEG_INFINITY, f32::MIN, -1e30, -64.0, below, f32::NAN];
        power_of_4(level, &mut x).unwrap();
        assert_eq!(x[..2], [1.0, 1.0], "{level}");
        assert_eq!(x[2..7].map_bits(), [0; 5], "{level}: {x:?}");
        assert!(x[7].is_nan(), "{level}");
        // Whole vectors of NaN, too, with any payload.
        let mut x = vec![f32::from_bits(0x7fc0_0001); 16];
        x.extend([f32::from_bits(0xffff_ffff); 16]);
        power_of_4(level, &mut x).unwrap();
        assert!(x.iter().all(|x| x.is_nan()), "{level}");
    }
}

#[test]
fn tanh_within_3_ulp() {
    for level in Level::available() {
        let range = || (0..f32::INFINITY.to_bits()).step_by(step());
        let bits = range().chain(range().map(|x| x | SIGN));
        let (error, at) = worst(tanh, f64::tanh, level, bits);
        println!("{level}: tanh {error:.3} ulp at {at:e}");
        assert!(error <= 3.0, "{level}: {error} ulp at {at:e}");
        let mut x = [f32::INFINITY, f32::NEG_INFINITY, 6000.0, -3e38, 0.0, f32::NAN];
        tanh(level, &mut x).unwrap();
        assert_eq!(x[..5], [1.0, -1.0, 1.0, -1.0, 0.0], "{level}");
        assert!(x[5].is_nan(), "{level}");
    }
}

trait MapBits {
    fn map_bits(&self) -> Vec<u32>;
}

impl MapBits for [f32] {
    fn map_bits(&self) -> Vec<u32> {
        self.iter().map(|x| x.to_bits()).collect()
    }
}

#[test]
fn ln_within_2_ulp() {
    for level in Level::available() {
        let bits = (f32::MIN_POSITIVE.to_bits()..=f32::MAX.to_bits()).step_by(step());
        // Near 1 every number counts: that is where the entropy of a single key lies.
        let near_1 = (1f32.to_bits() - 20_000..1f32.to_bits() + 20_000).step_by(3);
        let (error, at) = worst(ln, f64::ln, level, bits.chain(near_1));
        println!("{level}: ln {error:.3} ulp at {at:e}");
        assert!(error <= 2.0, "{level}: {error} ulp at {at:e}");
        let mut one = [1.0];
        ln(level, &mut one).unwrap();
        assert_eq!(one, [0.0], "{level}");
    }
}

/// Against the formula in f64, for weights that differ by much and by little, and of any length.
#[test]
fn divergence_is_relatively_exact() {
    let exact = |p: f64, q: f64| {
        let part = |p: f64, q: f64| if p > 0.0 { p * ((p - q) / (p + q)).ln_1p() } else { 0.0 };
        (part(p, q) + part(q, p)) / 2.0
    };
    for level in Level::available() {
        for n in [0, 1, 3, 16, 33, 100] {
            for difference in [0.0, 1e-6, 1e-3, 0.3, 0.8, 1.0] {
                let p: Vec<f32> = (0..n).map(|i| 1e-3 + (i as f32).sin().abs() / n as f32).collect();
                let q: Vec<f32> =
                    p.iter().enumerate().map(|(i, p)| p * (1.0 - difference * (i % 2) as f32)).collect();
                let want: f64 = p.iter().zip(&q).map(|(&p, &q)| exact(p.into(), q.into())).sum();
                let got = divergence(level, &p, &q).unwrap();
                // The series of f32 `1 - difference` starts from rounded numbers that `want` starts from,
                // too.
                assert!((got - want).abs() <= 2e-6 * want, "{level}: {n}, {difference}: {got} is not {want}");
            }
        }
        assert!(divergence(level, &[1.0], &[]).is_err());
    }
}
