//! One lane: a vector is an `f32`.

use half::{bf16, f16};

use super::Isa;

impl Isa for pulp::Scalar {
    type Square = [f32; 1];

    #[inline(always)]
    fn square(self) -> [f32; 1] {
        [0.0]
    }

    #[inline(always)]
    fn transpose(self, square: [f32; 1]) -> [f32; 1] {
        square
    }

    #[inline(always)]
    fn prefetch(self, _: *const u8) {}

    #[inline(always)]
    unsafe fn load_f16(self, ptr: *const f16) -> f32 {
        // SAFETY: the caller's.
        unsafe { *ptr }.to_f32_const()
    }

    #[inline(always)]
    unsafe fn store_f16(self, ptr: *mut f16, x: f32) {
        // SAFETY: the caller's.
        unsafe { *ptr = f16::from_f32_const(x) };
    }

    #[inline(always)]
    unsafe fn load_bf16(self, ptr: *const bf16) -> f32 {
        // SAFETY: the caller's.
        f32::from_bits(u32::from(unsafe { *ptr }.to_bits()) << 16)
    }

    #[inline(always)]
    unsafe fn load_i8(self, ptr: *const i8) -> f32 {
        // SAFETY: the caller's.
        f32::from(unsafe { *ptr })
    }

    #[inline(always)]
    unsafe fn store_high(self, ptr: *mut bf16, x: u32) {
        // SAFETY: the caller's.
        unsafe { *ptr = bf16::from_bits((x >> 16) as u16) };
    }

    #[inline(always)]
    fn hide(self, x: f32, bits: u64) -> f32 {
        if bits & 1 == 1 { x } else { f32::NEG_INFINITY }
    }

    #[inline(always)]
    fn sums(self, x: [f32; 4]) -> [f32; 4] {
        x
    }
}
