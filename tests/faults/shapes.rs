//! Sizes: head sizes of every kind, values wider or narrower than keys, nothing at all, too much.

use headwise::{Attention, Error};

use crate::*;

const SIZES: [usize; 26] =
    [1, 2, 3, 5, 7, 8, 9, 12, 15, 17, 20, 31, 33, 40, 47, 65, 72, 80, 96, 100, 127, 129, 160, 200, 256, 257];

/// intel/intel-extension-for-pytorch #703: a kernel crashed on head sizes that are no multiple of 16; and
/// CrispStrobe/CrispEmbed #41, the levels agree.
#[test]
fn every_head_size() {
    for d in SIZES {
        let ln = Ln::new([1, 2, 3, d], 37, d);
        let [q, k, v] = ln.views();
        gives(Attention::new(), q, k, v, &ln.expected());
        let answers: Vec<Answer> = levels().map(|level| run(Attention::new(), level, q, k, v)).collect();
        for answer in &answers {
            let apart = |(a, b): (&f32, &f32)| (a - b).abs() > 1e-6 * a.abs();
            assert!(!answer.0.iter().zip(&answers[0].0).any(apart), "{d}");
        }
    }
}

/// apple/coreai-torch #117: the output was given the size of the query heads.
#[test]
fn values_have_a_size_of_their_own() {
    for dv in [24, 1, 40, 0].into_iter().chain(SIZES) {
        let ln = Ln::new([1, 1, 8, 32], 36, dv);
        let [q, k, v] = ln.views();
        // Eight query heads of one token on one key/value head.
        gives(Attention::new(), q.swap_axes(1, 2), k, v, &ln.expected());
    }
}

/// pytorch/pytorch #141218: no heads, or an empty axis, divided by zero and ended the process.
#[test]
fn sizes_may_be_zero() {
    let none = |shape| bhld(&[0.0f32; 0], shape);
    let zeros = [0.0; 64];
    let some = |[b, h, l, d]: [usize; 4]| bhld(&zeros[..b * h * l * d], [b, h, l, d]);
    let plain = Attention::new();
    gives_lse(plain, none([2, 2, 0, 4]), some([2, 2, 3, 4]), some([2, 2, 3, 2]), &[], &[]); // no queries
    let (out, lse) = ([0.0; 16], [f64::NEG_INFINITY; 8]);
    gives_lse(plain, some([1, 2, 4, 4]), none([1, 2, 0, 4]), none([1, 2, 0, 2]), &out, &lse); // no keys
    gives_lse(plain, some([1, 8, 1, 4]), none([1, 2, 0, 4]), none([1, 2, 0, 2]), &out, &lse);
    gives_lse(plain, none([0, 2, 3, 4]), none([0, 2, 3, 4]), none([0, 2, 3, 2]), &[], &[]); // no batch
    gives_lse(plain, none([2, 0, 3, 4]), none([2, 0, 3, 4]), none([2, 0, 3, 2]), &[], &[]); // no heads
    gives_lse(plain, none([2, 0, 3, 4]), some([2, 2, 3, 4]), some([2, 2, 3, 2]), &[], &[]);
    let error = plain.plan(some([1, 4, 3, 4]), none([1, 0, 3, 4]), none([1, 0, 3, 2])).unwrap_err();
    assert_eq!(error, Error::Heads { query: 4, key: 0 });

    let v = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0];
    let (q, k, v) = (none([1, 1, 1, 0]), none([1, 1, 3, 0]), bhld(&v, [1, 1, 3, 2]));
    let ln_3 = 3f64.ln();
    gives_lse(plain.scale(1.0), q, k, v, &[1.0, 1.0], &[ln_3]); // no features
    assert_eq!(plain.plan(q, k, v).unwrap_err(), Error::NoDefaultScale);
    gives_lse(plain, some([1, 1, 1, 4]), some([1, 1, 3, 4]), none([1, 1, 3, 0]), &[], &[ln_3]); // no values
}

/// The same kind: every combination of axes of size 0, masks, biases and all other terms given as well.
#[test]
fn any_sizes_may_be_zero() {
    for zero in 0..64 {
        let [b, h, l, s, d, dv] =
            std::array::from_fn(|axis| if zero >> axis & 1 == 1 { 0 } else { [2, 3, 5, 40, 4, 3][axis] });
        let (x, y, z) = (wave(0.3, 0.1, b * h * l * d), wave(0.2, 0.1, b * h * s * d), ramp(b * h * s * dv));
        let (q, k, v) = (bhld(&x, [b, h, l, d]), bhld(&y, [b, h, s, d]), bhld(&z, [b, h, s, dv]));
        let (mask, bias) = (vec![true; l * s], wave(0.9, 0.2, b * h * l * s));
        let (lens, q_lens, per_head) = (vec![s.saturating_sub(1); b], vec![l / 2; b], vec![0.5; h]);
        let all = Attention::new()
            .scale(0.5)
            .softcap(3.0)
            .causal()
            .window(Some(9), Some(2))
            .mask(compact(&mask, &[l, s]))
            .bias(bhld(&bias, [b, h, l, s]))
            .kv_lens(&lens)
            .q_lens(&q_lens)
            .slopes(&per_head)
            .sinks(&per_head)
            .gates(&per_head);
        for attention in [Attention::new().scale(0.5), all] {
            let want = reference::attention(q, k, v, attention.terms()).unwrap();
            gives_lse(attention, q, k, v, &want.out, &want.lse);
        }
    }
}

