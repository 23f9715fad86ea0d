//! Arrays in all kinds of strides against the f64 reference and against each other.

use headwise_ndarray::headwise::{Attention, Error, View, reference};
use headwise_ndarray::ndarray::{Array1, Array2, Array3, Array4, Array5, ArrayView4, Axis, s};
use headwise_ndarray::{attention, attention_into, attention_with_lse, view};

/// Uniform in [-1, 1): splitmix64.
fn fill(shape: [usize; 4], seed: u64) -> Array4<f32> {
    let mut i = seed << 40;
    Array4::from_shape_simple_fn(shape, || {
        i += 1;
        let mut x = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
}

/// The f64 reference on compact copies.
fn expected(attention: &Attention<'_>, [q, k, v]: [ArrayView4<'_, f32>; 3]) -> reference::Reference {
    let [q, k, v] =
        [q, k, v].map(|array| (array.shape().to_vec(), array.iter().copied().collect::<Vec<_>>()));
    let [q, k, v] = [&q, &k, &v].map(|(shape, data)| View::compact(data, shape).unwrap());
    reference::attention(q, k, v, attention.terms()).unwrap()
}

fn worst<'x>(got: impl IntoIterator<Item = &'x f32>, want: &[f64]) -> f64 {
    let got: Vec<&f32> = got.into_iter().collect();
    assert_eq!(got.len(), want.len());
    let differences = got.into_iter().zip(want).map(|(&got, want)| (f64::from(got) - want).abs());
    differences.fold(0.0, |max, x| if x.is_nan() { f64::INFINITY } else { x.max(max) })
}

/// The array in memory of another order, with the same elements seen in the same places.
fn lying(kind: usize, array: &Array4<f32>) -> Array4<f32> {
    match kind {
        0 => array.clone(),
        1..=4 => {
            let order = [[0, 2, 1, 3], [0, 1, 3, 2], [3, 2, 1, 0], [2, 0, 3, 1]][kind - 1];
            let mut back = [0; 4];
            order.iter().enumerate().for_each(|(to, &from)| back[from] = to);
            let copy = array.view().permuted_axes(order).as_standard_layout().into_owned();
            copy.permuted_axes(back)
        }
        _ => {
            // Reversed in memory on some of the axes.
            let axes = [0, 1, 2, 3].into_iter().filter(|axis| (kind - 4) >> axis & 1 == 1);
            let mut copy = array.clone();
            axes.clone().for_each(|axis| copy.invert_axis(Axis(axis)));
            let mut copy = copy.as_standard_layout().into_owned();
            axes.for_each(|axis| copy.invert_axis(Axis(axis)));
            copy
        }
    }
}

#[test]
fn any_strides() {
    let (q, k, v) = (fill([2, 4, 7, 20], 1), fill([2, 2, 33, 20], 2), fill([2, 2, 33, 9], 3));
    let causal = Attention::new().causal();
    let want = expected(&causal, [q.view(), k.view(), v.view()]);
    let same = attention(&causal, q.view(), k.view(), v.view()).unwrap();
    assert!(worst(&same, &want.out) < 2e-6);
    let mut negative = 0;
    for kind in 0..20 {
        let (q, k, v) = (lying(kind, &q), lying((kind + 7) % 20, &k), lying((kind + 13) % 20, &v));
        assert_eq!((q.dim(), k.dim(), v.dim()), ((2, 4, 7, 20), (2, 2, 33, 20), (2, 2, 33, 9)));
        negative += q.strides().iter().filter(|&&stride| stride < 0).count();
        let out = attention(&causal, q.view(), k.view(), v.view()).unwrap();
        assert!(worst(&out, &want.out) < 2e-6, "{kind}");
        // Into an array of any strides, with a gap between its elements that stays.
        let mut larger = lying((kind + 3) % 20, &Array4::from_elem([4, 8, 14, 18], 7.0));
        attention_into(&causal, q.view(), k.view(), v.view(), larger.slice_mut(s![..;2, 1..;2, ..;-2, ..;2]))
            .unwrap();
        assert_eq!(larger.slice(s![..;2, 1..;2, ..;-2, ..;2]), out, "{kind}");
        assert_eq!(larger.iter().filter(|&&x| x == 7.0).count(), 4 * 8 * 14 * 18 - 2 * 4 * 7 * 9);
    }
    assert!(negative > 10);
    let (out, lse) = attention_with_lse(&causal, q.view(), k.view(), v.view()).unwrap();
    assert_eq!(out, same);
    assert!(lse.dim() == (2, 4, 7) && worst(&lse, &want.lse) < 2e-6);
}

