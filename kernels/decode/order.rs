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
    let turn = |two: &mut [f32], was: &[f32]| {
        for i in 0..lanes {
            (two[i], two[lanes + i]) = (was[2 * i], was[2 * i + 1]);
        }
    };
    // SAFETY: the caller's.
    unsafe { each_two(row, length, lanes, turn) };
}

/// Turns the whole tiles of a record, `length` long, back.
///
/// # Safety
/// As for [`as_loaded`].
pub(super) unsafe fn in_turn(row: *mut f32, length: usize, lanes: usize) {
    let turn = |two: &mut [f32], was: &[f32]| {
        for i in 0..lanes {
            (two[2 * i], two[2 * i + 1]) = (was[i], was[lanes + i]);
        }
    };
    // SAFETY: the caller's.
    unsafe { each_two(row, length / (WIDE * lanes) * (WIDE * lanes), lanes, turn) };
}

/// `turn(two, was)` for each two vectors of a row, and what they were.
///
/// # Safety
/// As for [`as_loaded`].
unsafe fn each_two(row: *mut f32, length: usize, lanes: usize, turn: impl Fn(&mut [f32], &[f32])) {
    // SAFETY: the caller's.
    for two in unsafe { core::slice::from_raw_parts_mut(row, length) }.chunks_exact_mut(2 * lanes) {
        let mut was = [0.0; 2 * WIDEST];
        was[..2 * lanes].copy_from_slice(two);
        turn(two, &was);
    }
}
