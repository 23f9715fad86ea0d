//! A text as the sentences that a model is given: Unicode's sentences (UAX #29), lines of a paragraph joined,
//! those with more tokens than the model has positions cut between words.

use tokenizers::{Encoding, Tokenizer};
use unicode_segmentation::UnicodeSegmentation;

/// What a model reads at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sentence {
    /// The text of its tokens.
    pub tokens: Vec<String>,
    /// Their ids.
    pub ids: Vec<u32>,
    /// Which tokens the tokenizer has added.
    pub special: Vec<bool>,
}

/// The sentences of a text, each of at most `positions` tokens. A sentence of nothing but added tokens is
/// left out.
///
/// # Errors
/// What the tokenizer says; or that there is no room for words beside the added tokens.
pub fn sentences(text: &str, tokenizer: &Tokenizer, positions: usize) -> Result<Vec<Sentence>, String> {
    let mut all = Vec::new();
    for paragraph in paragraphs(text) {
        for sentence in paragraph.unicode_sentences() {
            let encoding = tokenizer.encode(sentence.trim(), true).map_err(|error| error.to_string())?;
            cut(&encoding, positions, &mut all)?;
        }
    }
    Ok(all)
}

/// What lies between empty lines, in one line each.
fn paragraphs(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let parts = lines.split(|line| line.is_empty()).filter(|part| !part.is_empty());
    parts.map(|lines| lines.join(" ")).collect()
}

/// Appends an encoded sentence in as many parts as it takes, each with the added tokens of the whole.
fn cut(encoding: &Encoding, positions: usize, all: &mut Vec<Sentence>) -> Result<(), String> {
    let added = |&at: &usize| encoding.get_special_tokens_mask()[at] == 1;
    let places: Vec<usize> = (0..encoding.len()).collect();
    let before = places.iter().take_while(|&at| added(at)).count();
    let behind = places[before..].iter().rev().take_while(|&at| added(at)).count();
    let (first, last) = (&places[..before], &places[places.len() - behind..]);
    let mut rest = &places[before..places.len() - behind];
    let room = positions.saturating_sub(before + behind);
    if room == 0 {
        return Err(format!("{positions} positions leave no room between the tokens that are added"));
    }
    let words = encoding.get_word_ids();
    while !rest.is_empty() {
        let begins_word = |&n: &usize| n == rest.len() || words[rest[n]] != words[rest[n - 1]];
        let n = (1..=room.min(rest.len())).rev().find(begins_word).unwrap_or(room.min(rest.len()));
        let part: Vec<usize> = [first, &rest[..n], last].concat();
        all.push(Sentence {
            tokens: part.iter().map(|&at| encoding.get_tokens()[at].clone()).collect(),
            ids: part.iter().map(|&at| encoding.get_ids()[at]).collect(),
            special: part.iter().map(added).collect(),
        });
        rest = &rest[n..];
    }
    Ok(())
}
