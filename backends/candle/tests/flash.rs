//! Whatever candle's own CPU flash attention accepts gives the same here.

mod common;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::attention as candle;
use common::{difference, fill, numbers, tensor};
use headwise_candle::{AttnMask, flash_attn};

/// q, k and v, `(B, S, H, D)`.
fn example(b: usize, s: usize, kv: usize) -> [Tensor; 3] {
    [tensor([b, s, 6, 20], 1), tensor([b, kv, 2, 20], 2), tensor([b, kv, 2, 20], 3)]
}

fn theirs(mask: &AttnMask) -> candle::AttnMask {
    match mask {
        AttnMask::None => candle::AttnMask::None,
        AttnMask::Causal { kv_offset } => candle::AttnMask::causal_with_offset(*kv_offset),
        AttnMask::Mask(mask) => candle::AttnMask::Mask(mask.clone()),
    }
}

fn flash([q, k, v]: &[Tensor; 3], mask: AttnMask, max_bias: Option<f32>, softcap: Option<f32>) -> Tensor {
    flash_attn::<f32>(q, k, v, 0.25, mask, max_bias, softcap).unwrap()
}

#[track_caller]
fn same([q, k, v]: &[Tensor; 3], mask: AttnMask, max_bias: Option<f32>, softcap: Option<f32>) {
    let what = format!("{:?} {:?}, {mask:?}, {max_bias:?}, {softcap:?}", q.dims(), k.dims());
    let want = candle::flash_attn::<f32>(q, k, v, 0.25, theirs(&mask), max_bias, softcap).expect(&what);
    let got = flash_attn::<f32>(q, k, v, 0.25, mask, max_bias, softcap).expect(&what);
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()), "{what}");
    let error = difference(&numbers(&got), numbers(&want).into_iter().map(f64::from));
    assert!(error < 2e-6, "{what}: {error}");
}

#[test]
fn one_batch_entry() {
    for (s, kv) in [(1, 1), (1, 40), (7, 40), (40, 40), (65, 130)] {
        let example = example(1, s, kv);
        for max_bias in [None, Some(0.0), Some(8.0)] {
            for softcap in [None, Some(0.0), Some(0.5)] {
                same(&example, AttnMask::None, max_bias, softcap);
                let hide = |x: f32| if x < -0.7 { f32::NEG_INFINITY } else { x };
                let mask: Vec<f32> = fill(s * kv, 5).into_iter().map(hide).collect();
                for shape in [vec![s, kv], vec![1, 1, s, kv]] {
                    let mask = Tensor::from_slice(&mask, shape, &Device::Cpu).unwrap();
                    same(&example, AttnMask::Mask(mask), max_bias, softcap);
                }
                // Of one query candle 0.11.1 takes a cap without ALiBi for ALiBi with slopes of 1.
                let no_bias = max_bias.is_none_or(|max| max == 0.0);
                if s == 1 && no_bias && softcap == Some(0.5) {
                    let all = |mask| flash(&example, mask, max_bias, softcap);
                    assert_eq!(numbers(&all(AttnMask::causal())), numbers(&all(AttnMask::None)));
                    continue;
                }
                for kv_offset in [0, kv - s, kv] {
                    same(&example, AttnMask::causal_with_offset(kv_offset), max_bias, softcap);
                }
            }
        }
    }
}

#[test]
fn several_batch_entries() {
    for (s, kv) in [(1, 1), (1, 40), (7, 40), (40, 40)] {
        for max_bias in [None, Some(8.0)] {
            same(&example(3, s, kv), AttnMask::None, max_bias, None);
            same(&example(3, s, kv), AttnMask::causal(), max_bias, None);
            same(&example(3, s, kv), AttnMask::causal_with_offset(kv - s), max_bias, None);
        }
    }
}

#[test]
fn strided_inputs() -> Result<()> {
    let heads_outside = [tensor([1, 6, 9, 20], 1), tensor([1, 2, 30, 20], 2), tensor([1, 2, 30, 20], 3)];
    let [q, k, v] = heads_outside.map(|tensor| tensor.transpose(1, 2).unwrap());
    same(&[q, k, v], AttnMask::causal_with_offset(21), None, None);
    let [q, k, v] = example(2, 9, 30);
    same(&[q, k.narrow(1, 3, 20)?, v.narrow(1, 5, 20)?], AttnMask::causal(), None, None);
    Ok(())
}

#[test]
fn beyond_candle() -> Result<()> {
    // A mask of its own for each batch entry and head: what one entry and head gives alone.
    let [q, k, v] = example(2, 5, 8);
    let mask = tensor([2, 6, 5, 8], 9);
    let got = flash_attn::<f32>(&q, &k, &v, 0.25, AttnMask::Mask(mask.clone()), None, Some(3.0))?;
    for b in 0..2 {
        for h in 0..6 {
            let one = |tensor: &Tensor, h| tensor.narrow(0, b, 1)?.narrow(2, h, 1);
            let mask = candle::AttnMask::Mask(mask.narrow(0, b, 1)?.narrow(1, h, 1)?);
            let (q, k, v) = (one(&q, h)?, one(&k, h / 3)?, one(&v, h / 3)?);
            let want = candle::flash_attn::<f32>(&q, &k, &v, 0.25, mask, None, Some(3.0))?;
            let got = numbers(&got.narrow(0, b, 1)?.narrow(1, h, 1)?);
            assert!(difference(&got, numbers(&want).into_iter().map(f64::from)) < 2e-6);
        }
    }
    Ok(())
}

#[test]
fn refused() -> Result<()> {
    let [q, k, v] = example(1, 5, 8);
    let call =
        |q: &Tensor, mask| flash_attn::<f32>(q, &k, &v, 1.0, mask, None, None).unwrap_err().to_string();
    assert!(call(&q.squeeze(0)?, AttnMask::None).contains("q has shape [5, 6, 20]"));
    assert!(call(&q.to_dtype(DType::F64)?, AttnMask::None).contains("q is F64, but was called with F32"));
    let mask = Tensor::ones((5, 8), DType::U8, &Device::Cpu)?;
    assert!(call(&q, AttnMask::Mask(mask)).contains("mask is U8"));
    let mask = Tensor::ones((5, 9), DType::F32, &Device::Cpu)?;
    let message = call(&q, AttnMask::Mask(mask));
    assert!(message.contains("[1, 1, 5, 9]") && message.contains("[1, 6, 5, 8]"), "{message}");
    Ok(())
}
