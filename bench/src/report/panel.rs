//! Runs that can be compared with each other: of one endpoint at one temperature.

use crate::results::{Results, Run};
use crate::setting::{Load, Setting};
use spec_build::cli::DraftLen;
use std::cmp::Ordering;

/// Runs of one endpoint at one temperature, by load, then by draft length.
pub(super) struct Panel<'a> {
    /// What tells it from the other panels; empty for one alone.
    pub(super) name: String,
    pub(super) runs: Vec<&'a Run>,
}

/// In the order in which they were measured first.
pub(super) fn panels(results: &Results) -> Vec<Panel<'_>> {
    let mut panels: Vec<Panel<'_>> = Vec::new();
    for run in &results.runs {
        let is_its = |panel: &&mut Panel<'_>| is_like(&panel.runs[0].setting, &run.setting);
        match panels.iter_mut().find(is_its) {
            Some(panel) => panel.runs.push(run),
            None => panels.push(Panel { name: String::new(), runs: vec![run] }),
        }
    }
    let endpoints = endpoints(results).len();
    let temperatures = temperatures(results).len();
    for panel in &mut panels {
        panel.runs.sort_by(|a, b| in_order(&a.setting, &b.setting));
        let setting = &panel.runs[0].setting;
        let temperature = format!("temperature {}", setting.temperature);
        panel.name = match (endpoints > 1, temperatures > 1) {
            (false, false) => String::new(),
            (true, false) => setting.endpoint.clone(),
            (false, true) => temperature,
            (true, true) => format!("{}, {temperature}", setting.endpoint),
        };
    }
    panels
}

impl<'a> Panel<'a> {
    /// Its loads with their runs, in order.
    pub(super) fn by_load(&self) -> Vec<(Load, Vec<&'a Run>)> {
        let mut loads: Vec<(Load, Vec<&Run>)> = Vec::new();
        for &run in &self.runs {
            match loads.last_mut() {
                Some((load, runs)) if order_of_loads(load, &run.setting.load).is_eq() => {
                    runs.push(run)
                }
                _ => loads.push((run.setting.load, vec![run])),
            }
        }
        loads
    }

    /// Its ways of drafting with their runs: no drafts first, `auto` last.
    pub(super) fn by_drafts(&self) -> Vec<(&'a Setting, Vec<&'a Run>)> {
        let mut drafts: Vec<(&Setting, Vec<&Run>)> = Vec::new();
        for &run in &self.runs {
            match drafts.iter_mut().find(|(other, _)| order_of_drafts(other, &run.setting).is_eq())
            {
                Some((_, runs)) => runs.push(run),
                None => drafts.push((&run.setting, vec![run])),
            }
        }
        drafts.sort_by(|(a, _), (b, _)| order_of_drafts(a, b));
        drafts
    }
}

/// Distinct ones, as measured.
pub(super) fn endpoints(results: &Results) -> Vec<&str> {
    let mut endpoints: Vec<&str> = Vec::new();
    for run in &results.runs {
        if !endpoints.contains(&run.setting.endpoint.as_str()) {
            endpoints.push(&run.setting.endpoint);
        }
    }
    endpoints
}

/// Distinct ones, rising.
pub(super) fn temperatures(results: &Results) -> Vec<f32> {
    let mut all: Vec<f32> = results.runs.iter().map(|run| run.setting.temperature).collect();
    all.sort_by(f32::total_cmp);
    all.dedup_by(|a, b| a.total_cmp(b).is_eq());
    all
}

/// Fewer at a time first; rates after them.
pub(super) fn order_of_loads(a: &Load, b: &Load) -> Ordering {
    match (a, b) {
        (Load::Concurrency(a), Load::Concurrency(b)) => a.cmp(b),
        (Load::Rate(a), Load::Rate(b)) => a.total_cmp(b),
        (Load::Concurrency(_), Load::Rate(_)) => Ordering::Less,
        (Load::Rate(_), Load::Concurrency(_)) => Ordering::Greater,
    }
}

/// Shorter drafts first, `auto` last, each with where it looks drafts up.
pub(super) fn order_of_drafts(a: &Setting, b: &Setting) -> Ordering {
    let len = |setting: &Setting| match setting.draft_len {
        DraftLen::Fixed(len) => (0, len),
        DraftLen::Auto => (1, 0),
    };
    len(a).cmp(&len(b)).then_with(|| a.drafts().cmp(&b.drafts()))
}

fn in_order(a: &Setting, b: &Setting) -> Ordering {
    order_of_loads(&a.load, &b.load).then_with(|| order_of_drafts(a, b))
}

fn is_like(a: &Setting, b: &Setting) -> bool {
    a.endpoint == b.endpoint && a.temperature.total_cmp(&b.temperature).is_eq()
}

#[cfg(test)]
mod tests {
    use super::super::example;
    use super::*;

    #[test]
    fn panels_are_told_apart_by_what_differs() {
        let mut results = example::sweep();
        assert_eq!(panels(&results)[0].name, "");
        results.runs[0].setting.temperature = 0.5;
        let names: Vec<String> = panels(&results).into_iter().map(|panel| panel.name).collect();
        assert_eq!(names, ["temperature 0.5", "temperature 0"]);
        results.runs[1].setting.endpoint = "other".into();
        assert_eq!(panels(&results)[1].name, "other, temperature 0");
    }

    #[test]
    fn runs_are_in_order_of_load_and_drafts() {
        let mut results = example::sweep();
        results.runs.reverse();
        let panels = panels(&results);
        let loads: Vec<String> =
            panels[0].by_load().iter().map(|(load, _)| load.to_string()).collect();
        assert_eq!(loads, ["1 at a time", "4 at a time", "16 at a time", "64 at a time"]);
        let drafts: Vec<String> = panels[0].by_drafts().iter().map(|(of, _)| of.drafts()).collect();
        assert_eq!(drafts, ["off", "K=2", "K=4", "K=8", "auto"]);
    }
}
