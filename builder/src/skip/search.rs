//! The search for layers to skip: a path that leaves out one part after the other, always the one that costs least, and
//! then changes that are tried as long as there is time.
//!
//! Sets of layers are compared by the speed that they are predicted to bring. A draft takes the share of the weights that
//! its pass reads; how long rows take to verify was measured, or is taken to be nothing.

use anyhow::{Result, ensure};
use spec_core::engine::{CostTable, Engine, Manifest, pass_share};
use spec_core::exec::{Agreement, SkipTrial, Written};
use spec_core::model::LayerSkip;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// Tokens of a draft that is tried.
const DEPTH: usize = 4;
/// Places that sets are compared at, and judged at.
const PLACES: usize = 48;
/// Parts that are tried for each step of the path: those that cost least where they alone are left out.
const TRIED: usize = 6;
/// The path ends where its drafts are right so seldom.
const LEAST_RIGHT: f64 = 0.35;

/// What was found.
pub(super) struct Found {
    pub(super) skip: LayerSkip,
    /// On texts that it was not searched on.
    judged: Agreement,
    speed: Speed,
    tried: usize,
    has_costs: bool,
}

/// What drafts are predicted to bring.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Speed {
    /// Tokens of a draft with which they bring most.
    draft_len: usize,
    /// To plain decoding.
    ratio: f64,
    /// Of a pass of the whole target.
    pass: f64,
}

/// A part of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Attention(usize),
    Mlp(usize),
}

/// What predicts speeds of a target.
struct Model {
    num_layers: usize,
    /// Shares of a pass that a layer's parts take.
    attention: f64,
    mlp: f64,
    /// What verifying takes, by rows from 1 on, of a plain step.
    verify: Vec<f64>,
}

/// Layers for a target, by what it has written itself. Texts take turns in what they are for: to search on, to judge by.
pub(super) fn search(engine: &Engine, texts: &[Written], minutes: f64) -> Result<Found> {
    let texts: Vec<Written> = texts.iter().filter(|text| text.has_place(DEPTH)).cloned().collect();
    ensure!(
        texts.len() >= 2,
        "{} answers are long enough to try drafts in, expected 2 at least: see --skip-prompts",
        texts.len()
    );
    let end = Instant::now() + Duration::from_secs_f64(60.0 * minutes);
    let take = |first: usize| texts.iter().skip(first).step_by(2).cloned().collect::<Vec<_>>();
    let trial = SkipTrial::new(engine, &take(0), DEPTH, PLACES, None)?;
    let model = Model::of(engine);
    let mut search = Search { trial: &trial, model: &model, end, tried: 0, best: None };
    search.run()?;
    let (tried, best) = (search.tried, search.best);
    let (skip, _) = best.expect("at least one set was tried");
    drop(trial);
    let judged = SkipTrial::new(engine, &take(1), DEPTH, PLACES, None)?.judge(&skip)?;
    let speed = model.speed(&skip, &judged.accepted);
    let has_costs = engine.manifest().costs.is_some();
    Ok(Found { skip, judged, speed, tried, has_costs })
}

struct Search<'a> {
    trial: &'a SkipTrial,
    model: &'a Model,
    end: Instant,
    tried: usize,
    best: Option<(LayerSkip, f64)>,
}

