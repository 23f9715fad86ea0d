//! Every way to be refused: the whole error, that its message names the argument and the numbers, and that
//! nothing has been written when it comes.

use std::ops::Range;

use headwise::{Attention, Error, Level, Partial, Position, Stage, View, ViewMut, merge, reference};

const ZEROS: [f32; 240] = [0.0; 240];

fn zeros(shape: [usize; 4]) -> View<'static, f32> {
    View::bhld(&ZEROS[..shape.iter().product()], shape).expect("few")
}

/// Runs attention with q, k and v of the given shapes; whatever it says, `plan`, `run_with_lse` and the
/// reference must say the same, and the output must not have been touched.
#[track_caller]
fn refused(attention: Attention<'static>, [q, k, v]: [[usize; 4]; 3], want: Error, message: &str) {
    let [q, k, v] = [q, k, v].map(zeros);
    let shape = [q.shape()[0], q.shape()[1], q.shape()[2], v.shape()[3]];
    let (mut out, mut lse) = (vec![7.0; shape.iter().product()], vec![7.0; shape[..3].iter().product()]);
    let view = ViewMut::bhld(&mut out, shape).expect("compact");
    let error = attention.run_with_lse(q, k, v, view, &mut lse).unwrap_err();
    assert_eq!(error, want);
    assert_eq!(error.to_string(), message);
    let view = ViewMut::bhld(&mut out, shape).expect("compact");
    assert_eq!(attention.run(q, k, v, view).unwrap_err(), want);
    assert_eq!(attention.plan(q, k, v).unwrap_err(), want);
    assert_eq!(reference::attention(q, k, v, attention.terms()).unwrap_err(), want);
    assert!(out.iter().chain(&lse).all(|&x| x == 7.0), "written on error");
}

/// B 2, Hq 4, Hk 2, Lq 3, Lk 5, D 4, Dv 2.
const FINE: [[usize; 4]; 3] = [[2, 4, 3, 4], [2, 2, 5, 4], [2, 2, 5, 2]];

#[test]
fn views_that_reach_outside_their_slice() {
    let data = [0.0f32; 10];
    let refused = |offset, shape, strides: [isize; 4]| {
        let error = View::new(&data, offset, shape, strides).unwrap_err();
        assert_eq!(error, Error::OutOfBounds { shape, strides, offset, len: 10 });
        assert_eq!(ViewMut::new(&mut [0.0f32; 10], offset, shape, strides).unwrap_err(), error);
        let message = error.to_string();
        for part in [format!("{shape:?}"), format!("{strides:?}"), format!("offset {offset}"), "10".into()] {
            assert!(message.contains(&part), "{message}");
        }
    };
    refused(0, [1, 1, 1, 11], [0, 0, 0, 1]);
    refused(10, [1, 1, 1, 1], [0, 0, 0, 1]);
    refused(usize::MAX, [1, 1, 1, 2], [0, 0, 0, 1]);
    refused(0, [1, 1, 1, 2], [0, 0, 0, -1]);
    refused(3, [1, 1, 2, 2], [0, 0, -3, -1]);
    refused(0, [2, 1, 1, 2], [9, 0, 0, 1]);
    refused(0, [1, 1, 1, 3], [0, 0, 0, isize::MAX]);
    refused(0, [1, 1, 1, 3], [0, 0, 0, isize::MIN]);
    refused(0, [1, 1, 1, isize::MAX as usize], [0, 0, 0, isize::MAX]);
    assert!(View::bhld(&data, [1, 1, 2, 5]).is_ok() && View::bhld(&data, [1, 1, 3, 5]).is_err());
    assert!(View::blhd(&data, [1, 2, 1, 5]).is_ok() && View::blhd(&data, [1, 2, 2, 5]).is_err());
    assert!(View::new(&data, usize::MAX, [1, 0, 1, 1], [isize::MAX; 4]).is_ok()); // no element, no place
}

