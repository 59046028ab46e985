//! Drawings as SVG text: only finite coordinates, only escaped text.

use super::text::escape;

/// Where text ends, begins or has its middle.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// A drawing in pixels from the upper left corner.
pub(super) struct Svg {
    pub(super) width: f64,
    pub(super) height: f64,
    body: String,
}

/// Shapes that tell series apart without their colours.
const SHAPES: usize = 5;

impl Svg {
    pub(super) fn new(width: f64, height: f64) -> Self {
        Self { width, height, body: String::new() }
    }

    /// A straight line.
    pub(super) fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        self.path(class, &[from, to], None);
    }

    /// A line through points; hovering over it shows `title`.
    pub(super) fn path(&mut self, class: &str, points: &[(f64, f64)], title: Option<&str>) {
        if points.len() < 2 {
            return;
        }
        let mut path = String::new();
        for &(x, y) in points {
            path +=
                &format!("{}{} {}", if path.is_empty() { "M" } else { "L" }, number(x), number(y));
        }
        let title = title.map(|title| format!("<title>{}</title>", escape(title)));
        self.body +=
            &format!(r#"<path class="{class}" d="{path}">{}</path>"#, title.unwrap_or_default());
    }

    /// A line of text on a baseline.
    pub(super) fn text(&mut self, class: &str, (x, y): (f64, f64), anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let (x, y, text) = (number(x), number(y), escape(text));
        self.body += &format!(
            r#"<text class="{class}" x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>"#
        );
    }

    /// A mark of one of several shapes; hovering over it or near it shows `title`.
    pub(super) fn mark(&mut self, class: &str, shape: usize, at: (f64, f64), title: &str) {
        let (x, y, shape, title) = (number(at.0), number(at.1), outline(shape, at), escape(title));
        self.body += &format!(
            r#"<g class="mark {class}"><title>{title}</title><circle class="near" cx="{x}" cy="{y}" r="9"/>{shape}</g>"#
        );
    }

    /// With what it shows, for those who do not see it.
    pub(super) fn image(&self, class: &str, label: &str) -> String {
        let (width, height) = (number(self.width), number(self.height));
        format!(
            "<svg class=\"{class}\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{}\">{}</svg>\n",
            escape(label),
            self.body
        )
    }
}

/// A line and a mark as legends show them.
pub(super) fn swatch(class: &str, shape: usize) -> String {
    let mark = outline(shape, (11.0, 6.0));
    format!(
        r#"<svg class="swatch {class}" viewBox="0 0 22 12" aria-hidden="true"><path class="curve" d="M1 6L21 6"></path>{mark}</svg>"#
    )
}

fn outline(shape: usize, (x, y): (f64, f64)) -> String {
    let corners: &[(f64, f64)] = match shape % SHAPES {
        0 => {
            return format!(r#"<circle class="dot" cx="{}" cy="{}" r="4"/>"#, number(x), number(y));
        }
        1 => &[(-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)],
        2 => &[(0.0, -4.5), (4.5, 3.5), (-4.5, 3.5)],
        3 => &[(0.0, -5.2), (5.2, 0.0), (0.0, 5.2), (-5.2, 0.0)],
        _ => &[(-4.5, -3.5), (4.5, -3.5), (0.0, 4.5)],
    };
    let points: Vec<String> =
        corners.iter().map(|(dx, dy)| format!("{},{}", number(x + dx), number(y + dy))).collect();
    format!(r#"<polygon class="dot" points="{}"/>"#, points.join(" "))
}

/// A tenth of a pixel is as exact as anyone sees.
fn number(value: f64) -> String {
    assert!(value.is_finite(), "a coordinate of {value}");
    let text = format!("{value:.1}");
    match text.strip_suffix(".0").unwrap_or(&text) {
        "-0" => "0".into(),
        short => short.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_are_short() {
        let shown = [0.0, -0.01, 12.0, 3.25].map(number);
        assert_eq!(shown, ["0", "0", "12", "3.2"]);
    }

    #[test]
    fn titles_are_escaped() {
        let mut svg = Svg::new(20.0, 20.0);
        svg.mark("d1", 0, (10.0, 10.0), "</title><script>");
        svg.text("label", (0.0, 0.0), Anchor::Start, "a<b");
        assert!(!svg.image("wide", "\"").contains("<script>"));
    }
}
