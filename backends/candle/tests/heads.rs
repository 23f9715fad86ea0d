//! The layer against the same in candle's plain operations, whole and over a cache.

mod common;

use std::collections::HashMap;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use common::{difference, fill, numbers};
use headwise_candle::headwise::WhenFull;
use headwise_candle::{Backward, Bias, KvCache, MultiHead, MultiHeadConfig, Options};

const CONFIG: MultiHeadConfig =
    MultiHeadConfig { width: 24, heads: 6, kv_heads: 2, head_dim: 8, bias: Bias::All };

fn random(shape: &[usize], seed: u64) -> Result<Tensor> {
    Tensor::from_vec(fill(shape.iter().product(), seed), shape, &Device::Cpu)
}

/// The weights of a layer under `attn`, and those of the projections whose biases are named in its config.
fn weights(config: MultiHeadConfig) -> Result<HashMap<String, Tensor>> {
    let MultiHeadConfig { width, heads, kv_heads, head_dim, bias } = config;
    let mut tensors = HashMap::new();
    let shapes = [
        ("q_proj", [heads * head_dim, width], bias != Bias::None),
        ("k_proj", [kv_heads * head_dim, width], bias != Bias::None),
        ("v_proj", [kv_heads * head_dim, width], bias != Bias::None),
        ("o_proj", [width, heads * head_dim], bias == Bias::All),
    ];
    for (seed, (name, shape, bias)) in (1..).zip(shapes) {
        tensors.insert(format!("attn.{name}.weight"), random(&shape, seed)?);
        if bias {
            tensors.insert(format!("attn.{name}.bias"), random(&shape[..1], seed + 10)?);
        }
    }
    Ok(tensors)
}

fn layer(config: MultiHeadConfig, tensors: &HashMap<String, Tensor>) -> Result<MultiHead> {
    let builder = VarBuilder::from_tensors(tensors.clone(), DType::F32, &Device::Cpu);
    MultiHead::new(config, builder.pp("attn"))
}

fn rotary(positions: usize, head_dim: usize) -> Result<[Tensor; 2]> {
    let angles: Vec<f32> = (0..positions * head_dim / 2)
        .map(|i| {
            let (position, pair) = (i / (head_dim / 2), i % (head_dim / 2));
            position as f32 * 1e4f32.powf(-2.0 * pair as f32 / head_dim as f32)
        })
        .collect();
    let angles = Tensor::from_vec(angles, (positions, head_dim / 2), &Device::Cpu)?;
    Ok([angles.cos()?, angles.sin()?])
}

