//! Tensors are read where they lie. Alone in its target: it watches the allocator.

mod common;

use candle_core::Result;
use common::tensor;
use headwise_candle::{Options, sdpa};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

#[test]
fn strided_inputs_are_not_copied() -> Result<()> {
    let [q, k, v] = [1, 2, 3].map(|seed| tensor([1, 4096, 8, 64], seed).transpose(1, 2).unwrap());
    let (k, v) = (k.narrow(2, 1, 4000)?, v.narrow(2, 1, 4000)?);
    let q = q.narrow(2, 0, 8)?;
    let options = Options::new().sequential();
    sdpa(&q, &k, &v, &options)?; // scratch that stays
    ALLOCATOR.reset_peak_usage();
    let before = ALLOCATOR.current_usage();
    sdpa(&q, &k, &v, &options)?;
    let extra = ALLOCATOR.peak_usage() - before;
    assert!(extra < 100_000, "{extra} bytes"); // k alone has 8 MB, the result 16 KB
    Ok(())
}