impl Search<'_> {
    fn run(&mut self) -> Result<()> {
        let ranked = self.ranked()?;
        self.walk(ranked.clone())?;
        self.improve(&ranked)
    }

    /// Tries a set, and keeps it if there is none better; how often its first draft is right.
    fn judge(&mut self, skip: &LayerSkip) -> Result<f64> {
        let agreement = self.trial.judge(skip)?;
        self.tried += 1;
        let ratio = self.model.speed(skip, &agreement.expected).ratio;
        if self.best.as_ref().is_none_or(|(_, best)| ratio > *best) {
            self.best = Some((skip.clone(), ratio));
        }
        Ok(agreement.expected[0])
    }

    /// All parts, first those that cost the fewest drafts for what they save.
    fn ranked(&mut self) -> Result<Vec<Part>> {
        let mut parts: Vec<(Part, f64)> = Vec::new();
        for part in self.model.parts() {
            let right = self.judge(&with(&LayerSkip::default(), part))?;
            parts.push((part, (1.0 - right) / self.model.share(part)));
        }
        parts.sort_by(|a, b| a.1.total_cmp(&b.1));
        Ok(parts.into_iter().map(|(part, _)| part).collect())
    }

    /// Leaves out one part after the other.
    fn walk(&mut self, mut left: Vec<Part>) -> Result<()> {
        let mut skip = LayerSkip::default();
        while !left.is_empty() && !self.is_over() {
            let mut tries = Vec::new();
            for (idx, &part) in left.iter().enumerate().take(TRIED) {
                let right = self.judge(&with(&skip, part))?;
                tries.push((idx, right, (1.0 - right) / self.model.share(part)));
            }
            tries.sort_by(|a, b| a.2.total_cmp(&b.2));
            let (idx, right, _) = tries[0];
            if right < LEAST_RIGHT {
                return Ok(());
            }
            skip = with(&skip, left.remove(idx));
        }
        Ok(())
    }

    /// Changes the best set by a part or two, as long as there is time. What is tried follows from the ranks alone.
    fn improve(&mut self, ranked: &[Part]) -> Result<()> {
        let mut turn = 0;
        while !self.is_over() {
            let Some((best, _)) = self.best.clone() else { return Ok(()) };
            let count = ranked.len();
            let (first, second) = (turn % count, turn / count);
            if second > count {
                return Ok(());
            }
            let changed = toggled(&best, ranked[first]);
            let changed = match second {
                0 => changed,
                _ => toggled(&changed, ranked[(first + second) % count]),
            };
            if changed != LayerSkip::default() {
                self.judge(&changed)?;
            }
            // From the beginning, once there is a better one.
            let is_better = self.best.as_ref().is_some_and(|(now, _)| *now != best);
            turn = if is_better { 0 } else { turn + 1 };
        }
        Ok(())
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.end
    }
}

fn layers_of(skip: &mut LayerSkip, part: Part) -> (&mut Vec<usize>, usize) {
    match part {
        Part::Attention(layer) => (&mut skip.attention, layer),
        Part::Mlp(layer) => (&mut skip.mlp, layer),
    }
}

/// Leaves out a part as well.
fn with(skip: &LayerSkip, part: Part) -> LayerSkip {
    let mut skip = skip.clone();
    let (layers, layer) = layers_of(&mut skip, part);
    if let Err(at) = layers.binary_search(&layer) {
        layers.insert(at, layer);
    }
    skip
}

/// Leaves out a part that was in, or the other way round.
fn toggled(skip: &LayerSkip, part: Part) -> LayerSkip {
    let mut changed = skip.clone();
    let (layers, layer) = layers_of(&mut changed, part);
    match layers.binary_search(&layer) {
        Ok(at) => {
            layers.remove(at);
            changed
        }
        Err(_) => with(skip, part),
    }
}

impl Model {
    fn of(engine: &Engine) -> Self {
        let Manifest { model, precision, device, .. } = engine.manifest();
        let share =
            |part| 1.0 - pass_share(&with(&LayerSkip::default(), part), model, precision, device);
        let costs = engine.manifest().costs.as_ref();
        Self {
            num_layers: model.num_layers,
            attention: share(Part::Attention(0)),
            mlp: share(Part::Mlp(0)),
            verify: (1..=DEPTH + 1).map(|rows| ratio(costs, rows)).collect(),
        }
    }

    fn parts(&self) -> impl Iterator<Item = Part> + use<> {
        let layers = 0..self.num_layers;
        layers.flat_map(|layer| [Part::Attention(layer), Part::Mlp(layer)])
    }

    fn share(&self, part: Part) -> f64 {
        match part {
            Part::Attention(_) => self.attention,
            Part::Mlp(_) => self.mlp,
        }
    }

