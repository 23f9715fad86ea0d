//! All of it as one page: the pictures, a table, and attention maps to choose from.

use serde_json::json;

use super::Choice;
use super::label::Figures;
use super::measure::Maps;
use super::plot;
use super::report::{Head, Report, names};
use super::svg::{self, escape};

/// The page, with a name in double braces for each part.
const PAGE: &str = include_str!("page.html");

/// Levels of a weight in the page's data: a character each, as `page.html` reads them.
const LEVELS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub(super) fn html(report: &Report, maps: &[Maps<'_>], choice: Choice) -> String {
    let similarity: Vec<String> = report
        .similarity
        .iter()
        .map(|layer| {
            format!("<figure><h3>Layer {}</h3>{}</figure>", layer.layer, plot::similarity(layer).inline())
        })
        .collect();
    let grids: Vec<String> = plot::grids(report)
        .iter()
        .zip(["Importance", "Previous token", "Next token", "Separators", "First token", "The token itself"])
        .map(|((_, picture), title)| format!("<figure><h3>{title}</h3>{}</figure>", picture.inline()))
        .collect();
    let map = maps.first().map_or(String::new(), |maps| plot::map(report, maps, choice).inline());
    let rows: Vec<String> = report.heads.iter().map(row).collect();
    let most = report.heads.iter().map(|head| head.importance).fold(0.0, f64::max);
    let parts = [
        ("model", escape(&report.model)),
        ("text", escape(&report.text)),
        ("sentences", report.sentences.to_string()),
        ("tokens", report.tokens.to_string()),
        ("measured", report.measured_sentences.to_string()),
        ("neighbour", format!("{:.3}", report.chance.neighbour)),
        ("separators", format!("{:.3}", report.chance.separators)),
        ("most", format!("{most:.4}")),
        ("style", svg::style().to_string()),
        ("entropy", plot::entropy(report).inline()),
        ("cosine", plot::cosine(&report.pruning).inline()),
        ("cost", plot::cost(&report.pruning).inline()),
        ("grids", grids.concat()),
        ("similarity", similarity.concat()),
        ("map", map),
        ("rows", rows.concat()),
        ("data", data(report, maps, choice)),
    ];
    // In one pass, so that what is put in is not looked at again.
    let mut html = String::with_capacity(1 << 20);
    let mut pieces = PAGE.split("{{");
    html.push_str(pieces.next().unwrap_or_default());
    for piece in pieces {
        let (name, rest) = piece.split_once("}}").unwrap_or(("", piece));
        html.push_str(parts.iter().find(|part| part.0 == name).map_or("", |part| &part.1));
        html.push_str(rest);
    }
    html
}

fn row(head: &Head) -> String {
    let Figures { normalised_entropy, first, separators, previous, next, diagonal, .. } = head.figures;
    let Figures { entropy, distance, absolute_distance, largest, .. } = head.figures;
    let cells = [
        entropy,
        normalised_entropy,
        first,
        separators,
        previous,
        next,
        diagonal,
        distance,
        absolute_distance,
        largest,
    ];
    let cells: String = cells.iter().map(|x| format!("<td>{x:.2}</td>")).collect();
    format!(
        "<tr><td>{}</td><td>{}</td>{cells}<td>{:.4}</td><td class=\"names\">{}</td></tr>\n",
        head.layer,
        head.head,
        head.importance,
        names(&head.labels)
    )
}

/// The maps as JSON that may stand in a script element.
fn data(report: &Report, maps: &[Maps<'_>], choice: Choice) -> String {
    let level = |&weight: &f32| char::from(LEVELS[(weight.clamp(0.0, 1.0) * 63.0).round() as usize]);
    let sentences: Vec<_> = maps
        .iter()
        .map(|maps| {
            let weights: String = maps.weights.iter().map(level).collect();
            json!({"number": maps.number + 1, "tokens": maps.tokens, "weights": weights})
        })
        .collect();
    let data = json!({
        "layers": report.layers(), "heads": report.width(), "layer": choice.layer, "head": choice.head,
        "sentences": sentences,
    });
    data.to_string().replace('<', "\\u003c")
}
