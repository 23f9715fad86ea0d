//! The figures, in f64 from whole attention maps.

use crate::common::reference::Gates;
use crate::*;

const LIMIT: f64 = 1e-5;

#[track_caller]
fn close(got: f64, want: f64, what: &str) {
    assert!((got - want).abs() <= LIMIT, "{what}: {got}, not {want}");
}

/// Of one head over all sentences: sums of rows, and how many there are.
#[derive(Default)]
struct Sums {
    sums: [f64; 10],
    counts: [f64; 10],
}

const NAMES: [&str; 10] = [
    "entropy",
    "normalised_entropy",
    "first",
    "separators",
    "previous",
    "next",
    "diagonal",
    "distance",
    "absolute_distance",
    "largest",
];

impl Sums {
    fn add(&mut self, row: &[f64], i: usize) {
        let n = row.len();
        let entropy: f64 = row.iter().map(|p| -p * p.ln()).sum();
        let at = |j: Option<usize>| j.and_then(|j| row.get(j)).copied();
        let over = |f: &dyn Fn(f64) -> f64| {
            Some(row.iter().enumerate().map(|(j, p)| p * f(i as f64 - j as f64)).sum::<f64>())
        };
        let numbers = [
            Some(entropy),
            Some(entropy / (n as f64).ln()),
            Some(row[0]),
            Some(row[n - 1]), // the only separator
            at(i.checked_sub(1)),
            at(Some(i + 1)),
            Some(row[i]),
            over(&|x| x),
            over(&f64::abs),
            Some(row.iter().copied().fold(0.0, f64::max)),
        ];
        for (x, (sum, count)) in numbers.into_iter().zip(self.sums.iter_mut().zip(&mut self.counts)) {
            *sum += x.unwrap_or(0.0);
            *count += if x.is_some() { 1.0 } else { 0.0 };
        }
    }
}

/// `1 - cosine` of each sentence's embedding with gates, against that without.
fn lost(model: &Model, gates: &Gates) -> Vec<f64> {
    let dot = |a: Vec<f64>, b: Vec<f64>| a.iter().zip(&b).map(|(a, b)| a * b).sum::<f64>();
    IDS.iter()
        .map(|ids| 1.0 - dot(model.embedding(ids, false, gates), model.embedding(ids, false, &WHOLE)))
        .collect()
}

fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}

#[test]
fn figures_are_those_of_the_maps() {
    let model = Model::new();
    let folder = model.write("figures");
    let report = report(&folder, &text(&folder, TEXT));
    assert_eq!((number(&report, "sentences"), number(&report, "tokens")), (4.0, 28.0));
    let maps: Vec<_> = IDS.iter().map(|ids| model.rows(ids, &WHOLE).1).collect();
    let heads = list(&report, "heads");
    assert_eq!(heads.len(), LAYERS * HEADS);
    for (at, head) in heads.iter().enumerate() {
        let (layer, h) = (at / HEADS, at % HEADS);
        assert_eq!((number(head, "layer"), number(head, "head")), (layer as f64, h as f64));
        let mut sums = Sums::default();
        for map in &maps {
            map[layer][h].iter().enumerate().for_each(|(i, row)| sums.add(row, i));
        }
        for (name, (sum, count)) in NAMES.into_iter().zip(sums.sums.into_iter().zip(sums.counts)) {
            close(number(head, name), sum / count, &format!("{name} of layer {layer} head {h}"));
        }
        let mut gates = WHOLE;
        gates[layer][h] = 0.0;
        close(number(head, "importance"), mean(&lost(&model, &gates)), &format!("importance of {layer} {h}"));
    }
    let rows = 28.0;
    let chance = &report["chance"];
    close(number(chance, "one"), 4.0 / rows, "one key");
    close(number(chance, "separators"), 4.0 / rows, "separators");
    let neighbours: f64 = IDS.iter().map(|ids| (ids.len() - 1) as f64 / ids.len() as f64).sum();
    close(number(chance, "neighbour"), neighbours / (rows - 4.0), "a neighbour");
}

