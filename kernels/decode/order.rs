//! The order of features where two vectors of bf16 are loaded at once, those at even places first: it is half the
//! work, and the sums of the scores do not care. Queries are put in that order, and records come out in it.

use crate::join::WIDEST;

/// Vectors of a tile of values; those behind the last whole tile are loaded one by one, in turn.
pub(super) const WIDE: usize = 4;

/// In each two vectors of `lanes` of a row of queries, `length` long: what lies at even places first, then the
/// rest; a last single vector stays.
///
/// # Safety
/// `row` must hold `length` f32.
pub(super) unsafe fn as_loaded(row: *mut f32, length: usize, lanes: usize) {
    // SAFETY: the caller's.
    for two in unsafe { core::slice::from_raw_parts_mut(row, length) }.chunks_exact_mut(2 * lanes) {
        let mut was = [0.0; 2 * WIDEST];
        was[..2 * lanes].copy_from_slice(two);
        let (even, odd) = two.split_at_mut(lanes);
        for ((even, odd), was) in even.iter_mut().zip(odd).zip(was.chunks_exact(2)) {
            (*even, *odd) = (was[0], was[1]);
        }
    }
}

/// Turns the whole tiles of a record, `length` long, back.
///
/// # Safety
/// As for [`as_loaded`].
pub(super) unsafe fn in_turn(row: *mut f32, length: usize, lanes: usize) {
    let length = length / (WIDE * lanes) * (WIDE * lanes);
    // SAFETY: the caller's.
    for two in unsafe { core::slice::from_raw_parts_mut(row, length) }.chunks_exact_mut(2 * lanes) {
        let mut was = [0.0; 2 * WIDEST];
        was[..2 * lanes].copy_from_slice(two);
        let (even, odd) = was[..2 * lanes].split_at(lanes);
        for ((two, even), odd) in two.chunks_exact_mut(2).zip(even).zip(odd) {
            (two[0], two[1]) = (*even, *odd);
        }
    }
}
