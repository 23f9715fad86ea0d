//! Caches of other types than the model's: integers with scales, halves beside f32 queries. What a cache
//! holds is near what was appended; attention on it is the reference's on what it holds, at every level, in
//! both kernels, however the tokens lie.

mod common;

use common::fill;
use half::{bf16, f16};
use headwise::{
    Attention, CacheLayout, CacheShape, DType, Error, KvCache, Level, Stored, Terms, View, ViewMut, WhenFull,
    reference,
};
use safetensors::SafeTensors;

/// Causal attention at every level against the reference on the same numbers.
fn attend<C: Stored>(what: &str, q: View<'_, f32>, k: View<'_, C>, v: View<'_, C>) {
    let terms = Terms { causal: true, ..Terms::default() };
    let want = reference::attention(q, k, v, &terms).unwrap();
    let [b, hq, lq, _] = q.shape();
    let shape = [b, hq, lq, v.shape()[3]];
    for level in Level::available() {
        let (mut out, mut lse) = (vec![f32::NAN; want.out.len()], vec![f32::NAN; want.lse.len()]);
        let to = ViewMut::bhld(&mut out, shape).unwrap();
        Attention::with_terms(terms).level(level).run_with_lse(q, k, v, to, &mut lse).unwrap();
        for (got, want) in out.iter().chain(&lse).zip(want.out.iter().chain(&want.lse)) {
            let near = f64::from(*got) == *want || (f64::from(*got) - want).abs() <= 4e-6;
            assert!(near, "{what}, {level}: {got} instead of {want}");
        }
    }
}

/// A cache of `n` tokens a sequence, appended in steps of 1 and more; its attention for 1, 3 and 20 queries.
fn cache_of<C: Stored>(shape: CacheShape, layout: CacheLayout, full: WhenFull, group: usize, n: usize) {
    let CacheShape { batch, heads, d, dv, .. } = shape;
    let mut cache = KvCache::<C>::grouped(shape, layout, full, group).unwrap();
    let (k, v) = (fill::<f32>(batch * heads * n * d, 1), fill::<f32>(batch * heads * n * dv, 2));
    let (k, v) =
        (View::bhld(&k, [batch, heads, n, d]).unwrap(), View::bhld(&v, [batch, heads, n, dv]).unwrap());
    let (mut done, mut step) = (0, 1);
    while done < n {
        let tokens = done..n.min(done + step);
        cache.append(k.tokens(tokens.clone()).unwrap(), v.tokens(tokens).unwrap()).unwrap();
        (done, step) = (done + step, step * 2);
    }
    let what = format!("{} in {shape:?}, {layout:?}, {full:?}, groups of {group}", C::DTYPE);
    // What is held is near what was appended; a rolling cache holds the last tokens, and those it keeps.
    let held = cache.lens()[0];
    for (cached, from, features) in [(cache.keys(), k, d), (cache.values(), v, dv)] {
        for at in 0..batch * heads * held * features {
            let [b, h, j, c] = [
                at / (heads * held * features),
                at / (held * features) % heads,
                at / features % held,
                at % features,
            ];
            let token = match full {
                WhenFull::Roll { keep } if j >= keep => n - held + j,
                _ => j,
            };
            let (got, want) = (cached.value([b, h, j, c]).unwrap(), from.get([b, h, token, c]).unwrap());
            let limit = match C::DTYPE {
                DType::I8 => 0.5 / 127.0 + 1e-6, // half a step of the largest scale there can be
                DType::Bf16 => want.abs() / 256.0,
                _ => want.abs() / 2048.0 + 1e-7,
            };
            assert!((got - want).abs() <= limit, "{what}: {got} instead of {want}");
        }
    }
    for lq in [1, 3, 20] {
        let hq = 2 * heads;
        let q = fill::<f32>(batch * hq * lq * d, 3);
        let q = View::bhld(&q, [batch, hq, lq, d]).unwrap();
        attend(&what, q, cache.keys(), cache.values());
    }
}

