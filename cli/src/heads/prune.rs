//! Removes heads, the least important first, and looks at what is left: how near the embeddings stay, what
//! the model costs. The heads are gone from the weights, not behind gates.

use std::time::Instant;

use headwise::layer::CostShape;
use headwise::{Attention, Error};
use indicatif::ProgressBar;

use super::HeadsError;
use super::measure::{cosines, in_batches, measured};
use super::report::{Head, Pruned};
use crate::encoder::{Batch, Encoder, Memory};
use crate::text::Sentence;

/// Points of the curve, about.
const POINTS: usize = 18;
/// Tokens that are timed, about.
const TIMED: usize = 512;
/// Rounds, each of the whole model and of the pruned one.
const ROUNDS: usize = 3;

/// The model `less` and less its heads, `whole` before.
pub(super) fn curve(
    whole: &Encoder<'_>,
    mut less: Encoder<'_>,
    sentences: &[Sentence],
    heads: &[Head],
    bar: &ProgressBar,
) -> Result<Vec<Pruned>, HeadsError> {
    let sentences = &sentences[..measured(sentences)];
    let longest = sentences.iter().map(|sentence| sentence.ids.len()).max().unwrap_or(0);
    let batches: Vec<Batch> = in_batches(sentences).into_iter().map(|(batch, _)| batch).collect();
    let mut rows = 0;
    let timed = batches.iter().take_while(|batch| {
        rows += batch.rows();
        rows <= TIMED
    });
    let timed = &batches[..timed.count().max(1)];

    let mut order: Vec<&Head> = heads.iter().collect();
    order.sort_by(|a, b| a.importance.total_cmp(&b.importance));
    let step = order.len().div_ceil(POINTS).max(1);
    bar.set_length(1 + order.len().div_ceil(step) as u64);
    bar.set_position(0);
    bar.set_message("pruning");

    let mut memory = Memory::default();
    let mut embed = |encoder: &Encoder<'_>| -> Result<Vec<f32>, Error> {
        let all =
            batches.iter().map(|batch| encoder.forward(batch, &mut memory)).collect::<Result<Vec<_>, _>>();
        Ok(all?.concat())
    };
    let want = embed(whole)?;
    let none = &order[..0];
    let mut points = Vec::new();
    for gone in std::iter::once(none).chain(order.chunks(step)) {
        for head in gone {
            less.layers_mut()[head.layer].prune(&[head.head])?;
        }
        let got = embed(&less)?;
        let near: Vec<f64> = cosines(&want, &got, whole.hidden()).collect();
        let time = time(whole, &less, timed)?;
        let layers = || less.layers().iter().map(|layer| layer.attention.layer());
        let shape = CostShape { batch: 1, queries: longest, keys: longest, new_keys: longest };
        let removed = points.last().map_or(0, |last: &Pruned| last.removed) + gone.len();
        points.push(Pruned {
            removed,
            heads: gone.iter().map(|head| [head.layer, head.head]).collect(),
            cosine: near.iter().sum::<f64>() / near.len() as f64,
            worst_cosine: near.iter().copied().fold(f64::INFINITY, f64::min),
            time: time.share,
            attention_time: time.attention_share,
            milliseconds: time.milliseconds,
            attention_parameters: layers().map(|layer| layer.parameters()).sum(),
            attention_bytes: layers().map(|layer| layer.memory(shape).weights).sum(),
            workspace_bytes: layers().map(|layer| layer.memory(shape).workspace).max().unwrap_or(0),
        });
        bar.inc(1);
    }
    Ok(points)
}

struct Time {
    share: f64,
    attention_share: f64,
    milliseconds: f64,
}

/// Both models in turn; medians.
fn time(whole: &Encoder<'_>, less: &Encoder<'_>, batches: &[Batch]) -> Result<Time, Error> {
    let mut memory = Memory::default();
    let (mut shares, mut attention, mut milliseconds) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (all, some) = (seconds(whole, batches, &mut memory)?, seconds(less, batches, &mut memory)?);
        shares.push(some[0] / all[0]);
        attention.push(some[1] / all[1]);
        milliseconds.push(some[0] * 1e3);
    }
    let [share, attention_share, milliseconds] = [shares, attention, milliseconds].map(median);
    Ok(Time { share, attention_share, milliseconds })
}

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_by(f64::total_cmp);
    x[x.len() / 2]
}

/// Of the layers together, and of their attention alone.
fn seconds(encoder: &Encoder<'_>, batches: &[Batch], memory: &mut Memory) -> Result<[f64; 2], Error> {
    let (mut all, mut attention) = (0.0, 0.0);
    for batch in batches {
        let mut x = Vec::new();
        encoder.embed(batch, &mut x)?;
        for layer in encoder.layers() {
            let start = Instant::now();
            layer.attend(&x, batch, &Attention::new(), memory)?;
            attention += start.elapsed().as_secs_f64();
            layer.feed(&mut x, batch, memory)?;
            all += start.elapsed().as_secs_f64();
        }
    }
    Ok([all, attention])
}
