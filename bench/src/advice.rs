//! What follows from the figures, in sentences: whether speculation is worth it here, which draft length, what acceptance
//! breaks even, what a better drafter would bring. From what was measured, not from rules of thumb.

use crate::report::percent;
use crate::results::Run;
use crate::setting::{Load, Setting};
use spec_build::cli::DraftLen;

/// Speed-ups this close to 1 are called none: what runs of the same setting differ by on a quiet machine.
const SAME: f64 = 0.03;

/// Requests below which a tail says nothing.
const FEW_REQUESTS: usize = 16;

/// Acceptance of a better drafter that is asked about, above what was measured.
const BETTER: f64 = 0.1;

/// What is to be said of the runs.
pub fn advice(runs: &[Run]) -> Vec<String> {
    let mut sentences = Vec::new();
    for plain in runs.iter().filter(|run| run.setting.is_plain()) {
        let drafting: Vec<&Run> = runs
            .iter()
            .filter(|run| !run.setting.is_plain() && run.setting.plain() == plain.setting)
            .filter(|run| run.speed_up.is_some())
            .collect();
        if !drafting.is_empty() {
            sentences.extend(of_load(plain, &drafting, runs));
        }
    }
    let unequal = runs.iter().filter(|run| run.same_text.is_some_and(|share| share < 1.0));
    sentences.extend(unequal.map(|run| {
        let share = percent(run.same_text.unwrap_or(0.0));
        format!(
            "{}, {}: {share} of the answers are the same as without drafts; lossless speculation gives all of them.",
            run.setting.endpoint,
            run.setting.drafts()
        )
    }));
    if let Some(few) =
        runs.iter().map(|run| run.answered).filter(|&count| count < FEW_REQUESTS).min()
    {
        sentences.push(format!(
            "Some figures come from {few} requests: enough for a median, not for a tail. `--requests` asks more."
        ));
    }
    sentences
}

/// Of one endpoint, load and temperature.
fn of_load(plain: &Run, drafting: &[&Run], runs: &[Run]) -> Vec<String> {
    let speed_up = |run: &Run| run.speed_up.unwrap_or(1.0);
    let Some(best) = drafting.iter().max_by(|a, b| speed_up(a).total_cmp(&speed_up(b))) else {
        return Vec::new();
    };
    let several = runs.iter().any(|run| run.setting.endpoint != plain.setting.endpoint);
    let at = place(&plain.setting, several);
    let (gain, drafts) = (speed_up(best), best.setting.drafts());
    let mut sentences = vec![if gain >= 1.0 + SAME {
        let what = match plain.setting.load {
            Load::Concurrency(_) => "tokens a second",
            Load::Rate(_) => "tokens a second of an answer",
        };
        format!(
            "{at}: speculation is worth it. {drafts} gives {gain:.2} times the {what} of plain decoding \
             ({:.1} against {:.1}).",
            best.pace(),
            plain.pace()
        )
    } else if gain > 1.0 - SAME {
        format!(
            "{at}: speculation changes nothing: the best is {drafts} with {gain:.2} of plain decoding."
        )
    } else {
        format!(
            "{at}: speculation costs: the best is {drafts} with {gain:.2} of plain decoding. Turn it off here."
        )
    }];
    let auto = drafting.iter().find(|run| run.setting.draft_len == DraftLen::Auto);
    if let Some(auto) = auto.filter(|auto| speed_up(auto) < 0.95 * gain) {
        sentences.push(format!(
            "{at}: `auto` gives {:.2}, {:.0} % less than {drafts}: `spec-build profile` measures what steps cost here.",
            speed_up(auto),
            100.0 * (1.0 - speed_up(auto) / gain)
        ));
    }
    let fixed = drafting.iter().filter(|run| run.setting.draft_len != DraftLen::Auto);
    if let Some(fixed) = fixed.max_by(|a, b| speed_up(a).total_cmp(&speed_up(b))) {
        sentences.extend(break_even(fixed, plain).map(|sentence| format!("{at}: {sentence}")));
    }
    sentences
}

fn place(setting: &Setting, several: bool) -> String {
    let load = match setting.load {
        Load::Concurrency(1) => "One request at a time".to_string(),
        load => load.to_string(),
    };
    let heat = match setting.temperature {
        0.0 => String::new(),
        temperature => format!(", temperature {temperature}"),
    };
    match several {
        true => format!("{}, {load}{heat}", setting.endpoint),
        false => format!("{load}{heat}"),
    }
}