#[test]
fn sizes_that_multiply_to_too_much() {
    let n = 1 << (usize::BITS / 3 + 1);
    let error = View::new(&ZEROS, 0, [n, n, 2, n], [0; 4]).unwrap_err();
    assert_eq!(error, Error::TooLarge { argument: "view", shape: [n, n, 2, n] });
    let message = format!("view: the sizes [{n}, {n}, 2, {n}] multiply to more than can be addressed");
    assert_eq!(error.to_string(), message);
    assert_eq!(View::bhld(&ZEROS, [n, n, 2, n]).unwrap_err(), error);
    assert_eq!(ViewMut::bhld(&mut [0.0f32], [n, n, 2, n]).unwrap_err(), error);

    let huge = |shape| View::new(&ZEROS, 0, shape, [0; 4]).unwrap();
    let plan = |q, k, v| Attention::new().plan(huge(q), huge(k), huge(v)).unwrap_err();
    let scores = plan([n, 1, n, 1], [n, 1, n, 1], [n, 1, n, 1]);
    assert_eq!(scores, Error::TooLarge { argument: "scores", shape: [n, 1, n, n] });
    let out = plan([n, 1, n, 1], [n, 1, 1, 1], [n, 1, 1, n]);
    assert_eq!(out, Error::TooLarge { argument: "out", shape: [n, 1, n, n] });
    assert!(out.to_string().starts_with("out: ") && scores.to_string().starts_with("scores: "));

    // One token, so far along its axis that the LSE of 8 heads cannot be counted.
    let start = 1 << (usize::BITS - 3);
    let starts = [start, start + 1];
    let q = View::new(&ZEROS, 0, [1, 8, start + 1, 0], [0; 4]).unwrap().packed(&starts).unwrap();
    let error = Attention::new().scale(1.0).plan(q, zeros([1, 8, 1, 0]), zeros([1, 8, 1, 1])).unwrap_err();
    assert_eq!(error, Error::TooLarge { argument: "rows", shape: [1, 8, start + 1, 1] });
}

#[test]
fn outputs_that_overlap() {
    let refused = |shape, strides| {
        let error = ViewMut::new(&mut [0.0f32; 40], 20, shape, strides).unwrap_err();
        assert_eq!(error, Error::Overlap { shape, strides });
        let message = error.to_string();
        assert!(message.starts_with("out: "), "{message}");
        assert!(message.contains(&format!("{shape:?}")) && message.contains(&format!("{strides:?}")));
    };
    refused([1, 2, 1, 3], [0, 0, 0, 1]);
    refused([1, 1, 3, 3], [0, 0, 2, 1]);
    refused([1, 1, 3, 3], [0, 0, 2, -1]);
    refused([1, 2, 2, 2], [0, 1, 2, 2]);
    assert!(ViewMut::new(&mut [0.0f32; 40], 20, [1, 1, 3, 3], [0, 0, -3, 1]).is_ok());
    assert!(ViewMut::new(&mut [0.0f32; 40], 0, [1, 2, 1, 3], [0, 3, 0, 1]).is_ok());
}

#[test]
fn masks_with_five_axes() {
    let error = View::compact(&ZEROS, &[1, 1, 2, 3, 4]).unwrap_err();
    assert_eq!(error, Error::Rank { rank: 5 });
    assert_eq!(error.to_string(), "a mask or bias has 1 to 4 axes, not 5");
}

#[test]
fn shapes_that_do_not_fit() {
    let [q, k, v] = FINE;
    let plain = Attention::new();
    let check = |argument, got: [usize; 4], expected: [usize; 4], shapes| {
        let message = format!("{argument} has shape {got:?}, expected {expected:?}");
        refused(plain, shapes, Error::Shape { argument, got, expected }, &message);
    };
    check("k", [1, 2, 5, 4], [2, 2, 5, 4], [q, [1, 2, 5, 4], v]);
    check("k", [2, 2, 5, 3], [2, 2, 5, 4], [q, [2, 2, 5, 3], v]);
    check("v", [1, 2, 5, 2], [2, 2, 5, 2], [q, k, [1, 2, 5, 2]]);
    check("v", [2, 1, 5, 2], [2, 2, 5, 2], [q, k, [2, 1, 5, 2]]);
    check("v", [2, 2, 4, 2], [2, 2, 5, 2], [q, k, [2, 2, 4, 2]]);
    for got in [[1, 4, 3, 2], [2, 2, 3, 2], [2, 4, 2, 2], [2, 4, 3, 4], [2, 4, 4, 2], [2, 4, 3, 0]] {
        let (mut out, mut lse) = (vec![7.0f32; got.iter().product()], [7.0; 24]);
        let view = ViewMut::bhld(&mut out, got).unwrap();
        let error = plain.run_with_lse(zeros(q), zeros(k), zeros(v), view, &mut lse).unwrap_err();
        assert_eq!(error, Error::Shape { argument: "out", got, expected: [2, 4, 3, 2] });
        assert!(out.iter().chain(&lse).all(|&x| x == 7.0));
    }
}

