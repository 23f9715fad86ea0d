//! Runs the encoder on the sentences, batch by batch, and looks at its heads: their statistics, how alike
//! they are, what an embedding loses without each.

use headwise::importance::Importance;
use headwise::similarity::{HeadMatrix, JensenShannon, OutputCosine, cluster};
use headwise::{Attention, Error, HeadStatistics, Stage, StatisticsOptions, Tokens, ViewMut};
use indicatif::ProgressBar;

use super::label::{Chance, Figures, labels};
use super::report::{Head, Report, Similarity};
use super::{Choice, HeadsError};
use crate::embed::batches;
use crate::encoder::{Batch, Encoder, Memory};
use crate::text::Sentence;

/// Tokens that importance and pruning are measured on, about: they take as many passes as there are heads.
const MEASURED: usize = 2048;

/// What is summed over the batches, of each layer.
struct Sums {
    statistics: Vec<HeadStatistics>,
    distances: JensenShannon,
    cosines: OutputCosine,
}

/// All but the pruning and the names.
pub(super) fn report(
    encoder: &Encoder<'_>,
    sentences: &[Sentence],
    bar: &ProgressBar,
) -> Result<Report, HeadsError> {
    let measured = measured(sentences);
    let steps = sentences.len() + measured * heads(encoder);
    bar.set_length(steps as u64);
    bar.set_message("what heads look at");
    let (mut layers, mut memory) = (Vec::new(), Memory::default());
    for (batch, some) in in_batches(sentences) {
        let mut x = Vec::new();
        encoder.embed(&batch, &mut x)?;
        for (index, layer) in encoder.layers().iter().enumerate() {
            layer.attend(&x, &batch, &Attention::new(), &mut memory)?;
            let sums = look(encoder, index, &x, &batch, some, &memory)?;
            layer.feed(&mut x, &batch, &mut memory)?;
            if !x.iter().all(|x| x.is_finite()) {
                return Err(HeadsError::NotFinite(index));
            }
            match layers.get_mut(index) {
                None => layers.push(sums),
                Some(all) => add(all, &sums)?,
            }
        }
        bar.inc(some.len() as u64);
    }
    bar.set_message("importance");
    let importance = importance(encoder, &sentences[..measured], bar)?;

    let figures: Vec<Figures> = layers.iter().flat_map(|sums| &sums.statistics).map(Figures::from).collect();
    let chance = chance(sentences);
    let places = encoder
        .layers()
        .iter()
        .enumerate()
        .flat_map(|(layer, of)| (0..of.attention.layer().config().heads).map(move |head| (layer, head)));
    let all = places.zip(&figures).zip(importance).zip(labels(&figures, &chance));
    let heads = all.map(|((((layer, head), &figures), importance), labels)| Head {
        layer,
        head,
        figures,
        importance,
        labels,
    });
    Ok(Report {
        model: String::new(),
        text: String::new(),
        sentences: sentences.len(),
        tokens: sentences.iter().map(|sentence| sentence.ids.len()).sum(),
        measured_sentences: measured,
        chance,
        heads: heads.collect(),
        similarity: layers.iter().enumerate().map(similarity).collect(),
        pruning: Vec::new(),
    })
}

/// The sentences that importance and pruning are measured on: the first of them, one at least.
pub(super) fn measured(sentences: &[Sentence]) -> usize {
    let mut tokens = 0;
    let fits = |sentence: &&Sentence| {
        tokens += sentence.ids.len();
        tokens <= MEASURED
    };
    sentences.iter().take_while(fits).count().max(1)
}

/// The sentences in batches.
pub(super) fn in_batches(sentences: &[Sentence]) -> Vec<(Batch, &[Sentence])> {
    let ids: Vec<Vec<u32>> = sentences.iter().map(|sentence| sentence.ids.clone()).collect();
    let batch = |some: std::ops::Range<usize>| {
        (Batch::new(ids[some.clone()].iter().map(Vec::as_slice)), &sentences[some])
    };
    batches(&ids).map(batch).collect()
}

/// The heads of all layers.
fn heads(encoder: &Encoder<'_>) -> usize {
    encoder.layers().iter().map(|layer| layer.attention.layer().config().heads).sum()
}

/// What the attention of a layer has just done.
fn look(
    encoder: &Encoder<'_>,
    index: usize,
    x: &[f32],
    batch: &Batch,
    some: &[Sentence],
    memory: &Memory,
) -> Result<Sums, Error> {
    let layer = encoder.layers()[index].attention.layer();
    let (config, tokens) = (layer.config(), Tokens::ragged(x, batch.starts())?);
    let [q, k, v] = layer.projected(tokens, tokens, memory.workspace())?;
    let longest = some.iter().map(|sentence| sentence.ids.len()).max().unwrap_or(0);
    let separators: Vec<bool> = some
        .iter()
        .flat_map(|sentence| (0..longest).map(|at| at > 0 && sentence.special.get(at) == Some(&true)))
        .collect();
    let attention = layer.attention(&Attention::new());
    let mut out = vec![0.0; batch.rows() * config.heads * config.d_v];
    let to = ViewMut::blhd(&mut out, [1, batch.rows(), config.heads, config.d_v])?.packed(batch.starts())?;
    let options = StatisticsOptions::new().special(&separators);
    Ok(Sums {
        statistics: attention.run_with_statistics(q, k, v, to, &options)?.heads(),
        distances: JensenShannon::new(&attention, q, k)?,
        cosines: OutputCosine::new(layer.head_outputs(tokens, memory.workspace())?),
    })
}

