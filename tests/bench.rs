//! `spec-bench` on an engine in this process: what it counts is what was asked.
#![allow(clippy::unwrap_used)]

mod common;

use common::models::Recipe;
use common::tiny;
use spec_bench::endpoint::Common;
use spec_bench::machine::Machine;
use spec_bench::measure::{Plan, measure};
use spec_bench::prompts::{Content, Prompt};
use spec_bench::results::{FORMAT, Results, Run};
use spec_bench::setting::{Load, Setting};
use spec_bench::{advice, report, terminal};
use spec_build::cli::DraftLen;
use spec_core::model::Dtype;
use std::path::Path;
use std::sync::Arc;

const MAX_TOKENS: usize = 12;
const ROUNDS: usize = 2;
const REQUESTS: usize = 5;
const DRAFT_LEN: usize = 3;

/// Prompts that repeat themselves and others.
fn prompts() -> Vec<Prompt> {
    let prompt = |category: &str, tokens: Vec<u32>| Prompt {
        category: category.into(),
        content: Content::Tokens(tokens),
    };
    vec![
        prompt("repeated", [5, 9, 2].repeat(6)),
        prompt("other", (1..20).collect()),
        prompt("repeated", [7, 7, 30, 31].repeat(4)),
    ]
}

fn measured(dir: &Path, load: Load, temperature: f32) -> Vec<Run> {
    tiny::write(&dir.join("checkpoint"), 2, 1);
    let pair = dir.join("engine");
    Recipe::ngram(dir.join("checkpoint"), Dtype::Fp32).build(&pair);
    let setting = |draft_len| Setting {
        endpoint: pair.display().to_string(),
        draft_len,
        lookup: None,
        load,
        temperature,
    };
    let settings = [DraftLen::Fixed(0), DraftLen::Auto, DraftLen::Fixed(DRAFT_LEN)].map(setting);
    let common = Common {
        prompts: Arc::new(prompts()),
        max_tokens: MAX_TOKENS,
        ignore_eos: true,
        threads: Some(1),
    };
    let plan = Plan { rounds: ROUNDS, requests: REQUESTS, warm_up: 1, quiet: true, key: 7 };
    measure(&settings, &common, &plan).unwrap()
}

#[test]
fn what_is_counted_is_what_was_asked() {
    for (load, temperature) in
        [(Load::Concurrency(1), 0.0), (Load::Concurrency(3), 1.0), (Load::Rate(500.0), 0.0)]
    {
        let dir = tempfile::tempdir().unwrap();
        let runs = measured(dir.path(), load, temperature);
        for run in &runs {
            let asked = ROUNDS * REQUESTS;
            assert_eq!((run.answered, run.failed.len()), (asked, 0), "{load}");
            assert_eq!(run.output_tokens, asked * MAX_TOKENS);
            // The prompts in turn: 18, 19, 16, 18, 19 tokens.
            assert_eq!(run.input_tokens, ROUNDS * 90);
            assert_eq!(run.latency.first_token.count, asked);
            assert_eq!(run.same_text, Some(1.0), "{load}: lossless");
            let told = run.speculation.as_ref().unwrap();
            assert_eq!(told.steps + told.accepted, run.output_tokens as u64);
            assert_eq!(told.histogram.iter().sum::<u64>(), told.steps);
            let tokens = told.histogram.iter().zip(0..).map(|(steps, accepted)| steps * accepted);
            assert_eq!(tokens.sum::<u64>(), told.accepted);
            let names: Vec<_> =
                run.categories.iter().map(|one| (one.name.as_str(), one.answered)).collect();
            assert_eq!(names, [("other", 2 * ROUNDS), ("repeated", 3 * ROUNDS)]);
        }
        let drafted = |idx: usize| runs[idx].speculation.as_ref().unwrap().drafted;
        assert_eq!((runs[0].speed_up, drafted(0)), (Some(1.0), 0));
        // Drawn texts need not repeat anything.
        assert!(temperature > 0.0 || drafted(2) > 0, "{load}: nothing was looked up");
    }
}

#[test]
fn results_are_read_back_shown_and_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let runs = measured(dir.path(), Load::Concurrency(1), 0.0);
    let results = Results {
        format: FORMAT,
        command: "spec-bench".into(),
        started: 0,
        machine: Machine::here(),
        prompts: vec!["of the test".into()],
        rounds: ROUNDS,
        max_tokens: MAX_TOKENS,
        advice: advice::advice(&runs),
        runs,
    };
    let json = serde_json::to_string(&results).unwrap();
    assert_eq!(serde_json::from_str::<Results>(&json).unwrap(), results);
    let (table, page) = (terminal::show(&results), report::html(&results));
    assert!(!results.advice.is_empty());
    for run in &results.runs {
        let told = run.speculation.as_ref().unwrap();
        let (speed, per_step) =
            (format!("{:.1}", run.tokens_per_second), format!("{:.2}", told.tokens_per_step()));
        assert!(table.contains(&speed) && table.contains(&per_step), "{table}");
        assert!(page.contains(&format!(">{per_step}<")), "{per_step}");
        assert_eq!(run.by_round.len(), ROUNDS);
        if let Some((least, most)) = run.speed_up_range() {
            assert!(run.speed_up.is_some_and(|median| least <= median && median <= most));
            assert!(table.contains(&format!("{least:.2}-{most:.2}")), "{table}");
        }
    }
    assert!(results.advice.iter().all(|sentence| table.contains(sentence)));
}
