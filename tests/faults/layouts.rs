//! Strides of every kind: what a view shows is what counts, not how it lies in memory.

use headwise::{Attention, Element};
use rayon::ThreadPoolBuilder;

use crate::*;

/// pytorch/pytorch #187506: a kernel took for granted that the innermost axis is contiguous.
#[test]
fn the_innermost_axis_may_have_a_stride() {
    let (q, k, v) = (wave(0.7, 0.1, 6), wave(0.5, 0.2, 9), wave(0.9, 0.3, 9));
    let q = bhld(&q, [1, 1, 3, 2]).swap_axes(2, 3);
    let want = [
        [0.09411310908853057, 0.1281142666232044, 0.06516110133280853],
        [0.023380553276981797, 0.004395154427794812, -0.017916409668169292],
    ];
    gives(Attention::new(), q, bhld(&k, [1, 1, 3, 3]), bhld(&v, [1, 1, 3, 3]), want.as_flattened());
}

/// A copy of a tensor whose axes lie in memory in the order given, the last innermost, `pad` elements apart
/// and the axes of `reversed` backwards: data, offset, strides.
fn laid_out<T: Copy>(
    x: View<'_, T>,
    order: [usize; 4],
    pad: usize,
    reversed: usize,
    fill: T,
) -> (Vec<T>, usize, [isize; 4]) {
    let (shape, mut strides) = (x.shape(), [0; 4]);
    let (mut stride, mut offset) = (1 + pad as isize, 0);
    for axis in order.into_iter().rev() {
        let far = stride * (shape[axis] as isize - 1);
        strides[axis] = if reversed >> axis & 1 == 1 { -stride } else { stride };
        offset += if reversed >> axis & 1 == 1 { far as usize } else { 0 };
        stride += far + pad as isize;
    }
    let mut data = vec![fill; stride as usize];
    let [_, h, l, d] = shape;
    for at in 0..shape.iter().product() {
        let index = [at / (h * l * d), at / (l * d) % h, at / d % l, at % d];
        let place: isize = index.iter().zip(strides).map(|(&i, stride)| i as isize * stride).sum();
        data[offset.strict_add_signed(place)] = x.get(index).unwrap();
    }
    (data, offset, strides)
}

fn orders() -> impl Iterator<Item = [usize; 4]> {
    (0..256)
        .map(|n| [n & 3, n >> 2 & 3, n >> 4 & 3, n >> 6])
        .filter(|order| (0..4).all(|x| order.contains(&x)))
}

/// The same kind: Q, K, V, mask, bias and output in every order of the axes, with gaps and backwards, and NaN
/// in the gaps: the same bits as compact ones, and nothing written between.
#[test]
fn every_order_of_the_axes() {
    let [b, hq, hk, l, s, d, dv] = [2, 4, 2, 9, 35, 6, 5];
    let (q, k, v) =
        (wave(0.7, 0.1, b * hq * l * d), wave(0.5, 0.2, b * hk * s * d), wave(0.9, 0.3, b * hk * s * dv));
    let (bias, mask) = (wave(0.3, 0.5, b * hq * l * s), keep(b * hq * l, s, |i, j| (i + j) % 5 != 0));
    let (q, k, v) = (bhld(&q, [b, hq, l, d]), bhld(&k, [b, hk, s, d]), bhld(&v, [b, hk, s, dv]));
    let (bias, mask) = (bhld(&bias, [b, hq, l, s]), bhld(&mask, [b, hq, l, s]));
    let wants: Vec<_> =
        levels().map(|level| run(Attention::new().bias(bias).mask(mask), level, q, k, v)).collect();
    let shape = [b, hq, l, dv];
    let nothing = vec![f32::NAN; shape.iter().product()];
    for (n, order) in orders().enumerate() {
        for (pad, reversed) in [(0, 0), (3, 0), (0, n % 16), (1, 15)] {
            let nan = f32::NAN;
            let copies = [q, k, v, bias].map(|x| laid_out(x, order, pad, reversed, nan));
            let [q, k, v, bias] = [0, 1, 2, 3].map(|at| {
                let (data, offset, strides) = &copies[at];
                View::new(data, *offset, [q, k, v, bias][at].shape(), *strides).unwrap()
            });
            let (data, offset, strides) = laid_out(mask, order, pad, reversed, false);
            let mask = View::new(&data, offset, mask.shape(), strides).unwrap();
            for (level, want) in levels().zip(&wants) {
                let (mut out, offset, strides) = laid_out(bhld(&nothing, shape), order, pad, reversed, 7.0);
                let mut lse = vec![nan; b * hq * l];
                let view = ViewMut::new(&mut out, offset, shape, strides).unwrap();
                let attention = Attention::new().bias(bias).mask(mask).level(level);
                attention.run_with_lse(q, k, v, view, &mut lse).unwrap();
                let view = View::new(&out, offset, shape, strides).unwrap();
                let what = format!("{level}, {order:?}, gaps of {pad}, {reversed:b} backwards");
                same(&what, &(elements(view), lse), want);
                let written = out.iter().filter(|&&x| x != 7.0).count();
                assert_eq!(written, nothing.len(), "{what}");
            }
        }
    }
}