#[test]
fn heads_that_do_not_divide() {
    let message = "4 query heads are not a multiple of 3 key/value heads";
    let shapes = [[2, 4, 3, 4], [2, 3, 5, 4], [2, 3, 5, 2]];
    refused(Attention::new(), shapes, Error::Heads { query: 4, key: 3 }, message);
    let message = "4 query heads are not a multiple of 0 key/value heads";
    let shapes = [[2, 4, 3, 4], [2, 0, 5, 4], [2, 0, 5, 2]];
    refused(Attention::new(), shapes, Error::Heads { query: 4, key: 0 }, message);
}

#[test]
fn masks_and_biases_that_do_not_broadcast() {
    for got in [[1, 1, 1, 4], [1, 1, 2, 1], [1, 2, 1, 1], [3, 1, 1, 1], [1, 1, 5, 3], [1, 1, 1, 0]] {
        let to = [2, 4, 3, 5];
        let check = |attention, argument| {
            let message =
                format!("{argument} of shape {got:?} does not broadcast to [B, Hq, Lq, Lk] = {to:?}");
            refused(attention, FINE, Error::Broadcast { argument, got, to }, &message);
        };
        check(Attention::new().mask(View::bhld(&[true; 15][..got.iter().product()], got).unwrap()), "mask");
        check(Attention::new().bias(zeros(got)), "bias");
    }
}

#[test]
fn slices_of_another_length() {
    let plain = Attention::new();
    let check = |attention, argument, got, expected| {
        let message = format!("{argument} has {got} entries, expected {expected}");
        refused(attention, FINE, Error::Length { argument, got, expected }, &message);
    };
    check(plain.kv_lens(&[5, 5, 5]), "kv_lens", 3, 2);
    check(plain.q_lens(&[]), "q_lens", 0, 2);
    check(plain.position(Position::Each(&[0])), "offsets", 1, 2);
    check(plain.slopes(&[0.5; 2]), "slopes", 2, 4);
    check(plain.sinks(&[0.5; 5]), "sinks", 5, 4);
    check(plain.gates(&[]), "gates", 0, 4);

    let [q, k, v] = FINE.map(zeros);
    for got in [0, 23, 25] {
        let (mut out, mut lse) = ([7.0f32; 48], vec![7.0; got]);
        let view = ViewMut::bhld(&mut out, [2, 4, 3, 2]).unwrap();
        let error = plain.run_with_lse(q, k, v, view, &mut lse).unwrap_err();
        assert_eq!(error, Error::Length { argument: "lse", got, expected: 24 });
        assert!(out.iter().chain(&lse).all(|&x| x == 7.0));
    }
}

#[test]
fn parts_of_another_length() {
    let check = |part: [usize; 2], out: usize, lse: usize, argument, got, expected| {
        let part = Partial { out: &ZEROS[..part[0]], lse: &ZEROS[..part[1]] };
        let (mut out, mut lse) = (vec![7.0; out], vec![7.0; lse]);
        let error = merge(&[part], &mut out, &mut lse).unwrap_err();
        assert_eq!(error, Error::Length { argument, got, expected });
        assert!(out.iter().chain(&lse).all(|&x| x == 7.0));
    };
    check([7, 3], 7, 3, "out", 7, 6);
    check([7, 0], 7, 0, "out", 7, 0);
    check([9, 3], 6, 3, "part.out", 9, 6);
    check([6, 2], 6, 3, "part.lse", 2, 3);
}

#[test]
fn lengths_beyond_their_axis() {
    let error = Error::BeyondAxis { argument: "kv_lens", index: 1, got: 6, axis: 5 };
    refused(Attention::new().kv_lens(&[5, 6]), FINE, error, "kv_lens[1] is 6, but the axis has 5");
    let error = Error::BeyondAxis { argument: "q_lens", index: 0, got: usize::MAX, axis: 3 };
    let message = format!("q_lens[0] is {}, but the axis has 3", usize::MAX);
    refused(Attention::new().q_lens(&[usize::MAX, 0]), FINE, error, &message);
}

