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

    /// `x` moved into `low..=high`, lane by lane; NaN stays NaN.
    #[inline(always)]
    fn clamp(self, x: Self::f32s, low: f32, high: f32) -> Self::f32s {
        let (low, high) = (self.splat_f32s(low), self.splat_f32s(high));
        let x = self.select_f32s(self.less_than_f32s(x, low), low, x);
        self.select_f32s(self.less_than_f32s(high, x), high, x)
    }

    /// `LANES` booleans as 0 where true and -inf where false.
    ///
    /// # Safety
    /// `ptr` must be valid for reading `LANES` booleans.
    unsafe fn load_mask(self, ptr: *const bool) -> Self::f32s;
}
