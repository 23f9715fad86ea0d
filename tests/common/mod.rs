//! Numbers for the tests.

use headwise::Element;

/// Uniform in [-1, 1): a hash of the index (Knuth's multiplicative).
pub fn fill<T: Element>(n: usize, seed: u32) -> Vec<T> {
    let hash =
        |i: u32| (i ^ seed << 20).wrapping_mul(2_654_435_761).rotate_left(15).wrapping_mul(0x85eb_ca6b);
    (0..n as u32).map(|i| T::from_f32(hash(i) as i32 as f32 / 2f32.powi(31))).collect()
}
