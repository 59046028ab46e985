//! How far into drafts the target agrees.

use super::axis::Axis;
use super::lines::{Lines, Point, Series};
use super::number::percent;
use super::palette::Palette;
use super::panel::Panel;
use super::plot::{NARROW, Named, WIDE};
use crate::results::Speculation;

const NOTE: &str = "How many steps accepted the first token of the draft, the second, and so on. A position is accepted \
                    only where all before it were.";
/// Positions with a name on the axis, at most.
const NAMED_POSITIONS: usize = 16;

/// One line a way of drafting, over all its loads: they hardly change what is accepted. None where nothing was drafted.
pub(super) fn by_position(panel: &Panel<'_>, palette: &Palette<'_>) -> Option<String> {
    let mut series: Vec<Series> = Vec::new();
    for (setting, runs) in panel.by_drafts() {
        let mut sum = Speculation::default();
        runs.iter().filter_map(|run| run.speculation.as_ref()).for_each(|run| sum.add(run));
        let shares = sum.by_position();
        if setting.is_plain() || sum.drafted == 0 || shares.is_empty() {
            continue;
        }
        let name = setting.drafts();
        let point = |(at, &share): (usize, &f64)| Point {
            x: (at + 1) as f64,
            y: share * 100.0,
            title: Some(format!("{name}, position {}: {} of steps", at + 1, percent(share))),
        };
        let points = shares.iter().enumerate().map(point).collect();
        let style = palette.drafts(setting);
        series.push(Series { title: name.clone(), name, style, points, apart: None });
    }
    let longest = series.iter().map(|series| series.points.len()).max()?;
    let every = longest.div_ceil(NAMED_POSITIONS);
    let ticks = (1..=longest).filter(|at| (at - 1) % every == 0 || *at == longest);
    let ticks = ticks.map(|at| (at as f64, at.to_string())).collect();
    let panel_name =
        if panel.name.is_empty() { String::new() } else { format!("{}. ", panel.name) };
    let loads = if panel.by_load().len() > 1 { " All loads together." } else { "" };
    let note = format!("{panel_name}{NOTE}{loads}");
    let x =
        Named { name: "position in the draft", axis: Axis::at_values(ticks, false), inset: 14.0 };
    let axis = Axis::linear([0.0, 100.0], 5);
    let y = Named { name: "steps that accepted it (%)", axis, inset: 0.0 };
    let title = "Acceptance by position".into();
    let lines = Lines { title, note, x, y, series, reference: None, ends_right: false };
    Some(lines.figure(&[WIDE, NARROW]))
}