/// What acceptance pays, and what more of it would bring. Only of a fixed length, whose steps are alike, and of one request at
/// a time: what a step with drafts takes, in plain steps, is what it must give to break even.
fn break_even(run: &Run, plain: &Run) -> Option<String> {
    let DraftLen::Fixed(len) = run.setting.draft_len else { return None };
    let told = run.speculation.as_ref()?;
    // Each step drafts this long, or the sum below is of something else.
    let drafts_always = told.drafted as f64 >= 0.8 * (told.steps * len as u64) as f64;
    let plain_ms = plain.latency.per_token.mean;
    if !drafts_always || run.setting.load != Load::Concurrency(1) || plain_ms <= 0.0 {
        return None;
    }
    let given = told.tokens_per_step();
    let plain_steps = run.latency.per_token.mean * given / plain_ms;
    let (measured, needed) = (rate_giving(given, len), rate_giving(plain_steps, len));
    let better = (measured + BETTER).min(1.0);
    let (now, then) = (given / plain_steps, tokens_per_step(better, len) / plain_steps);
    let pays = match plain_steps > (len + 1) as f64 {
        true => "so no acceptance pays".to_string(),
        false => format!("so drafts pay from an acceptance of {:.0} % a token on", 100.0 * needed),
    };
    Some(format!(
        "a step that drafts and verifies {len} takes {plain_steps:.2} plain steps, {pays}; it is {:.0} %. A drafter that \
         reaches {:.0} % would give {then:.2} instead of {now:.2}{}",
        100.0 * measured,
        100.0 * better,
        if then > 1.1 * now { ": training one may be worth it." } else { "." }
    ))
}

/// Tokens of a step that drafts `len`, each accepted with this chance if those before it were.
fn tokens_per_step(rate: f64, len: usize) -> f64 {
    (0..=len as i32).map(|position| rate.powi(position)).sum()
}

/// The chance at which steps give so many tokens: between 0 and 1.
fn rate_giving(tokens: f64, len: usize) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        match tokens_per_step(middle, len) < tokens {
            true => low = middle,
            false => high = middle,
        }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantiles::Quantiles;
    use crate::results::{Latency, Speculation};

    /// A run of 40 requests at 10 ms a plain step.
    fn run(len: DraftLen, speed_up: f64, told: Option<Speculation>) -> Run {
        let of = |ms: f64| Quantiles::of(vec![ms; 40]);
        let given = told.as_ref().map_or(1.0, Speculation::tokens_per_step);
        let load = Load::Concurrency(1);
        let endpoint = "model".to_string();
        Run {
            setting: Setting { endpoint, draft_len: len, lookup: None, load, temperature: 0.0 },
            tokens_per_second: 100.0 * speed_up,
            requests_per_second: 1.0,
            speed_up: Some(speed_up),
            by_round: Vec::new(),
            same_text: Some(1.0),
            answered: 40,
            failed: Vec::new(),
            input_tokens: 400,
            output_tokens: 4000,
            latency: Latency {
                first_token: of(50.0),
                per_token: of(10.0 / speed_up),
                between: of(10.0 / speed_up * given),
                whole: of(1000.0 / speed_up),
            },
            speculation: told,
            categories: Vec::new(),
        }
    }

    /// Steps that draft 4 tokens of which 2 are accepted.
    fn told() -> Option<Speculation> {
        let histogram = vec![0, 0, 100];
        Some(Speculation { steps: 100, drafted: 400, accepted: 200, histogram })
    }

    #[test]
    fn what_pays_is_told_and_from_where_on() {
        let runs = [run(DraftLen::Fixed(0), 1.0, None), run(DraftLen::Fixed(4), 1.5, told())];
        let sentences = advice(&runs);
        assert!(
            sentences[0].contains("speculation is worth it. K=4 gives 1.50 times"),
            "{sentences:?}"
        );
        // 3 tokens a step at 1.5 times the speed: a step takes 2 plain ones, which 2 tokens a step pay for.
        assert!(sentences[1].contains("verifies 4 takes 2.00 plain steps"), "{sentences:?}");
        assert!(sentences[1].contains("an acceptance of 52 %"), "{sentences:?}");
        assert_eq!(sentences.len(), 2);
    }

    #[test]
    fn what_costs_is_told() {
        let plain = run(DraftLen::Fixed(0), 1.0, None);
        let runs = [plain.clone(), run(DraftLen::Fixed(4), 0.8, told())];
        assert!(advice(&runs)[0].contains("speculation costs"), "{:?}", advice(&runs));
        let runs = [plain.clone(), run(DraftLen::Auto, 1.01, told())];
        assert!(advice(&runs)[0].contains("changes nothing"), "{:?}", advice(&runs));
        let other = Run { same_text: Some(0.5), ..run(DraftLen::Auto, 1.5, told()) };
        assert!(advice(&[plain, other])[1].contains("50 % of the answers are the same"));
    }

    #[test]
    fn a_rate_is_found_from_what_it_gives() {
        for rate in [0.0, 0.3, 0.62, 0.9, 1.0] {
            let found = rate_giving(tokens_per_step(rate, 5), 5);
            assert!((found - rate).abs() < 1e-9, "{rate} {found}");
        }
    }

    #[test]
    fn without_plain_runs_nothing_is_compared() {
        let alone = Run { speed_up: None, same_text: None, ..run(DraftLen::Auto, 1.0, told()) };
        assert_eq!(advice(&[alone]), Vec::<String>::new());
    }
}
