//! The results as tables.

use crate::report::percent;
use crate::results::{Results, Run, Speculation};
use spec_build::table::Table;
use std::fmt::Write;

/// Everything worth reading first.
pub fn show(results: &Results) -> String {
    let mut text = String::new();
    let mut table = Table::new([
        "",
        "drafts",
        "load",
        "tokens/s",
        "speed-up",
        "of rounds",
        "first token ms",
        "p99",
        "ms a token",
        "p99",
        "tokens a step",
        "accepted",
        "same text",
    ]);
    results.runs.iter().for_each(|run| table.row(row(run)));
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{table}");
    if let Some(positions) = positions(&results.runs) {
        let _ = writeln!(text, "Steps that accepted a draft's first tokens:\n{positions}");
    }
    if let Some(categories) = categories(&results.runs) {
        let _ = writeln!(text, "{categories}");
    }
    for run in &results.runs {
        for (why, count) in &run.failed {
            let _ = writeln!(
                text,
                "{}, {}: {count} failed: {why}",
                run.setting.endpoint,
                run.setting.drafts()
            );
        }
    }
    results.advice.iter().for_each(|sentence| {
        let _ = writeln!(text, "{sentence}");
    });
    text
}

/// A figure, or a dash.
fn or_dash(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".into(), |value| format!("{value:.digits$}"))
}

/// Folders and models by their last name.
fn short(endpoint: &str) -> &str {
    endpoint.trim_end_matches('/').rsplit('/').next().unwrap_or(endpoint)
}

fn row(run: &Run) -> Vec<String> {
    let told = run.speculation.as_ref();
    let latency = &run.latency;
    let heat = match run.setting.temperature {
        0.0 => String::new(),
        temperature => format!(", T={temperature}"),
    };
    vec![
        short(&run.setting.endpoint).to_string(),
        run.setting.drafts(),
        format!("{}{heat}", run.setting.load),
        format!("{:.1}", run.tokens_per_second),
        or_dash(run.speed_up, 2),
        run.speed_up_range().map_or("-".into(), |(least, most)| format!("{least:.2}-{most:.2}")),
        format!("{:.0}", latency.first_token.at(50)),
        format!("{:.0}", latency.first_token.at(99)),
        format!("{:.2}", latency.per_token.at(50)),
        format!("{:.2}", latency.per_token.at(99)),
        or_dash(told.map(Speculation::tokens_per_step), 2),
        or_dash(told.and_then(Speculation::acceptance), 2),
        run.same_text.map_or("-".into(), percent),
    ]
}

fn positions(runs: &[Run]) -> Option<Table> {
    let told = |run: &Run| run.speculation.as_ref().map(Speculation::by_position);
    let most = runs.iter().filter_map(told).map(|positions| positions.len()).max()?;
    if most == 0 {
        return None;
    }
    let mut table = Table::new(
        ["".into(), "drafts".into(), "load".into()]
            .into_iter()
            .chain((1..=most).map(|n| n.to_string())),
    );
    for run in runs {
        let Some(positions) = told(run).filter(|positions| !positions.is_empty()) else { continue };
        let names = [
            short(&run.setting.endpoint).into(),
            run.setting.drafts(),
            run.setting.load.to_string(),
        ];
        table.row(names.into_iter().chain(positions.iter().map(|share| format!("{share:.2}"))));
    }
    Some(table)
}

/// A row a category, a column a run that was compared with plain decoding.
fn categories(runs: &[Run]) -> Option<Table> {
    let drafting: Vec<&Run> =
        runs.iter().filter(|run| run.speed_up.is_some() && !run.setting.is_plain()).collect();
    let names: Vec<&str> =
        drafting.first()?.categories.iter().map(|category| category.name.as_str()).collect();
    if names.len() < 2 {
        return None;
    }
    let heading = |run: &&Run| format!("{}, {}", run.setting.drafts(), run.setting.load);
    let mut table = Table::new(
        std::iter::once("speed-up by category".into()).chain(drafting.iter().map(heading)),
    );
    for name in names {
        let of = |run: &&Run| {
            let found = run.categories.iter().find(|category| category.name == name);
            or_dash(found.and_then(|category| category.speed_up), 2)
        };
        table.row(std::iter::once(name.to_string()).chain(drafting.iter().map(of)));
    }
    Some(table)
}
