//! Every layout and every option against the f64 reference.

mod common;

use candle_core::{DType, Device, Result, Tensor};
use common::{LIES, Lies, difference, expected, fill, lying, numbers, tensor, three_steps};
use headwise_candle::headwise::{Position, Terms, View, alibi_slopes};
use headwise_candle::{Options, sdpa};

const LIMIT: f64 = 2e-6;

#[test]
fn every_layout() -> Result<()> {
    let shapes =
        [([2, 4, 7, 20], [2, 2, 9, 20], [2, 2, 9, 12]), ([1, 3, 33, 5], [1, 1, 70, 5], [1, 1, 70, 7])];
    for (q_shape, k_shape, v_shape) in shapes {
        for (at, q_lies) in LIES.into_iter().enumerate() {
            for kv_lies in LIES {
                let q = lying(q_lies, q_shape, 1)?;
                let k = lying(kv_lies, k_shape, 2)?;
                let v = lying(LIES[(at + 1) % LIES.len()], v_shape, 3)?;
                assert_eq!(q.is_contiguous(), q_lies == Lies::Compact);
                let out = sdpa(&q, &k, &v, &Options::new())?;
                assert_eq!(out.dims(), [q_shape[0], q_shape[1], q_shape[2], v_shape[3]]);
                assert_eq!(out.dtype(), DType::F32);
                let error = difference(&numbers(&out), expected(&q, &k, &v, &Terms::default()));
                assert!(error < LIMIT, "{q_lies:?} {kv_lies:?}: {error}");
                assert!(out.transpose(1, 2)?.is_contiguous());
            }
        }
    }
    Ok(())
}

/// q, k and v of two batch entries, four query heads on two.
fn example() -> [Tensor; 3] {
    [tensor([2, 4, 6, 16], 1), tensor([2, 2, 9, 16], 2), tensor([2, 2, 9, 16], 3)]
}

#[track_caller]
fn same(options: Options, terms: Terms<'_>) {
    let [q, k, v] = example();
    let out = numbers(&sdpa(&q, &k, &v, &options).unwrap());
    let error = difference(&out, expected(&q, &k, &v, &terms));
    assert!(error < LIMIT, "{options:?}: {error}");
    let sequential = options.sequential().level(headwise_candle::headwise::Level::Scalar);
    let error = difference(&numbers(&sdpa(&q, &k, &v, &sequential).unwrap()), expected(&q, &k, &v, &terms));
    assert!(error < LIMIT, "{sequential:?}: {error}");
}

#[test]
fn every_option() -> Result<()> {
    let plain = Terms::default();
    same(Options::new().scale(-0.3), Terms { scale: Some(-0.3), ..plain });
    same(Options::new().softcap(0.7), Terms { softcap: Some(0.7), ..plain });
    same(Options::new().causal(), Terms { causal: true, ..plain });
    let window = Terms { left: Some(2), right: Some(1), ..plain };
    same(Options::new().window(Some(2), Some(1)), window);
    for position in [Position::TopLeft, Position::BottomRight, Position::At(-2), Position::At(5)] {
        same(Options::new().causal().position(position), Terms { causal: true, position, ..plain });
    }
    let offsets = Terms { causal: true, position: Position::Each(&[1, -3]), ..plain };
    same(Options::new().causal().offsets([1, -3]), offsets);
    let lens = Terms { kv_lens: Some(&[9, 4]), q_lens: Some(&[5, 6]), causal: true, ..plain };
    same(Options::new().causal().kv_lens([9, 4]).q_lens([5, 6]), lens);
    let slopes = alibi_slopes(4);
    same(Options::new().slopes(slopes.as_slice()), Terms { slopes: Some(&slopes), ..plain });
    let (sinks, gates) = ([0.5, -1.0, 2.0, 0.0], [1.0, 0.0, -2.0, 0.5]);
    same(
        Options::new().sinks(sinks).gates(gates),
        Terms { sinks: Some(&sinks), gates: Some(&gates), ..plain },
    );
    Ok(())
}