#[test]
fn sequences_that_cannot_be_packed() {
    let refused = |shape: [usize; 4], starts: &'static [usize], message: &str| {
        let error = zeros(shape).packed(starts).unwrap_err();
        assert_eq!(error, Error::Packed { shape, end: starts.last().copied() });
        assert_eq!(error.to_string(), message);
        let mut data = vec![0.0f32; shape.iter().product()];
        assert_eq!(ViewMut::bhld(&mut data, shape).unwrap().packed(starts).unwrap_err(), error);
    };
    let starts = "starts of sequences must not fall, and end inside the 5 tokens; the last is";
    refused([1, 2, 5, 4], &[], &format!("{starts} None"));
    refused([1, 2, 5, 4], &[0, 3, 2, 5], &format!("{starts} Some(5)"));
    refused([1, 2, 5, 4], &[0, 3, 6], &format!("{starts} Some(6)"));
    refused([1, 2, 5, 4], &[usize::MAX], &format!("{starts} Some({})", usize::MAX));
    refused([2, 2, 5, 4], &[0, 5], "sequences are packed in one batch entry, not 2");
    refused([0, 2, 5, 4], &[0, 5], "sequences are packed in one batch entry, not 0");
    // Once is enough.
    let packed = zeros([1, 2, 5, 4]).packed(&[0, 5]).unwrap();
    let error = Error::Packed { shape: [1, 2, 5, 4], end: Some(5) };
    assert_eq!(packed.packed(&[0, 5]).unwrap_err(), error);
    let paged = zeros([1, 2, 5, 4]).paged(&[0], &[5]).unwrap();
    assert_eq!(paged.packed(&[0, 5]).unwrap_err(), error);
    let mut data = [0.0f32; 40];
    let packed = ViewMut::bhld(&mut data, [1, 2, 5, 4]).unwrap().packed(&[0, 5]).unwrap();
    assert_eq!(packed.packed(&[0, 5]).unwrap_err(), error);
    assert!(zeros([1, 2, 5, 4]).packed(&[0]).is_ok() && zeros([1, 2, 5, 4]).packed(&[1, 1, 4]).is_ok());
}

#[test]
fn caches_that_cannot_be_paged() {
    let refused = |pool: [usize; 4], table: &'static [u32], lens: &'static [usize]| {
        let error = zeros(pool).paged(table, lens).unwrap_err();
        let (table, rows) = (table.len(), lens.len());
        assert_eq!(error, Error::Paged { pool, table, rows });
        let message =
            format!("a pool of shape {pool:?} cannot be paged by {table} entries for {rows} sequences");
        assert_eq!(error.to_string(), message);
    };
    refused([3, 2, 0, 4], &[0, 1], &[0]); // pages of no tokens
    refused([3, 2, 5, 4], &[0, 1, 2], &[5, 5]);
    refused([3, 2, 5, 4], &[0], &[]);
    let packed = zeros([1, 2, 5, 4]).packed(&[0, 5]).unwrap();
    let error = Error::Paged { pool: [1, 2, 5, 4], table: 1, rows: 1 };
    assert_eq!(packed.paged(&[0], &[5]).unwrap_err(), error);
    let paged = zeros([1, 2, 5, 4]).paged(&[0], &[5]).unwrap();
    assert_eq!(paged.paged(&[0], &[5]).unwrap_err(), error);
}

#[test]
fn pages_that_are_not_there() {
    let pool = zeros([3, 2, 5, 4]);
    let error = pool.paged(&[0, 1, 3, 2], &[10, 1]).unwrap_err();
    assert_eq!(error, Error::Page { index: 2, got: 3, pages: 3 });
    assert_eq!(error.to_string(), "table[2] is page 3, but the pool has 3");
    let error = pool.paged(&[2, u32::MAX], &[6]).unwrap_err();
    assert_eq!(error, Error::Page { index: 1, got: u32::MAX as usize, pages: 3 });
    assert!(pool.paged(&[2, u32::MAX], &[5]).is_ok()); // it is behind the pages in use
    let error = zeros([0, 2, 5, 4]).paged(&[0], &[1]).unwrap_err();
    assert_eq!(error, Error::Page { index: 0, got: 0, pages: 0 });

    let error = pool.paged(&[0, 1, 2, 0], &[10, 11]).unwrap_err();
    assert_eq!(error, Error::BeyondAxis { argument: "lens", index: 1, got: 11, axis: 10 });
    let error = pool.paged(&[], &[1]).unwrap_err();
    assert_eq!(error, Error::BeyondAxis { argument: "lens", index: 0, got: 1, axis: 0 });
    let size = 1 << (usize::BITS - 2);
    let pool = View::new(&ZEROS, 0, [1, 1, size, 1], [0; 4]).unwrap();
    let error = pool.paged(&[0; 2], &[1]).unwrap_err();
    assert_eq!(error, Error::TooLarge { argument: "paged", shape: [1, 1, 2 * size, 1] });
}

