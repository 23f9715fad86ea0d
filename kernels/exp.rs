//! exp, powers of 4, ln and tanh on vectors.

use crate::isa::Isa;

/// Smallest `x` with `exp(x)` a normal number; below it the result is exactly 0.
const UNDERFLOW: f32 = -87.336_54;

/// `exp(x)` for `x <= 88`: within 2 ulp, exactly 0 below [`UNDERFLOW`] (-inf included), exactly 1 at 0, NaN
/// for NaN.
///
/// `x = n ln 2 + r` with `n` the nearest integer, found by adding a number so large that the sum has no
/// fraction; `ln 2` in two parts, of which the first has few enough bits for `n * LN2_HIGH` to be exact, so
/// the reduction is as good without a fused multiply-add; `exp(r)` by a polynomial of degree 6 (minimax in
/// ulp on `|r| <= ln 2 / 2`; degree 5 reaches 2.2 ulp without fused multiply-adds); `2^n` from the low bits
/// of the sum.
#[inline(always)]
pub(crate) fn exp<I: Isa>(isa: I, x: I::f32s) -> I::f32s {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const MAGIC: f32 = 12_582_912.0 + 127.0; // 1.5 * 2^23, and the bias of the exponent
    const C: [f32; 5] = [0.5, 0.166_665_2, 0.041_669_087, 0.008_368_847, 0.001_378_040_7];
    let c = |x: f32| isa.splat_f32s(x);

    let sum = isa.mul_add_e_f32s(x, c(core::f32::consts::LOG2_E), c(MAGIC));
    let n = isa.sub_f32s(sum, c(MAGIC));
    let r = isa.mul_add_e_f32s(n, c(-LN2_HIGH), x);
    let r = isa.mul_add_e_f32s(n, c(-LN2_LOW), r);
    let mut p = isa.mul_add_e_f32s(c(C[4]), r, c(C[3]));
    p = isa.mul_add_e_f32s(p, r, c(C[2]));
    p = isa.mul_add_e_f32s(p, r, c(C[1]));
    p = isa.mul_add_e_f32s(p, r, c(C[0]));
    p = isa.mul_add_e_f32s(p, r, c(1.0));
    p = isa.mul_add_e_f32s(p, r, c(1.0));
    let two_n = isa.wrapping_dyn_shl_u32s(isa.transmute_u32s_f32s(sum), isa.splat_u32s(23));
    let p = isa.mul_f32s(p, isa.transmute_f32s_u32s(two_n));
    isa.zero_below(x, UNDERFLOW, p)
}

/// What scores are multiplied by on their way to weights: `exp(s) = 4^(s log4(e))`. Powers of 4 are had in
/// fewer operations than those of e, as the reduction is exact without a second step; those of 2 in one less,
/// but their factor is above 1, so scores near the end of f32's range would overflow.
pub(crate) const LOG4_E: f32 = 0.721_347_5;

/// Smallest `x` with `4^x` a normal number.
pub(crate) const UNDERFLOW_4: f32 = -63.0;

/// `4^x` for `x <= 63`: within 2 ulp, exactly 0 below [`UNDERFLOW_4`] (-inf included), exactly 1 at 0, NaN for
/// NaN. Levels call it by [`Isa::power_of_4`], as some have a shorter way.
///
/// `x = n / 2 + r` with `n` the nearest integer to `2x`, both exactly; `4^r` by a polynomial of degree 5
/// (minimax in ulp on `|r| <= 1/4`, the last places of its factors searched for the least error with and
/// without fused multiply-adds: 1.85 and 1.99 ulp).
#[inline(always)]
pub(crate) fn power_of_4<I: Isa>(isa: I, x: I::f32s) -> I::f32s {
    const MAGIC: f32 = 12_582_912.0 + 127.0; // as above
    const C: [f32; 5] = [1.386_293_4, 0.960_889_6, 0.444_087_33, 0.154_745_27, 0.042_115_867];
    let c = |x: f32| isa.splat_f32s(x);

    let sum = isa.mul_add_e_f32s(x, c(2.0), c(MAGIC));
    let n = isa.sub_f32s(sum, c(MAGIC));
    let r = isa.mul_add_e_f32s(n, c(-0.5), x);
    let mut p = isa.mul_add_e_f32s(c(C[4]), r, c(C[3]));
    p = isa.mul_add_e_f32s(p, r, c(C[2]));
    p = isa.mul_add_e_f32s(p, r, c(C[1]));
    p = isa.mul_add_e_f32s(p, r, c(C[0]));
    p = isa.mul_add_e_f32s(p, r, c(1.0));
    let two_n = isa.wrapping_dyn_shl_u32s(isa.transmute_u32s_f32s(sum), isa.splat_u32s(23));
    let p = isa.mul_f32s(p, isa.transmute_f32s_u32s(two_n));
    isa.zero_below(x, UNDERFLOW_4, p)
}