/// What a model would write without headwise: every step an operation of candle's on whole tensors.
fn plain(
    config: MultiHeadConfig,
    tensors: &HashMap<String, Tensor>,
    x: &Tensor,
    rotary: Option<&[Tensor; 2]>,
) -> Result<Tensor> {
    let MultiHeadConfig { heads, kv_heads, head_dim, .. } = config;
    let (batch, tokens, _) = x.dims3()?;
    let project = |x: &Tensor, name: &str| -> Result<Tensor> {
        let y = x.broadcast_matmul(&tensors[&format!("attn.{name}.weight")].t()?)?;
        match tensors.get(&format!("attn.{name}.bias")) {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    };
    let split = |name, heads| -> Result<Tensor> {
        project(x, name)?.reshape((batch, tokens, heads, head_dim))?.transpose(1, 2)?.contiguous()
    };
    let turn = |x: Tensor| -> Result<Tensor> {
        let Some([cos, sin]) = rotary else { return Ok(x) };
        let cos = Tensor::cat(&[cos, cos], 1)?.narrow(0, 0, tokens)?;
        let sin = Tensor::cat(&[sin, sin], 1)?.narrow(0, 0, tokens)?;
        let (first, second) = (x.narrow(3, 0, head_dim / 2)?, x.narrow(3, head_dim / 2, head_dim / 2)?);
        let turned = Tensor::cat(&[second.neg()?, first], 3)?;
        x.broadcast_mul(&cos)? + turned.broadcast_mul(&sin)?
    };
    let (q, k, v) =
        (turn(split("q_proj", heads)?)?, turn(split("k_proj", kv_heads)?)?, split("v_proj", kv_heads)?);
    let repeat = |x: Tensor| -> Result<Tensor> {
        let shape = (batch, kv_heads, heads / kv_heads, tokens, head_dim);
        x.unsqueeze(2)?.broadcast_as(shape)?.contiguous()?.reshape((batch, heads, tokens, head_dim))
    };
    let (k, v) = (repeat(k)?, repeat(v)?);
    let hidden: Vec<f32> =
        (0..tokens * tokens).map(|i| if i % tokens > i / tokens { f32::NEG_INFINITY } else { 0.0 }).collect();
    let hidden = Tensor::from_vec(hidden, (tokens, tokens), &Device::Cpu)?;
    let scores = (q.matmul(&k.t()?)? / (head_dim as f64).sqrt())?.broadcast_add(&hidden)?;
    let y = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
    project(&y.transpose(1, 2)?.reshape((batch, tokens, heads * head_dim))?, "o_proj")
}

fn close(got: &Tensor, want: &Tensor) {
    assert_eq!(got.dims(), want.dims());
    let error = difference(&numbers(got), numbers(want).into_iter().map(f64::from));
    assert!(error < 2e-5, "{error}"); // sums of 24 and 48 products up to 8 large
}

#[test]
fn whole_sequences() -> Result<()> {
    let x = random(&[3, 13, 24], 7)?;
    for bias in [Bias::None, Bias::Inputs, Bias::All] {
        for kv_heads in [1, 2, 3, 6] {
            let config = MultiHeadConfig { kv_heads, bias, ..CONFIG };
            let tensors = weights(config)?;
            let layer = layer(config, &tensors)?;
            assert_eq!(layer.config(), config);
            close(&layer.forward(&x, &Options::new().causal())?, &plain(config, &tensors, &x, None)?);
            let rotary = rotary(20, config.head_dim)?;
            let layer = layer.with_rotary(&rotary[0], &rotary[1])?;
            close(
                &layer.forward(&x, &Options::new().causal())?,
                &plain(config, &tensors, &x, Some(&rotary))?,
            );
        }
    }
    Ok(())
}

#[test]
fn prompt_and_steps_over_a_cache() -> Result<()> {
    let (x, tensors, rotary) = (random(&[2, 17, 24], 7)?, weights(CONFIG)?, rotary(17, CONFIG.head_dim)?);
    let layer = layer(CONFIG, &tensors)?.with_rotary(&rotary[0], &rotary[1])?;
    let want = plain(CONFIG, &tensors, &x, Some(&rotary))?;
    let mut cache = KvCache::new(4);
    let mut start = 0;
    for n in [9, 1, 1, 5, 1] {
        let got = layer.forward_cached(&x.narrow(1, start, n)?, &mut cache, &Options::new().causal())?;
        close(&got, &want.narrow(1, start, n)?);
        start += n;
        assert_eq!(cache.lens(), [start; 2]);
    }
    let error = layer.forward_cached(&x.narrow(1, 0, 1)?, &mut cache, &Options::new().causal()).unwrap_err();
    assert!(error.to_string().contains("17 rotary positions for 18 tokens"), "{error}");
    assert_eq!(cache.lens(), [17; 2]);

    cache.truncate(1, 16)?;
    let error = layer.forward_cached(&x.narrow(1, 0, 1)?, &mut cache, &Options::new().causal()).unwrap_err();
    assert!(error.to_string().contains("[17, 16] tokens"), "{error}");
    Ok(())
}

/// A cache that rolls lets tokens go; positions go on.
#[test]
fn a_rolling_cache() -> Result<()> {
    let (x, tensors) = (random(&[1, 12, 24], 7)?, weights(CONFIG)?);
    let layer = layer(CONFIG, &tensors)?;
    let want = layer.forward(&x, &Options::new().causal().window(Some(3), None))?;
    let mut cache = KvCache::with(4, Default::default(), WhenFull::Roll { keep: 0 });
    for token in 0..12 {
        let got = layer.forward_cached(&x.narrow(1, token, 1)?, &mut cache, &Options::new().causal())?;
        close(&got, &want.narrow(1, token, 1)?);
    }
    assert_eq!((cache.lens(), cache.appended()), (&[4][..], &[12][..]));
    Ok(())
}

/// The weights learn: gradients are those of the plain operations.
#[test]
fn gradients() -> Result<()> {
    let mut vars = HashMap::new();
    for (name, tensor) in weights(CONFIG)? {
        vars.insert(name, candle_core::Var::from_tensor(&tensor)?.into_inner());
    }
    let (x, rotary) = (random(&[2, 5, 24], 7)?, rotary(5, CONFIG.head_dim)?);
    let layer = layer(CONFIG, &vars)?.with_rotary(&rotary[0], &rotary[1])?;
    let options = Options::new().causal().backward(Backward::Plain);
    let got = layer.forward(&x, &options)?.sqr()?.sum_all()?.backward()?;
    let want = plain(CONFIG, &vars, &x, Some(&rotary))?.sqr()?.sum_all()?.backward()?;
    for (name, var) in &vars {
        let (got, want) = (numbers(got.get(var).unwrap()), numbers(want.get(var).unwrap()));
        let largest = want.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let error = difference(&got, want.into_iter().map(f64::from));
        assert!(error <= 2e-5 * f64::from(largest), "{name}: {error} of {largest}");
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_named() -> Result<()> {
    let tensors = weights(CONFIG)?;
    let refused = |config| layer(config, &tensors).unwrap_err().to_string();
    let error = refused(MultiHeadConfig { kv_heads: 4, ..CONFIG });
    assert!(error.contains("6 query heads") && error.contains("4 key/value heads"), "{error}");
    assert!(refused(MultiHeadConfig { kv_heads: 0, ..CONFIG }).contains("0 key/value heads"));
    assert!(refused(MultiHeadConfig { heads: 4, ..CONFIG }).contains("q_proj"));

    let layer = layer(CONFIG, &tensors)?;
    let [cos, sin] = rotary(9, 6)?;
    let error = layer.clone().with_rotary(&cos, &sin).unwrap_err().to_string();
    assert!(error.contains("cos has shape [9, 3], expected [positions, 4]"), "{error}");
    assert!(layer.forward(&random(&[5, 24], 1)?, &Options::new()).is_err());
    assert!(layer.forward(&random(&[1, 5, 23], 1)?, &Options::new()).is_err());
    Ok(())
}
