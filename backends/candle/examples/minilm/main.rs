//! Sentence embeddings of all-MiniLM-L6-v2: candle's own BERT beside the same with headwise's attention.
//!
//! ```sh
//! cargo run --release -p headwise-candle --example minilm -- DIRECTORY
//! ```
//!
//! DIRECTORY holds `model.safetensors` and `config.json`. Fails unless both give the same embeddings within
//! 1e-5, and those that were computed elsewhere (`embeddings.json`) too.

mod bert;

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::bert::{BertModel, Config};

#[derive(serde::Deserialize)]
struct Expected {
    token_ids: Vec<Vec<u32>>,
    embeddings: Vec<Vec<f32>>,
}

const LIMIT: f32 = 1e-5;

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let directory = std::env::args().nth(1).ok_or("usage: minilm DIRECTORY")?;
    let directory = Path::new(&directory);
    let expected: Expected = serde_json::from_str(include_str!("embeddings.json"))?;
    let config: Config = serde_json::from_reader(std::fs::File::open(directory.join("config.json"))?)?;
    let weights = std::fs::read(directory.join("model.safetensors"))?;
    let vb = VarBuilder::from_buffered_safetensors(weights, DType::F32, &Device::Cpu)?;
    let (theirs, ours) = (BertModel::load(vb.clone(), &config)?, bert::Bert::load(vb, &config)?);

    let lens: Vec<usize> = expected.token_ids.iter().map(Vec::len).collect();
    let longest = lens.iter().copied().max().unwrap_or(0);
    let padded = expected.token_ids.iter().flat_map(|ids| {
        ids.iter().copied().chain(std::iter::repeat_n(config.pad_token_id as u32, longest - ids.len()))
    });
    let ids = Tensor::from_vec(padded.collect::<Vec<u32>>(), (lens.len(), longest), &Device::Cpu)?;
    let valid = lens.iter().flat_map(|&len| (0..longest).map(move |i| f32::from(u8::from(i < len))));
    let valid = Tensor::from_vec(valid.collect::<Vec<f32>>(), (lens.len(), longest), &Device::Cpu)?;

    let candle = || embeddings(&theirs.forward(&ids, &ids.zeros_like()?, Some(&valid))?, &valid);
    let headwise = || embeddings(&ours.forward(&ids, &lens)?, &valid);
    let (by_candle, by_headwise) = (candle()?, headwise()?);
    let elsewhere = Tensor::new(expected.embeddings, &Device::Cpu)?;
    let mut wrong = false;
    for (what, other) in [("candle's own attention", &by_candle), ("embeddings.json", &elsewhere)] {
        let difference = (&by_headwise - other)?.abs()?.max_all()?.to_scalar::<f32>()?;
        println!("largest difference to {what}: {difference:.1e}");
        wrong |= difference.is_nan() || difference > LIMIT;
    }
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..15 {
        for (times, model) in times.iter_mut().zip([&candle as &dyn Fn() -> Result<Tensor>, &headwise]) {
            let start = Instant::now();
            model()?;
            times.push(start.elapsed());
        }
    }
    let [candle, headwise] = times.map(|mut times| {
        times.sort();
        times[times.len() / 2]
    });
    println!("{} texts of up to {longest} tokens: candle {candle:.1?}, headwise {headwise:.1?}", lens.len());
    if wrong { Err(format!("embeddings differ by more than {LIMIT:.0e}").into()) } else { Ok(()) }
}

/// The mean over the valid tokens, of length 1.
fn embeddings(x: &Tensor, valid: &Tensor) -> Result<Tensor> {
    let sum = x.broadcast_mul(&valid.unsqueeze(2)?)?.sum(1)?;
    let mean = sum.broadcast_div(&valid.sum_keepdim(1)?)?;
    mean.broadcast_div(&mean.sqr()?.sum_keepdim(1)?.sqrt()?)
}