fn elements<T: Element>(x: View<'_, T>) -> Vec<T> {
    let [b, h, l, d] = x.shape();
    let index = |at: usize| [at / (h * l * d), at / (l * d) % h, at / d % l, at % d];
    (0..b * h * l * d).map(|at| x.get(index(at)).unwrap()).collect()
}

/// BobMcDear/attorch #14: row numbers were made by dividing strides, so that in a token-major layout every
/// head became the first one, and threads wrote over each other.
#[test]
fn tokens_may_lie_outside_the_heads() {
    let [b, l, h, d] = [2, 3, 3, 4];
    let zeros = vec![0.0; b * l * h * d];
    let v: Vec<f32> = (0..b * l * h * d)
        .map(|at| (1000 * (at / (l * h * d)) + 100 * (at / d % h) + at / (h * d) % l) as f32)
        .collect();
    let blhd = |x| View::blhd(x, [b, l, h, d]).unwrap();
    let want: Vec<f64> = (0..b * h * l * d)
        .map(|at| (1000 * (at / (h * l * d)) + 100 * (at / (l * d) % h) + 1) as f64)
        .collect();
    let pool = ThreadPoolBuilder::new().num_threads(4).build().unwrap();
    for _ in 0..50 {
        pool.install(|| gives(Attention::new(), blhd(&zeros), blhd(&zeros), blhd(&v), &want));
    }
}

/// ml-explore/mlx #3473: key/value heads spread over the group with stride 0 gave results off by magnitudes.
#[test]
fn heads_may_have_stride_zero() {
    let [h, l, s, d] = [4, 13, 3, 2]; // more rows than the kernel for few rows takes, with and without the group
    flat(Attention::new(), [1, h, 1, l, s], &[10.0, 11.0, 12.0], &[11.0; 52]);
    let (q, k, v) = (wave(0.7, 0.1, h * l * d), wave(0.5, 0.2, s * d), wave(0.9, 0.3, s * d));
    let (four_k, four_v) = (k.repeat(h), v.repeat(h));
    let (q, k, v) = (bhld(&q, [1, h, l, d]), bhld(&k, [1, 1, s, d]), bhld(&v, [1, 1, s, d]));
    let spread = [k, v].map(|x| x.broadcast([1, h, s, d]).unwrap());
    let copied = [&four_k, &four_v].map(|x| bhld(x, [1, h, s, d]));
    for level in levels() {
        let want = run(Attention::new(), level, q, k, v);
        same(level, &run(Attention::new(), level, q, spread[0], spread[1]), &want);
        same(level, &run(Attention::new(), level, q, copied[0], copied[1]), &want);
    }
}

