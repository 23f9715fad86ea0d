//! What statistics cost: calls with and without them in turn, one thread, medians of their times. The ratio
//! is what the documentation promises.
//!
//! `cargo bench --bench statistics`

use std::time::Instant;

use headwise::{Attention, Error, StatisticsOptions, View, ViewMut};

/// Name, `[B, H, L, D]`, causal.
const SHAPES: [(&str, [usize; 4], bool); 5] = [
    ("1 x 8 x 2048, D 64", [1, 8, 2048, 64], false),
    ("8 x 12 x 128, D 64", [8, 12, 128, 64], false),
    ("16 x 12 x 64, D 32", [16, 12, 64, 32], false),
    ("1 x 8 x 2048, D 64, causal", [1, 8, 2048, 64], true),
    ("1 x 8 x 2048, D 128", [1, 8, 2048, 128], false),
];

fn main() -> Result<(), Error> {
    for (name, [b, h, l, d], causal) in SHAPES {
        // A hash of the index (Knuth's multiplicative), in [-1, 1): no two rows alike.
        let fill = |seed: u32| -> Vec<f32> {
            let hash = |i: u32| i.wrapping_add(seed).wrapping_mul(2_654_435_761) as i32;
            (0..(b * h * l * d) as u32).map(|i| hash(i) as f32 / 2f32.powi(31)).collect()
        };
        let (q, k, v, mut out) = (fill(1), fill(7), fill(13), vec![0.0; b * h * l * d]);
        let [q, k, v] = [&q, &k, &v].map(|x| View::bhld(x, [b, h, l, d]).expect("compact"));
        let attention = Attention::new().sequential();
        let attention = if causal { attention.causal() } else { attention };
        let special: Vec<bool> = (0..b * l).map(|j| j % 16 == 0).collect();
        let (plain, special) = (StatisticsOptions::new(), StatisticsOptions::new().special(&special));
        let mut run = |options: Option<&StatisticsOptions<'_>>| {
            let (out, start) = (ViewMut::bhld(&mut out, [b, h, l, d])?, Instant::now());
            match options {
                None => attention.run(q, k, v, out)?,
                Some(options) => _ = attention.run_with_statistics(q, k, v, out, options)?,
            }
            Ok::<_, Error>(start.elapsed().as_secs_f64() * 1e3)
        };
        let calls = [None, Some(&plain), Some(&special), Some(&special.received())];
        let mut times = [const { Vec::new() }; 4];
        for _ in 0..41 {
            for (times, call) in times.iter_mut().zip(calls) {
                times.push(run(call)?);
            }
        }
        let [none, plain, special, received] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        });
        println!(
            "{name}: {none:.2} ms, with statistics {:.2} x, special keys {:.2} x, received {:.2} x",
            plain / none,
            special / none,
            received / none
        );
    }
    Ok(())
}
