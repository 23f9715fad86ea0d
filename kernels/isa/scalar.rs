//! One lane: a vector is an `f32`.

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
    fn prefetch_near(self, _: *const f32) {}

    #[inline(always)]
    fn prefetch(self, _: *const f32) {}

    #[inline(always)]
    fn hide(self, x: f32, bits: u64) -> f32 {
        if bits & 1 == 1 { x } else { f32::NEG_INFINITY }
    }

    #[inline(always)]
    fn sums(self, x: [f32; 4]) -> [f32; 4] {
        x
    }
}
