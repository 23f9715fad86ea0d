//! What a level adds to pulp: the few operations that pulp lacks.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::has_f16c;

use half::{bf16, f16};

use crate::exp;

/// A pulp token with `LANES = Self::F32_LANES` lanes of f32, and what the kernels need beside it.
pub(crate) trait Isa: pulp::Simd {
    /// `LANES` vectors: a square of f32.
    type Square: Copy + AsRef<[Self::f32s]> + AsMut<[Self::f32s]>;

    /// A square of zeros.
    fn square(self) -> Self::Square;

    /// Exchanges rows and columns.
    fn transpose(self, square: Self::Square) -> Self::Square;

    /// `y`, but 0 where `x < low`; where `x` is NaN `y` stays.
    #[inline(always)]
    fn zero_below(self, x: Self::f32s, low: f32, y: Self::f32s) -> Self::f32s {
        self.select_f32s(self.less_than_f32s(x, self.splat_f32s(low)), self.splat_f32s(0.0), y)
    }

    /// `x`, but -inf where `bias` is.
    #[inline(always)]
    fn hide_like(self, x: Self::f32s, bias: Self::f32s) -> Self::f32s {
        let minus_inf = self.splat_f32s(f32::NEG_INFINITY);
        self.select_f32s(self.equal_f32s(bias, minus_inf), minus_inf, x)
    }

    /// `4^x` for `x <= 63`, as [`exp::power_of_4`] says.
    #[inline(always)]
    fn power_of_4(self, x: Self::f32s) -> Self::f32s {
        exp::power_of_4(self, x)
    }

    /// Asks for the cache line at `ptr`, which may be any address, for the second-level cache.
    fn prefetch(self, ptr: *const u8);

    /// The same, for the nearest cache.
    fn prefetch_near(self, ptr: *const u8);

    /// Loads a vector of f16.
    ///
    /// # Safety
    /// `ptr` must be valid for reading `LANES` elements.
    unsafe fn load_f16(self, ptr: *const f16) -> Self::f32s;

    /// Stores the nearest f16, ties to even; NaN stays NaN.
    ///
    /// # Safety
    /// `ptr` must be valid for writing `LANES` elements.
    unsafe fn store_f16(self, ptr: *mut f16, x: Self::f32s);

    /// Loads a vector of bf16.
    ///
    /// # Safety
    /// As for [`Isa::load_f16`].
    unsafe fn load_bf16(self, ptr: *const bf16) -> Self::f32s;

    /// Whether [`Isa::load_two_bf16`] gives the elements at even places first, and those at odd ones second.
    const EVEN_FIRST: bool = false;

    /// Loads two vectors of bf16, in order or, where that is less work, even places first.
    ///
    /// # Safety
    /// `ptr` must be valid for reading `2 * LANES` elements.
    #[inline(always)]
    unsafe fn load_two_bf16(self, ptr: *const bf16) -> [Self::f32s; 2] {
        // SAFETY: the caller's.
        unsafe { [self.load_bf16(ptr), self.load_bf16(ptr.add(Self::F32_LANES))] }
    }

    /// Whether some processors with these registers have [`Isa::dot`].
    const DOTS: bool = false;

    /// `acc + a0 * b0 + a1 * b1` in each lane, where `a` and `b` hold two bf16 each: rounded as the
    /// processor's instruction does it, which takes subnormal numbers for 0.
    ///
    /// # Safety
    /// The processor must have it: [`crate::Level::is_available`].
    #[inline(always)]
    unsafe fn dot(self, acc: Self::f32s, _a: Self::f32s, _b: Self::f32s) -> Self::f32s {
        acc
    }

    /// Loads a vector of i8.
    ///
    /// # Safety
    /// As for [`Isa::load_f16`].
    unsafe fn load_i8(self, ptr: *const i8) -> Self::f32s;

    /// Stores the upper halves of a vector, which are bf16.
    ///
    /// # Safety
    /// As for [`Isa::store_f16`].
    unsafe fn store_high(self, ptr: *mut bf16, x: Self::u32s);

    /// Stores the nearest bf16, ties to even; NaN stays NaN.
    ///
    /// # Safety
    /// As for [`Isa::store_f16`].
    #[inline(always)]
    unsafe fn store_bf16(self, ptr: *mut bf16, x: Self::f32s) {
        let bits = self.transmute_u32s_f32s(x);
        let odd = self.and_u32s(self.wrapping_dyn_shr_u32s(bits, self.splat_u32s(16)), self.splat_u32s(1));
        let rounded = self.add_u32s(self.add_u32s(bits, self.splat_u32s(0x7fff)), odd);
        let rounded = self.transmute_f32s_u32s(rounded);
        let rounded = self.select_f32s(self.equal_f32s(x, x), rounded, self.splat_f32s(f32::NAN));
        // SAFETY: the caller's.
        unsafe { self.store_high(ptr, self.transmute_u32s_f32s(rounded)) };
    }

    /// Bit `j` of the result is `*ptr.add(j)`, for `j < n <= 64`.
    ///
    /// # Safety
    /// `ptr` must be valid for reading `n` booleans.
    #[inline(always)]
    unsafe fn bits(self, ptr: *const bool, n: usize) -> u64 {
        // SAFETY: the caller's.
        (0..n).fold(0, |bits, j| bits | u64::from(unsafe { *ptr.add(j) }) << j)
    }

    /// `x` where the lane's bit is 1, -inf where it is 0; bit 0 is lane 0's.
    fn hide(self, x: Self::f32s, bits: u64) -> Self::f32s;

    /// The sums of the lanes of four vectors.
    fn sums(self, x: [Self::f32s; 4]) -> [f32; 4];
}