/// Lengths of the batch entries that do not agree, or lie beyond those that packed and paged views know.
#[test]
fn sequences_of_other_lengths() {
    let q = zeros([1, 4, 5, 4]).packed(&[0, 2, 5]).unwrap();
    let k = zeros([1, 2, 9, 4]).packed(&[0, 5, 9]).unwrap();
    let v = zeros([1, 2, 9, 2]).packed(&[0, 5, 9]).unwrap();
    let other = zeros([1, 2, 9, 2]).packed(&[0, 4, 9]).unwrap();
    let paged = zeros([2, 2, 5, 2]).paged(&[0, 1], &[5, 3]).unwrap();
    let plain = zeros([2, 2, 5, 2]);
    let tokens = |argument, b, got, expected| Error::Tokens { argument, b, got, expected };
    let beyond = |argument, index, got, axis| Error::BeyondAxis { argument, index, got, axis };
    let all = Attention::new();
    let check = |attention: Attention<'static>, v, want: Error, message: &str| {
        let (mut out, mut lse) = ([7.0; 40], [7.0; 20]);
        let view = ViewMut::bhld(&mut out, [1, 4, 5, 2]).unwrap().packed(&[0, 2, 5]).unwrap();
        assert_eq!(attention.run_with_lse(q, k, v, view, &mut lse).unwrap_err(), want);
        assert_eq!(attention.plan(q, k, v).unwrap_err(), want);
        assert_eq!(reference::attention(q, k, v, attention.terms()).unwrap_err(), want);
        assert!(out.iter().chain(&lse).all(|&x| x == 7.0), "written on error");
        assert_eq!(want.to_string(), message);
    };
    check(all, other, tokens("v", 0, 4, 5), "v has 4 tokens in batch entry 0, expected 5");
    check(all, paged, tokens("v", 1, 3, 4), "v has 3 tokens in batch entry 1, expected 4");
    check(all, plain, tokens("v", 1, 5, 4), "v has 5 tokens in batch entry 1, expected 4");
    let message = "kv_lens[1] is 5, but the axis has 4";
    check(all.kv_lens(&[5, 5]), v, beyond("kv_lens", 1, 5, 4), message);
    check(all.q_lens(&[3, 3]), v, beyond("q_lens", 0, 3, 2), "q_lens[0] is 3, but the axis has 2");

    // The output has the lengths of the queries, and its LSE all of their tokens.
    let check = |q, starts: Option<&'static [usize]>, lse: usize, want: Error| {
        let (mut out, mut lse) = ([7.0; 48], vec![7.0; lse]);
        let view = match starts {
            Some(starts) => ViewMut::bhld(&mut out[..40], [1, 4, 5, 2]).unwrap().packed(starts).unwrap(),
            None => ViewMut::bhld(&mut out, [2, 4, 3, 2]).unwrap(),
        };
        assert_eq!(all.run_with_lse(q, k, v, view, &mut lse).unwrap_err(), want);
        assert!(out.iter().chain(&lse).all(|&x| x == 7.0), "written on error");
    };
    check(q, Some(&[0, 3, 5]), 20, tokens("out", 0, 3, 2));
    check(q, None, 20, tokens("out", 0, 3, 2));
    check(zeros([2, 4, 3, 4]), Some(&[0, 2, 5]), 24, tokens("out", 0, 2, 3));
    check(q, Some(&[0, 2, 5]), 24, Error::Length { argument: "lse", got: 24, expected: 20 });

    // Rows behind paged queries would have no place to be told from.
    let queries = zeros([2, 4, 5, 4]).paged(&[0, 1], &[5, 3]).unwrap();
    let (mut out, mut lse) = ([7.0; 80], [7.0; 40]);
    let view = ViewMut::bhld(&mut out, [2, 4, 5, 2]).unwrap();
    let error = all.run_with_lse(queries, k, v, view, &mut lse).unwrap_err();
    assert_eq!(error, tokens("out", 1, 5, 3));
    assert!(out.iter().chain(&lse).all(|&x| x == 7.0), "written on error");

    // Masks and biases are padded.
    let mask = View::bhld(&[true; 25], [1, 1, 5, 5]).unwrap().packed(&[0, 2, 5]).unwrap();
    let error = all.mask(mask).plan(q, k, v).unwrap_err();
    assert_eq!(error, Error::Broadcast { argument: "mask", got: [2, 1, 3, 5], to: [2, 4, 3, 5] });
}

