//! Plots of lines with marks.

use super::axis::is_drawable;
use super::figure::{Entry, figure};
use super::labels::spread;
use super::palette::{AUTO_SHAPE, Style};
use super::plot::{FONT_SIZE, Named, Plot, Size};
use super::svg::Anchor;
use super::text::{clip, width};

/// Between labels beside the ends of lines.
const LINE_HEIGHT: f64 = 15.0;
/// Of such a label.
const LABEL_CHARACTERS: usize = 20;
/// More lines have only the legend.
const MOST_LABELS: usize = 8;

/// A place in a plot.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) y: f64,
    /// Shown where the mark is hovered over; none has no mark.
    pub(super) title: Option<String>,
}

/// A line through points.
pub(super) struct Series {
    pub(super) name: String,
    pub(super) style: Style,
    /// From left to right.
    pub(super) points: Vec<Point>,
    /// Beside the line: what belongs to it without a place on its axis.
    pub(super) apart: Option<Point>,
    /// Shown where the line is hovered over.
    pub(super) title: String,
}

/// Lines in one plot.
pub(super) struct Lines {
    pub(super) title: String,
    pub(super) note: String,
    pub(super) x: Named,
    pub(super) y: Named,
    pub(super) series: Vec<Series>,
    /// A value of the upright axis to compare with, and what it is.
    pub(super) reference: Option<(f64, &'static str)>,
    /// Whether lines end beside the right edge, where their names can stand.
    pub(super) ends_right: bool,
}

impl Lines {
    /// As a figure in these sizes.
    pub(super) fn figure(mut self, sizes: &[Size]) -> String {
        for series in &mut self.series {
            series.points.retain(Point::is_drawable);
            series.apart.take_if(|point| !point.is_drawable());
        }
        self.series.retain(|series| series.last().is_some());
        let mut legend: Vec<Entry<'_>> =
            self.series.iter().map(|series| (&series.style, series.name.as_str())).collect();
        let reference = Style { class: "reference".into(), shape: 0 };
        legend.extend(self.reference.map(|(_, name)| (&reference, name)));
        let images: String = sizes.iter().map(|&size| self.image(size)).collect();
        figure(&self.title, &self.note, &legend, &images)
    }

    fn image(&self, size: Size) -> String {
        let names: Vec<String> =
            self.series.iter().map(|series| clip(&series.name, LABEL_CHARACTERS)).collect();
        let is_labelled =
            size.class == "wide" && self.ends_right && (2..=MOST_LABELS).contains(&names.len());
        let widest = names.iter().map(|name| width(name, FONT_SIZE)).fold(0.0, f64::max);
        let margin = if is_labelled { widest + 14.0 } else { 12.0 };
        let mut plot = Plot::new(size, &self.x, &self.y, margin);
        if let Some((value, _)) = self.reference {
            let y = plot.at(0.0, value).1;
            plot.svg.line("reference", (plot.left, y), (plot.right, y));
        }
        for series in &self.series {
            series.draw(&mut plot);
        }
        if is_labelled {
            self.label(&mut plot, &names);
        }
        let names: Vec<&str> = self.series.iter().map(|series| series.name.as_str()).collect();
        let axes = format!("{} over {}", self.y.name, self.x.name);
        plot.svg.image(size.class, &format!("{}. {axes}: {}.", self.title, names.join("; ")))
    }

    fn label(&self, plot: &mut Plot<'_>, names: &[String]) {
        let ends = self.series.iter().filter_map(Series::last);
        let ends: Vec<f64> = ends.map(|end| plot.at(end.x, end.y).1).collect();
        let Some(places) = spread(&ends, LINE_HEIGHT, plot.top, plot.bottom) else { return };
        for (name, y) in names.iter().zip(places) {
            let baseline = (plot.right + 10.0, y + FONT_SIZE * 0.35);
            plot.svg.text("label", baseline, Anchor::Start, name);
        }
    }
}

impl Series {
    fn draw(&self, plot: &mut Plot<'_>) {
        let Style { class, shape } = &self.style;
        let points: Vec<(f64, f64)> =
            self.points.iter().map(|point| plot.at(point.x, point.y)).collect();
        plot.svg.path(&format!("curve {class}"), &points, Some(&self.title));
        let marked = self.points.iter().map(|point| (point, *shape));
        for (point, shape) in marked.chain(self.apart.iter().map(|point| (point, AUTO_SHAPE))) {
            if let Some(title) = &point.title {
                let at = plot.at(point.x, point.y);
                plot.svg.mark(class, shape, at, title);
            }
        }
    }

    /// What lies furthest to the right.
    fn last(&self) -> Option<&Point> {
        self.apart.as_ref().or(self.points.last())
    }
}

impl Point {
    fn is_drawable(&self) -> bool {
        is_drawable(self.x) && is_drawable(self.y)
    }
}
