//! Speed-up against draft length and against load.

use super::axis::{Axis, is_drawable};
use super::lines::{Lines, Point, Series};
use super::number::times;
use super::palette::{Palette, Style};
use super::panel::Panel;
use super::plot::{NARROW, Named, WIDE};
use crate::results::Run;
use crate::setting::Load;
use spec_build::cli::DraftLen;

const NAME: &str = "speed-up (×)";
const REFERENCE: Option<(f64, &str)> = Some((1.0, "without drafts: 1.0"));
/// On the upright axis in any case, so that there is room under the reference.
const BELOW: f64 = 0.95;
/// Of the upright axis, about.
const TICKS: usize = 5;
/// Pixels between marks and the ends of the level axis.
const INSET: f64 = 14.0;

/// One line a load and place to look drafts up. None with fewer than two draft lengths.
pub(super) fn by_draft_len(panel: &Panel<'_>, palette: &Palette<'_>) -> Option<String> {
    let measured =
        || panel.runs.iter().filter(|run| speed_up(run).is_some() && !run.setting.is_plain());
    let mut lens: Vec<usize> = measured().filter_map(|run| fixed(run)).collect();
    lens.sort_unstable();
    lens.dedup();
    let (&longest, true) = (lens.last()?, lens.len() >= 2) else { return None };
    let auto = longest as f64 + (longest as f64 / 6.0).max(1.0);
    let has_auto = measured().any(|run| run.setting.draft_len == DraftLen::Auto);
    let mut series: Vec<Series> = Vec::new();
    for run in measured() {
        let style = palette.load(&run.setting.load);
        let name = match run.setting.lookup {
            Some(lookup) => format!("{}, {} look-up", run.setting.load, lookup.name()),
            None => run.setting.load.to_string(),
        };
        let at = match series.iter().position(|other| other.name == name) {
            Some(at) => at,
            None => {
                series.push(from_no_drafts(name, style, run));
                series.len() - 1
            }
        };
        let x = fixed(run).map_or(auto, |len| len as f64);
        match fixed(run) {
            Some(_) => series[at].points.push(point(x, run)),
            None => series[at].apart = Some(point(x, run)),
        }
    }
    let mut ticks = vec![(0.0, "off".to_string())];
    ticks.extend(lens.iter().map(|&len| (len as f64, len.to_string())));
    ticks.extend(has_auto.then(|| (auto, "auto".to_string())));
    let x = Named {
        name: "draft length K (tokens a step)",
        axis: Axis::at_values(ticks, false),
        inset: INSET,
    };
    Some(lines("Speed-up against draft length", panel, x, series).figure(&[WIDE, NARROW]))
}

/// One line a way of drafting. None with fewer than two loads.
pub(super) fn by_load(panel: &Panel<'_>, palette: &Palette<'_>) -> Option<String> {
    let concurrency = against(panel, palette, "requests at a time", |load| match load {
        Load::Concurrency(count) => Some(count as f64),
        Load::Rate(_) => None,
    });
    let rate = against(panel, palette, "requests a second", |load| match load {
        Load::Rate(rate) => Some(rate),
        Load::Concurrency(_) => None,
    });
    let plots: String = [concurrency, rate].into_iter().flatten().collect();
    (!plots.is_empty()).then_some(plots)
}

fn against(
    panel: &Panel<'_>,
    palette: &Palette<'_>,
    name: &'static str,
    of: impl Fn(Load) -> Option<f64>,
) -> Option<String> {
    let mut ticks: Vec<(f64, String)> = Vec::new();
    let mut series: Vec<Series> = Vec::new();
    for (setting, runs) in panel.by_drafts() {
        let places = runs.iter().filter(|run| speed_up(run).is_some());
        let points: Vec<Point> = places
            .filter_map(|run| {
                of(run.setting.load).filter(|&x| is_drawable(x)).map(|x| point(x, run))
            })
            .collect();
        if setting.is_plain() || points.is_empty() {
            continue;
        }
        ticks.extend(points.iter().map(|point| (point.x, format!("{}", point.x))));
        let (name, style) = (setting.drafts(), palette.drafts(setting));
        series.push(Series { title: name.clone(), name, style, points, apart: None });
    }
    ticks.sort_by(|a, b| a.0.total_cmp(&b.0));
    ticks.dedup_by(|a, b| a.0 == b.0);
    if ticks.len() < 2 {
        return None;
    }
    let x = Named { name, axis: Axis::at_values(ticks, true), inset: INSET };
    Some(lines("Speed-up against load", panel, x, series).figure(&[WIDE, NARROW]))
}

fn lines(title: &str, panel: &Panel<'_>, x: Named, series: Vec<Series>) -> Lines {
    let marks = series.iter().flat_map(|series| series.points.iter().chain(&series.apart));
    let axis = Axis::linear(marks.map(|mark| mark.y).chain([BELOW]), TICKS);
    let y = Named { name: NAME, axis, inset: 0.0 };
    let (title, note) = (title.to_string(), panel.name.clone());
    Lines { title, note, x, y, series, reference: REFERENCE, ends_right: true }
}

/// A line that begins where every speed-up does.
fn from_no_drafts(name: String, style: Style, run: &Run) -> Series {
    let title = format!("off, {}: 1.00×", run.setting.load);
    let start = Point { x: 0.0, y: 1.0, title: Some(title) };
    Series { title: name.clone(), name, style, points: vec![start], apart: None }
}

fn point(x: f64, run: &Run) -> Point {
    let y = run.speed_up.unwrap_or(f64::NAN);
    let setting = &run.setting;
    Point { x, y, title: Some(format!("{}, {}: {}", setting.drafts(), setting.load, times(y))) }
}

fn speed_up(run: &Run) -> Option<f64> {
    run.speed_up.filter(|&speed_up| is_drawable(speed_up))
}

fn fixed(run: &Run) -> Option<usize> {
    match run.setting.draft_len {
        DraftLen::Fixed(len) => Some(len),
        DraftLen::Auto => None,
    }
}