#[test]
fn caches_of_every_type() {
    for layout in [CacheLayout::HeadMajor, CacheLayout::TokenMajor] {
        for (d, dv) in [(64, 64), (32, 40), (5, 3)] {
            let shape = CacheShape { batch: 2, heads: 2, capacity: 90, d, dv };
            for full in [WhenFull::Refuse, WhenFull::Grow, WhenFull::Roll { keep: 4 }] {
                let n = if full == WhenFull::Refuse { 90 } else { 130 };
                for group in [usize::MAX, 32, 7] {
                    cache_of::<i8>(shape, layout, full, group, n);
                }
                cache_of::<f16>(shape, layout, full, usize::MAX, n);
                cache_of::<bf16>(shape, layout, full, usize::MAX, n);
            }
        }
    }
}

/// Several spans of keys, joined.
#[test]
fn a_long_cache_of_integers() {
    let shape = CacheShape { batch: 1, heads: 1, capacity: 2500, d: 64, dv: 32 };
    cache_of::<i8>(shape, CacheLayout::HeadMajor, WhenFull::Refuse, usize::MAX, 2500);
}

/// Pages and packed sequences find a token's scales where they find the token: bit for bit the plain view's
/// answer.
#[test]
fn scales_follow_their_tokens() {
    let (h, d, n) = (2, 48, 70);
    let data: Vec<i8> = fill::<f32>(h * n * d, 1).iter().map(|x| i8::from_f32(x * 127.0)).collect();
    let scales: Vec<f32> = fill::<f32>(h * n * 2, 2).iter().map(|x| x.abs() / 127.0).collect();
    let plain = |from: usize, len: usize| {
        let view = View::new(&data[from * h * d..], 0, [1, h, len, d], [0, d as isize, (h * d) as isize, 1])
            .unwrap();
        let strides = [0, 2, (h * 2) as isize, 1];
        view.scaled(View::new(&scales[from * h * 2..], 0, [1, h, len, 2], strides).unwrap()).unwrap()
    };
    // 7 pages of 10 tokens, each [H, 10, D] with strides of tokens outside heads.
    let pool =
        View::new(&data, 0, [7, h, 10, d], [(10 * h * d) as isize, d as isize, (h * d) as isize, 1]).unwrap();
    let of_pool =
        View::new(&scales, 0, [7, h, 10, 2], [(10 * h * 2) as isize, 2, (h * 2) as isize, 1]).unwrap();
    let (table, lens) = ([0, 1, 2, 5, 6, 3], [30, 20]);
    let paged = pool.scaled(of_pool).unwrap().paged(&table, &lens).unwrap();
    let packed = plain(0, n).packed(&[0, 30, 70]).unwrap();
    for lq in [1, 17] {
        let q = fill::<f32>(2 * h * lq * d, 3);
        let both = View::bhld(&q, [2, h, lq, d]).unwrap();
        for level in Level::available() {
            let run = |q: View<'_, f32>, kv: View<'_, i8>| {
                let mut out = vec![f32::NAN; q.shape()[0] * h * lq * d];
                let to = ViewMut::bhld(&mut out, [q.shape()[0], h, lq, d]).unwrap();
                Attention::new().level(level).run(q, kv, kv, to).unwrap();
                out
            };
            let one = |b: usize, kv| run(both.entry(b).unwrap(), kv);
            let expected = [one(0, plain(0, 30)), one(1, plain(50, 20))].concat();
            assert_eq!(run(both, paged), expected, "paged, {level}");
            let expected = [one(0, plain(0, 30)), one(1, plain(30, 40))].concat();
            assert_eq!(run(both, packed), expected, "packed, {level}");
        }
    }
}

