//! What was measured, when, and what follows from it.

use super::date::utc;
use super::number::counted;
use super::panel::{endpoints, temperatures};
use super::text::escape;
use crate::results::Results;

/// The title, the advice and how it was measured.
pub(super) fn header(results: &Results) -> String {
    let date = utc(results.started);
    format!(
        "<header>\n<p class=\"kicker\">spec-bench · <time>{date}</time></p>\n<h1>{}</h1>\n{}{}</header>\n",
        "What speculative decoding brings",
        advice(&results.advice),
        conditions(results)
    )
}

fn advice(advice: &[String]) -> String {
    if advice.is_empty() {
        return String::new();
    }
    let sentences: String =
        advice.iter().map(|text| format!("<li>{}</li>\n", escape(text))).collect();
    format!(
        "<section class=\"advice\" aria-label=\"Advice\">\n<ul>\n{sentences}</ul>\n</section>\n"
    )
}

fn conditions(results: &Results) -> String {
    let joined =
        |texts: Vec<String>| texts.iter().map(|text| escape(text)).collect::<Vec<_>>().join("<br>");
    let endpoints = endpoints(results).into_iter().map(String::from).collect();
    let temperatures: Vec<String> = temperatures(results).iter().map(f32::to_string).collect();
    let measured = format!(
        "{} of each setting in turn, at most {} an answer",
        counted(results.rounds, "round", "rounds"),
        counted(results.max_tokens, "new token", "new tokens")
    );
    // Lines break between words, not after the hyphens of options.
    let word = |word: &str| format!("<span>{}</span>", escape(word));
    let command: Vec<String> = results.command.split_whitespace().map(word).collect();
    let terms = [
        ("Endpoint", joined(endpoints)),
        ("Prompts", joined(results.prompts.clone())),
        ("Temperature", escape(&temperatures.join(", "))),
        ("Measured", measured),
        ("Machine", escape(&results.machine.to_string())),
        ("Command", format!("<code>{}</code>", command.join(" "))),
    ];
    let term =
        |(name, value): &(&str, String)| format!("<div><dt>{name}</dt><dd>{value}</dd></div>\n");
    let filled = terms.iter().filter(|(_, value)| !value.is_empty());
    format!("<dl class=\"conditions\">\n{}</dl>\n", filled.map(term).collect::<String>())
}
