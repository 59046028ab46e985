//! Requests that failed, and what they were told.

use super::number::decimal;
use super::text::{clip, escape};
use crate::results::Results;

/// Of a message: a server may answer with a page.
const MESSAGE_CHARACTERS: usize = 600;

/// A table of messages; empty without any.
pub(super) fn table(results: &Results) -> String {
    let mut rows = String::new();
    for run in &results.runs {
        let setting = &run.setting;
        for (message, count) in &run.failed {
            rows += &format!(
                "<tr><th scope=\"row\">{}, {}</th><td>{}</td><td class=\"message\">{}</td></tr>\n",
                escape(&setting.drafts()),
                escape(&setting.load.to_string()),
                decimal(*count as f64, 0),
                escape(&clip(message, MESSAGE_CHARACTERS)),
            );
        }
    }
    if rows.is_empty() {
        return rows;
    }
    format!(
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Failed requests\">\n<table class=\"failures\">\n\
         <thead><tr><th scope=\"col\">Setting</th><th scope=\"col\">Requests</th><th scope=\"col\">Message</th></tr></thead>\n\
         <tbody>\n{rows}</tbody>\n</table>\n</div>\n"
    )
}
