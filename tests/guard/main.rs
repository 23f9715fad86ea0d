//! No kernel touches memory beside the caller's: every tensor and list ends, and then starts, at a page that
//! traps.
//!
//! An out-of-bounds read of a vector kernel mostly hits other live memory and shows in no result. Here each
//! input and each output lies against a page without access, so a single byte too far ends the process with
//! SIGSEGV. Which case it was, the last line of a run with `--nocapture` tells. Results are the same to the bit
//! as on ordinary memory.
#![cfg(target_os = "linux")]

mod attention;
mod layer;
mod memory;
mod serving;

use headwise::{View, ViewMut};

/// On both sides of vectors of 4, 8 and 16, of tiles of 32 rows and of blocks of 128 keys.
const SIZES: [usize; 15] = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 40, 65, 129];

/// `[B, H, L, D]` in compact memory, tokens outside the heads or inside.
fn view<X: Copy>(tokens_first: bool, data: &[X], [b, h, l, d]: [usize; 4]) -> View<'_, X> {
    if tokens_first { View::blhd(data, [b, l, h, d]) } else { View::bhld(data, [b, h, l, d]) }.unwrap()
}

/// The same, to be written.
fn view_mut<X: Copy>(tokens_first: bool, data: &mut [X], [b, h, l, d]: [usize; 4]) -> ViewMut<'_, X> {
    if tokens_first { ViewMut::blhd(data, [b, l, h, d]) } else { ViewMut::bhld(data, [b, h, l, d]) }.unwrap()
}