/// `tanh(x)` for any `x`: within 3 ulp, 1 and -1 at the infinities, NaN for NaN.
///
/// Small `x`: an odd polynomial (minimax on `|x| <= 0.55`). Else `1 - 2t / (1 + t)` with `t = exp(-2|x|)`,
/// which cannot overflow.
#[inline(always)]
pub(crate) fn tanh<I: Isa>(isa: I, x: I::f32s) -> I::f32s {
    const SMALL: f32 = 0.55;
    const C: [f32; 4] = [-0.333_329_74, 0.133_211_95, -0.052_680_05, 0.016_421_42];
    let c = |x: f32| isa.splat_f32s(x);

    let a = isa.abs_f32s(x);
    let z = isa.mul_f32s(a, a);
    let mut p = isa.mul_add_e_f32s(c(C[3]), z, c(C[2]));
    p = isa.mul_add_e_f32s(p, z, c(C[1]));
    p = isa.mul_add_e_f32s(p, z, c(C[0]));
    let small = isa.mul_add_e_f32s(isa.mul_f32s(p, z), a, a);

    let t = exp(isa, isa.mul_f32s(a, c(-2.0)));
    let large = isa.sub_f32s(c(1.0), isa.div_f32s(isa.add_f32s(t, t), isa.add_f32s(t, c(1.0))));

    let y = isa.select_f32s(isa.less_than_f32s(a, c(SMALL)), small, large);
    let sign = isa.and_u32s(isa.transmute_u32s_f32s(x), isa.splat_u32s(1 << 31));
    isa.transmute_f32s_u32s(isa.or_u32s(isa.transmute_u32s_f32s(y), sign))
}

/// `ln(x)` for normal `x > 0`: within 2 ulp, and within 1e-7 near 1. Nothing is promised for other `x`.
///
/// `x = 2^n (1 + f)` with `1 + f` from the root of 1/2 to that of 2, by integer arithmetic on the bits; `ln(1
/// + f) = f - f^2 / 2 + f^3 P(f)` with the polynomial of Moshier's Cephes library (`logf`).
#[inline(always)]
pub(crate) fn ln<I: Isa>(isa: I, x: I::f32s) -> I::f32s {
    const ROOT_HALF: u32 = 0x3f35_04f3;
    const MAGIC: u32 = 0x4b00_0000; // 2^23: a number in its low bits
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const C: [f32; 9] = [
        0.333_333_3,
        -0.249_999_94,
        0.200_007_15,
        -0.166_680_58,
        0.142_493_23,
        -0.124_201_41,
        0.116_769_99,
        -0.115_146_1,
        0.070_376_836,
    ];
    let c = |x: f32| isa.splat_f32s(x);
    let u = |x: u32| isa.splat_u32s(x);

    let bits = isa.transmute_u32s_f32s(x);
    let biased = isa.wrapping_dyn_shr_u32s(isa.add_u32s(bits, u(ONE - ROOT_HALF)), u(23)); // n + 127
    let power = isa.wrapping_dyn_shl_u32s(isa.sub_u32s(biased, u(127)), u(23));
    let f = isa.sub_f32s(isa.transmute_f32s_u32s(isa.sub_u32s(bits, power)), c(1.0));
    let n = isa.sub_f32s(isa.transmute_f32s_u32s(isa.or_u32s(biased, u(MAGIC))), c(8_388_608.0 + 127.0));
    let mut p = c(C[8]);
    for factor in C[..8].iter().rev() {
        p = isa.mul_add_e_f32s(p, f, c(*factor));
    }
    let square = isa.mul_f32s(f, f);
    let mut y = isa.mul_f32s(isa.mul_f32s(p, f), square);
    y = isa.mul_add_e_f32s(n, c(LN2_LOW), y);
    y = isa.mul_add_e_f32s(square, c(-0.5), y);
    isa.mul_add_e_f32s(n, c(LN2_HIGH), isa.add_f32s(f, y))
}

/// The bits of 1.
const ONE: u32 = 0x3f80_0000;