#[test]
fn numbers_that_the_formula_does_not_allow() {
    let plain = Attention::new();
    let check = |attention: Attention<'static>, argument, got: f32, must| {
        let message = format!("{argument} is {got}, must be {must}");
        if got.is_nan() {
            let [q, k, v] = FINE.map(zeros);
            assert_eq!(attention.plan(q, k, v).unwrap_err().to_string(), message); // NaN is not NaN
        } else {
            refused(attention, FINE, Error::Value { argument, got, must }, &message);
        }
    };
    for got in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        check(plain.scale(got), "scale", got, "finite");
        check(plain.softcap(got), "softcap", got, "finite and above 0");
    }
    for got in [0.0, -0.0, -50.0] {
        check(plain.softcap(got), "softcap", got, "finite and above 0");
    }
}

#[test]
fn no_features_and_no_scale() {
    let message = "scale: D is 0, so the default 1/sqrt(D) does not exist; give a scale";
    let shapes = [[2, 4, 3, 0], [2, 2, 5, 0], [2, 2, 5, 2]];
    refused(Attention::new(), shapes, Error::NoDefaultScale, message);
}

#[test]
fn levels_that_are_not_there() {
    let error = "avx9".parse::<Level>().unwrap_err();
    assert_eq!(error, Error::UnknownLevel { name: "avx9".into() });
    let message = error.to_string();
    assert!(message.starts_with("level \"avx9\" is unknown"), "{message}");
    assert!(Level::ALL.iter().all(|level| message.contains(level.name())), "{message}");
    for level in Level::ALL {
        assert_eq!(level.name().parse(), Ok(level));
    }
    for level in Level::ALL.into_iter().filter(|level| !level.is_available()) {
        let mut message = format!("level {level} is not available on this processor; available are");
        Level::available().for_each(|level| message += &format!(" {level}"));
        let [q, k, v] = FINE.map(zeros);
        let mut out = [7.0f32; 48];
        let view = ViewMut::bhld(&mut out, [2, 4, 3, 2]).unwrap();
        let error = Attention::new().level(level).run(q, k, v, view).unwrap_err();
        assert_eq!(error, Error::LevelUnavailable { level });
        assert_eq!(error.to_string(), message);
        assert_eq!(out, [7.0; 48]);
    }
}

#[test]
fn scores_that_do_not_fit() {
    let [q, k, _] = FINE.map(zeros);
    let check =
        |attention: Attention<'static>, heads: Range<usize>, queries: Range<usize>, n, want: Error| {
            for stage in [Stage::Scaled, Stage::Capped, Stage::Biased, Stage::Weights] {
                let mut out = vec![7.0; n];
                let scores = attention.scores(stage, q, k, heads.clone(), queries.clone(), &mut out);
                assert_eq!(scores, Err(want.clone()));
                assert!(out.iter().all(|&x| x == 7.0));
            }
        };
    let plain = Attention::new();
    let length = |got, expected| Error::Length { argument: "out", got, expected };
    check(plain, 0..4, 0..3, 119, length(119, 120));
    check(plain, 1..4, 1..2, 120, length(120, 30));
    check(plain, 4..4, 0..3, 1, length(1, 0));
    let beyond = |argument, got, axis| Error::Range { argument, got, axis };
    check(plain, 0..5, 0..3, 150, beyond("heads", [0, 5], 4));
    check(plain, 5..5, 0..3, 0, beyond("heads", [5, 5], 4));
    check(plain, 0..4, 1..4, 120, beyond("queries", [1, 4], 3));
    assert_eq!(beyond("queries", [1, 4], 3).to_string(), "queries 1..4 is not a range of an axis of 3");
    let must = "finite and above 0";
    check(plain.softcap(-1.0), 0..4, 0..3, 120, Error::Value { argument: "softcap", got: -1.0, must });
}
