//! What throughput costs in latency: all settings as points, and those that no other beats in both.

use super::axis::{Axis, is_drawable};
use super::figure::{Entry, figure};
use super::labels::{Area, beside};
use super::number::figure as shown;
use super::palette::{self, Palette, Style};
use super::panel::{endpoints, temperatures};
use super::plot::{FONT_SIZE, FULL, NARROW, Named, Plot, Size, WIDE};
use super::svg::Anchor;
use super::text::{clip, width};
use crate::results::{Results, Run};
use crate::setting::Load;

const TICKS: usize = 6;
/// Of a point's label.
const LABEL_CHARACTERS: usize = 24;

struct Point {
    ms_per_token: f64,
    tokens_per_second: f64,
    style: Style,
    /// Of its colour.
    series: String,
    label: String,
    title: String,
    is_best: bool,
}

/// One plot a temperature. Empty with fewer than two settings.
pub(super) fn plots(results: &Results, palette: &Palette<'_>) -> String {
    let temperatures = temperatures(results);
    let plot = |temperature: &f32| {
        let runs = results.runs.iter();
        let runs: Vec<&Run> =
            runs.filter(|run| run.setting.temperature.total_cmp(temperature).is_eq()).collect();
        let better = "Up and to the left is better.";
        let note = match temperatures.len() {
            1 => better.to_string(),
            _ => format!("Temperature {temperature}. {better}"),
        };
        let points = points(&runs, &endpoints(results), palette);
        if points.len() >= 2 { plot(&points, &note) } else { String::new() }
    };
    temperatures.iter().map(plot).collect()
}

fn points(runs: &[&Run], endpoints: &[&str], palette: &Palette<'_>) -> Vec<Point> {
    let differ = |of: fn(&Run) -> String| runs.windows(2).any(|pair| of(pair[0]) != of(pair[1]));
    let drafts_differ = differ(|run| run.setting.drafts());
    let loads_differ = differ(|run| run.setting.load.to_string());
    let point = |run: &&Run| {
        let setting = &run.setting;
        let (x, y) = (run.latency.per_token.at(50), run.tokens_per_second);
        let load = match setting.load {
            Load::Concurrency(count) => count.to_string(),
            Load::Rate(rate) => format!("{rate}/s"),
        };
        let label = match (drafts_differ, loads_differ) {
            (true, true) => format!("{} · {load}", setting.drafts()),
            (false, true) => setting.load.to_string(),
            (_, false) => setting.drafts(),
        };
        let at = endpoints.iter().position(|endpoint| *endpoint == setting.endpoint).unwrap_or(0);
        let is_drawn = run.latency.per_token.count > 0 && x > 0.0 && y > 0.0;
        (is_drawn && is_drawable(x) && is_drawable(y)).then(|| Point {
            ms_per_token: x,
            tokens_per_second: y,
            style: if endpoints.len() > 1 {
                palette::endpoint(at)
            } else {
                palette.drafts(setting)
            },
            series: if endpoints.len() > 1 { setting.endpoint.clone() } else { setting.drafts() },
            label: clip(&label, LABEL_CHARACTERS),
            title: format!(
                "{}, {}: {} tokens a second, {} ms a token ({})",
                setting.drafts(),
                setting.load,
                shown(y),
                shown(x),
                setting.endpoint
            ),
            is_best: false,
        })
    };
    let mut points: Vec<Point> = runs.iter().filter_map(point).collect();
    mark_best(&mut points);
    points
}

/// The best come first, from the left; no other is both faster for a user and faster for all.
fn mark_best(points: &mut [Point]) {
    points.sort_by(|a, b| {
        let (x, y) = (
            a.ms_per_token.total_cmp(&b.ms_per_token),
            b.tokens_per_second.total_cmp(&a.tokens_per_second),
        );
        x.then(y)
    });
    let mut most = 0.0;
    for point in &mut *points {
        point.is_best = point.tokens_per_second > most;
        most = point.tokens_per_second.max(most);
    }
    points.sort_by_key(|point| !point.is_best);
}

