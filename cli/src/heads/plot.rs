//! The pictures: entropy by layer, a number of every head, similar heads side by side, an attention map, what
//! is left without heads.

use super::Choice;
use super::measure::Maps;
use super::report::{Head, Pruned, Report, Similarity, names};
use super::svg::{Anchor, Svg};

/// Width and height of a plot with axes, and what its frame leaves at left, right, top and bottom.
const SIZE: [f64; 2] = [440.0, 270.0];
const MARGINS: [f64; 4] = [54.0, 12.0, 14.0, 38.0];

/// Every picture, with the name of its file.
pub(super) fn all(report: &Report, maps: &[Maps<'_>], choice: Choice) -> Vec<(String, Svg)> {
    let mut all = vec![("entropy".to_string(), entropy(report))];
    all.extend(grids(report).into_iter().map(|(name, svg)| (name.to_string(), svg)));
    all.extend(
        report.similarity.iter().map(|layer| (format!("similarity-{}", layer.layer), similarity(layer))),
    );
    all.extend(maps.first().map(|maps| ("map".to_string(), map(report, maps, choice))));
    all.push(("pruning-cosine".to_string(), cosine(&report.pruning)));
    all.push(("pruning-cost".to_string(), cost(&report.pruning)));
    all
}

/// A plot with axes.
struct Axes {
    svg: Svg,
    /// The largest number on each axis; both begin at 0.
    ends: [f64; 2],
}

impl Axes {
    fn new(title: &str, [x, y]: [&str; 2], ends: [f64; 2], x_ticks: &[usize]) -> Self {
        let [left, right, top, bottom] = MARGINS;
        let (mut svg, [width, height]) = (Svg::new(SIZE[0], SIZE[1], title), SIZE);
        svg.text("soft", [(left + width - right) / 2.0, height - 4.0], Anchor::Middle, x);
        svg.upwards("soft", [12.0, (top + height - bottom) / 2.0], Anchor::Middle, y);
        let mut axes = Self { svg, ends };
        let step = 0.25 * (ends[1] / 2.0).ceil();
        for value in (0..).map(|n| f64::from(n) * step).take_while(|&value| value <= ends[1]) {
            let ([x0, y], [x1, _]) = (axes.at([0.0, value]), axes.at([ends[0], value]));
            axes.svg.line("line", &[[x0, y], [x1, y]]);
            axes.svg.text("soft", [left - 6.0, y + 4.0], Anchor::End, format_args!("{value:.2}"));
        }
        for &tick in x_ticks {
            let [x, y] = axes.at([tick as f64, 0.0]);
            axes.svg.text("soft", [x, y + 16.0], Anchor::Middle, tick);
        }
        axes
    }

    fn at(&self, [x, y]: [f64; 2]) -> [f64; 2] {
        let [left, right, top, bottom] = MARGINS;
        let [width, height] = [SIZE[0] - left - right, SIZE[1] - top - bottom];
        [left + x / self.ends[0] * width, top + (1.0 - (y / self.ends[1]).clamp(0.0, 1.0)) * height]
    }

    fn line(&mut self, class: &str, points: impl Iterator<Item = [f64; 2]>) {
        let points: Vec<[f64; 2]> = points.map(|point| self.at(point)).collect();
        self.svg.line(class, &points);
    }
}

/// At most about eight whole numbers up to `last`.
fn ticks(last: usize) -> Vec<usize> {
    (0..=last).step_by(last.div_ceil(8).max(1)).collect()
}

/// A dot for each head, a line through the means of the layers.
pub(super) fn entropy(report: &Report) -> Svg {
    let layers = report.layers();
    let place = |layer: usize| layer as f64 + 0.5;
    let names = ["layer (a dot is a head, the line their mean)", "entropy, share of the largest"];
    let mut axes = Axes::new("Entropy of the heads by layer", names, [layers as f64, 1.0], &[]);
    let mut means = Vec::new();
    for layer in 0..layers {
        let heads: Vec<&Head> = report.heads.iter().filter(|head| head.layer == layer).collect();
        let sum: f64 = heads.iter().map(|head| head.figures.normalised_entropy).sum();
        means.push([place(layer), sum / heads.len() as f64]);
        let [x, y] = axes.at([place(layer), 0.0]);
        axes.svg.text("soft", [x, y + 16.0], Anchor::Middle, layer);
        for head in heads {
            // Heads stand side by side, so that equal ones do not hide each other.
            let aside = (head.head as f64 + 0.5) / report.width() as f64 - 0.5;
            let at = axes.at([place(layer) + 0.7 * aside, head.figures.normalised_entropy]);
            axes.svg.dot("a", at, tells(head, head.figures.normalised_entropy));
        }
    }
    axes.line("ls bs", means.into_iter());
    axes.svg
}

fn tells(head: &Head, value: f64) -> String {
    let labels = names(&head.labels);
    let gap = if labels.is_empty() { "" } else { ", " };
    format!("layer {} head {}: {value:.3}{gap}{labels}", head.layer, head.head)
}

/// A number of every head, layers by heads.
fn grid(report: &Report, title: &str, largest: f64, value: impl Fn(&Head) -> f64) -> Svg {
    let (layers, heads) = (report.layers(), report.width());
    let (left, top) = (34.0, 20.0);
    let cell = (300.0 / heads as f64).min(25.0);
    let (width, height) = (left + cell * heads as f64, cell * layers as f64);
    let mut svg = Svg::new(width + 4.0, top + height + 22.0, title);
    for head in 0..heads {
        let x = left + (head as f64 + 0.5) * cell;
        if heads <= 16 || head % 4 == 0 {
            svg.text("soft", [x, top - 6.0], Anchor::Middle, head);
        }
    }
    for layer in 0..layers {
        if layers <= 16 || layer % 4 == 0 {
            let y = top + (layer as f64 + 0.5) * cell + 4.0;
            svg.text("soft", [left - 6.0, y], Anchor::End, layer);
        }
    }
    svg.upwards("soft", [10.0, top + height / 2.0], Anchor::Middle, "layer");
    svg.text("soft", [left + cell * heads as f64 / 2.0, top + height + 15.0], Anchor::Middle, "head");
    for head in &report.heads {
        let at = [left + head.head as f64 * cell, top + head.layer as f64 * cell];
        let value = value(head);
        let share = if largest > 0.0 { value / largest } else { 0.0 };
        svg.cell(at, cell, share, tells(head, value));
    }
    svg.frame("line", [left, top], [cell * heads as f64, height]);
    svg
}

/// Weights on named keys, and the importance, of every head.
pub(super) fn grids(report: &Report) -> Vec<(&'static str, Svg)> {
    let most = report.heads.iter().map(|head| head.importance).fold(0.0, f64::max);
    vec![
        ("importance", grid(report, "Importance of every head", most, |head| head.importance)),
        ("previous", grid(report, "Weight on the token before", 1.0, |head| head.figures.previous)),
        ("next", grid(report, "Weight on the token after", 1.0, |head| head.figures.next)),
        ("separators", grid(report, "Weight on separators", 1.0, |head| head.figures.separators)),
        ("first", grid(report, "Weight on the first token", 1.0, |head| head.figures.first)),
        ("itself", grid(report, "Weight on the token itself", 1.0, |head| head.figures.diagonal)),
    ]
}

/// The heads of a layer, like beside like: strong where two look at the same.
pub(super) fn similarity(layer: &Similarity) -> Svg {
    let (heads, left, top) = (layer.order.len(), 22.0, 18.0);
    let cell = 192.0 / heads.max(1) as f64;
    let title = format!("Similarity of the heads of layer {}", layer.layer);
    let mut svg = Svg::new(left + 196.0, top + 196.0, &title);
    for (at, a) in layer.order.iter().enumerate() {
        let place = (at as f64 + 0.5) * cell;
        if heads <= 16 || at % 4 == 0 {
            svg.text("soft", [left + place, top - 5.0], Anchor::Middle, a);
            svg.text("soft", [left - 5.0, top + place + 4.0], Anchor::End, a);
        }
        for (beside, b) in layer.order.iter().enumerate() {
            let distance = layer.distances[*a][*b];
            let corner = [left + beside as f64 * cell, top + at as f64 * cell];
            svg.cell(corner, cell, 1.0 - distance, format_args!("heads {a} and {b}: distance {distance:.3}"));
        }
    }
    svg.frame("line", [left, top], [192.0, 192.0]);
    svg
}

/// The attention map of a head: a row is a query.
pub(super) fn map(report: &Report, maps: &Maps<'_>, choice: Choice) -> Svg {
    let (n, cell, margin) = (maps.tokens.len(), 15.0, 92.0);
    let Choice { layer, head, .. } = choice;
    let first = (layer * report.width() + head) * n * n;
    let size = margin + n as f64 * cell + 4.0;
    let mut svg = Svg::new(size, size, &format!("Attention map of layer {layer} head {head}"));
    for (i, token) in maps.tokens.iter().enumerate() {
        let place = margin + (i as f64 + 0.5) * cell + 4.0;
        svg.text("", [margin - 6.0, place], Anchor::End, token);
        svg.upwards("", [place, margin - 6.0], Anchor::Start, token);
        for (j, &weight) in maps.weights[first + i * n..][..n].iter().enumerate() {
            if weight >= 0.005 {
                let at = [margin + j as f64 * cell, margin + i as f64 * cell];
                let tells = format_args!("{token} to {}: {weight:.2}", maps.tokens[j]);
                svg.cell(at, cell, f64::from(weight), tells);
            }
        }
    }
    svg.frame("line", [margin; 2], [n as f64 * cell; 2]);
    svg
}

/// How near the embeddings stay.
pub(super) fn cosine(pruning: &[Pruned]) -> Svg {
    let last = pruning.last().map_or(0, |last| last.removed);
    let names = ["heads removed", "cosine with the whole model"];
    let ends = [last.max(1) as f64, 1.0];
    let mut axes = Axes::new("Embeddings without the least important heads", names, ends, &ticks(last));
    axes.line("ls as", pruning.iter().map(|pruned| [pruned.removed as f64, pruned.cosine]));
    axes.line("ls bs", pruning.iter().map(|pruned| [pruned.removed as f64, pruned.worst_cosine]));
    dots(&mut axes, "a", pruning, |pruned| pruned.cosine);
    legend(&mut axes.svg, &["mean over the sentences", "worst sentence"]);
    axes.svg
}

/// What the model costs.
pub(super) fn cost(pruning: &[Pruned]) -> Svg {
    let last = pruning.last().map_or(0, |last| last.removed);
    let bytes = pruning.first().map_or(1, |first| first.attention_bytes.max(1)) as f64;
    let memory = |pruned: &Pruned| pruned.attention_bytes as f64 / bytes;
    let most = pruning.iter().map(|pruned| pruned.time.max(pruned.attention_time)).fold(1.0, f64::max);
    let names = ["heads removed", "share of the whole model"];
    let ends = [last.max(1) as f64, (most * 4.0).ceil() / 4.0];
    let mut axes = Axes::new("Time and memory without heads", names, ends, &ticks(last));
    let line = |axes: &mut Axes, class: &str, of: &dyn Fn(&Pruned) -> f64| {
        axes.line(class, pruning.iter().map(|pruned| [pruned.removed as f64, of(pruned)]));
    };
    line(&mut axes, "ls as", &|pruned| pruned.time);
    line(&mut axes, "ls bs", &|pruned| pruned.attention_time);
    line(&mut axes, "ls cs", &memory);
    dots(&mut axes, "a", pruning, |pruned| pruned.time);
    legend(&mut axes.svg, &["time of the model", "time of attention", "memory of attention weights"]);
    axes.svg
}

fn dots(axes: &mut Axes, class: &str, pruning: &[Pruned], of: impl Fn(&Pruned) -> f64) {
    for pruned in pruning {
        let at = axes.at([pruned.removed as f64, of(pruned)]);
        axes.svg.dot(class, at, format_args!("{} heads removed: {:.3}", pruned.removed, of(pruned)));
    }
}

/// What each line is, at the lower left.
fn legend(svg: &mut Svg, lines: &[&str]) {
    let [left, _, _, bottom] = MARGINS;
    for ((at, text), class) in lines.iter().enumerate().zip(["ls as", "ls bs", "ls cs"]) {
        let y = SIZE[1] - bottom - 12.0 - 16.0 * (lines.len() - 1 - at) as f64;
        svg.line(class, &[[left + 8.0, y - 4.0], [left + 34.0, y - 4.0]]);
        svg.text("", [left + 40.0, y], Anchor::Start, text);
    }
}
