//! Measures settings in turn, round by round, and puts the answers together.

use crate::answer::{Answer, Ask, millis};
use crate::endpoint::{Address, Common, Endpoint};
use crate::load;
use crate::quantiles::{Quantiles, median};
use crate::results::{Category, Latency, Rates, Run, Speculation};
use crate::setting::{Load, Setting};
use anyhow::{Context, Result};
use spec_build::progress::Progress;
use std::collections::BTreeMap;

/// How much is asked.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Times that each setting is measured.
    pub rounds: usize,
    /// Requests of a setting in a round; the prompts come in turn.
    pub requests: usize,
    /// Requests before each of those, which count for nothing.
    pub warm_up: usize,
    /// Shows nothing while it runs.
    pub quiet: bool,
    /// Of this measurement alone: a server may still have what an earlier one sent.
    pub key: u64,
}

/// One setting's answers of one round.
struct Round {
    answers: Vec<Answer>,
}

/// Measures every setting once a round, every other round backwards, so that a machine whose speed drifts leaves their ratios.
pub fn measure(settings: &[Setting], common: &Common, plan: &Plan) -> Result<Vec<Run>> {
    // One thread: the engine in this process needs the others.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(in_turn(settings, common, plan))
}

async fn in_turn(settings: &[Setting], common: &Common, plan: &Plan) -> Result<Vec<Run>> {
    // `[setting][round]`
    let mut rounds: Vec<Vec<Round>> = settings.iter().map(|_| Vec::new()).collect();
    let total = settings.len() * plan.rounds * plan.requests;
    let progress = match plan.quiet {
        true => Progress::hidden(),
        false => Progress::counting("spec-bench", total as u64, "requests"),
    };
    for round in 0..plan.rounds {
        for idx in turns(settings.len(), round) {
            let setting = &settings[idx];
            let answers = ask_all(setting, common, plan, (round, idx), &progress)
                .await
                .with_context(|| setting.endpoint.clone())?;
            rounds[idx].push(Round { answers });
        }
    }
    progress.finish();
    let plain = |setting: &Setting| settings.iter().position(|other| *other == setting.plain());
    let run = |idx: usize| {
        let plain = plain(&settings[idx]).map(|plain| &rounds[plain][..]);
        put_together(&settings[idx], common, &rounds[idx], plain)
    };
    Ok((0..settings.len()).map(run).collect())
}

/// The settings of a round in their order.
fn turns(settings: usize, round: usize) -> Vec<usize> {
    match round % 2 {
        0 => (0..settings).collect(),
        _ => (0..settings).rev().collect(),
    }
}

async fn ask_all(
    setting: &Setting,
    common: &Common,
    plan: &Plan,
    (round, turn): (usize, usize),
    progress: &Progress,
) -> Result<Vec<Answer>> {
    let address: Address = setting.endpoint.parse().map_err(anyhow::Error::msg)?;
    let endpoint = Endpoint::open(&address, setting, common).await?;
    let num_prompts = common.prompts.len();
    // Prompts of one measurement may share the cache of what they have in common, as users' do; none finds another's.
    let cache_salt = format!("spec-bench-{:x}-{round}-{turn}", plan.key);
    let ask = |idx: usize, kind: &str| Ask {
        prompt: idx % num_prompts,
        seed: idx as u64,
        cache_salt: format!("{cache_salt}-{kind}-{}", idx / num_prompts),
    };
    // Those that come last in a round, which tells least of the first.
    let warm_up = (0..plan.warm_up).map(|idx| ask(num_prompts - 1 - idx % num_prompts, "warm-up"));
    let first = match setting.load {
        Load::Concurrency(_) => setting.load,
        Load::Rate(_) => Load::Concurrency(1),
    };
    load::drive(&endpoint, first, warm_up.collect(), |_| ()).await;
    let asks = (0..plan.requests).map(|idx| ask(idx, "measured")).collect();
    Ok(load::drive(&endpoint, setting.load, asks, |_| progress.add(1)).await)
}

impl Round {
    fn answered(&self) -> impl Iterator<Item = &Answer> {
        self.answers.iter().filter(|answer| answer.failure.is_none())
    }

