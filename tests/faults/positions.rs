//! Causal edges, windows and slopes: all of them measured from where the query stands.

use headwise::{Attention, Position, Terms};

use crate::*;

/// ml-explore/mlx #2835: two libraries gave different numbers for "causal", because one lets the first query
/// stand at the first key and the other the last at the last.
#[test]
fn causal_starts_at_the_first_key_or_ends_at_the_last() {
    let (q, k, v) = (wave(0.7, 0.1, 4), wave(0.4, 0.3, 10), wave(0.6, 0.8, 10));
    let (q, k, v) = (bhld(&q, [1, 1, 2, 2]), bhld(&k, [1, 1, 5, 2]), bhld(&v, [1, 1, 5, 2]));
    let top_left = [0.7173560908995228, 0.9854497299884601, 0.8422526665253496, 0.6796534804582515];
    let bottom_right = [0.2638249915131319, 0.058917351565057674, 0.24699551144897172, 0.02661001188417254];
    let causal = Attention::new().causal();
    for position in [Position::TopLeft, Position::At(0), Position::Each(&[0])] {
        gives(causal.position(position), q, k, v, &top_left);
    }
    for position in [Position::BottomRight, Position::default(), Position::At(3), Position::Each(&[3])] {
        gives(causal.position(position), q, k, v, &bottom_right);
    }
}

/// The same kind: each way to name an offset, with valid lengths as well, means what it says.
#[test]
fn positions_are_offsets() {
    let (b, d) = (2, 4);
    for (l, s) in [(1, 40), (5, 5), (33, 70), (70, 33)] {
        let (q, k, v) = (wave(0.7, 0.1, b * l * d), wave(0.4, 0.3, b * s * d), wave(0.6, 0.8, b * s * d));
        let (q, k, v) = (bhld(&q, [b, 1, l, d]), bhld(&k, [b, 1, s, d]), bhld(&v, [b, 1, s, d]));
        let (kv_lens, q_lens) = ([s, s / 2], [l, l.div_ceil(2)]);
        let whole = [s as i64 - l as i64; 2];
        let valid = [0, 1].map(|b| kv_lens[b] as i64 - q_lens[b] as i64);
        for terms in [
            Terms { causal: true, ..Terms::default() },
            Terms { left: Some(2), right: Some(1), ..Terms::default() },
            Terms { slopes: Some(&[0.5]), ..Terms::default() },
        ] {
            let at = |terms: Terms<'static>, position| Attention::with_terms(terms).position(position);
            for level in levels() {
                let run = |attention| run(attention, level, q, k, v);
                let want = run(at(terms, Position::Each(&whole)));
                same(level, &run(at(terms, Position::BottomRight)), &want);
                same(level, &run(at(terms, Position::At(whole[0]))), &want);
                same(level, &run(at(terms, Position::TopLeft)), &run(at(terms, Position::At(0))));
                let with_lens = |position| at(terms, position).kv_lens(&kv_lens).q_lens(&q_lens);
                let want = run(with_lens(Position::Each(&valid)));
                same(level, &run(with_lens(Position::BottomRight)), &want);
            }
        }
    }
}

