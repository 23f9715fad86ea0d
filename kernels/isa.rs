//! What a level adds to pulp: the few operations that pulp lacks.

#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

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

    /// Asks for the cache line at `ptr`, which may be any address, for the second-level cache.
    fn prefetch(self, ptr: *const f32);

    /// The same, for the nearest cache.
    fn prefetch_near(self, ptr: *const f32);

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