fn add(all: &mut Sums, more: &Sums) -> Result<(), Error> {
    all.statistics.iter_mut().zip(&more.statistics).for_each(|(all, more)| all.add(more));
    all.distances.add(&more.distances)?;
    all.cosines.add(&more.cosines)
}

/// What equal weights would give: each row of a sentence of `n` tokens puts `1/n` on each.
fn chance(sentences: &[Sentence]) -> Chance {
    let (mut rows, mut neighbours, mut separators) = (0.0, 0.0, 0.0);
    for sentence in sentences {
        let n = sentence.ids.len() as f64;
        rows += n;
        neighbours += (n - 1.0) / n; // rows that have a neighbour on that side, 1/n each
        separators += sentence.special.iter().skip(1).filter(|&&special| special).count() as f64;
    }
    let with_neighbour = rows - sentences.len() as f64;
    Chance {
        one: sentences.len() as f64 / rows,
        neighbour: if with_neighbour > 0.0 { neighbours / with_neighbour } else { 0.0 },
        separators: separators / rows,
    }
}

fn similarity((layer, sums): (usize, &Sums)) -> Similarity {
    let distances = sums.distances.distances();
    let square =
        |matrix: &HeadMatrix| matrix.values().chunks(matrix.heads().max(1)).map(<[f64]>::to_vec).collect();
    Similarity {
        layer,
        order: cluster(&distances).order,
        distances: square(&distances),
        cosines: square(&sums.cosines.cosines()),
    }
}

/// What the embeddings lose without each head, layer by layer: `1 - cosine`, the mean over the sentences.
/// Only the layers from the head's own on are computed again.
fn importance(
    encoder: &Encoder<'_>,
    sentences: &[Sentence],
    bar: &ProgressBar,
) -> Result<Vec<f64>, HeadsError> {
    let (mut scores, mut memory) = (vec![0.0; heads(encoder)], Memory::default());
    for (batch, some) in in_batches(sentences) {
        let mut x = Vec::new();
        encoder.embed(&batch, &mut x)?;
        let whole = encoder.forward(&batch, &mut memory)?;
        let mut scores = scores.iter_mut();
        for (index, layer) in encoder.layers().iter().enumerate() {
            let count = layer.attention.layer().config().heads;
            let lost = Importance::leave_one_out(count, |gates| {
                let mut x = x.clone();
                for (at, layer) in encoder.layers().iter().enumerate().skip(index) {
                    let attention = Attention::new();
                    let attention = if at == index { attention.gates(gates) } else { attention };
                    layer.attend(&x, &batch, &attention, &mut memory)?;
                    layer.feed(&mut x, &batch, &mut memory)?;
                }
                if gates.contains(&0.0) {
                    bar.inc(some.len() as u64);
                }
                let without = encoder.pool(&x, &batch)?;
                Ok::<f64, Error>(cosines(&whole, &without, encoder.hidden()).map(|cosine| 1.0 - cosine).sum())
            })?;
            lost.scores().iter().zip(&mut scores).for_each(|(lost, score)| *score += lost);
            layer.forward(&mut x, &batch, &mut memory)?;
        }
    }
    Ok(scores.iter().map(|score| score / sentences.len() as f64).collect())
}

/// The cosine of each row with its like: rows have length 1.
pub(super) fn cosines(a: &[f32], b: &[f32], width: usize) -> impl Iterator<Item = f64> {
    let cosine = |(a, b): (&[f32], &[f32])| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
    a.chunks_exact(width).zip(b.chunks_exact(width)).map(cosine)
}

/// The attention maps of a sentence.
pub(super) struct Maps<'s> {
    /// From 0.
    pub number: usize,
    pub tokens: &'s [String],
    /// `[layers, heads, tokens, tokens]`.
    pub weights: Vec<f32>,
}

/// Weights of all maps together: what a page can hold.
const WEIGHTS: usize = 1 << 20;
/// Sentences that a page lets choose from.
const SENTENCES: usize = 12;

/// The maps of the chosen sentence and of those behind it, as far as they fit.
pub(super) fn maps<'s>(
    encoder: &Encoder<'_>,
    sentences: &'s [Sentence],
    choice: Choice,
) -> Result<Vec<Maps<'s>>, HeadsError> {
    let (mut memory, mut all, mut count) = (Memory::default(), Vec::new(), 0);
    for (number, sentence) in sentences.iter().enumerate().skip(choice.sentence).take(SENTENCES) {
        let n = sentence.ids.len();
        count += heads(encoder) * n * n;
        if count > WEIGHTS && number > choice.sentence {
            break;
        }
        let batch = Batch::new([&sentence.ids[..]]);
        let (mut x, mut weights) = (Vec::new(), Vec::new());
        encoder.embed(&batch, &mut x)?;
        for layer in encoder.layers() {
            layer.attend(&x, &batch, &Attention::new(), &mut memory)?;
            let (of, tokens) = (layer.attention.layer(), Tokens::ragged(&x, batch.starts())?);
            let [q, k, _] = of.projected(tokens, tokens, memory.workspace())?;
            let heads = of.config().heads;
            let mut map = vec![0.0; heads * n * n];
            of.attention(&Attention::new()).scores(Stage::Weights, q, k, 0..heads, 0..n, &mut map)?;
            weights.append(&mut map);
            layer.feed(&mut x, &batch, &mut memory)?;
        }
        all.push(Maps { number, tokens: &sentence.tokens, weights });
    }
    Ok(all)
}