/// huggingface/transformers #39408: a window of W keys went to a kernel whose left bound does not count the
/// query itself, so that one more key was visible.
#[test]
fn a_left_bound_does_not_count_the_query_itself() {
    let causal = Attention::new().causal();
    let check =
        |left, want: [f64; 6]| flat(causal.window(Some(left), None), [1, 1, 1, 6, 6], &ramp(6), &want);
    check(2, [0.0, 0.5, 1.0, 2.0, 3.0, 4.0]);
    check(3, [0.0, 0.5, 1.0, 1.5, 2.5, 3.5]);
    check(0, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    check(usize::MAX, [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]);
}

/// jax-ml/jax #32300: the window was ignored where no mask was given.
#[test]
fn windows_and_masks_apply_together() {
    let window = Attention::new().window(Some(1), Some(0));
    let (all, none) = ([true; 24], [0.0; 24]);
    let check = |attention, want: [f64; 4]| flat(attention, [1, 1, 1, 4, 6], &ramp(6), &want);
    check(window, [1.5, 2.5, 3.5, 4.5]);
    check(window.mask(compact(&all, &[4, 6])), [1.5, 2.5, 3.5, 4.5]);
    check(window.bias(compact(&none, &[4, 6])), [1.5, 2.5, 3.5, 4.5]);
    let without = keep(4, 6, |_, j| j != 3);
    check(window.mask(compact(&without, &[4, 6])), [1.5, 2.0, 4.0, 4.5]);
}

/// trymirai/lalamo #200: with a cached prefix the window was measured from the row numbers of the call, so
/// that one token at a time and several together saw different keys.
#[test]
fn windows_are_measured_from_the_position() {
    let attention = Attention::new().causal().window(Some(2), None);
    flat(attention, [1, 1, 1, 3, 7], &ramp(7), &[3.0, 4.0, 5.0]);
    for seen in 5..8 {
        flat(attention, [1, 1, 1, 1, seen], &ramp(seen), &[seen as f64 - 2.0]);
        let at = attention.position(Position::At(seen as i64 - 1));
        flat(at, [1, 1, 1, 1, 7], &ramp(7), &[seen as f64 - 2.0]);
    }
}

/// The kind of the three above: causal and windows of any size, at any position and with any valid length,
/// give the same bits as the mask that says the same.
#[test]
fn every_window_is_like_its_mask() {
    let (d, dv) = (5, 3);
    for (l, s) in [(1, 70), (6, 6), (33, 130), (130, 40)] {
        let (q, k, v) = (wave(0.7, 0.1, l * d), wave(0.4, 0.3, s * d), wave(0.6, 0.8, s * dv));
        let (q, k, v) = (bhld(&q, [1, 1, l, d]), bhld(&k, [1, 1, s, d]), bhld(&v, [1, 1, s, dv]));
        let sides = [None, Some(0), Some(1), Some(2), Some(31), Some(64), Some(usize::MAX)];
        for causal in [false, true] {
            for (left, right) in sides.iter().flat_map(|left| sides.map(|right| (*left, right))) {
                for (offset, len) in [(0, s), (s as i64 - l as i64, s), (-3, s), (s as i64 / 2, s / 2)] {
                    let visible = keep(l, s, |i, j| {
                        let (far, j) =
                            (|side: Option<usize>| side.map_or(1 << 60, |w| w.min(1 << 60) as i64), j as i64);
                        let pos = i as i64 + offset;
                        j < len as i64
                            && (!causal || j <= pos)
                            && pos - far(left) <= j
                            && j <= pos + far(right)
                    });
                    let lens = [len];
                    let terms = Terms {
                        causal,
                        left,
                        right,
                        position: Position::At(offset),
                        kv_lens: Some(&lens),
                        ..Terms::default()
                    };
                    let mask = Attention::new().mask(compact(&visible, &[l, s]));
                    for level in levels() {
                        let got = run(Attention::with_terms(terms), level, q, k, v);
                        same(format!("{level}: {terms:?}"), &got, &run(mask, level, q, k, v));
                    }
                }
            }
        }
    }
}

/// ml-explore/mlx #343: wrong ALiBi numbers; here those that follow from the slopes of six heads.
#[test]
fn slopes_are_subtracted_by_distance() {
    let slopes = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125];
    let want = [
        1.1649537390192322,
        1.0416395628691966,
        1.0104162428338344,
        1.0026041600439504,
        1.3201566678298065,
        1.0831170515500113,
    ];
    flat(Attention::new().slopes(&slopes), [1, 6, 1, 1, 3], &ramp(3), &want);
    let at = Attention::new().slopes(&slopes).position(Position::At(2));
    flat(at, [1, 6, 1, 1, 3], &ramp(3), &want);
    let bias: Vec<f32> =
        slopes.iter().flat_map(|slope| (0..3).map(move |j| -slope * (2 - j) as f32)).collect();
    flat(Attention::new().bias(compact(&bias, &[6, 1, 3])), [1, 6, 1, 1, 3], &ramp(3), &want);
}

/// pytorch/pytorch #27461: the extra slot of zeros shifted the causal edge, and queries saw the future. The
/// slot is a sink of logit 0, or a key of its own that a mask leaves visible.
#[test]
fn a_slot_of_zeros_does_not_move_the_causal_edge() {
    let want = [0.5, 1.0, 1.5];
    flat(Attention::new().causal().sinks(&[0.0]), [1, 1, 1, 3, 3], &[1.0, 2.0, 3.0], &want);
    let mask = keep(3, 4, |i, j| j <= i || j == 3);
    flat(Attention::new().mask(compact(&mask, &[3, 4])), [1, 1, 1, 3, 4], &[1.0, 2.0, 3.0, 0.0], &want);
}
