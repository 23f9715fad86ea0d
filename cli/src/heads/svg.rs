//! A picture as SVG text. On a page its colours are the page's, light or dark; a file has those of paper.

use std::fmt::{Display, Write};

/// Classes that pictures use. `page.html` gives the variables other values in the dark.
const STYLE: &str = "text{font:11px system-ui,sans-serif;fill:var(--ink)}.soft{fill:var(--soft)}\
    .line{stroke:var(--grid);fill:none}.a{fill:var(--a)}.b{fill:var(--b)}.c{fill:var(--c)}\
    .ls{fill:none;stroke-width:2}.as{stroke:var(--a)}.bs{stroke:var(--b);stroke-dasharray:6 3}\
    .cs{stroke:var(--c);stroke-dasharray:2 3}.chosen{fill:none;stroke:var(--ink);stroke-width:1.5}";
/// The values on paper.
const PAPER: [(&str, &str); 6] = [
    ("var(--ink)", "#1d232b"),
    ("var(--soft)", "#5b6673"),
    ("var(--grid)", "#d5dae0"),
    ("var(--a)", "#1f66b0"),
    ("var(--b)", "#b4500f"),
    ("var(--c)", "#2b7a4b"),
];

/// The style of all pictures on a page.
pub(super) fn style() -> &'static str {
    STYLE
}

/// Where a text is held.
#[derive(Debug, Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// A picture.
#[derive(Debug)]
pub(super) struct Svg {
    width: f64,
    height: f64,
    title: String,
    body: String,
}

impl Svg {
    /// An empty one; `title` is read to those who do not see it.
    pub fn new(width: f64, height: f64, title: &str) -> Self {
        Self { width, height, title: escape(title), body: String::new() }
    }

    fn push(&mut self, element: std::fmt::Arguments<'_>) {
        let _ = self.body.write_fmt(element); // a String takes all
        self.body.push('\n');
    }

    /// A cell of a heat map, `value` of 0 to 1 as its strength. What it shows is told on hovering.
    pub fn cell(&mut self, [x, y]: [f64; 2], size: f64, value: f64, tells: impl Display) {
        let (value, tells) = (value.clamp(0.0, 1.0), escape(&tells.to_string()));
        self.push(format_args!(
            "<rect class=\"a\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{size:.1}\" height=\"{size:.1}\" \
             fill-opacity=\"{value:.3}\"><title>{tells}</title></rect>"
        ));
    }

    /// A frame around a place.
    pub fn frame(&mut self, class: &str, [x, y]: [f64; 2], [width, height]: [f64; 2]) {
        self.push(format_args!(
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"/>"
        ));
    }

    /// A dot.
    pub fn dot(&mut self, class: &str, [x, y]: [f64; 2], tells: impl Display) {
        let tells = escape(&tells.to_string());
        self.push(format_args!(
            "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill-opacity=\"0.65\">\
             <title>{tells}</title></circle>"
        ));
    }

    /// A line through points.
    pub fn line(&mut self, class: &str, points: &[[f64; 2]]) {
        let points: Vec<String> = points.iter().map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
        self.push(format_args!("<polyline class=\"{class}\" points=\"{}\"/>", points.join(" ")));
    }

    /// A text.
    pub fn text(&mut self, class: &str, [x, y]: [f64; 2], anchor: Anchor, text: impl Display) {
        let anchor = anchor_name(anchor);
        let text = escape(&text.to_string());
        self.push(format_args!(
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"
        ));
    }

    /// A text that runs upwards.
    pub fn upwards(&mut self, class: &str, [x, y]: [f64; 2], anchor: Anchor, text: impl Display) {
        let anchor = anchor_name(anchor);
        let text = escape(&text.to_string());
        self.push(format_args!(
            "<text class=\"{class}\" transform=\"translate({x:.1} {y:.1}) rotate(-90)\" \
             text-anchor=\"{anchor}\">{text}</text>"
        ));
    }

    /// As part of a page, as wide as there is room.
    pub fn inline(&self) -> String {
        let Self { width, height, title, body } = self;
        format!(
            "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{title}\" \
             style=\"max-width:{width}px\">\n{body}</svg>"
        )
    }

    /// As a file.
    pub fn file(&self) -> String {
        let Self { width, height, title, body } = self;
        let style = PAPER.iter().fold(STYLE.to_string(), |style, (name, value)| style.replace(name, value));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\">\n<title>{title}</title>\n<style>{style}</style>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{body}</svg>\n"
        )
    }
}

fn anchor_name(anchor: Anchor) -> &'static str {
    match anchor {
        Anchor::Start => "start",
        Anchor::Middle => "middle",
        Anchor::End => "end",
    }
}

/// Text as the content of an element or attribute. Control characters, which XML cannot hold, become spaces.
pub(super) fn escape(text: &str) -> String {
    let text = text.replace(char::is_control, " ");
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