/// NaN and infinities make their group NaN; a group of zeros, and of numbers too small to matter, is zeros.
#[test]
fn groups_that_have_no_scale() {
    let shape = CacheShape { batch: 1, heads: 1, capacity: 4, d: 4, dv: 4 };
    let mut cache = KvCache::<i8>::grouped(shape, CacheLayout::HeadMajor, WhenFull::Refuse, 2).unwrap();
    let x = [1.0, f32::NAN, 2.0, -4.0, f32::INFINITY, 0.0, 0.0, 0.0, 1e-44, -1e-40, 3e38, 1e38];
    let view = View::bhld(&x, [1, 1, 3, 4]).unwrap();
    cache.append(view, view).unwrap();
    let held: Vec<f32> = (0..12).map(|at| cache.keys().value([0, 0, at / 4, at % 4]).unwrap()).collect();
    assert!(held[0].is_nan() && held[1].is_nan() && held[4].is_nan() && held[5].is_nan());
    assert!((held[2] - 2.0).abs() <= 2.0 / 127.0 && held[3] == -4.0);
    assert_eq!(held[6..10], [0.0; 4]);
    assert!((held[10] / 3e38 - 1.0).abs() < 1e-6 && (held[11] / 1e38 - 1.0).abs() < 0.02);
    // Queries that see the NaN come out as NaN, those that do not do not.
    for lq in [1, 16] {
        let q = vec![0.0; lq * 4];
        for level in Level::available() {
            let mut out = vec![0.0; lq * 4];
            Attention::new()
                .level(level)
                .run(
                    View::bhld(&q, [1, 1, lq, 4]).unwrap(),
                    cache.keys(),
                    cache.values(),
                    ViewMut::bhld(&mut out, [1, 1, lq, 4]).unwrap(),
                )
                .unwrap();
            assert!(out.iter().all(|x| x.is_nan()), "{level}: {out:?}");
            // A window of one key: the last one, which has no NaN.
            let mut out = vec![f32::NAN; lq * 4];
            let attention = Attention::new().level(level).window(Some(0), Some(0));
            attention
                .position(headwise::Position::At(2))
                .q_lens(&[1])
                .run(
                    View::bhld(&q, [1, 1, lq, 4]).unwrap(),
                    cache.keys(),
                    cache.values(),
                    ViewMut::bhld(&mut out, [1, 1, lq, 4]).unwrap(),
                )
                .unwrap();
            assert!(out.iter().all(|x| x.is_finite()), "{level}: {out:?}");
        }
    }
}

/// The largest error of attention on an integer cache of these keys and values, by features of a group.
fn error_of<'a>(
    q: View<'a, f32>,
    k: View<'a, f32>,
    v: View<'a, f32>,
    lens: &'a [usize],
    group: usize,
) -> f64 {
    let ([b, h, l, d], dv) = (k.shape(), v.shape()[3]);
    let shape = CacheShape { batch: b, heads: h, capacity: l, d, dv };
    let mut cache = KvCache::<i8>::grouped(shape, CacheLayout::HeadMajor, WhenFull::Refuse, group).unwrap();
    cache.append(k, v).unwrap();
    let terms = Terms { kv_lens: Some(lens), ..Terms::default() };
    let want = reference::attention(q, k, v, &terms).unwrap().out;
    let got = reference::attention(q, cache.keys(), cache.values(), &terms).unwrap().out;
    got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f64::max)
}

