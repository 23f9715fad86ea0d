//! Joining results over parts of the keys.

use headwise::{Partial, merge};

fn joined(parts: &[(f32, f32)]) -> (f32, f32) {
    let rows: Vec<_> = parts.iter().map(|&(out, lse)| ([out], [lse])).collect();
    let parts: Vec<_> = rows.iter().map(|(out, lse)| Partial { out, lse }).collect();
    let (mut out, mut lse) = ([f32::NAN], [f32::NAN]);
    merge(&parts, &mut out, &mut lse).unwrap();
    (out[0], lse[0])
}

const NOTHING: f32 = f32::NEG_INFINITY;

/// flashinfer-ai/flashinfer #4051: two empty results made -inf minus -inf, which is NaN.
#[test]
fn empty_parts_count_for_nothing() {
    assert_eq!(joined(&[]), (0.0, NOTHING));
    assert_eq!(joined(&[(0.0, NOTHING)]), (0.0, NOTHING));
    assert_eq!(joined(&[(0.0, NOTHING), (0.0, NOTHING)]), (0.0, NOTHING));
    assert_eq!(joined(&[(f32::NAN, NOTHING), (f32::INFINITY, NOTHING)]), (0.0, NOTHING));
    for nothing in [0.0, 5.0, f32::NAN, f32::INFINITY] {
        assert_eq!(joined(&[(nothing, NOTHING), (3.0, 1.2)]), (3.0, 1.2));
        assert_eq!(joined(&[(3.0, 1.2), (nothing, NOTHING)]), (3.0, 1.2));
        assert_eq!(joined(&[(nothing, NOTHING), (3.0, 1.2), (nothing, NOTHING)]), (3.0, 1.2));
    }
}

#[test]
fn parts_are_joined_by_their_lse() {
    let near = |got: (f32, f32), out: f64, lse: f64| {
        assert!((got.0 as f64 - out).abs() <= 1e-6 * out.abs(), "{got:?}");
        assert!((got.1 as f64 - lse).abs() <= 1e-6 * lse.abs(), "{got:?}");
    };
    near(joined(&[(1.0, 0.2), (3.0, 1.2)]), 2.46211715726001, 1.5132616875182228);
    near(joined(&[(1.0, -1e30), (3.0, -1e30)]), 2.0, -1e30);
    near(joined(&[(1.0, 1e30), (3.0, 1e30)]), 2.0, 1e30);
    near(joined(&[(1.0, -80000.0), (3.0, -80001.0)]), 1.5378828427399902, -79999.68673831248);
    // Far apart: the small one is lost, and nothing overflows.
    near(joined(&[(1.0, 1e30), (3.0, -1e30)]), 1.0, 1e30);
    near(joined(&[(1.0, -1e30), (3.0, 1e30)]), 3.0, 1e30);
    near(joined(&[(1.0, 0.0), (3.0, 200.0)]), 3.0, 200.0);
}

/// In any order and any grouping, to rounding.
#[test]
fn joining_is_commutative_and_associative() {
    let parts = [(1.0, 0.2), (3.0, 1.2), (-2.0, -0.7), (0.5, 3.0), (9.0, NOTHING), (-4.0, 2.9)];
    let all = joined(&parts);
    let near = |got: (f32, f32)| {
        assert!((got.0 - all.0).abs() < 1e-6 && (got.1 - all.1).abs() < 1e-6, "{got:?}, not {all:?}");
    };
    for first in 0..parts.len() {
        let mut turned = parts;
        turned.rotate_left(first);
        near(joined(&turned));
        near(joined(&[joined(&parts[..first]), joined(&parts[first..])]));
        near(turned.into_iter().reduce(|a, b| joined(&[a, b])).unwrap());
    }
}