/// ekzhang/jax-js #180: key/value heads were taken in turn (0, 1, 0, 1) and not in groups (0, 0, 1, 1).
#[test]
fn query_heads_share_key_value_heads_in_groups() {
    flat(Attention::new(), [1, 4, 2, 1, 2], &[10.0, 10.0, 20.0, 20.0], &[10.0, 10.0, 20.0, 20.0]);
    for (hk, group) in [(1, 7), (2, 3), (3, 2), (5, 4), (2, 33)] {
        let v: Vec<f32> = (0..hk).map(|g| 10.0 * (g + 1) as f32).collect();
        let want: Vec<f64> = (0..hk * group).map(|h| 10.0 * (h / group + 1) as f64).collect();
        flat(Attention::new(), [1, hk * group, hk, 1, 1], &v, &want);
    }
}

/// fla-org/flash-linear-attention #1029: numbers of heads that do not divide left outputs unwritten.
#[test]
fn heads_that_do_not_divide_are_refused() {
    let x = [0.0f32; 33];
    let heads = |h: usize| bhld(&x[..h], [1, h, 1, 1]);
    for (query, key) in [(3, 2), (33, 2), (2, 4), (4, 0), (5, 3), (1, 2)] {
        let (q, k, mut out) = (heads(query), heads(key), [7.0; 33]);
        let view = ViewMut::bhld(&mut out[..query], [1, query, 1, 1]).unwrap();
        let error = Attention::new().run(q, k, k, view).unwrap_err();
        assert_eq!(error, Error::Heads { query, key });
        assert!(error.to_string().contains(&format!("{query} query heads")), "{error}");
        assert!(error.to_string().contains(&format!("{key} key/value heads")), "{error}");
        assert_eq!(out, [7.0; 33]);
    }
    let error = Attention::new().plan(heads(4), heads(2), heads(4)).unwrap_err();
    assert_eq!(error, Error::Shape { argument: "v", got: [1, 4, 1, 1], expected: [1, 2, 1, 1] });
}

/// microsoft/onnxruntime #20921: places in memory were computed in 32 bits. Rows and mask rows here lie more
/// than 2^31 apart (bytes, and bytes that are elements).
#[test]
#[cfg(all(target_pointer_width = "64", not(miri)))]
fn rows_may_lie_far_apart() {
    let stride = (1 << 29) + 8;
    let mut far = vec![0.0f32; stride + 2]; // pages that are never touched cost nothing
    far[0] = 1.0;
    far[stride..].copy_from_slice(&[2.0, 5.0]);
    let q = [1.0];
    let q = bhld(&q, [1, 1, 1, 1]);
    let mean = |a: f64, b: f64| (1f64.exp() * a + 2f64.exp() * b) / (1f64.exp() + 2f64.exp());
    let rows = |offset, stride| View::new(&far, offset, [1, 1, 2, 1], [0, 0, stride, 1]).unwrap();
    let (there, back) = (stride as isize, -(stride as isize));
    gives(Attention::new(), q, rows(0, there), rows(1, there), &[mean(0.0, 5.0)]);
    gives(Attention::new(), q, rows(stride, back), rows(stride + 1, back), &[mean(0.0, 5.0)]);

    let stride = (1usize << 31) + 8;
    let mut mask = vec![false; stride + 3];
    mask[1] = true;
    mask[stride..].copy_from_slice(&[true, false, true]);
    let v = [1.0, 3.0, 7.0];
    let zeros = [0.0; 3];
    let view = View::new(&mask, 0, [1, 1, 2, 3], [0, 0, stride as isize, 1]).unwrap();
    let (q, k) = (bhld(&zeros[..2], [1, 1, 2, 1]), bhld(&zeros, [1, 1, 3, 1]));
    gives(Attention::new().mask(view), q, k, bhld(&v, [1, 1, 3, 1]), &[3.0, 4.0]);
}

/// The same report: products of sizes that overflow are refused, and sizes of 0 do not hide them.
#[test]
fn products_of_sizes_do_not_wrap() {
    let one = [0.0f32];
    let n = 1 << (usize::BITS / 3 + 1);
    let q = View::new(&one, 0, [n, 1, n, 1], [0; 4]).unwrap();
    let k = View::new(&one, 0, [n, 1, n, 1], [0; 4]).unwrap();
    let error = Attention::new().plan(q, k, k).unwrap_err();
    assert_eq!(error, Error::TooLarge { argument: "scores", shape: [n, 1, n, n] });
    let error = View::new(&one, 0, [n, n, n, 1], [0; 4]).unwrap_err();
    assert_eq!(error, Error::TooLarge { argument: "view", shape: [n, n, n, 1] });

    let v = View::new(&one, 0, [n, 1, 1, n], [0; 4]).unwrap();
    let k = View::new(&one, 0, [n, 1, 1, 1], [0; 4]).unwrap();
    let error = Attention::new().plan(q, k, v).unwrap_err();
    assert_eq!(error, Error::TooLarge { argument: "out", shape: [n, 1, n, n] });

    let huge = 1 << (usize::BITS / 2 + 1);
    let empty = View::bhld(&one[..0], [huge, huge, 0, 8]).unwrap();
    for level in levels() {
        let mut nothing: [f32; 0] = [];
        let out = ViewMut::bhld(&mut nothing, [huge, huge, 0, 8]).unwrap();
        Attention::new().level(level).run_with_lse(empty, empty, empty, out, &mut []).unwrap();
    }
}
