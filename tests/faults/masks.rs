//! Masks and biases of every shape that broadcasts.

use headwise::Attention;

use crate::*;

/// openvinotoolkit/openvino #21217: one shape of mask was taken for granted; others gave wrong numbers.
#[test]
fn masks_of_every_rank_broadcast() {
    let v: Vec<f32> = (0..12).map(|at| (at % 3) as f32).collect();
    let check = |mask: &[u8], sizes: &[usize], want: [f64; 8]| {
        let mask: Vec<bool> = mask.iter().map(|&x| x == 1).collect();
        flat(Attention::new().mask(compact(&mask, sizes)), [2, 2, 2, 2, 3], &v, &want);
    };
    check(&[1, 1, 0, 0, 0, 1], &[2, 1, 1, 3], [0.5, 0.5, 0.5, 0.5, 2.0, 2.0, 2.0, 2.0]);
    check(&[1, 0, 0, 0, 1, 1], &[1, 2, 1, 3], [0.0, 0.0, 1.5, 1.5, 0.0, 0.0, 1.5, 1.5]);
    check(&[1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1], &[2, 2, 3], [0.0, 0.5, 2.0, 1.5, 0.0, 0.5, 2.0, 1.5]);
    check(&[0, 1, 0, 1, 0, 1], &[2, 3], [1.0; 8]);
    check(&[1, 1, 0], &[3], [0.5; 8]);
    check(&[1], &[1], [1.0; 8]);
    check(&[0], &[], [0.0; 8]);
    flat(Attention::new().bias(compact(&[0.0], &[1, 1, 1, 1])), [2, 2, 2, 2, 3], &v, &[1.0; 8]);
}

/// The same kind: each of the sixteen shapes, of masks and of biases and of both, gives the same bits as the
/// mask written out in full. Each lies at the end of its allocation, where a loader that runs on would leave
/// it.
#[test]
fn a_broadcast_is_like_the_mask_in_full() {
    let [b, h, l, d, dv] = [2, 4, 9, 6, 3];
    for s in [1, 7, 16, 37, 130] {
        let full = [b, h, l, s];
        let (q, k, v) =
            (wave(0.7, 0.2, b * h * l * d), wave(0.5, 0.1, b * 2 * s * d), wave(0.9, 0.3, b * 2 * s * dv));
        let (q, k, v) = (bhld(&q, [b, h, l, d]), bhld(&k, [b, 2, s, d]), bhld(&v, [b, 2, s, dv]));
        for stretched in 0..16 {
            let shape: [usize; 4] =
                std::array::from_fn(|axis| if stretched >> axis & 1 == 1 { 1 } else { full[axis] });
            let n: usize = shape.iter().product();
            let bias: Vec<f32> = wave(1.3, 0.4, n);
            let mask: Vec<bool> = bias.iter().map(|&x| x < 0.7).collect();
            let (bias, mask) = (bias.into_boxed_slice(), mask.into_boxed_slice());
            let (bias, mask) = (bhld(&bias, shape), bhld(&mask, shape));
            let bias_in_full = in_full(bias, full);
            let mask_in_full = in_full(mask, full);
            let plain = Attention::new();
            let pairs = [
                (plain.bias(bias), plain.bias(bhld(&bias_in_full, full))),
                (plain.mask(mask), plain.mask(bhld(&mask_in_full, full))),
                (plain.mask(mask).bias(bias), plain.mask(bhld(&mask_in_full, full)).bias(bias)),
                (plain.mask(mask).bias(bias), plain.mask(mask).bias(bhld(&bias_in_full, full))),
            ];
            for (short, long) in pairs {
                for level in levels() {
                    let (got, want) = (run(short, level, q, k, v), run(long, level, q, k, v));
                    same(format!("{level}, {shape:?}"), &got, &want);
                }
            }
        }
    }
}

fn in_full<T: Copy>(view: View<'_, T>, shape: [usize; 4]) -> Vec<T> {
    let view = view.broadcast(shape).unwrap();
    let [_, h, l, s] = shape;
    let index = |at: usize| [at / (h * l * s), at / (l * s) % h, at / s % l, at % s];
    (0..shape.iter().product()).map(|at| view.get(index(at)).unwrap()).collect()
}

/// pytorch/pytorch #128816: the vector loader ran past the end of a mask whose key axis has size 1.
#[test]
fn a_mask_may_have_one_entry_a_query() {
    for s in [1, 2, 5, 8, 15, 16, 17, 64, 65, 200] {
        let ln = Ln::new([1, 1, 2, 3], s, 3);
        let [q, k, v] = ln.views();
        let want = ln.expected();
        gives(Attention::new().bias(compact(&[5.0, -7.0], &[1, 1, 2, 1])), q, k, v, &want);
        let first: Vec<f64> = want[..3].iter().copied().chain([0.0; 3]).collect();
        gives(Attention::new().mask(compact(&[true, false], &[1, 1, 2, 1])), q, k, v, &first);
    }
}

/// ml-explore/mlx-lm #1467: with grouped heads, the batch axis of a mask met the axis of the key/value heads.
#[test]
fn grouped_heads_keep_their_batch_entry_s_mask() {
    let mask = [1, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1].map(|x| x == 1);
    let v: Vec<f32> = (0..12).map(|at| (10 * (at / 3 % 2) + at % 3) as f32).collect();
    let want = [0.0, 0.5, 0.0, 0.5, 10.0, 10.5, 10.0, 10.5, 2.0, 1.5, 2.0, 1.5, 12.0, 11.5, 12.0, 11.5];
    flat(Attention::new().mask(compact(&mask, &[2, 1, 2, 3])), [2, 4, 2, 2, 3], &v, &want);
}