    /// From the first request to the last token.
    fn seconds(&self) -> f64 {
        let sent = self.answers.iter().map(|answer| answer.sent).min();
        let ended = self.answers.iter().map(Answer::ended).max();
        sent.zip(ended).map_or(0.0, |(sent, ended)| millis(sent, ended) / 1e3)
    }

    fn tokens_per_second(&self) -> f64 {
        let tokens: usize = self.answered().map(Answer::tokens).sum();
        tokens as f64 / self.seconds().max(1e-9)
    }

    /// What is the larger the faster answers come: tokens a second of all of them, or of each where requests come at a rate
    /// of their own, which decides about the former.
    fn pace(&self, load: Load) -> f64 {
        match load {
            Load::Concurrency(_) => self.tokens_per_second(),
            Load::Rate(_) => {
                let times = self.answered().filter_map(Answer::per_token_ms);
                1e3 / Quantiles::of(times.collect()).mean
            }
        }
    }

    fn requests_per_second(&self) -> f64 {
        self.answered().count() as f64 / self.seconds().max(1e-9)
    }

    /// Whether each answer is the same as another round's to the same request.
    fn same_texts(&self, other: &Self) -> impl Iterator<Item = bool> {
        let pairs = self.answers.iter().zip(&other.answers);
        let both = pairs.filter(|(one, two)| one.failure.is_none() && two.failure.is_none());
        both.map(|(one, two)| one.text_hash == two.text_hash)
    }

    /// Times as fast as another round. None where either answered nothing.
    fn speed_up(&self, plain: &Self, load: Load) -> Option<f64> {
        let ratio = self.pace(load) / plain.pace(load);
        Some(ratio).filter(|ratio| ratio.is_finite() && *ratio > 0.0)
    }
}

/// The share of all rounds' answers that are the same as those of plain decoding.
fn same_text(rounds: &[Round], plain: &[Round]) -> Option<f64> {
    let pairs = rounds.iter().zip(plain);
    let same: Vec<bool> = pairs.flat_map(|(one, plain)| one.same_texts(plain)).collect();
    let count = same.iter().filter(|same| **same).count();
    (!same.is_empty()).then(|| count as f64 / same.len() as f64)
}

fn put_together(
    setting: &Setting,
    common: &Common,
    rounds: &[Round],
    plain: Option<&[Round]>,
) -> Run {
    let answered: Vec<&Answer> = rounds.iter().flat_map(Round::answered).collect();
    let mut failed: BTreeMap<&str, usize> = BTreeMap::new();
    for failure in
        rounds.iter().flat_map(|round| &round.answers).filter_map(|a| a.failure.as_deref())
    {
        *failed.entry(failure).or_default() += 1;
    }
    let rates = |rate: fn(&Round) -> f64| median(rounds.iter().map(rate)).unwrap_or(0.0);
    let of_round = |(idx, round): (usize, &Round)| Rates {
        tokens_per_second: round.tokens_per_second(),
        speed_up: plain.and_then(|plain| round.speed_up(plain.get(idx)?, setting.load)),
    };
    let by_round: Vec<Rates> = rounds.iter().enumerate().map(of_round).collect();
    Run {
        setting: setting.clone(),
        tokens_per_second: rates(Round::tokens_per_second),
        requests_per_second: rates(Round::requests_per_second),
        speed_up: median(by_round.iter().filter_map(|rates| rates.speed_up)),
        by_round,
        same_text: plain.and_then(|plain| same_text(rounds, plain)),
        answered: answered.len(),
        failed: failed.into_iter().map(|(why, count)| (why.to_string(), count)).collect(),
        input_tokens: answered.iter().map(|answer| answer.input_tokens).sum(),
        output_tokens: answered.iter().map(|answer| answer.tokens()).sum(),
        latency: Latency {
            first_token: Quantiles::of(
                answered.iter().filter_map(|a| a.first_token_ms()).collect(),
            ),
            per_token: Quantiles::of(answered.iter().filter_map(|a| a.per_token_ms()).collect()),
            between: Quantiles::of(answered.iter().flat_map(|a| a.between_ms()).collect()),
            whole: Quantiles::of(answered.iter().map(|a| a.whole_ms()).collect()),
        },
        speculation: speculation(&answered),
        categories: categories(&answered, common, plain),
    }
}