    /// The best that drafts without these layers bring where `accepted[i]` is how often `i + 1` of them are right.
    fn speed(&self, skip: &LayerSkip, accepted: &[f64]) -> Speed {
        let LayerSkip { attention, mlp } = skip;
        let left_out = attention.len() as f64 * self.attention + mlp.len() as f64 * self.mlp;
        let pass = 1.0 - left_out;
        let mut best = Speed { draft_len: 0, ratio: 0.0, pass };
        let mut tokens = 1.0;
        for (idx, accepted) in accepted.iter().enumerate() {
            let draft_len = idx + 1;
            tokens += accepted;
            let ratio = tokens / (draft_len as f64 * pass + self.verify[draft_len]);
            if ratio > best.ratio {
                best = Speed { draft_len, ratio, pass };
            }
        }
        best
    }
}

/// What a pass over so many rows takes, of one over one row: nothing more where that was not measured.
fn ratio(costs: Option<&CostTable>, rows: usize) -> f64 {
    let Some(CostTable { rows: at, step_ms, .. }) = costs else { return 1.0 };
    let above = at.partition_point(|&point| point < rows).min(at.len() - 1);
    let ms = match above.checked_sub(1) {
        Some(below) if at[above] > rows => {
            let share = (rows - at[below]) as f64 / (at[above] - at[below]) as f64;
            step_ms[below] + share * (step_ms[above] - step_ms[below])
        }
        _ => step_ms[above],
    };
    ms / step_ms[0]
}

impl Found {
    pub(super) fn report(&self) -> String {
        let Self { skip, judged, speed, tried, has_costs } = self;
        let Speed { draft_len, ratio, pass } = speed;
        let accepted: Vec<String> =
            judged.accepted.iter().map(|share| format!("{share:.2}")).collect();
        let mut text = format!(
            "{tried} sets were tried: without {} attentions and {} MLPs a pass takes {pass:.2} of one of the target, and on \
             other texts drafts of {DEPTH} are right up to each of their tokens at {}; predicted with {draft_len} a step: \
             {ratio:.2} of plain decoding\n",
            skip.attention.len(),
            skip.mlp.len(),
            accepted.join(" "),
        );
        if !has_costs {
            text += "what rows take to verify is taken to be nothing: `spec-build profile` measures it\n";
        }
        if *ratio < 1.0 {
            _ = writeln!(
                text,
                "this drafter is predicted to bring nothing: lengths that adapt will leave it idle"
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Model {
        Model { num_layers: 10, attention: 0.02, mlp: 0.06, verify: vec![1.0, 1.1, 1.2, 1.3, 1.4] }
    }

    #[test]
    fn a_speed_is_tokens_by_what_they_take() {
        let skip = LayerSkip { attention: vec![1, 2], mlp: vec![3, 4, 5, 6, 7, 8] };
        // A pass takes 0.6: 1.9 tokens in 1.7, 2.7 in 2.4, 3.4 in 3.1, 3.5 in 3.8.
        let speed = model().speed(&skip, &[0.9, 0.8, 0.7, 0.1]);
        assert_eq!(speed.draft_len, 2);
        assert!((speed.ratio - 2.7 / 2.4).abs() < 1e-9 && (speed.pass - 0.6).abs() < 1e-9);
    }

    #[test]
    fn rows_between_those_that_were_measured_lie_between_them() {
        let costs = CostTable {
            rows: vec![1, 2, 6],
            step_ms: vec![10.0, 11.0, 15.0],
            ..CostTable::default()
        };
        let at = |rows| (10.0 * ratio(Some(&costs), rows)).round() as u32;
        assert_eq!([1, 2, 3, 5, 6, 9].map(at), [10, 11, 12, 14, 15, 15]);
        assert_eq!(ratio(None, 5), 1.0);
    }

    #[test]
    fn parts_are_put_in_order_and_taken_out() {
        let skip = LayerSkip { attention: vec![4], mlp: vec![] };
        let two = with(&skip, Part::Attention(2));
        assert_eq!(two.attention, [2, 4]);
        assert_eq!(with(&two, Part::Attention(2)), two);
        assert_eq!(toggled(&two, Part::Attention(4)).attention, [2]);
        assert_eq!(toggled(&two, Part::Mlp(0)).mlp, [0]);
    }
}