#[test]
fn masks_and_biases_broadcast() -> Result<()> {
    for shape in [vec![9], vec![6, 9], vec![4, 1, 9], vec![2, 1, 1, 9], vec![2, 4, 6, 9]] {
        let (n, mut padded) = (shape.iter().product(), [1; 4]);
        padded[4 - shape.len()..].copy_from_slice(&shape);
        let numbers = fill(n, 7);
        let shown: Vec<bool> = numbers.iter().map(|&x| x > -0.4).collect();
        for yes in [1u8, 7] {
            let bytes: Vec<u8> = shown.iter().map(|&shown| if shown { yes } else { 0 }).collect();
            let mask = Tensor::from_vec(bytes, shape.as_slice(), &Device::Cpu)?;
            let terms = Terms { mask: Some(View::bhld(&shown, padded).unwrap()), ..Terms::default() };
            same(Options::new().mask(&mask), terms);
        }
        let bias = Tensor::from_slice(&numbers, shape.as_slice(), &Device::Cpu)?;
        let terms = Terms { bias: Some(View::bhld(&numbers, padded).unwrap()), ..Terms::default() };
        same(Options::new().bias(&bias), terms);
        same(Options::new().bias(&bias.to_dtype(DType::F64)?), terms);
    }
    // In layouts of their own: a narrowed mask, a transposed bias.
    let [q, k, v] = example();
    let wide = Tensor::from_vec(fill(9 * 8, 9), (9, 8), &Device::Cpu)?;
    let bias = wide.t()?.narrow(0, 1, 6)?;
    let mask = wide.gt(-0.5f32)?.t()?.narrow(0, 2, 6)?;
    let got = sdpa(&q, &k, &v, &Options::new().bias(&bias).mask(&mask))?;
    let want = sdpa(&q, &k, &v, &Options::new().bias(&bias.contiguous()?).mask(&mask.contiguous()?))?;
    assert_eq!(numbers(&got), numbers(&want));
    Ok(())
}

#[test]
fn as_models_write_it() -> Result<()> {
    let (q, k, v) = (tensor([2, 3, 40, 32], 1), tensor([2, 3, 50, 32], 2), tensor([2, 3, 50, 32], 3));
    let bias = Tensor::from_vec(fill(40 * 50, 4), (1, 1, 40, 50), &Device::Cpu)?;
    let want = three_steps(&q, &k, &v, 0.2, Some(&bias))?;
    let got = sdpa(&q, &k, &v, &Options::new().scale(0.2).bias(&bias))?;
    let error = difference(&numbers(&got), numbers(&want).into_iter().map(f64::from));
    assert!(error < LIMIT, "{error}");
    Ok(())
}

#[test]
fn nothing_to_see_and_nothing_to_do() -> Result<()> {
    let [q, k, v] = example();
    let hidden = Tensor::zeros((6, 9), DType::U8, &Device::Cpu)?;
    assert!(numbers(&sdpa(&q, &k, &v, &Options::new().mask(&hidden))?).iter().all(|&x| x == 0.0));
    for axis in 0..4 {
        let few = |tensor: &Tensor| tensor.narrow(axis, 0, 0);
        let options = Options::new().scale(1.0);
        match axis {
            0 => assert_eq!(sdpa(&few(&q)?, &few(&k)?, &few(&v)?, &options)?.dims(), [0, 4, 6, 16]),
            1 => assert!(sdpa(&q, &few(&k)?, &few(&v)?, &options).is_err()),
            2 => {
                let out = sdpa(&q, &few(&k)?, &few(&v)?, &options)?;
                assert!(out.dims() == [2, 4, 6, 16] && numbers(&out).iter().all(|&x| x == 0.0));
            }
            _ => assert_eq!(sdpa(&q, &k, &few(&v)?, &options)?.dims(), [2, 4, 6, 0]),
        }
    }
    Ok(())
}