/// What became of all their drafts. None where nobody told.
fn speculation(answers: &[&Answer]) -> Option<Speculation> {
    let mut told = answers.iter().filter_map(|answer| answer.speculation.as_ref());
    let first = told.next()?.clone();
    Some(told.fold(first, |mut sum, one| {
        sum.add(one);
        sum
    }))
}

fn categories(answered: &[&Answer], common: &Common, plain: Option<&[Round]>) -> Vec<Category> {
    let category = |answer: &Answer| common.prompts[answer.prompt].category.as_str();
    let of = |answers: &mut dyn Iterator<Item = &Answer>, name: &str| -> Option<f64> {
        let times = answers.filter(|answer| category(answer) == name);
        let quantiles = Quantiles::of(times.filter_map(Answer::per_token_ms).collect());
        (quantiles.count > 0).then_some(quantiles.mean)
    };
    let mut names: Vec<&str> =
        common.prompts.iter().map(|prompt| prompt.category.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let one = |name: &str| {
        let answers: Vec<&Answer> =
            answered.iter().copied().filter(|answer| category(answer) == name).collect();
        let per_token_ms = of(&mut answers.iter().copied(), name).unwrap_or(0.0);
        let of_plain =
            plain.and_then(|rounds| of(&mut rounds.iter().flat_map(Round::answered), name));
        Category {
            name: name.to_string(),
            answered: answers.len(),
            per_token_ms,
            speed_up: of_plain.filter(|_| per_token_ms > 0.0).map(|plain| plain / per_token_ms),
            speculation: speculation(&answers),
        }
    };
    names.into_iter().map(one).filter(|category| category.answered > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    /// Requests a second after each other, each with 10 tokens behind the first.
    fn round(ms_a_token: u64) -> Round {
        let start = Instant::now();
        let answer = |idx| {
            let mut answer = Answer::new(&Ask { prompt: 0, seed: 0, cache_salt: String::new() });
            answer.sent = start + Duration::from_secs(idx);
            let at = |token| answer.sent + Duration::from_millis(100 + token * ms_a_token);
            answer.came = (0..=10).map(|token| (at(token), 1)).collect();
            answer
        };
        Round { answers: (0..100).map(answer).collect() }
    }

    #[test]
    fn where_requests_come_at_their_rate_the_time_of_a_token_tells() {
        let (plain, faster) = (round(20), round(10));
        let ratio = |load| faster.pace(load) / plain.pace(load);
        assert!((ratio(Load::Rate(1.0)) - 2.0).abs() < 1e-9);
        // As many tokens, over nearly the same time.
        assert!(ratio(Load::Concurrency(1)) < 1.01);
    }

    #[test]
    fn rounds_without_answers_are_compared_with_nothing() {
        let (round, mut failed) = (round(20), round(20));
        for answer in &mut failed.answers {
            (answer.failure, answer.came) = (Some("refused".into()), Vec::new());
        }
        for load in [Load::Rate(1.0), Load::Concurrency(1)] {
            assert_eq!(round.speed_up(&round, load), Some(1.0));
            assert_eq!(failed.speed_up(&round, load), None);
            assert_eq!(round.speed_up(&failed, load), None);
        }
        assert_eq!(same_text(&[failed], &[round]), None);
    }

    #[test]
    fn one_text_of_all_rounds_that_differs_is_told() {
        let rounds = || -> Vec<Round> { (0..3).map(|_| round(20)).collect() };
        let mut other = rounds();
        assert_eq!(same_text(&other, &rounds()), Some(1.0));
        other[1].answers[7].text_hash ^= 1;
        assert_eq!(same_text(&other, &rounds()), Some(299.0 / 300.0));
    }

    #[test]
    fn every_setting_has_as_many_before_it_as_behind_it_over_two_rounds() {
        for settings in 1..5 {
            let (there, back) = (turns(settings, 0), turns(settings, 1));
            let place = |turns: &[usize], idx| turns.iter().position(|&turn| turn == idx).unwrap();
            for idx in 0..settings {
                assert_eq!(place(&there, idx) + place(&back, idx), settings - 1);
            }
        }
    }
}
