//! Gradients are right or refused, never silently zero.

mod common;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use common::{difference, fill, numbers, tensor};
use headwise_candle::headwise::Position;
use headwise_candle::{AttnMask, Backward, KvCache, Options, flash_attn, sdpa};

fn example() -> Result<[Var; 3]> {
    let var = |shape, seed| Var::from_tensor(&tensor(shape, seed));
    Ok([var([2, 4, 5, 8], 1)?, var([2, 2, 7, 8], 2)?, var([2, 2, 7, 6], 3)?])
}

/// A sum of the result in which no two elements count the same.
fn loss(out: &Tensor) -> Result<Tensor> {
    let weights = Tensor::from_vec(fill(out.elem_count(), 4), out.dims(), &Device::Cpu)?;
    (out * weights)?.sum_all()
}

#[test]
fn refused_by_default() -> Result<()> {
    let [q, k, v] = example()?;
    let message = loss(&sdpa(&q, &k, &v, &Options::new())?)?.backward().unwrap_err().to_string();
    assert!(
        message.contains("backward is not supported") && message.contains("Backward::Plain"),
        "{message}"
    );
    assert!(message.contains("[2, 4, 5, 8]") && message.contains("[2, 2, 7, 6]"), "{message}");

    let out = flash_attn::<f32>(&q, &q, &q, 1.0, AttnMask::None, None, None)?;
    assert!(loss(&out)?.backward().is_err());

    // Whichever of them asks for it.
    let options = Options::new();
    for one in 0..3 {
        let pick = |i: usize, var: &Var| if i == one { var.as_tensor().clone() } else { var.detach() };
        assert!(loss(&sdpa(&pick(0, &q), &pick(1, &k), &pick(2, &v), &options)?)?.backward().is_err());
    }
    // Without anything that asks there is no gradient and no error.
    let out = loss(&sdpa(&q.detach(), &k.detach(), &v.detach(), &options)?)?;
    assert!(!out.track_op());
    Ok(())
}

#[test]
fn what_gets_no_gradient_must_not_ask_for_one() -> Result<()> {
    let [q, k, v] = example()?;
    let bias = Var::zeros((5, 7), DType::F32, &Device::Cpu)?;
    for backward in [Backward::Refuse, Backward::Plain] {
        let options = Options::new().backward(backward).bias(&bias);
        let message = sdpa(&q, &k, &v, &options).unwrap_err().to_string();
        assert!(message.contains("bias of shape [5, 7]") && message.contains("detach()"), "{message}");
    }
    assert!(sdpa(&q, &k, &v, &Options::new().bias(&bias.detach())).is_ok());
    let mut cache = KvCache::new(16);
    let message = cache.append(&k, &v).unwrap_err().to_string();
    assert!(message.contains("k of shape [2, 2, 7, 8]") && message.contains("gradient"), "{message}");
    cache.append(&k.detach(), &v.detach())?;
    assert!(cache.sdpa(&q, &Options::new()).unwrap_err().to_string().contains("q of shape [2, 4, 5, 8]"));
    assert!(cache.attend(&q, &k.detach(), &v.detach(), &Options::new()).is_err());
    assert_eq!(cache.lens(), [7, 7]); // the refused step has left nothing
    Ok(())
}

/// Gradients as candle takes them of what a model would write, heads repeated, hidden pairs by an additive
/// mask.
#[test]
fn as_of_three_steps() -> Result<()> {
    let [q, k, v] = example()?;
    let hide = |x: f32| if x < -0.5 { f32::NEG_INFINITY } else { x };
    let bias: Vec<f32> = fill(5 * 7, 8).into_iter().map(hide).collect();
    let bias = Tensor::from_vec(bias, (5, 7), &Device::Cpu)?;
    let repeat =
        |x: &Tensor, d| x.unsqueeze(2)?.broadcast_as((2, 2, 2, 7, d))?.contiguous()?.reshape((2, 4, 7, d));
    let scores = (q.matmul(&repeat(&k, 8)?.t()?.contiguous()?)? * 0.3)?.broadcast_add(&bias)?;
    let want = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&repeat(&v, 6)?)?;
    let want = loss(&want)?.backward()?;

    let options = Options::new().scale(0.3).bias(&bias).backward(Backward::Plain);
    let got = loss(&sdpa(&q, &k, &v, &options)?)?.backward()?;
    for (name, var) in [("q", &q), ("k", &k), ("v", &v)] {
        let (got, want) = (got.get(var).expect(name), want.get(var).expect(name));
        let error = difference(&numbers(got), numbers(want).into_iter().map(f64::from));
        assert!(error < 2e-6, "{name}: {error}");
    }
    Ok(())
}

