//! NEON: 4 lanes.

use core::arch::aarch64::*;
use core::arch::asm;

use half::{bf16, f16};
use pulp::aarch64::Neon;
use pulp::{f32x4, u32x4};

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
    fn prefetch_near(self, ptr: *const u8) {
        // SAFETY: a hint; it reads nothing and faults on no address.
        unsafe { asm!("prfm pldl1keep, [{}]", in(reg) ptr, options(nostack, preserves_flags)) };
    }

    #[inline(always)]
    fn prefetch(self, ptr: *const u8) {
        // SAFETY: a hint; it reads nothing and faults on no address.
        unsafe { asm!("prfm pldl2keep, [{}]", in(reg) ptr, options(nostack, preserves_flags)) };
    }

    #[inline(always)]
    unsafe fn load_f16(self, ptr: *const f16) -> f32x4 {
        let wide: float32x4_t;
        // SAFETY: `self` proves NEON, which has this conversion; the caller's. Four f16 are eight bytes.
        unsafe {
            let x = vld1_u16(ptr.cast());
            asm!("fcvtl {y:v}.4s, {x:v}.4h", x = in(vreg) x, y = out(vreg) wide,
                options(pure, nomem, nostack, preserves_flags));
        }
        p(wide)
    }

    #[inline(always)]
    unsafe fn store_f16(self, ptr: *mut f16, x: f32x4) {
        let narrow: uint16x4_t;
        // SAFETY: `self` proves NEON, which has this conversion; the caller's.
        unsafe {
            asm!("fcvtn {y:v}.4h, {x:v}.4s", x = in(vreg) v(x), y = out(vreg) narrow,
                options(pure, nomem, nostack, preserves_flags));
            vst1_u16(ptr.cast(), narrow);
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, ptr: *const bf16) -> f32x4 {
        // SAFETY: `self` proves NEON; the caller's.
        unsafe { p(vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(ptr.cast())))) }
    }

    const DOTS: bool = true;

    #[inline(always)]
    unsafe fn dot(self, acc: f32x4, a: f32x4, b: f32x4) -> f32x4 {
        let mut acc = v(acc);
        // SAFETY: the caller's. The directive is for the assembler, which does not know what was detected.
        unsafe {
            asm!(".arch_extension bf16", "bfdot {acc:v}.4s, {a:v}.8h, {b:v}.8h",
                acc = inout(vreg) acc, a = in(vreg) v(a), b = in(vreg) v(b),
                options(pure, nomem, nostack, preserves_flags));
        }
        p(acc)
    }

    #[inline(always)]
    unsafe fn load_i8(self, ptr: *const i8) -> f32x4 {
        // SAFETY: `self` proves NEON; the caller's, of four bytes.
        unsafe {
            let bytes = vcreate_s8(u64::from(ptr.cast::<u32>().read_unaligned()));
            p(vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes)))))
        }
    }

    #[inline(always)]
    unsafe fn store_high(self, ptr: *mut bf16, x: u32x4) {
        // SAFETY: `self` proves NEON; the caller's.
        unsafe { vst1_u16(ptr.cast(), vshrn_n_u32::<16>(pulp::cast(x))) };
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