/// What integers cost in exactness: the figures in the documentation of `KvCache::grouped`.
#[test]
fn errors_of_integers() {
    let bytes = include_bytes!("../cli/tests/data/minilm-layer0.safetensors");
    let file = SafeTensors::deserialize(bytes).unwrap();
    let read = |name: &str| {
        let tensor = file.tensor(name).unwrap();
        let data: Vec<f32> = tensor.data().as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect();
        (data, <[usize; 4]>::try_from(tensor.shape()).unwrap())
    };
    let [q, k, v] = ["q", "k", "v"].map(read);
    let [q, k, v] = [&q, &k, &v].map(|(data, shape)| View::bhld(data, *shape).unwrap());
    let lens = file.tensor("kv_lens").unwrap();
    let lens: Vec<usize> = match lens.dtype() {
        safetensors::Dtype::I64 => {
            lens.data().as_chunks().0.iter().map(|&x| i64::from_le_bytes(x) as usize).collect()
        }
        _ => lens.data().as_chunks().0.iter().map(|&x| i32::from_le_bytes(x) as usize).collect(),
    };
    let largest = (0..v.shape().iter().product()).fold(0.0f32, |most, at: usize| {
        let [_, h, l, d] = v.shape();
        most.max(v.get([at / (h * l * d), at / (l * d) % h, at / d % l, at % d]).unwrap().abs())
    });
    let model = [usize::MAX, 16, 8].map(|group| error_of(q, k, v, &lens, group));
    // Keys with one feature 20 times as large as the others, as some models have them.
    let (l, d) = (256, 64);
    let (q, mut k, v) = (fill::<f32>(l * d, 1), fill::<f32>(l * d, 2), fill::<f32>(l * d, 3));
    k.iter_mut().skip(7).step_by(d).for_each(|x| *x += 20.0);
    let shape = [1, 1, l, d];
    let [q, k, v] = [&q, &k, &v].map(|data| View::bhld(data, shape).unwrap());
    let outliers = [usize::MAX, 32, 16].map(|group| error_of(q, k, v, &[l], group));
    println!("model (values to {largest}): {model:.5?}, outliers: {outliers:.5?}");
    assert!(model.iter().all(|&error| error < 0.02), "{model:?}");
    assert!(outliers[0] < 0.05 && outliers[2] < outliers[0], "{outliers:?}");
}

#[test]
fn what_does_not_fit_is_refused() {
    let (data, scales) = ([0i8; 24], [0.0f32; 24]);
    let view = View::bhld(&data, [1, 2, 3, 4]).unwrap();
    let refused = |shape: [usize; 4]| {
        let scales = View::bhld(&scales[..shape.iter().product()], shape).unwrap();
        let error = view.scaled(scales).unwrap_err();
        assert_eq!(error, Error::Scales { got: shape, view: [1, 2, 3, 4] });
        assert!(error.to_string().contains(&format!("{shape:?}")), "{error}");
    };
    refused([1, 2, 2, 1]);
    refused([1, 1, 3, 1]);
    refused([1, 2, 3, 0]);
    refused([1, 2, 3, 3]); // groups of two features make two
    let q = [0.0f32; 24];
    let (q, mut out) = (View::bhld(&q, [1, 2, 3, 4]).unwrap(), [7.0f32; 24]);
    let to = ViewMut::bhld(&mut out, [1, 2, 3, 4]).unwrap();
    assert_eq!(Attention::new().run(q, view, view, to), Err(Error::NoScales { argument: "k" }));
    let scales = View::bhld(&scales[..6], [1, 2, 3, 1]).unwrap();
    let scaled = view.scaled(scales).unwrap();
    let to = ViewMut::bhld(&mut out, [1, 2, 3, 4]).unwrap();
    assert_eq!(Attention::new().run(q, scaled, view, to), Err(Error::NoScales { argument: "v" }));
    assert_eq!(out, [7.0; 24]);
    let error = scales.scaled(scales).unwrap_err();
    assert_eq!(error, Error::Type { argument: "scaled", got: DType::F32, expected: DType::I8 });
    assert_eq!(error.to_string(), "scaled is of type f32, expected i8");
}

/// Types that differ between Q and the cache, by name in the plan.
#[test]
fn the_plan_names_the_types() {
    let (q, kv) = ([bf16::ZERO; 8], [f16::ZERO; 8]);
    let (q, kv) = (View::bhld(&q, [1, 1, 2, 4]).unwrap(), View::bhld(&kv, [1, 1, 2, 4]).unwrap());
    let kernel = Attention::new().level(Level::Scalar).plan(q, kv, kv).unwrap().kernel();
    assert_eq!(kernel, "scalar-bf16-f16");
    assert_eq!(Attention::new().level(Level::Scalar).plan(q, q, q).unwrap().kernel(), "scalar-bf16");
    if Level::Avx2.is_available() {
        let says = |kv| Attention::new().level(Level::Avx2).plan(q, kv, kv).unwrap().describe();
        assert!(says(kv).contains("F16C"), "{}", says(kv));
        assert!(!Attention::new().level(Level::Avx2).plan(q, q, q).unwrap().describe().contains("F16C"));
    }
}
