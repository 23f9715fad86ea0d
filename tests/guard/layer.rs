//! What is around attention: packing of weights, projections, norms, rotary positions, appending to a cache,
//! merging.

use half::{bf16, f16};
use headwise::layer::{Activation, Linear, Norm, Pairing, Rotary, Then, Weight, WeightLayout, Weights};
use headwise::{CacheShape, KvCache, Level, Partial, Run, Stored, Threads, View, merge};

use super::SIZES;
use super::memory::{Guarded, Trap};

const TRAPS: [Trap; 3] = [Trap::Nowhere, Trap::Behind, Trap::Before];

fn fill<T: Stored>(n: usize, trap: Trap) -> Guarded<T> {
    let numbers = (0..n as u32).map(|i| i.wrapping_mul(2_654_435_761) as i32 as f32 / 2f32.powi(31));
    Guarded::new(&numbers.map(T::from_f32).collect::<Vec<_>>(), trap)
}

/// `f` with each place of the trap and at each level: the same numbers.
fn same(what: &str, f: impl Fn(Trap, Run) -> Vec<f32>) {
    for level in Level::available() {
        let run = Run { level: Some(level), threads: Threads::Calling };
        let [ordinary, behind, before] = TRAPS.map(|trap| f(trap, run));
        assert!(ordinary == behind && ordinary == before, "{what}, {level}");
        assert!(ordinary.iter().all(|x| x.is_finite()), "{what}, {level}");
    }
}

fn projections<W: Weight>() {
    for (i, rows) in SIZES.into_iter().enumerate() {
        let (inputs, outputs) = (SIZES[(i * 7 + 3) % SIZES.len()], SIZES[(i * 4 + 1) % SIZES.len()]);
        let layout = if i % 2 == 0 { WeightLayout::OutIn } else { WeightLayout::InOut };
        same(&format!("{} rows, {inputs} to {outputs} of {}", rows, W::DTYPE), |trap, run| {
            let weights = Weights::pack(&fill::<W>(inputs * outputs, trap), layout, inputs, outputs).unwrap();
            let linear = Linear::with_weights(weights, Some(&fill(outputs, trap))).unwrap();
            let residual = fill(rows * outputs, trap);
            let (x, mut y) = (fill(rows * inputs, trap), fill(rows * outputs, trap));
            for then in [Then::Accumulate, Then::Add(&residual), Then::Activate(Activation::Silu)] {
                linear.forward(&x, then, run, &mut y).unwrap();
            }
            y.to_vec()
        });
    }
}

#[test]
fn projections_of_every_type() {
    projections::<f32>();
    projections::<f16>();
    projections::<bf16>();
}

#[test]
fn norms_and_rotary_positions() {
    for features in SIZES {
        same(&format!("{features} features"), |trap, run| {
            let (x, mut y) = (fill(3 * features, trap), fill(3 * features, trap));
            let norm = Norm::layer(&fill(features, trap), Some(&fill(features, trap)), 1e-5).unwrap();
            norm.forward(&x, &mut y, run).unwrap();
            Norm::rms(&fill(features, trap), 1e-5).unwrap().in_place(&mut y, run).unwrap();
            for pairing in [Pairing::Halves, Pairing::Interleaved] {
                let rotary = Rotary::new(features / 2 * 2, pairing, 1e4).unwrap();
                rotary.rotate(&mut y, features, 7).unwrap();
            }
            y.to_vec()
        });
    }
}

fn appended<C: Stored>() {
    for (d, dv) in SIZES.into_iter().zip(SIZES.into_iter().rev()) {
        same(&format!("a cache of {}, {d} and {dv} features", C::DTYPE), |trap, _| {
            let shape = CacheShape { batch: 1, heads: 2, capacity: 5, d, dv };
            let mut cache = KvCache::<C>::new(shape).unwrap();
            let (k, v) = (fill::<f32>(2 * 5 * d, trap), fill::<f32>(2 * 5 * dv, trap));
            cache
                .append(View::blhd(&k, [1, 5, 2, d]).unwrap(), View::bhld(&v, [1, 2, 5, dv]).unwrap())
                .unwrap();
            let at = |view: View<'_, C>, d| -> Vec<f32> {
                (0..10 * d).map(|i| view.value([0, i / (5 * d), i / d % 5, i % d]).unwrap()).collect()
            };
            [at(cache.keys(), d), at(cache.values(), dv)].concat()
        });
    }
}

#[test]
fn caches_of_every_type() {
    appended::<f32>();
    appended::<f16>();
    appended::<bf16>();
    appended::<i8>();
}

#[test]
fn merging() {
    for dv in SIZES {
        same(&format!("{dv} features"), |trap, _| {
            let parts = [fill(3 * dv, trap), fill(3 * dv, trap)];
            let lses = [fill(3, trap), fill(3, trap)];
            let parts = [0, 1].map(|i: usize| Partial { out: &parts[i], lse: &lses[i] });
            let (mut out, mut lse) = (fill(3 * dv, trap), fill(3, trap));
            merge(&parts, &mut out, &mut lse).unwrap();
            [&out[..], &lse[..]].concat()
        });
    }
}
