//! How far two rows of weights are apart:
//!
//! ```text
//! JS(p, q) = (KL(p | m) + KL(q | m)) / 2 = sum over j of m(j) g(r(j)) / 2
//! m = (p + q) / 2     r = (p - q) / (p + q)     g(r) = (1 + r) ln(1 + r) + (1 - r) ln(1 - r)
//! ```
//!
//! (Lin 1991, "Divergence Measures Based on the Shannon Entropy".) No term is negative, and near `r = 0` the
//! series `r^2 + r^4 / 6 + r^6 / 15 + ..` replaces the logarithms: rows that differ by little lose no digits,
//! and equal ones are 0 apart.

use crate::call::length;
use crate::exp::ln;
use crate::isa::Isa;
use crate::level::Op;
use crate::{Error, Level};

/// The Jensen-Shannon divergence of `p` and `q` in nats, as far as these outcomes give it: of probabilities
/// that sum to 1 each, 0 to `ln 2`. Relatively exact to a few roundings of f32.
///
/// ```
/// use headwise_kernels::{Level, divergence};
/// assert_eq!(divergence(Level::detect(), &[0.25, 0.75], &[0.25, 0.75])?, 0.0);
/// let far = divergence(Level::detect(), &[1.0, 0.0], &[0.0, 1.0])?;
/// assert!((far - 2f64.ln()).abs() < 1e-6);
/// # Ok::<(), headwise_kernels::Error>(())
/// ```
///
/// # Errors
/// [`Error::Length`] if `q` is not as long as `p`, [`Error::LevelUnavailable`].
pub fn divergence(level: Level, p: &[f32], q: &[f32]) -> Result<f64, Error> {
    length("q", q.len(), p.len())?;
    level.dispatch(Divergence { p, q })
}

struct Divergence<'a> {
    p: &'a [f32],
    q: &'a [f32],
}

/// Vectors whose sums are kept apart.
const SUMS: usize = 4;

impl Op for Divergence<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<I: Isa, const NQ: usize, const MR: usize>(self, isa: I) -> f64 {
        let ((p, p_tail), (q, q_tail)) = (I::as_simd_f32s(self.p), I::as_simd_f32s(self.q));
        let mut sums = [isa.splat_f32s(0.0); SUMS];
        for (at, (p, q)) in p.iter().zip(q).enumerate() {
            let sum = &mut sums[at % SUMS];
            *sum = isa.add_f32s(*sum, term(isa, *p, *q));
        }
        let last = term(isa, isa.partial_load_f32s(p_tail), isa.partial_load_f32s(q_tail));
        let sums = isa.add_f32s(isa.add_f32s(sums[0], sums[1]), isa.add_f32s(sums[2], sums[3]));
        f64::from(isa.reduce_sum_f32s(isa.add_f32s(sums, last))) / 4.0
    }
}

/// `(p + q) g(r)`.
#[inline(always)]
fn term<I: Isa>(isa: I, p: I::f32s, q: I::f32s) -> I::f32s {
    /// `1 / (k (2 k - 1))`: at the limit the next one is below the rounding.
    const SERIES: [f32; 8] =
        [1.0, 1.0 / 6.0, 1.0 / 15.0, 1.0 / 28.0, 1.0 / 45.0, 1.0 / 66.0, 1.0 / 91.0, 1.0 / 120.0];
    const LIMIT: f32 = 0.4;
    let (zero, c) = (isa.splat_f32s(0.0), |x: f32| isa.splat_f32s(x));
    let sum = isa.add_f32s(p, q);
    let inverse = isa.div_f32s(c(1.0), isa.select_f32s(isa.equal_f32s(sum, zero), c(1.0), sum));
    let r = isa.mul_f32s(isa.sub_f32s(p, q), inverse);
    let square = isa.mul_f32s(r, r);
    let mut near = c(SERIES[7]);
    for factor in SERIES[..7].iter().rev() {
        near = isa.mul_add_e_f32s(near, square, c(*factor));
    }
    let near = isa.mul_f32s(near, square);
    // ln(0) is a number here, and times 0 it is 0.
    let [a, b] = [p, q].map(|x| isa.mul_f32s(isa.add_f32s(x, x), inverse));
    // Two products, so that p and q may be exchanged.
    let far = isa.add_f32s(isa.mul_f32s(a, ln(isa, a)), isa.mul_f32s(b, ln(isa, b)));
    let far = isa.select_f32s(isa.less_than_f32s(isa.abs_f32s(r), c(LIMIT)), near, far);
    isa.mul_f32s(sum, far)
}
