//! f16 and bf16, alone and with one another, against the f64 reference on the same numbers: within half a
//! unit in the last place of the result and 2e-5, and bf16 within 2 units of the largest result, as where the
//! processor multiplies it as such.

mod common;

use candle_core::{DType, Result, Tensor};
use common::{LIES, difference, expected, lying, numbers, tensor};
use headwise_candle::headwise::{self, Terms};
use headwise_candle::{AttnMask, Backward, KvCache, Options, flash_attn, sdpa};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Half of what lies between two neighbours of the type at `x`, and the budget.
fn limit(dtype: DType, x: f64) -> f64 {
    let bits = match dtype {
        DType::F16 => 10,
        DType::BF16 => 7,
        _ => return 2e-6,
    };
    let exponent = (x.abs().log2().floor() as i32).max(-24);
    2f64.powi(exponent - bits) / 2.0 + 2e-5
}

#[track_caller]
fn close(got: &Tensor, want: &[f64]) {
    let dtype = got.dtype();
    let got = numbers(got);
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    for (&got, &want) in got.iter().zip(want) {
        let level = headwise::Attention::default_level().expect("a level");
        let rounds_weights = dtype == DType::BF16 && level != level.exact();
        let limit = if rounds_weights { 4.0 * limit(dtype, largest) } else { limit(dtype, want) };
        assert!((f64::from(got) - want).abs() <= limit, "{dtype:?}: {got} instead of {want}");
    }
}

#[test]
fn every_pair_of_types() -> Result<()> {
    for lies in LIES {
        let q = lying(lies, [2, 4, 7, 20], 1)?;
        let (k, v) = (lying(lies, [2, 2, 33, 20], 2)?, lying(lies, [2, 2, 33, 12], 3)?);
        for of_q in TYPES {
            for of_kv in TYPES {
                let (q, k, v) = (q.to_dtype(of_q)?, k.to_dtype(of_kv)?, v.to_dtype(of_kv)?);
                let out = sdpa(&q, &k, &v, &Options::new().causal())?;
                assert_eq!(out.dtype(), of_q);
                close(&out, &expected(&q, &k, &v, &Terms { causal: true, ..Terms::default() }));
            }
        }
    }
    Ok(())
}

/// In strides of their own, too, which converting has made compact above.
#[test]
fn strided() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let part = |shape, seed| tensor(shape, seed).to_dtype(dtype)?.transpose(1, 2)?.narrow(2, 1, 9);
        let (q, kv) = (part([1, 12, 4, 16], 1)?, part([1, 20, 2, 16], 2)?);
        assert!(!q.is_contiguous());
        close(&sdpa(&q, &kv, &kv, &Options::new())?, &expected(&q, &kv, &kv, &Terms::default()));
    }
    Ok(())
}

#[test]
fn flash() -> Result<()> {
    let [q, k, v] = [tensor([1, 9, 6, 32], 1), tensor([1, 30, 2, 32], 2), tensor([1, 30, 2, 32], 3)];
    let [q, k, v] = [q, k, v].map(|tensor| tensor.to_dtype(DType::F16).unwrap());
    let mask = candle_nn::attention::AttnMask::causal_with_offset(21);
    let want = candle_nn::attention::flash_attn::<half::f16>(&q, &k, &v, 0.2, mask, None, None)?;
    let got = flash_attn::<half::f16>(&q, &k, &v, 0.2, AttnMask::causal_with_offset(21), None, None)?;
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()));
    let [q, k, v] = [q, k, v].map(|tensor| tensor.transpose(1, 2).unwrap());
    let terms = Terms { causal: true, scale: Some(0.2), ..Terms::default() };
    let exact = expected(&q, &k, &v, &terms);
    assert!(difference(&numbers(&got), exact.iter().copied()) < 2e-6); // not rounded to f16
    assert!(difference(&numbers(&want), exact) < 1e-2);
    Ok(())
}

#[test]
fn gradients_have_the_types_of_the_inputs() -> Result<()> {
    let var = |shape, seed| candle_core::Var::from_tensor(&tensor(shape, seed).to_dtype(DType::BF16)?);
    let (q, k, v) = (var([1, 2, 5, 8], 1)?, var([1, 2, 7, 8], 2)?, var([1, 2, 7, 8], 3)?);
    let options = Options::new().causal().backward(Backward::Plain);
    let grads = sdpa(&q, &k, &v, &options)?.sum_all()?.backward()?;
    let [q, k, v] = [&q, &k, &v].map(|var| {
        let wide = candle_core::Var::from_tensor(&var.to_dtype(DType::F32).unwrap().detach()).unwrap();
        (var.clone(), wide)
    });
    let want = sdpa(&q.1, &k.1, &v.1, &options)?.sum_all()?.backward()?;
    for (narrow, wide) in [q, k, v] {
        let grad = grads.get(&narrow).expect("a gradient");
        assert_eq!(grad.dtype(), DType::BF16);
        let want = numbers(want.get(&wide).expect("a gradient"));
        assert!(difference(&numbers(grad), want.into_iter().map(f64::from)) < 2e-2);
    }
    Ok(())
}

#[test]
fn caches() -> Result<()> {
    let (q, k, v) = (tensor([2, 4, 9, 16], 1), tensor([2, 2, 9, 16], 2), tensor([2, 2, 9, 16], 3));
    let causal = Terms { causal: true, ..Terms::default() };
    for dtype in TYPES {
        let [q, k, v] = [&q, &k, &v].map(|tensor| tensor.to_dtype(dtype).unwrap());
        let out = KvCache::new(4).attend(&q, &k, &v, &Options::new().causal())?;
        assert_eq!(out.dtype(), dtype);
        close(&out, &expected(&q, &k, &v, &causal));
    }
    // Of another type than the model's: rounded on the way in.
    for (stored, dtype) in [(headwise::DType::F16, DType::F16), (headwise::DType::Bf16, DType::BF16)] {
        let out = KvCache::new(4).stored_as(stored).attend(&q, &k, &v, &Options::new().causal())?;
        let (k, v) = (k.to_dtype(dtype)?, v.to_dtype(dtype)?);
        assert_eq!(out.dtype(), DType::F32);
        close(&out, &expected(&q, &k, &v, &causal));
    }
    let out = KvCache::new(4).stored_as(headwise::DType::I8).attend(&q, &k, &v, &Options::new().causal())?;
    let error = difference(&numbers(&out), expected(&q, &k, &v, &causal));
    assert!(error > 1e-4 && error < 2e-2, "{error}"); // 7 bits
    Ok(())
}