/// The same kind: stride 0 on any axes of Q, K and V is the same to the bit as the copies it stands for.
#[test]
fn any_axis_may_have_stride_zero() {
    let [b, h, l, s, d] = [2, 2, 19, 70, 6];
    let x = wave(0.7, 0.1, b * h * s * d);
    let tensor = |shape: [usize; 4], stretched: usize| {
        let small: [usize; 4] =
            std::array::from_fn(|axis| if stretched >> axis & 1 == 1 { 1 } else { shape[axis] });
        bhld(&x[..small.iter().product()], small).broadcast(shape).unwrap()
    };
    for stretched in 0..16 {
        let [q, k, v] = [[b, h, l, d], [b, h, s, d], [b, h, s, d]].map(|shape| tensor(shape, stretched));
        let copies = [q, k, v].map(elements);
        let [q_copy, k_copy, v_copy] = [0, 1, 2].map(|at| bhld(&copies[at], [q, k, v][at].shape()));
        for level in levels() {
            let want = run(Attention::new(), level, q_copy, k_copy, v_copy);
            same(format!("{level}, {stretched:b}"), &run(Attention::new(), level, q, k, v), &want);
        }
    }
}

/// onnx/onnx #7118: merged heads `[B, L, H * D]` were taken for `[B, H, L, D]`.
#[test]
fn merged_heads() {
    let (q, k, v) = (wave(0.6, 0.2, 8), wave(0.5, 0.1, 12), wave(0.8, 0.4, 12));
    let (q, k, v) = (
        View::blhd(&q, [1, 2, 2, 2]).unwrap(),
        View::blhd(&k, [1, 3, 2, 2]).unwrap(),
        View::blhd(&v, [1, 3, 2, 2]).unwrap(),
    );
    let want = [
        [0.04264622229199755, 0.11460705490949763, 0.6074075459050541, 0.22452662692700856],
        [0.058576356743441305, 0.13322560032230044, 0.27771147264427426, 0.06462242986442039],
    ];
    for level in levels() {
        let mut out = [f32::NAN; 8];
        let view = ViewMut::blhd(&mut out, [1, 2, 2, 2]).unwrap();
        Attention::new().level(level).run(q, k, v, view).unwrap();
        near(level.name(), &out.map(f64::from), want.as_flattened(), 1e-5);
    }
}

/// PaddlePaddle/Paddle #19487: an aligned load crashed on a row that was not aligned.
#[test]
fn slices_may_start_anywhere() {
    let unaligned = |x: &[f32], by: usize| {
        let mut room = vec![f32::NAN; x.len() + 64];
        let start = room.as_ptr().align_offset(64) + by;
        room[start..][..x.len()].copy_from_slice(x);
        (room, start..start + x.len())
    };
    for d in [8, 16, 64] {
        for by in [1, 2, 3, 5, 7] {
            let (l, s) = (18, 37);
            let ln = Ln::new([1, 2, l, d], s, d);
            let shapes = [[1, 2, l, d], [1, 2, s, d], [1, 2, s, d], [1, 1, l, s]];
            let tensors = [&ln.q, &ln.k, &ln.v, &vec![0.5; l * s]].map(|x| unaligned(x, by));
            let [q, k, v, bias] =
                [0, 1, 2, 3].map(|at| bhld(&tensors[at].0[tensors[at].1.clone()], shapes[at]));
            let mask = vec![true; l * s + by];
            let attention = Attention::new().bias(bias).mask(compact(&mask[by..], &[l, s]));
            let want = ln.expected();
            for level in levels() {
                let (mut room, place) = unaligned(&vec![f32::NAN; want.len()], by);
                let view = ViewMut::bhld(&mut room[place.clone()], shapes[0]).unwrap();
                attention.level(level).run(q, k, v, view).unwrap();
                let out: Vec<f64> = room[place].iter().map(|&x| x.into()).collect();
                near(level.name(), &out, &want, 1e-5);
            }
        }
    }
}
