//! What was measured, as it is written to JSON, shown on the terminal and drawn in the report.

use crate::machine::Machine;
use crate::quantiles::Quantiles;
use crate::setting::{Load, Setting};
use serde::{Deserialize, Serialize};

/// Of the JSON: readers refuse another.
pub const FORMAT: u32 = 2;

/// Everything that one command measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`FORMAT`].
    pub format: u32,
    /// The command line.
    pub command: String,
    /// Seconds since 1970 at the start.
    pub started: u64,
    /// Where it ran.
    pub machine: Machine,
    /// What the prompts are: file names, or the built-in ones.
    pub prompts: Vec<String>,
    /// Times that every setting was measured, in turn with the others.
    pub rounds: usize,
    /// New tokens of an answer at most.
    pub max_tokens: usize,
    /// One a setting, in the order in which they were measured.
    pub runs: Vec<Run>,
    /// What follows from the figures, in sentences.
    pub advice: Vec<String>,
}

/// One setting, over all rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// What was measured.
    pub setting: Setting,
    /// Output tokens a second of all requests together, the median of the rounds.
    pub tokens_per_second: f64,
    /// Requests that ended in a second, the median of the rounds.
    pub requests_per_second: f64,
    /// `tokens_per_second` over that of draft length 0 at the same endpoint, load and temperature: the median of the
    /// rounds' ratios. Where requests come at a rate, which decides about that, the mean time of a token of draft length 0 over
    /// this one's. None where that was not measured.
    pub speed_up: Option<f64>,
    /// What these are medians of, a round after the other.
    pub by_round: Vec<Rates>,
    /// Answers that were the same as with draft length 0 in the same round, as a share. None where that was not measured.
    pub same_text: Option<f64>,
    /// Requests that were answered.
    pub answered: usize,
    /// Requests that failed, and why: `(message, count)`.
    pub failed: Vec<(String, usize)>,
    /// Tokens of prompts and of answers.
    pub input_tokens: usize,
    /// Tokens of answers.
    pub output_tokens: usize,
    /// Milliseconds, of all rounds' requests together.
    pub latency: Latency,
    /// None where the endpoint does not tell.
    pub speculation: Option<Speculation>,
    /// By category of the prompts, by name; one alone where prompts have none.
    pub categories: Vec<Category>,
}

/// A round of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Output tokens a second.
    pub tokens_per_second: f64,
    /// Over that of draft length 0 in the same round. None where that was not measured.
    pub speed_up: Option<f64>,
}

impl Run {
    /// What its speed-up is a ratio of: tokens a second of all answers, or of each where requests come at a rate.
    pub fn pace(&self) -> f64 {
        match self.setting.load {
            Load::Concurrency(_) => self.tokens_per_second,
            Load::Rate(_) => 1e3 / self.latency.per_token.mean,
        }
    }

    /// The least and the largest speed-up of its rounds. None where there are not two.
    pub fn speed_up_range(&self) -> Option<(f64, f64)> {
        let ratios: Vec<f64> = self.by_round.iter().filter_map(|round| round.speed_up).collect();
        let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let largest = ratios.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        (ratios.len() > 1 && !self.setting.is_plain()).then_some((least, largest))
    }
}

/// How long users wait, in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// From sending to the first token.
    pub first_token: Quantiles,
    /// From the first token to the last, by token: one value a request of at least two tokens.
    pub per_token: Quantiles,
    /// Between responses that bring tokens; a step with accepted drafts brings several at once.
    pub between: Quantiles,
    /// From sending to the last token.
    pub whole: Quantiles,
}

/// What became of drafts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Speculation {
    /// Steps that gave tokens.
    pub steps: u64,
    /// Draft tokens that were verified.
    pub drafted: u64,
    /// Draft tokens that were accepted.
    pub accepted: u64,
    /// Steps that accepted exactly 0, 1, 2 .. draft tokens.
    pub histogram: Vec<u64>,
}

/// Prompts of one kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Category {
    /// As the prompts' file calls it.
    pub name: String,
    /// Requests that were answered.
    pub answered: usize,
    /// The mean over requests of their time per token, in milliseconds.
    pub per_token_ms: f64,
    /// That of draft length 0 over this one's. None where that was not measured.
    pub speed_up: Option<f64>,
    /// None where the endpoint does not tell.
    pub speculation: Option<Speculation>,
}

impl Speculation {
    /// Adds another request's.
    pub fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        if self.histogram.len() < other.histogram.len() {
            self.histogram.resize(other.histogram.len(), 0);
        }
        for (sum, count) in self.histogram.iter_mut().zip(&other.histogram) {
            *sum += count;
        }
    }

    /// Accepted of the draft tokens, 0 to 1. None where nothing was drafted.
    pub fn acceptance(&self) -> Option<f64> {
        (self.drafted > 0).then(|| self.accepted as f64 / self.drafted as f64)
    }

    /// Tokens that a step gave: its accepted drafts and one more.
    pub fn tokens_per_step(&self) -> f64 {
        1.0 + self.accepted as f64 / self.steps.max(1) as f64
    }

    /// Of each position of a draft, the share of steps that accepted it.
    pub fn by_position(&self) -> Vec<f64> {
        let steps: u64 = self.histogram.iter().sum();
        let at_least = |position: usize| self.histogram[position + 1..].iter().sum::<u64>();
        let positions = 0..self.histogram.len().saturating_sub(1);
        positions.map(|position| at_least(position) as f64 / steps.max(1) as f64).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_became_of_drafts_adds_up() {
        let mut sum = Speculation::default();
        sum.add(&Speculation { steps: 4, drafted: 8, accepted: 3, histogram: vec![2, 1, 1] });
        sum.add(&Speculation { steps: 2, drafted: 0, accepted: 0, histogram: vec![2] });
        assert_eq!((sum.steps, sum.histogram.clone()), (6, vec![4, 1, 1]));
        assert_eq!((sum.acceptance(), sum.tokens_per_step()), (Some(0.375), 1.5));
        assert_eq!(sum.by_position(), [2.0 / 6.0, 1.0 / 6.0]);
        assert_eq!(Speculation::default().acceptance(), None);
    }
}
