//! What a feed-forward layer applies to the result of its first projection.

use crate::exp;
use crate::isa::Isa;

/// Functions applied to each element of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// `x/2 * (1 + erf(x / sqrt 2))` (Hendrycks and Gimpel 2016, "Gaussian Error Linear Units").
    Gelu,
    /// `x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`: the approximation in the same paper, section 2.
    GeluTanh,
    /// `x / (1 + exp(-x))`.
    Silu,
}

/// The function on a vector.
#[inline(always)]
pub(super) fn activate<I: Isa>(isa: I, activation: Activation, x: I::f32s) -> I::f32s {
    let splat = |x: f32| isa.splat_f32s(x);
    match activation {
        Activation::Relu => isa.max_f32s(x, splat(0.0)),
        Activation::Gelu => {
            let half = isa.mul_f32s(x, splat(0.5));
            isa.mul_add_e_f32s(half, erf(isa, isa.mul_f32s(x, splat(core::f32::consts::FRAC_1_SQRT_2))), half)
        }
        Activation::GeluTanh => {
            let half = isa.mul_f32s(x, splat(0.5));
            let cube = isa.mul_f32s(isa.mul_f32s(x, x), x);
            let inner = isa.mul_add_e_f32s(cube, splat(0.044715), x);
            let inner = isa.mul_f32s(inner, splat((2.0 / core::f32::consts::PI).sqrt()));
            isa.mul_add_e_f32s(half, exp::tanh(isa, inner), half)
        }
        Activation::Silu => {
            let e = exp::exp(isa, isa.neg_f32s(isa.abs_f32s(x)));
            let y = isa.select_f32s(isa.less_than_f32s(x, splat(0.0)), e, splat(1.0));
            isa.div_f32s(isa.mul_f32s(x, y), isa.add_f32s(splat(1.0), e))
        }
    }
}

/// `erf` within 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26): `1 - (a1 t + .. + a5 t^5) exp(-x^2)` with
/// `t = 1 / (1 + p |x|)`, and the sign of x.
#[inline(always)]
fn erf<I: Isa>(isa: I, x: I::f32s) -> I::f32s {
    const A: [f32; 5] = [0.254_829_6, -0.284_496_72, 1.421_413_8, -1.453_152_1, 1.061_405_4];
    let splat = |x: f32| isa.splat_f32s(x);
    let size = isa.abs_f32s(x);
    let t = isa.div_f32s(splat(1.0), isa.mul_add_e_f32s(size, splat(0.327_591_1), splat(1.0)));
    let sum = A.into_iter().rev().fold(splat(0.0), |sum, a| isa.mul_f32s(isa.add_f32s(sum, splat(a)), t));
    let e = exp::exp(isa, isa.neg_f32s(isa.mul_f32s(x, x)));
    let y = isa.sub_f32s(splat(1.0), isa.mul_f32s(sum, e));
    isa.select_f32s(isa.less_than_f32s(x, splat(0.0)), isa.neg_f32s(y), y)
}