fn plot(points: &[Point], note: &str) -> String {
    let x = Axis::fitting(points.iter().map(|point| point.ms_per_token), TICKS);
    let y = Axis::fitting(points.iter().map(|point| point.tokens_per_second), TICKS);
    let x = Named { name: "median time a token (ms)", axis: x, inset: 10.0 };
    let y = Named { name: "throughput (tokens a second)", axis: y, inset: 10.0 };
    let mut series: Vec<(&Style, &str)> = Vec::new();
    for point in points {
        if !series.iter().any(|(_, name)| *name == point.series) {
            series.push((&point.style, &point.series));
        }
    }
    // No drafts first, `auto` last, as everywhere.
    series.sort_by_key(|(style, _)| (style.class == "auto", style.class != "plain", &style.class));
    let front = Style { class: "front".into(), shape: 0 };
    let mut legend: Vec<Entry<'_>> = series;
    legend.push((&front, "no other setting is better in both; paler ones are beaten"));
    let images: String =
        [FULL, WIDE, NARROW].iter().map(|&size| image(size, &x, &y, points)).collect();
    let figure = figure("Throughput against time a token", note, &legend, &images);
    figure.replacen("<figure>", "<figure class=\"full\">", 1)
}

fn image(size: Size, x: &Named, y: &Named, points: &[Point]) -> String {
    let mut plot = Plot::new(size, x, y, 12.0);
    let at = |plot: &Plot<'_>, point: &Point| plot.at(point.ms_per_token, point.tokens_per_second);
    let best = points.iter().filter(|point| point.is_best);
    let mut steps: Vec<(f64, f64)> = Vec::new();
    for (x, y) in best.map(|point| at(&plot, point)) {
        steps.extend(steps.last().map(|&(_, before)| (x, before)));
        steps.push((x, y));
    }
    plot.svg.path("front curve", &steps, None);
    // The best ones last, over the others.
    for point in points.iter().rev() {
        let place = at(&plot, point);
        let class = &point.style.class;
        let class = if point.is_best { class.clone() } else { format!("{class} paler") };
        plot.svg.mark(&class, point.style.shape, place, &point.title);
    }
    let within = Area {
        left: plot.left,
        top: plot.top - 8.0,
        right: plot.svg.width - 2.0,
        bottom: plot.bottom,
    };
    let mut taken: Vec<Area> =
        points.iter().map(|point| Area::around(at(&plot, point), 6.0)).collect();
    taken.extend(steps.windows(2).map(|ends| Area {
        left: ends[0].0.min(ends[1].0) - 1.0,
        top: ends[0].1.min(ends[1].1) - 1.0,
        right: ends[0].0.max(ends[1].0) + 1.0,
        bottom: ends[0].1.max(ends[1].1) + 1.0,
    }));
    for point in points {
        let label = (width(&point.label, FONT_SIZE), FONT_SIZE + 3.0);
        let Some(area) = beside(at(&plot, point), label, &within, &taken) else { continue };
        let class = if point.is_best { "label" } else { "label paler" };
        plot.svg.text(class, (area.left, area.bottom - 4.0), Anchor::Start, &point.label);
        taken.push(area);
    }
    let best = points.iter().filter(|point| point.is_best);
    let best: Vec<&str> = best.map(|point| point.title.as_str()).collect();
    let label = format!("{} over {}. Not beaten in both: {}.", y.name, x.name, best.join("; "));
    plot.svg.image(size.class, &label)
}

#[cfg(test)]
mod tests {
    use super::super::example;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_best_are_those_that_no_other_beats(
            figures in prop::collection::vec((1u32..30, 1u32..30), 1..40),
        ) {
            let mut results = example::sweep();
            let run = results.runs[0].clone();
            results.runs = figures.iter().map(|&(ms, tokens)| {
                let mut run = run.clone();
                run.latency.per_token.percentiles = vec![f64::from(ms); 101];
                run.tokens_per_second = f64::from(tokens);
                run
            }).collect();
            let runs: Vec<&Run> = results.runs.iter().collect();
            for point in points(&runs, &["m"], &Palette::new(&results)) {
                let (x, y) = (point.ms_per_token, point.tokens_per_second);
                let is_beaten = figures.iter().any(|&(ms, tokens)| {
                    let (ms, tokens) = (f64::from(ms), f64::from(tokens));
                    ms <= x && tokens >= y && (ms < x || tokens > y)
                });
                // Of equal ones, the first stands for all.
                prop_assert!(!(point.is_best && is_beaten));
                let has_equal = figures.iter().filter(|&&of| (f64::from(of.0), f64::from(of.1)) == (x, y)).count() > 1;
                prop_assert!(point.is_best || is_beaten || has_equal);
            }
        }
    }
}
