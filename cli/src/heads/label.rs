//! What a head's figures say of it.
//!
//! A label is a figure with a threshold, no more: more than half of the weight on one kind of key, and at
//! least three times what equal weights would put there. A head is called broad only where others are not: a
//! layer without training is broad all over, and that says nothing of any head.

use headwise::{HeadStatistics, Statistic};
use serde::Serialize;

/// Means over the rows of a text. Weights are shares of 1.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Figures {
    /// In nats.
    pub entropy: f64,
    /// The entropy by that of equal weights.
    pub normalised_entropy: f64,
    /// Weight on the first token.
    pub first: f64,
    /// Weight on the tokens that the tokenizer adds behind the first: separators.
    pub separators: f64,
    /// Weight on the token before.
    pub previous: f64,
    /// Weight on the token after.
    pub next: f64,
    /// Weight on the token itself.
    pub diagonal: f64,
    /// How far back the weight lies, in tokens; negative: ahead.
    pub distance: f64,
    /// How far away the weight lies, in tokens.
    pub absolute_distance: f64,
    /// The largest weight of a row.
    pub largest: f64,
    /// The norm of the head's output.
    pub norm: f64,
}

impl From<&HeadStatistics> for Figures {
    /// Means over no rows are 0.
    fn from(head: &HeadStatistics) -> Self {
        let mean = |statistic| head.mean(statistic).unwrap_or(0.0);
        Self {
            entropy: mean(Statistic::Entropy),
            normalised_entropy: mean(Statistic::NormalisedEntropy),
            first: mean(Statistic::First),
            separators: mean(Statistic::Special),
            previous: mean(Statistic::Previous),
            next: mean(Statistic::Next),
            diagonal: mean(Statistic::Diagonal),
            distance: mean(Statistic::Distance),
            absolute_distance: mean(Statistic::AbsoluteDistance),
            largest: mean(Statistic::Largest),
            norm: mean(Statistic::Norm),
        }
    }
}

/// What equal weights on all tokens of the same sentences would give.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Chance {
    /// On one token: the first, or the one itself.
    pub one: f64,
    /// On a neighbour, where there is one.
    pub neighbour: f64,
    /// On the separators.
    pub separators: f64,
}

/// What a head does with most of its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Label {
    /// It lies on the token before.
    Previous,
    /// It lies on the token after.
    Next,
    /// It lies on the token itself.
    Itself,
    /// It lies on the first token.
    First,
    /// It lies on the separators.
    Separators,
    /// It lies on all tokens nearly alike, unlike that of most other heads.
    Broad,
}

impl Label {
    /// The name in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Previous => "previous",
            Self::Next => "next",
            Self::Itself => "itself",
            Self::First => "first",
            Self::Separators => "separators",
            Self::Broad => "broad",
        }
    }
}

/// More than half: "most".
const MOST: f64 = 0.5;
/// Times chance.
const ABOVE_CHANCE: f64 = 3.0;
/// Of the largest entropy there is.
const BROAD: f64 = 0.85;
/// Above the median head.
const ABOVE_MEDIAN: f64 = 0.15;

/// The labels of each head of a model.
pub fn labels(heads: &[Figures], chance: &Chance) -> Vec<Vec<Label>> {
    let mut entropies: Vec<f64> = heads.iter().map(|head| head.normalised_entropy).collect();
    entropies.sort_by(f64::total_cmp);
    let median = entropies.get(entropies.len() / 2).copied().unwrap_or(1.0);
    let of = |head: &Figures| {
        let on = [
            (Label::Previous, head.previous, chance.neighbour),
            (Label::Next, head.next, chance.neighbour),
            (Label::Itself, head.diagonal, chance.one),
            (Label::First, head.first, chance.one),
            (Label::Separators, head.separators, chance.separators),
        ];
        let heavy = on.into_iter().filter(|&(_, mass, chance)| mass > MOST && mass >= ABOVE_CHANCE * chance);
        let broad = head.normalised_entropy > BROAD && head.normalised_entropy >= median + ABOVE_MEDIAN;
        heavy.map(|(label, ..)| label).chain(broad.then_some(Label::Broad)).collect()
    };
    heads.iter().map(of).collect()
}