/// Every option against central differences of the forward pass, which the f64 reference vouches for.
#[test]
fn as_of_differences() -> Result<()> {
    let bytes: Vec<u8> = fill(4 * 5 * 7, 6).into_iter().map(|x| u8::from(x > -0.5)).collect();
    let mask = Tensor::from_vec(bytes, (4, 5, 7), &Device::Cpu)?;
    let bias = Tensor::from_vec(fill(7, 7), 7, &Device::Cpu)?;
    let plain = Options::new().backward(Backward::Plain);
    let all = [
        plain.clone().scale(0.5).softcap(0.8),
        plain.clone().causal().slopes([0.5, 0.25, 0.125, 1.0]),
        plain.clone().window(Some(2), Some(1)).position(Position::At(1)),
        plain.clone().causal().position(Position::At(-2)).sinks([0.5, -1.0, 3.0, 0.0]),
        plain.clone().causal().position(Position::At(-2)).scale(40.0), // rows that see nothing
        plain.clone().mask(&mask).bias(&bias).gates([1.0, 0.0, -2.0, 0.5]),
        plain.clone().kv_lens([7, 3]).q_lens([4, 5]).causal(),
        plain.clone().offsets([0, 3]).window(Some(1), None).softcap(2.0).sinks([0.0, 1.0, 2.0, 3.0]),
    ];
    for options in all {
        let [q, k, v] = example()?;
        let grads = loss(&sdpa(&q, &k, &v, &options)?)?.backward()?;
        let value = |inputs: &[Tensor; 3]| -> Result<f64> {
            let out = numbers(&sdpa(&inputs[0], &inputs[1], &inputs[2], &options)?);
            let weights = fill(out.len(), 4);
            Ok(out.iter().zip(weights).map(|(&out, weight)| f64::from(out) * f64::from(weight)).sum())
        };
        let inputs = [&q, &k, &v].map(|var| var.detach());
        for (which, var) in [&q, &k, &v].into_iter().enumerate() {
            let got = numbers(grads.get(var).expect("a gradient"));
            let base = numbers(var);
            for at in (0..base.len()).step_by(3) {
                let step = 1e-2;
                let moved = |by: f32| {
                    let (mut inputs, mut data) = (inputs.clone(), base.clone());
                    data[at] += by;
                    inputs[which] = Tensor::from_vec(data, var.dims(), &Device::Cpu)?;
                    value(&inputs)
                };
                let slope = |step: f32| {
                    Ok::<_, candle_core::Error>((moved(step)? - moved(-step)?) / f64::from(2.0 * step))
                };
                // Richardson: the error of two steps cancels.
                let want = (4.0 * slope(step)? - slope(2.0 * step)?) / 3.0;
                let error = (f64::from(got[at]) - want).abs();
                let limit = if options_are_steep(&options) { 0.02 } else { 5e-4 };
                assert!(error < limit, "{which} at {at}: {} against {want}, {options:?}", got[at]);
            }
        }
    }
    Ok(())
}

/// Whether the third derivative is too large for close differences.
fn options_are_steep(options: &Options) -> bool {
    format!("{options:?}").contains("scale: Some(40.0)")
}

#[test]
fn through_strides_and_twice() -> Result<()> {
    // The same tensor as q, k and v, transposed and narrowed: the gradients add up in it.
    let x = Var::from_tensor(&tensor([2, 6, 3, 8], 1))?;
    let options = Options::new().causal().backward(Backward::Plain);
    let part = |start| x.transpose(1, 2)?.narrow(2, start, 5);
    let got = loss(&sdpa(&part(0)?, &part(1)?, &part(0)?, &options)?)?.backward()?;
    let [q, k] = [part(0)?, part(1)?].map(|part| part.contiguous());
    let (q, k) = (q?, k?);
    let causal: Vec<f32> = (0..25).map(|at| if at % 5 > at / 5 { f32::NEG_INFINITY } else { 0.0 }).collect();
    let causal = Tensor::from_vec(causal, (5, 5), &Device::Cpu)?;
    let want = loss(&common::three_steps(&q, &k, &q, 1.0 / 8f64.sqrt(), Some(&causal))?)?.backward()?;
    let (got, want) = (got.get(&x).unwrap(), want.get(&x).unwrap());
    assert!(difference(&numbers(got), numbers(want).into_iter().map(f64::from)) < 5e-6);
    Ok(())
}