#[test]
fn slices_and_broadcasts() {
    let all = fill([3, 5, 40, 64], 1);
    let plain = Attention::new();
    let q = all.slice(s![..2, 1.., ..10;3, 3..20;2]);
    let k = all.slice(s![1.., ..;-4, ..;-2, 40..;-3]).to_owned();
    let k = k.slice(s![.., .., .., ..8]);
    let one = all.slice(s![..1, ..1, 20.., 7..18]);
    let v = one.broadcast([2, 2, 20, 11]).unwrap();
    let q = q.slice(s![.., .., .., ..8]);
    let out = attention(&plain, q, k, v).unwrap();
    assert_eq!(out.dim(), (2, 4, 4, 11));
    assert!(worst(&out, &expected(&plain, [q, k, v]).out) < 2e-6);
}

#[test]
fn what_lies_between_is_not_touched() {
    // Two interleaved halves of one array: one is written while the other is read.
    let mut all = fill([1, 2, 6, 8], 1);
    let copy = all.clone();
    let (even, odd) = all.multi_slice_mut((s![.., .., ..;2, ..], s![.., .., 1..;2, ..]));
    attention_into(&Attention::new(), even.view(), even.view(), even.view(), odd).unwrap();
    let even = copy.slice(s![.., .., ..;2, ..]);
    assert_eq!(all.slice(s![.., .., ..;2, ..]), even);
    assert_eq!(all.slice(s![.., .., 1..;2, ..]), attention(&Attention::new(), even, even, even).unwrap());
}

#[test]
fn masks_and_biases_of_fewer_axes() {
    let (q, k) = (fill([2, 4, 5, 8], 1), fill([2, 2, 6, 8], 2));
    let bias = fill([1, 4, 5, 6], 3).remove_axis(Axis(0));
    let mask = Array2::from_shape_fn([6, 5], |(j, i)| (i * j) % 3 != 1).reversed_axes();
    let keys = Array1::from_iter([0.5, -0.5, f32::NEG_INFINITY, 0.0, 1.0, 2.0]);
    let with = |attention: Attention<'_>| {
        let out = headwise_ndarray::attention(&attention, q.view(), k.view(), k.view()).unwrap();
        assert!(worst(&out, &expected(&attention, [q.view(), k.view(), k.view()]).out) < 2e-6);
    };
    with(Attention::new().mask(view(mask.view()).unwrap()));
    with(Attention::new().bias(view(bias.slice(s![..;-1, .., ..])).unwrap()));
    with(Attention::new().bias(view(keys.view()).unwrap()).mask(view(mask.view()).unwrap()));
}

#[test]
fn empty() {
    let (q, none) = (fill([1, 2, 3, 4], 1), fill([1, 2, 0, 4], 1));
    let out = attention(&Attention::new(), q.view(), none.view(), none.view()).unwrap();
    assert_eq!(out, Array4::<f32>::zeros([1, 2, 3, 4]));
    let (out, lse) = attention_with_lse(&Attention::new(), none.view(), q.view(), q.view()).unwrap();
    assert!(out.is_empty() && lse == Array3::<f32>::zeros([1, 2, 0]));
}

#[test]
fn refused() {
    let (q, k) = (fill([1, 2, 3, 4], 1), fill([1, 2, 3, 5], 1));
    let error = attention(&Attention::new(), q.view(), k.view(), q.view()).unwrap_err();
    assert_eq!(error, Error::Shape { argument: "k", got: [1, 2, 3, 5], expected: [1, 2, 3, 4] });
    let mut out = Array4::from_elem([1, 2, 3, 3], 7.0);
    let error = attention_into(&Attention::new(), q.view(), q.view(), q.view(), out.view_mut()).unwrap_err();
    assert_eq!(error, Error::Shape { argument: "out", got: [1, 2, 3, 3], expected: [1, 2, 3, 4] });
    assert!(out.iter().all(|&x| x == 7.0));
    assert_eq!(view(Array5::<f32>::zeros([1; 5]).view()).unwrap_err(), Error::Rank { rank: 5 });
}
