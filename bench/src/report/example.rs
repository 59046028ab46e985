//! Results as a sweep gives them, for tests.

use crate::machine::Machine;
use crate::quantiles::Quantiles;
use crate::results::{Category, FORMAT, Latency, Rates, Results, Run, Speculation};
use crate::setting::{Load, Setting};
use spec_build::cli::DraftLen;

/// Steps that accepted so many drafts, of a thousand: each position with this chance.
fn speculation(longest: usize, chance: f64) -> Speculation {
    let reached = |at: usize| (1000.0 * chance.powi(at as i32)) as u64;
    let ends = |at: usize| if at < longest { reached(at) - reached(at + 1) } else { reached(at) };
    let histogram: Vec<u64> = (0..=longest).map(ends).collect();
    let accepted = histogram.iter().enumerate().map(|(count, steps)| count as u64 * steps).sum();
    let steps = histogram.iter().sum();
    Speculation { steps, drafted: steps * longest as u64, accepted, histogram }
}

/// A distribution with a long tail.
fn times(median: f64) -> Quantiles {
    let at = |percent: usize| {
        let share = (percent as f64 + 0.5) / 101.0;
        median * ((share / (1.0 - share)).ln() * 0.16).exp()
    };
    Quantiles::of((0..=100).map(at).collect())
}

fn run(draft_len: DraftLen, at_a_time: usize) -> Run {
    let len = match draft_len {
        DraftLen::Auto => 5,
        DraftLen::Fixed(len) => len,
    };
    let chance = if draft_len == DraftLen::Auto { 0.79 } else { 0.74 - 0.01 * len as f64 };
    let spec = speculation(len, chance);
    // What a step of several tokens costs: the more rows are at work, the dearer each further one.
    let cost = 1.0 + len as f64 * (0.03 + at_a_time as f64 * 0.0025);
    let speed_up = match draft_len {
        DraftLen::Auto => (spec.tokens_per_step() / cost * 1.06).max(1.02),
        DraftLen::Fixed(_) => spec.tokens_per_step() / cost,
    };
    let ms = 21.0 * (1.0 + at_a_time as f64 / 40.0);
    let per_token = ms / speed_up;
    let category = |(name, of): (&str, f64)| Category {
        name: name.into(),
        answered: 40,
        per_token_ms: per_token / of,
        speed_up: (len > 0).then_some(speed_up * of),
        speculation: Some(speculation(len, (0.72 * of).min(0.95))),
    };
    let kinds = [
        ("code", 1.18),
        ("maths", 1.1),
        ("summaries", 1.04),
        ("translation", 0.74),
        ("writing", 0.82),
    ];
    let tokens_per_second = at_a_time as f64 * 1000.0 / per_token;
    let by_round = [0.97, 1.0, 1.02].map(|pace| Rates {
        tokens_per_second: tokens_per_second * pace,
        speed_up: Some(speed_up * pace),
    });
    Run {
        setting: Setting {
            endpoint: "models/llama-3.2-3b-fp8".into(),
            draft_len,
            lookup: None,
            load: Load::Concurrency(at_a_time),
            temperature: 0.0,
        },
        tokens_per_second,
        requests_per_second: tokens_per_second / 200.0,
        speed_up: Some(speed_up),
        by_round: by_round.into(),
        same_text: Some(if at_a_time == 64 { 0.995 } else { 1.0 }),
        answered: 200,
        failed: Vec::new(),
        input_tokens: 24_000,
        output_tokens: 40_000,
        latency: Latency {
            first_token: times(38.0 + at_a_time as f64 * (4.0 + 0.15 * len as f64)),
            per_token: times(per_token),
            between: times(ms * cost),
            whole: times(per_token * 210.0),
        },
        speculation: Some(spec),
        categories: kinds.map(category).into(),
    }
}

/// Five ways of drafting at four loads.
pub(super) fn sweep() -> Results {
    let drafts = [0, 2, 4, 8].map(DraftLen::Fixed).into_iter().chain([DraftLen::Auto]);
    let drafts: Vec<DraftLen> = drafts.collect();
    let runs =
        [1, 4, 16, 64].into_iter().flat_map(|load| drafts.iter().map(move |&len| run(len, load)));
    let mut runs: Vec<Run> = runs.collect();
    runs[13].failed = vec![("503 Service Unavailable: the queue of 64 requests is full".into(), 3)];
    Results {
        format: FORMAT,
        command: "spec-bench models/llama-3.2-3b-fp8 --draft-len 0,2,4,8,auto --concurrency 1,4,16,64 \
                  --prompts prompts.jsonl --rounds 3 --max-tokens 256 --report report.html"
            .into(),
        started: 1_767_362_400,
        machine: Machine {
            processor: "AMD EPYC 9R14 96-Core Processor".into(),
            cpus: 16,
            memory_bytes: 64 << 30,
            version: "0.1.0".into(),
        },
        prompts: vec!["prompts.jsonl (80 prompts of 5 kinds)".into()],
        rounds: 3,
        max_tokens: 256,
        runs,
        advice: vec![
            "Serve with auto: 3.29 times the tokens a second of no drafts at 1 at a time, and never slower.".into(),
            "With 64 at a time a fixed K=8 pays least: verifying takes longer than the accepted drafts save.".into(),
        ],
    }
}
