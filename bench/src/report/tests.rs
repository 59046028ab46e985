//! The page as a whole: well-formed, whatever is in the results, and every coordinate inside its drawing.

use super::example::sweep;
use super::html;
use super::text::width;
use crate::quantiles::Quantiles;
use crate::results::Results;
use crate::setting::Load;
use proptest::prelude::*;
use spec_build::cli::DraftLen;
use std::collections::HashMap;

/// Elements without an end in HTML.
const VOID: [&str; 3] = ["meta", "link", "br"];

/// A tag with its attributes, and the text that follows it.
struct Tag<'a> {
    name: &'a str,
    attributes: HashMap<&'a str, &'a str>,
    text: &'a str,
}

/// All tags of a page; panics where one is not closed in its turn, or a quote is not.
fn tags(page: &str) -> Vec<Tag<'_>> {
    let (mut tags, mut open) = (Vec::new(), Vec::new());
    let page = page.strip_prefix("<!doctype html>").unwrap();
    // Greater-than signs of the style sheet would end no tag.
    for piece in page.split('<').skip(1) {
        let (tag, text) = piece.split_once('>').unwrap_or_else(|| panic!("no end of <{piece}"));
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "</{name}> closes another");
            continue;
        }
        let (name, rest) = tag.split_once(' ').unwrap_or((tag, ""));
        let mut attributes = HashMap::new();
        let mut rest = rest.trim_end_matches('/').trim();
        while let Some((key, after)) = rest.split_once('=') {
            let value = after.strip_prefix('"').unwrap_or_else(|| panic!("no quote in <{tag}>"));
            let (value, after) =
                value.split_once('"').unwrap_or_else(|| panic!("no quote in <{tag}>"));
            assert!(attributes.insert(key, value).is_none(), "{key} twice in <{tag}>");
            rest = after.trim();
        }
        assert!(rest.is_empty() || rest == "open", "{rest} in <{tag}>");
        if !tag.ends_with('/') && !VOID.contains(&name) {
            open.push(name);
        }
        tags.push(Tag { name, attributes, text });
    }
    assert!(open.is_empty(), "open at the end: {open:?}");
    tags
}

/// Panics where a page is not well-formed or draws beyond its drawings. Returns how many there are.
fn check(page: &str) -> usize {
    assert!(!page.contains("NaN") && !page.contains("inf\"") && !page.contains("<script"));
    let (mut drawings, mut size) = (0, (0.0, 0.0));
    for Tag { name, attributes, text } in tags(page) {
        let number = |key: &str| attributes[key].parse::<f64>().unwrap();
        let inside = |x: f64, y: f64| {
            assert!(
                (0.0..=size.0).contains(&x) && (0.0..=size.1).contains(&y),
                "{x} {y} beyond {size:?}"
            );
        };
        match name {
            "svg" => {
                let sides: Vec<f64> =
                    attributes["viewBox"].split(' ').map(|side| side.parse().unwrap()).collect();
                size = (sides[2], sides[3]);
                let is_image =
                    attributes.get("role") == Some(&"img") && attributes.contains_key("aria-label");
                assert!(is_image || attributes.contains_key("aria-hidden"));
                drawings += usize::from(is_image);
            }
            "circle" => {
                inside(number("cx") - 4.0, number("cy") - 4.0);
                inside(number("cx") + 4.0, number("cy") + 4.0);
            }
            "path" | "polygon" => {
                let points = attributes.get("d").or(attributes.get("points")).unwrap();
                let numbers = points.split(['M', 'L', ' ', ',']).filter(|text| !text.is_empty());
                let numbers: Vec<f64> = numbers.map(|text| text.parse().unwrap()).collect();
                numbers.chunks(2).for_each(|point| inside(point[0], point[1]));
            }
            "text" => {
                let wide = width(text, 12.0);
                let left = number("x")
                    - match attributes["text-anchor"] {
                        "start" => 0.0,
                        "middle" => wide / 2.0,
                        _ => wide,
                    };
                inside(left, number("y") - 10.0);
                inside(left + wide, number("y") + 2.0);
            }
            "th" => assert!(attributes.contains_key("scope")),
            _ => {}
        }
    }
    drawings
}

/// For `scripts/bench/report-check`, and for people who change the page.
fn keep(name: &str, page: &str) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../target");
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(format!("{folder}/{name}"), page).unwrap();
}

#[test]
fn a_sweep_has_every_plot() {
    let page = html(&sweep());
    // Three figures for two widths, one for three, three distributions a load.
    assert_eq!(check(&page), 3 * 2 + 3 + 4 * 3);
    for title in [
        "Speed-up against draft length",
        "Speed-up against load",
        "Acceptance by position",
        "Throughput against time a token",
        "By category",
        "Failed requests",
        "the queue of 64 requests is full",
    ] {
        assert!(page.contains(title), "{title}");
    }
    assert!(!page.contains("http"), "nothing is fetched");
    keep("report-example.html", &page);
}

