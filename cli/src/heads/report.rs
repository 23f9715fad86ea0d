//! What was found, as a table, JSON and CSV.

use std::io::{self, Write};

use serde::Serialize;

use super::label::{Chance, Figures, Label};

/// All that was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The model's directory.
    pub model: String,
    /// The text's file.
    pub text: String,
    /// Sentences.
    pub sentences: usize,
    /// Their tokens.
    pub tokens: usize,
    /// The first sentences, which importance and pruning were measured on.
    pub measured_sentences: usize,
    /// What equal weights would give.
    pub chance: Chance,
    /// Every head, layer by layer.
    pub heads: Vec<Head>,
    /// How alike the heads of each layer are.
    pub similarity: Vec<Similarity>,
    /// What is left without the heads, the least important ones removed first.
    pub pruning: Vec<Pruned>,
}

/// A head.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Head {
    /// From 0.
    pub layer: usize,
    /// From 0.
    pub head: usize,
    /// What it does.
    #[serde(flatten)]
    pub figures: Figures,
    /// `1 - cosine` between the embeddings with and without it, the mean over the measured sentences.
    pub importance: f64,
    /// What the figures say.
    pub labels: Vec<Label>,
}

/// The heads of a layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Similarity {
    /// From 0.
    pub layer: usize,
    /// The heads, like beside like.
    pub order: Vec<usize>,
    /// Mean Jensen-Shannon distances between the rows of each two heads, in their own order; 0: the same.
    pub distances: Vec<Vec<f64>>,
    /// Cosines between the outputs of each two heads, in their own order.
    pub cosines: Vec<Vec<f64>>,
}

/// The model without some heads.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pruned {
    /// Heads that are gone.
    pub removed: usize,
    /// Those that went since the line before: layer and head.
    pub heads: Vec<[usize; 2]>,
    /// Between its embeddings and those of the whole model: the mean over the measured sentences.
    pub cosine: f64,
    /// The smallest of them.
    pub worst_cosine: f64,
    /// Time of the model, as a share of that of the whole one: the median of interleaved rounds.
    pub time: f64,
    /// The same of the attention layers alone.
    pub attention_time: f64,
    /// Milliseconds of the model for the timed sentences: the median.
    pub milliseconds: f64,
    /// Numbers in the attention layers.
    pub attention_parameters: usize,
    /// Bytes of their packed weights.
    pub attention_bytes: usize,
    /// Bytes that one layer's call needs between its projections, for the longest sentence: the largest one.
    pub workspace_bytes: usize,
}

impl Report {
    /// Heads of a layer.
    pub fn width(&self) -> usize {
        self.heads.iter().map(|head| head.head + 1).max().unwrap_or(0)
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.heads.last().map_or(0, |head| head.layer + 1)
    }

    pub(super) fn json(&self, out: &mut impl Write) -> io::Result<()> {
        serde_json::to_writer(&mut *out, self).map_err(io::Error::from)?;
        writeln!(out)
    }

    pub(super) fn csv(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(
            out,
            "layer,head,entropy,normalised_entropy,first,separators,previous,next,diagonal,distance,\
             absolute_distance,largest,norm,importance,labels"
        )?;
        for head in &self.heads {
            write!(out, "{},{}", head.layer, head.head)?;
            let Figures { entropy, normalised_entropy, first, separators, previous, next, .. } = head.figures;
            let Figures { diagonal, distance, absolute_distance, largest, norm, .. } = head.figures;
            for x in [entropy, normalised_entropy, first, separators, previous, next, diagonal, distance] {
                write!(out, ",{x}")?;
            }
            for x in [absolute_distance, largest, norm, head.importance] {
                write!(out, ",{x}")?;
            }
            writeln!(out, ",{}", names(&head.labels))?;
        }
        Ok(())
    }

    pub(super) fn table(&self, out: &mut impl Write) -> io::Result<()> {
        let Self { model, text, sentences, tokens, measured_sentences, .. } = self;
        writeln!(out, "{} on {}: {sentences} sentences, {tokens} tokens", plain(model), plain(text))?;
        let Chance { one, neighbour, separators } = self.chance;
        writeln!(out, "equal weights: first {one:.3}, neighbour {neighbour:.3}, separators {separators:.3}")?;
        writeln!(
            out,
            "\nlayer head entropy  norm. first  sep. prev.  next  self  dist. |dist.| largest import. labels"
        )?;
        for head in &self.heads {
            let Figures { entropy, normalised_entropy, first, separators, previous, next, .. } = head.figures;
            let Figures { diagonal, distance, absolute_distance, largest, .. } = head.figures;
            let line = format!(
                "{:>5} {:>4} {entropy:>7.3} {normalised_entropy:>6.3} {first:>5.2} {separators:>5.2} \
                 {previous:>5.2} {next:>5.2} {diagonal:>5.2} {distance:>6.2} {absolute_distance:>7.2} \
                 {largest:>7.2} {:>7.4} {}",
                head.layer,
                head.head,
                head.importance,
                names(&head.labels)
            );
            writeln!(out, "{}", line.trim_end())?;
        }
        writeln!(
            out,
            "\nheads removed, the least important first ({measured_sentences} sentences; time and memory of \
             the whole model: 1)\n\nremoved cosine  worst  time attention parameters"
        )?;
        let whole = self.pruning.first().map_or(1.0, |first| first.attention_parameters as f64);
        for pruned in &self.pruning {
            writeln!(
                out,
                "{:>7} {:>6.3} {:>6.3} {:>5.2} {:>9.2} {:>10.2}",
                pruned.removed,
                pruned.cosine,
                pruned.worst_cosine,
                pruned.time,
                pruned.attention_time,
                pruned.attention_parameters as f64 / whole
            )?;
        }
        Ok(())
    }
}

pub(super) fn names(labels: &[Label]) -> String {
    labels.iter().map(|label| label.name()).collect::<Vec<_>>().join(" ")
}

/// Names of files may hold anything.
fn plain(name: &str) -> String {
    name.replace(char::is_control, " ")
}
