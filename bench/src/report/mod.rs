//! The results as one HTML file that needs nothing else: no script, no network, no fonts.

mod acceptance;
mod axis;
mod categories;
mod date;
#[cfg(test)]
mod example;
mod failures;
mod figure;
mod header;
mod labels;
mod latency;
mod lines;
mod number;
mod palette;
mod panel;
mod pareto;
mod plot;
mod speed_up;
mod svg;
mod table;
#[cfg(test)]
mod tests;
mod text;

pub(crate) use number::percent;

use crate::results::Results;
use palette::Palette;
use panel::{Panel, panels};

const STYLE: &str = include_str!("style.css");

/// The page. What the data does not have is left out: plots of one point, categories of one kind.
pub fn html(results: &Results) -> String {
    let panels = panels(results);
    let palette = Palette::new(results);
    let each = |part: fn(&Panel<'_>, &Palette<'_>) -> String| -> String {
        panels.iter().map(|panel| part(panel, &palette)).collect()
    };
    let runs = match panels.is_empty() {
        true => "<p class=\"note\">Nothing was measured.</p>".into(),
        false => table::summary(&panels),
    };
    let speed_ups = each(|panel, palette| {
        let figures = [
            speed_up::by_draft_len(panel, palette),
            speed_up::by_load(panel, palette),
            acceptance::by_position(panel, palette),
        ];
        let figures: String = figures.into_iter().flatten().collect();
        match figures.is_empty() {
            true => figures,
            false => format!("<div class=\"plots\">\n{figures}</div>\n"),
        }
    });
    let sections = [
        section("runs", "All runs", FASTEST, &runs),
        section("speculation", "Speed-up and acceptance", "", &speed_ups),
        section("latency", "How long users wait", LATENCY, &each(latency::distributions)),
        section("trade-off", "Throughput and latency", "", &pareto::plots(results, &palette)),
        section("categories", "By category", CATEGORIES, &each(categories::tables)),
        section("failures", "Failed requests", "", &failures::table(results)),
    ];
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <link rel=\"icon\" href=\"data:,\">\n\
         <title>What speculative decoding brings: spec-bench, {}</title>\n<style>\n{STYLE}</style>\n</head>\n\
         <body>\n<main>\n{}{}</main>\n</body>\n</html>\n",
        date::utc(results.started),
        header::header(results),
        sections.concat()
    )
}

const FASTEST: &str = "In bold: the fastest at its load. Speed-up is over no drafts at the same load; the same text is \
                       the share of answers that did not change.";
const LATENCY: &str = "How many requests waited no longer than a time; marks at 50, 90 and 99 %. Further left is better.";
const CATEGORIES: &str =
    "Kinds of prompts differ in how well they can be drafted. The thin line marks 1: no drafts.";

/// Empty where there is nothing in it. `note` may be empty.
fn section(id: &str, title: &str, note: &str, content: &str) -> String {
    if content.is_empty() {
        return String::new();
    }
    let note = match note {
        "" => String::new(),
        note => format!("<p class=\"note\">{note}</p>\n"),
    };
    format!(
        "<section aria-labelledby=\"{id}\">\n<h2 id=\"{id}\">{title}</h2>\n{note}{content}</section>\n"
    )
}
