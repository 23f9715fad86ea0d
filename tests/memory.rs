//! lucidrains/x-transformers #261: a padding mask was expanded to batch x heads x queries x keys.

use headwise::{Attention, View, ViewMut};
use peak_alloc::PeakAlloc;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// MiB that a call takes beyond its arguments: a padding mask and a bias `[1, 1, L, L]`, whose rows are
/// shifted views of one short slice.
fn extra([b, h, l, d]: [usize; 4]) -> f32 {
    let x: Vec<f32> = (0..b * h * l * d).map(|at| (at as f32 * 0.1).sin()).collect();
    let padding: Vec<bool> = (0..b * l).map(|at| at % l < l - 7).collect();
    let bias: Vec<f32> = (0..2 * l).map(|at| (at as f32 * 0.01).cos()).collect();
    let mut out = vec![0.0; x.len()];
    let x = View::bhld(&x, [b, h, l, d]).unwrap();
    let padding = View::compact(&padding, &[b, 1, 1, l]).unwrap();
    let bias = View::new(&bias, l - 1, [1, 1, l, l], [0, 0, -1, 1]).unwrap();
    let attention = Attention::new().mask(padding).bias(bias);
    let before = MEMORY.current_usage_as_mb();
    MEMORY.reset_peak_usage();
    attention.run(x, x, x, ViewMut::bhld(&mut out, [b, h, l, d]).unwrap()).unwrap();
    MEMORY.peak_usage_as_mb() - before
}

/// One test, so that nothing else allocates meanwhile.
#[test]
fn masks_and_biases_are_not_expanded() {
    // In full the mask would be 256 MiB and the bias 1024.
    let threads = rayon::current_num_threads() as f32;
    let first = extra([2, 8, 4096, 4]);
    assert!(first < 16.0 && first < threads, "{first} MiB on {threads} threads"); // 1 MiB a thread
    let longer = extra([1, 2, 8192, 4]);
    assert!(longer < 2.0 * first.max(0.25), "{longer} MiB, {first} at half the length");
    let wide = extra([1, 1, 700, 256]);
    assert!(wide < threads, "{wide} MiB on {threads} threads");
}
