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

    /// Asks for the cache line at `ptr`, which may be any address.
    fn prefetch(self, ptr: *const f32);

    /// `LANES` booleans as 0 where true and -inf where false.
    ///
    /// # Safety
    /// `ptr` must be valid for reading `LANES` booleans.
    unsafe fn load_mask(self, ptr: *const bool) -> Self::f32s;
}
