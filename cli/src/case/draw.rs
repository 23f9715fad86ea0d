//! The stream of numbers that a case is drawn from, and what its elements are like.

/// A stream of numbers: bytes of a fuzzer, or a generator with a seed.
pub struct Draw<'a>(pub &'a mut dyn FnMut() -> u32);

impl Draw<'_> {
    /// A number below `n`, or 0.
    pub fn below(&mut self, n: usize) -> usize {
        if n < 2 { 0 } else { (self.0)() as usize % n }
    }

    pub(super) fn uniform(&mut self) -> f32 {
        (self.0)() as i32 as f32 / (1u32 << 31) as f32
    }

    pub(super) fn maybe<T>(&mut self, one_in: usize, f: impl FnOnce(&mut Self) -> T) -> Option<T> {
        (self.below(one_in) == 1).then(|| f(self))
    }
}

/// What the numbers in Q, K and V are like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Values {
    /// Uniform in [-1, 1]: the range of the error budget.
    Unit,
    /// Uniform in [-30, 30]: weights that underflow, scores of thousands.
    Large,
    /// Mostly uniform, with NaN, infinities and zeros.
    Special,
    /// Mostly uniform, with denormals and numbers near the largest: not together with infinities, where the
    /// product depends on whether a denormal times the scale is still above 0.
    Extreme,
}

/// The next number of a stream (splitmix64: Steele, Lea and Flood 2014).
pub fn splitmix(state: &mut u64) -> u32 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 32) as u32
}

pub(super) fn offset(draw: &mut Draw<'_>, lk: usize) -> i64 {
    match draw.below(12) {
        1 => i64::MAX,
        2 => i64::MIN,
        _ => draw.below(2 * lk + 5) as i64 - (lk as i64 / 2 + 2),
    }
}

pub(super) fn number(draw: &mut Draw<'_>, values: Values) -> f32 {
    const SPECIAL: [f32; 5] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0];
    const EXTREME: [f32; 5] = [1e-40, -1e-45, f32::MAX, f32::MIN, 1e18];
    match values {
        Values::Unit => draw.uniform(),
        Values::Large => 30.0 * draw.uniform(),
        Values::Special if draw.below(200) == 1 => SPECIAL[draw.below(SPECIAL.len())],
        Values::Extreme if draw.below(200) == 1 => EXTREME[draw.below(EXTREME.len())],
        Values::Special | Values::Extreme => 3.0 * draw.uniform(),
    }
}