#[test]
fn what_the_data_does_not_have_is_left_out() {
    let mut results = sweep();
    results.runs.retain(|run| {
        run.setting.load == Load::Concurrency(1)
            && matches!(run.setting.draft_len, DraftLen::Fixed(0 | 4))
    });
    for run in &mut results.runs {
        run.categories.truncate(1);
    }
    let page = html(&results);
    for title in ["Speed-up against", "By category", "Failed requests"] {
        assert!(!page.contains(title), "{title}");
    }
    check(&page);
}

#[test]
fn without_runs_there_is_still_a_page() {
    let results = Results { runs: Vec::new(), advice: Vec::new(), ..sweep() };
    let page = html(&results);
    assert_eq!(check(&page), 0);
    assert!(page.contains("Nothing was measured"));
}

#[test]
fn runs_without_answers_have_no_plots() {
    let mut results = sweep();
    for run in &mut results.runs {
        let none = || Quantiles::of(Vec::new());
        (run.tokens_per_second, run.answered, run.output_tokens) = (0.0, 0, 0);
        (run.speed_up, run.same_text, run.speculation) = (None, None, None);
        (run.latency.first_token, run.latency.per_token) = (none(), none());
        (run.latency.between, run.latency.whole) = (none(), none());
        run.categories.clear();
    }
    assert_eq!(check(&html(&results)), 0);
}

#[test]
fn hostile_names_are_only_text() {
    let hostile =
        "</title></svg><script>alert(1)</script>\"' onload=x \0\u{7}\u{202e}&amp; ".repeat(20);
    let mut results = sweep();
    (results.command, results.prompts) = (hostile.clone(), vec![hostile.clone(), String::new()]);
    results.advice = vec![hostile.clone()];
    for (at, run) in results.runs.iter_mut().enumerate() {
        run.setting.endpoint = format!("{}{hostile}", at % 2);
        run.failed = vec![(hostile.clone(), 1)];
        run.categories.iter_mut().for_each(|category| category.name += &hostile);
    }
    let page = html(&results);
    check(&page);
    keep("report-hostile.html", &page);
}

#[test]
fn endpoints_and_temperatures_have_plots_of_their_own() {
    let mut results = sweep();
    for (endpoint, temperature) in [("http://127.0.0.1:8000", 0.0), ("http://127.0.0.1:8000", 0.8)]
    {
        results.runs.extend(sweep().runs.into_iter().map(|mut run| {
            (run.setting.endpoint, run.setting.temperature) = (endpoint.into(), temperature);
            if temperature > 0.0 {
                let Load::Concurrency(count) = run.setting.load else { panic!("a rate") };
                run.setting.load = Load::Rate(count as f64 / 2.0);
            }
            run.tokens_per_second *= 0.9;
            run
        }));
    }
    let page = html(&results);
    // Three panels with three figures for two widths, two temperatures with one for three; three distributions a load.
    assert_eq!(check(&page), 3 * 3 * 2 + 2 * 3 + 3 * 4 * 3);
    assert!(page.contains("requests a second") && page.contains("Temperature 0.8."));
    keep("report-panels.html", &page);
}

/// What floating-point arithmetic may leave behind.
fn figures() -> impl Strategy<Value = f64> {
    prop_oneof![
        Just(f64::NAN),
        Just(f64::INFINITY),
        Just(f64::NEG_INFINITY),
        Just(0.0),
        Just(-1.0),
        Just(1e300),
        Just(1e-300),
        1e-3f64..1e7,
        0.5f64..3.0,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_figure_breaks_the_page(
        values in prop::collection::vec((figures(), figures(), figures(), any::<bool>()), 20),
        rate in figures().prop_filter("told as it is", |rate| !rate.is_nan()),
    ) {
        let mut results = sweep();
        for (run, &(speed, speed_up, time, is_rate)) in results.runs.iter_mut().zip(&values) {
            (run.tokens_per_second, run.speed_up, run.same_text) = (speed, Some(speed_up), Some(speed_up));
            run.latency.per_token = Quantiles::of(vec![time, speed, 1.0]);
            run.latency.whole.percentiles = vec![time, speed_up];
            run.setting.temperature = if is_rate { 0.5 } else { f32::INFINITY };
            if is_rate {
                run.setting.load = Load::Rate(rate);
            }
            for category in &mut run.categories {
                (category.per_token_ms, category.speed_up) = (time, Some(speed));
            }
        }
        check(&html(&results));
    }
}
