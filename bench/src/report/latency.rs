//! How long users wait: distributions as cumulative curves.

use super::axis::{Axis, is_drawable};
use super::lines::{Lines, Point, Series};
use super::number::figure;
use super::palette::Palette;
use super::panel::Panel;
use super::plot::{Named, SMALL};
use super::text::escape;
use crate::quantiles::Quantiles;
use crate::results::{Latency, Run};
use crate::setting::Load;

/// With a mark on the curve.
const MARKED: [usize; 3] = [50, 90, 99];

/// A title, the name of its axis and the distribution.
type Wait = (&'static str, &'static str, fn(&Latency) -> &Quantiles);

const WAITS: [Wait; 3] = [
    ("Time to the first token", "ms to the first token", |latency| &latency.first_token),
    ("Time a token", "ms a token, after the first", |latency| &latency.per_token),
    ("Time of the whole answer", "ms to the last token", |latency| &latency.whole),
];

/// A row of plots for each load; the first one is unfolded. Empty where no request was answered.
pub(super) fn distributions(panel: &Panel<'_>, palette: &Palette<'_>) -> String {
    let mut rows = String::new();
    for (load, runs) in panel.by_load() {
        let plots: String = WAITS.iter().filter_map(|wait| curves(wait, &runs, palette)).collect();
        if !plots.is_empty() {
            rows += &row(panel, load, &plots, rows.is_empty());
        }
    }
    rows
}

fn row(panel: &Panel<'_>, load: Load, plots: &str, is_open: bool) -> String {
    let open = if is_open { " open" } else { "" };
    let load = escape(&load.to_string());
    let name = match panel.name.as_str() {
        "" => load,
        name => format!("{load} <span class=\"note\">{}</span>", escape(name)),
    };
    format!(
        "<details{open}>\n<summary>{name}</summary>\n<div class=\"row\">\n{plots}</div>\n</details>\n"
    )
}

fn curves((title, name, of): &Wait, runs: &[&Run], palette: &Palette<'_>) -> Option<String> {
    let series: Vec<Series> =
        runs.iter().filter_map(|run| curve(run, of(&run.latency), palette)).collect();
    if series.is_empty() {
        return None;
    }
    let times = series.iter().flat_map(|series| series.points.iter().map(|point| point.x));
    let x = Named { name, axis: Axis::fitting(times, 4), inset: 0.0 };
    let quarters = [0.0, 25.0, 50.0, 75.0, 100.0];
    let axis = Axis::at_values(quarters.map(|at| (at, format!("{at}"))).into(), false);
    let y = Named { name: "requests within it (%)", axis, inset: 0.0 };
    let (title, note) = (title.to_string(), String::new());
    let lines = Lines { title, note, x, y, series, reference: None, ends_right: false };
    Some(lines.figure(&[SMALL]))
}

fn curve(run: &Run, times: &Quantiles, palette: &Palette<'_>) -> Option<Series> {
    let name = run.setting.drafts();
    let point = |(percent, &x): (usize, &f64)| {
        let title = format!("{name}: {percent} % within {} ms", figure(x));
        Point { x, y: percent as f64, title: MARKED.contains(&percent).then_some(title) }
    };
    let points: Vec<Point> = times.percentiles.iter().enumerate().map(point).collect();
    if times.count == 0 || !points.iter().any(|point| is_drawable(point.x)) {
        return None;
    }
    let [half, most, nearly_all] = MARKED.map(|percent| figure(times.at(percent)));
    let title = format!("{name}: p50 {half} ms, p90 {most} ms, p99 {nearly_all} ms");
    Some(Series { name, style: palette.drafts(&run.setting), points, apart: None, title })
}
