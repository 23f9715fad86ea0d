//! Bytes are the numbers that a case is drawn from: every level against the reference and the other levels.
//!
//! The first eight bytes seed what follows the last of them; a seed of 0 stands for zeros, the plainest case.
//! So a short input can be a case with full tensors, and the fuzzer's bytes steer its sizes and options.
#![no_main]

use headwise::Level;
use headwise_cli::case::{Case, Draw, splitmix};
use libfuzzer_sys::fuzz_target;

/// Pairs of queries and keys, about: hundreds of cases a second.
const SCORES: usize = 200;

fuzz_target!(|bytes: &[u8]| {
    let Some((seed, bytes)) = bytes.split_first_chunk() else { return };
    let (seed, mut words) = (u64::from_le_bytes(*seed), bytes.as_chunks().0.iter());
    let mut state = seed;
    let mut after = || if seed == 0 { 0 } else { splitmix(&mut state) };
    let mut next = || words.next().map_or_else(&mut after, |word| u32::from_le_bytes(*word));
    let case = Case::draw_within(&mut Draw(&mut next), SCORES);
    let levels: Vec<Level> = Level::available().collect();
    if let Err(what) = case.check(&levels) {
        panic!("{what}\n{:?}", case.terms());
    }
});
