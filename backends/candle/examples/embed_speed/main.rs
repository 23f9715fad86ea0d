//! Sentences a second of a BERT-like encoder: `headwise embed`'s, on ragged batches, beside candle's own BERT
//! on padded ones, with the same weights in the same rounds. Token ids in, embeddings out.
//!
//! `cargo run --release -p headwise-candle --example embed_speed -- MODEL [ROUNDS]`, the folder of
//! all-MiniLM-L6-v2; `RAYON_NUM_THREADS` sets the threads of both.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::bert::{BertModel, Config};
use headwise_candle::headwise::layer::Checkpoint;
use headwise_cli::embed::batches;
use headwise_cli::encoder::{Batch, Encoder, Memory};
use headwise_cli::model::Model;

/// Texts of a padded batch.
const TEXTS: usize = 32;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("give the folder of a model")?;
    let rounds: usize = arguments.next().map_or(Ok(3), |rounds| rounds.parse())?;
    let model = Model::open(folder.as_ref())?;
    let encoder = Encoder::load(&Checkpoint::new([model.weights()])?, &model.config, model.pooling)?;
    let config: Config = serde_json::from_slice(&std::fs::read(format!("{folder}/config.json"))?)?;
    let weights = VarBuilder::from_slice_safetensors(model.weights(), DType::F32, &Device::Cpu)?;
    let bert = BertModel::load(weights, &config)?;
    let mut memory = Memory::default();

    let text = |length: usize, seed: usize| -> Vec<u32> {
        let inner = |i: usize| 1000 + (i * 7919 + seed * 104_729) as u32 % 28_000;
        std::iter::once(101).chain((2..length).map(inner)).chain([102]).collect()
    };
    let mixed: Vec<_> = (0..256).map(|i| text(5 + i * 61 % 116, i)).collect();
    let equal: Vec<_> = (0..256).map(|i| text(64, i)).collect();
    for (name, texts) in [("5 to 120 tokens", mixed), ("64 tokens", equal)] {
        let (ours, theirs) = (ragged(&encoder, &texts, &mut memory)?, padded(&bert, &texts)?);
        let difference = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let mut seconds = [Vec::new(), Vec::new()];
        for _ in 0..rounds {
            let start = Instant::now();
            ragged(&encoder, &texts, &mut memory)?;
            seconds[0].push(start.elapsed().as_secs_f64());
            let start = Instant::now();
            padded(&bert, &texts)?;
            seconds[1].push(start.elapsed().as_secs_f64());
        }
        let [ours, theirs] = seconds.map(|mut seconds| {
            seconds.sort_by(f64::total_cmp);
            texts.len() as f64 / seconds[seconds.len() / 2]
        });
        let times = ours / theirs;
        println!(
            "{name}: headwise {ours:.1}/s, candle {theirs:.1}/s, {times:.2}x, apart by {difference:.1e}"
        );
    }
    Ok(())
}

/// Embeddings by headwise, in the batches of `headwise embed`.
fn ragged(
    encoder: &Encoder,
    texts: &[Vec<u32>],
    memory: &mut Memory,
) -> Result<Vec<f32>, headwise_candle::headwise::Error> {
    let mut out = Vec::new();
    for some in batches(texts) {
        let batch = Batch::new(texts[some].iter().map(Vec::as_slice));
        out.extend(encoder.forward(&batch, memory)?);
    }
    Ok(out)
}

/// Embeddings by candle, in batches of [`TEXTS`] texts padded to the longest.
fn padded(bert: &BertModel, texts: &[Vec<u32>]) -> candle_core::Result<Vec<f32>> {
    let mut out = Vec::new();
    for texts in texts.chunks(TEXTS) {
        let length = texts.iter().map(Vec::len).max().unwrap_or(0);
        let column = |of: fn(Option<&u32>) -> u32| -> candle_core::Result<Tensor> {
            let ids = texts.iter().flat_map(|text| (0..length).map(|i| of(text.get(i))));
            Tensor::from_vec(ids.collect::<Vec<u32>>(), (texts.len(), length), &Device::Cpu)
        };
        let ids = column(|id| id.copied().unwrap_or(0))?;
        let mask = column(|id| u32::from(id.is_some()))?;
        let states = bert.forward(&ids, &ids.zeros_like()?, Some(&mask))?;
        let mask = mask.to_dtype(DType::F32)?.unsqueeze(2)?;
        let mean = states.broadcast_mul(&mask)?.sum(1)?.broadcast_div(&mask.sum(1)?)?;
        let norm = mean.sqr()?.sum_keepdim(1)?.sqrt()?;
        out.extend(mean.broadcast_div(&norm)?.flatten_all()?.to_vec1::<f32>()?);
    }
    Ok(out)
}
