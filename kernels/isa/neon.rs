//! NEON: 4 lanes.

use core::arch::aarch64::*;

use pulp::aarch64::Neon;
use pulp::f32x4;

use super::Isa;

#[inline(always)]
fn v(x: f32x4) -> float32x4_t {
    pulp::cast(x)
}

#[inline(always)]
fn p(x: float32x4_t) -> f32x4 {
    pulp::cast(x)
}

impl Isa for Neon {
    type Square = [f32x4; 4];

    #[inline(always)]
    fn square(self) -> Self::Square {
        [f32x4(0.0, 0.0, 0.0, 0.0); 4]
    }

    #[inline(always)]
    fn transpose(self, square: Self::Square) -> Self::Square {
        let [a, b, c, d] = [v(square[0]), v(square[1]), v(square[2]), v(square[3])];
        // SAFETY: `self` proves NEON.
        unsafe {
            let (ab_even, ab_odd) = (vtrn1q_f32(a, b), vtrn2q_f32(a, b));
            let (cd_even, cd_odd) = (vtrn1q_f32(c, d), vtrn2q_f32(c, d));
            let join = |x, y, high: bool| {
                let (x, y) = (vreinterpretq_f64_f32(x), vreinterpretq_f64_f32(y));
                p(vreinterpretq_f32_f64(if high { vtrn2q_f64(x, y) } else { vtrn1q_f64(x, y) }))
            };
            [
                join(ab_even, cd_even, false),
                join(ab_odd, cd_odd, false),
                join(ab_even, cd_even, true),
                join(ab_odd, cd_odd, true),
            ]
        }
    }

    #[inline(always)]
    fn prefetch_near(self, ptr: *const f32) {
        // SAFETY: a hint; it reads nothing and faults on no address.
        unsafe { core::arch::asm!("prfm pldl1keep, [{}]", in(reg) ptr, options(nostack, preserves_flags)) };
    }

    #[inline(always)]
    fn prefetch(self, ptr: *const f32) {
        // SAFETY: a hint; it reads nothing and faults on no address.
        unsafe { core::arch::asm!("prfm pldl2keep, [{}]", in(reg) ptr, options(nostack, preserves_flags)) };
    }

    #[inline(always)]
    fn hide(self, x: f32x4, bits: u64) -> f32x4 {
        // SAFETY: `self` proves NEON.
        unsafe {
            let lane = vld1q_u32([1, 2, 4, 8].as_ptr());
            let shown = vtstq_u32(vdupq_n_u32(bits as u32), lane);
            p(vbslq_f32(shown, v(x), vdupq_n_f32(f32::NEG_INFINITY)))
        }
    }

    #[inline(always)]
    fn sums(self, x: [f32x4; 4]) -> [f32; 4] {
        // SAFETY: `self` proves NEON.
        let sums = unsafe { vpaddq_f32(vpaddq_f32(v(x[0]), v(x[1])), vpaddq_f32(v(x[2]), v(x[3]))) };
        pulp::cast(sums)
    }
}