/// Jensen-Shannon distances, by the definition.
#[test]
fn similar_heads_are_those_of_the_maps() {
    let model = Model::new();
    let folder = model.write("similarity");
    let report = report(&folder, &text(&folder, TEXT));
    let maps: Vec<_> = IDS.iter().map(|ids| model.rows(ids, &WHOLE).1).collect();
    let divergence = |p: &[f64], m: &[f64]| p.iter().zip(m).map(|(p, m)| p * (p / m).log2()).sum::<f64>();
    for (layer, similarity) in list(&report, "similarity").iter().enumerate() {
        let mut order: Vec<u64> = list(similarity, "order").iter().filter_map(Value::as_u64).collect();
        order.sort_unstable();
        assert_eq!(order, [0, 1, 2]);
        for (a, b) in [(0, 1), (0, 2), (1, 2), (2, 1), (1, 1)] {
            let (mut sum, mut rows) = (0.0, 0.0);
            for map in &maps {
                for (p, q) in map[layer][a].iter().zip(&map[layer][b]) {
                    let m: Vec<f64> = p.iter().zip(q).map(|(p, q)| (p + q) / 2.0).collect();
                    sum += ((divergence(p, &m) + divergence(q, &m)) / 2.0).max(0.0).sqrt();
                    rows += 1.0;
                }
            }
            let got = similarity["distances"][a][b].as_f64().expect("a number");
            close(got, sum / rows, &format!("heads {a} and {b} of layer {layer}"));
        }
    }
}

#[test]
fn the_pruned_model_is_the_one_with_gates() {
    let model = Model::new();
    let folder = model.write("pruning");
    let report = report(&folder, &text(&folder, TEXT));
    let points = list(&report, "pruning");
    assert_eq!(points.len(), 1 + LAYERS * HEADS);
    let mut heads: Vec<&Value> = list(&report, "heads").iter().collect();
    heads.sort_by(|a, b| number(a, "importance").total_cmp(&number(b, "importance")));
    let (mut gates, whole) = (WHOLE, number(&points[0], "attention_parameters"));
    for (removed, point) in points.iter().enumerate() {
        if let Some(head) = removed.checked_sub(1).map(|last| heads[last]) {
            let (layer, head) = (number(head, "layer") as usize, number(head, "head") as usize);
            assert_eq!(point["heads"], serde_json::json!([[layer, head]]));
            gates[layer][head] = 0.0;
        }
        let lost = lost(&model, &gates);
        assert_eq!(number(point, "removed"), removed as f64);
        close(number(point, "cosine"), 1.0 - mean(&lost), &format!("{removed} heads removed"));
        let worst = lost.iter().copied().fold(0.0, f64::max);
        close(number(point, "worst_cosine"), 1.0 - worst, &format!("the worst, {removed} heads removed"));
        let one = HIDDEN / HEADS * (4 * HIDDEN + 3); // weights of four maps, biases of three
        assert_eq!(number(point, "attention_parameters"), whole - (removed * one) as f64);
        for key in ["time", "attention_time", "milliseconds"] {
            assert!(number(point, key) > 0.0);
        }
    }
    let last = &points[points.len() - 1];
    assert_eq!(
        (number(last, "workspace_bytes"), number(last, "attention_parameters")),
        (0.0, (LAYERS * HIDDEN) as f64)
    );
}

/// Sentences with more tokens than there are positions are cut between words; nothing is lost.
#[test]
fn long_sentences_are_cut() {
    let folder = Model::new().write("long");
    let words = format!("{}walked walked {}", "river ".repeat(12), "bank ".repeat(20));
    let report = report(&folder, &text(&folder, words));
    // 36 tokens, 14 a part: 12 and a "walk ##ed", the other one and 12, then 8; each with two added.
    assert_eq!((number(&report, "sentences"), number(&report, "tokens")), (3.0, 42.0));
}
