//! Small target and draft models with known exact probabilities, and a naive twin of the sampler that
//! computes those probabilities.

use spec_core::sampling::SamplingParams;
use spec_core::testing::draft::Proposal;
use spec_core::testing::sampling::{Context, Coupling, Distribution, Sampler, Stream};
use spec_core::testing::verify::{Verdict, verify};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

/// Stands before every generated token.
pub(crate) const PROMPT: [u32; 2] = [1, 0];

/// Tokens that `min_tokens` holds back.
pub(crate) const ENDS: [u32; 1] = [2];

/// Logits after the prompt and these generated tokens.
pub(crate) type Model = Box<dyn Fn(&[u32]) -> Vec<f32>>;

/// The token to propose after these generated ones.
pub(crate) type Guess = Box<dyn Fn(&[u32]) -> u32>;

/// A verification rule under test.
pub(crate) type Rule<'a> = &'a dyn Fn(
    &Sampler,
    &Proposal,
    &mut dyn FnMut(Option<usize>, &[u32]) -> Distribution,
    usize,
) -> Verdict;

/// The rule that is shipped.
pub(crate) fn shipped(
    sampler: &Sampler,
    proposal: &Proposal,
    target: &mut dyn FnMut(Option<usize>, &[u32]) -> Distribution,
    first_position: usize,
) -> Verdict {
    verify(sampler, proposal, target, first_position)
}

/// Where the drafts of a game come from.
pub(crate) enum Drafts {
    /// Drawn from a model's processed distribution.
    Drawn(Model),
    /// Drawn like that, but reported with the distribution of another temperature: a bug.
    Misreported(Model, f32),
    /// Given by a rule.
    Given(Guess),
}

/// A target, a drafter and a request.
pub(crate) struct Game {
    pub(crate) params: SamplingParams,
    pub(crate) target: Model,
    pub(crate) drafts: Drafts,
    target_rows: RefCell<HashMap<Vec<u32>, Distribution>>,
    draft_rows: RefCell<HashMap<Vec<u32>, (Distribution, Distribution)>>,
}

impl Game {
    pub(crate) fn new(params: SamplingParams, target: Model, drafts: Drafts) -> Self {
        params.validate(1 << 10).expect("games ask for what is allowed");
        Self {
            params,
            target,
            drafts,
            target_rows: Default::default(),
            draft_rows: Default::default(),
        }
    }

    pub(crate) fn sampler(&self, coupling: Coupling) -> Sampler {
        Sampler::new(self.params.clone(), coupling, ENDS.to_vec())
    }

    /// The sampler's distribution after these generated tokens, of which the last `num_drafted` are drafts.
    fn row(
        params: &SamplingParams,
        model: &Model,
        output: &[u32],
        num_drafted: usize,
    ) -> Distribution {
        let (generated, drafted) = output.split_at(output.len() - num_drafted);
        let tokens = [&PROMPT[..], generated].concat();
        let context = Context { tokens: &tokens, prompt_len: PROMPT.len(), drafted };
        let sampler = Sampler::new(params.clone(), Coupling::Independent(0), ENDS.to_vec());
        sampler.distribution(&model(output), context)
    }

    pub(crate) fn target_row(&self, output: &[u32], num_drafted: usize) -> Distribution {
        if let Some(row) = self.target_rows.borrow().get(output) {
            return row.clone();
        }
        let row = Self::row(&self.params, &self.target, output, num_drafted);
        self.target_rows.borrow_mut().insert(output.to_vec(), row.clone());
        row
    }

    /// The distribution a draft is drawn from and the one that is reported.
    fn draft_row(
        &self,
        model: &Model,
        temperature: f32,
        output: &[u32],
    ) -> (Distribution, Distribution) {
        if let Some(rows) = self.draft_rows.borrow().get(output) {
            return rows.clone();
        }
        let other = SamplingParams { temperature, ..self.params.clone() };
        let rows = (
            Self::row(&self.params, model, output, output.len()),
            Self::row(&other, model, output, output.len()),
        );
        self.draft_rows.borrow_mut().insert(output.to_vec(), rows.clone());
        rows
    }

    pub(crate) fn propose(&self, sampler: &Sampler, output: &[u32], draft_len: usize) -> Proposal {
        let mut proposal = Proposal::default();
        let mut output = output.to_vec();
        for _ in 0..draft_len {
            let position = PROMPT.len() + output.len();
            let (token, q) = match &self.drafts {
                Drafts::Given(give) => (give(&output), None),
                Drafts::Drawn(model) | Drafts::Misreported(model, _) => {
                    let temperature = match self.drafts {
                        Drafts::Misreported(_, temperature) => temperature,
                        _ => self.params.temperature,
                    };
                    let (drawn, reported) = self.draft_row(model, temperature, &output);
                    (
                        sampler.draw(
                            &drawn,
                            position,
                            Stream::Draft { depth: proposal.len(), place: 0 },
                        ),
                        Some(reported),
                    )
                }
            };
            proposal.push(token, q);
            output.push(token);
        }
        proposal
    }

    /// One step after `output`.
    pub(crate) fn step(
        &self,
        sampler: &Sampler,
        output: &[u32],
        draft_len: usize,
        rule: Rule<'_>,
    ) -> (usize, Vec<u32>) {
        let proposal = self.propose(sampler, output, draft_len);
        let mut row = |_: Option<usize>, drafted: &[u32]| {
            self.target_row(&[output, drafted].concat(), drafted.len())
        };
        let verdict = rule(sampler, &proposal, &mut row, PROMPT.len() + output.len());
        (verdict.accepted(), verdict.tokens(&proposal).collect())
    }

    /// Exact target probabilities.
    pub(crate) fn p(&self, output: &[u32]) -> Vec<f64> {
        naive(&self.params, &(self.target)(output), output)
    }

    /// Exact draft probabilities.
    fn q(&self, output: &[u32]) -> Vec<f64> {
        match &self.drafts {
            Drafts::Drawn(model) | Drafts::Misreported(model, _) => {
                naive(&self.params, &model(output), output)
            }
            Drafts::Given(give) => {
                let mut q = vec![0.0; (self.target)(output).len()];
                q[give(output) as usize] = 1.0;
                q
            }
        }
    }

    /// The exact joint distribution of (number accepted, tokens) of a first step.
    pub(crate) fn expected_step(&self, draft_len: usize) -> BTreeMap<(usize, Vec<u32>), f64> {
        let mut cells = BTreeMap::new();
        self.expect(draft_len, &mut Vec::new(), 1.0, &mut cells);
        cells
    }

    fn expect(
        &self,
        draft_len: usize,
        output: &mut Vec<u32>,
        reached: f64,
        cells: &mut BTreeMap<(usize, Vec<u32>), f64>,
    ) {
        let accepted = output.len();
        let p = self.p(output);
        let q = if accepted < draft_len { self.q(output) } else { vec![0.0; p.len()] };
        for (token, (&p, &q)) in p.iter().zip(&q).enumerate() {
            output.push(token as u32);
            if p > q {
                *cells.entry((accepted, output.clone())).or_default() += reached * (p - q);
            }
            if p.min(q) > 0.0 {
                self.expect(draft_len, output, reached * p.min(q), cells);
            }
            output.pop();
        }
    }

    /// The exact distribution of the first `len` tokens.
    pub(crate) fn expected_text(&self, len: usize) -> BTreeMap<Vec<u32>, f64> {
        let mut texts = BTreeMap::from([(Vec::new(), 1.0)]);
        for _ in 0..len {
            let longer = texts.iter().flat_map(|(text, reached)| {
                (0u32..)
                    .zip(self.p(text))
                    .filter(|(_, p)| *p > 0.0)
                    .map(move |(token, p)| ([&text[..], &[token]].concat(), reached * p))
            });
            texts = longer.collect();
        }
        texts
    }
}

/// What the sampler should do, in f64 with full sorts: bans, penalties, temperature, top-k, top-p, min-p.
pub(crate) fn naive(params: &SamplingParams, logits: &[f32], output: &[u32]) -> Vec<f64> {
    let penalise = |(id, &logit): (usize, &f32)| {
        let count = output.iter().filter(|&&token| token as usize == id).count() as f64;
        let is_allowed = |allowed: &[u32]| allowed.contains(&(id as u32));
        let is_held_back = output.len() < params.min_tokens && ENDS.contains(&(id as u32));
        if is_held_back || !params.allowed_tokens.as_deref().is_none_or(is_allowed) {
            return f64::NEG_INFINITY;
        }
        let mut logit = f64::from(logit);
        if count > 0.0 || PROMPT.contains(&(id as u32)) {
            let factor = f64::from(params.repetition_penalty);
            logit = if logit > 0.0 { logit / factor } else { logit * factor };
        }
        logit -= count * f64::from(params.frequency_penalty);
        logit - if count > 0.0 { f64::from(params.presence_penalty) } else { 0.0 }
    };
    let logits: Vec<f64> = logits.iter().enumerate().map(penalise).collect();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if params.is_greedy() {
        order.truncate(1);
    }
    if params.top_k > 0 {
        order.truncate(params.top_k);
    }
    let likeliest = logits[order[0]];
    let temperature = if params.is_greedy() { 1.0 } else { f64::from(params.temperature) };
    let weight = |id: usize| ((logits[id] - likeliest) / temperature).exp();
    if params.top_p < 1.0 {
        let goal = f64::from(params.top_p) * order.iter().map(|&id| weight(id)).sum::<f64>();
        let mut held = 0.0;
        let crosses = order.iter().position(|&id| {
            held += weight(id);
            held >= goal
        });
        order.truncate(crosses.map_or(order.len(), |idx| idx + 1));
    }
    order.retain(|&id| weight(id) >= f64::from(params.min_p));
    let total: f64 = order.iter().map(|&id| weight(id)).sum();
    let mut probs = vec![0.0; logits.len()];
    order.iter().for_each(|&id| probs[id] = weight(id) / total);
    probs
}

/// A model whose logits depend on the last token and the position, between -`spread` and `spread`.
pub(crate) fn markov(vocab: u32, salt: u64, spread: f32) -> Model {
    Box::new(move |output| {
        let last = output.last().copied().unwrap_or(99);
        let state =
            u64::from(last) << 32 ^ output.len() as u64 ^ salt.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let value = |id: u32| (uniform(state ^ u64::from(id) << 48) * 2.0 - 1.0) as f32 * spread;
        (0..vocab).map(value).collect()
    })
}

/// A model with the same logits everywhere.
pub(crate) fn constant(logits: &[f32]) -> Model {
    let logits = logits.to_vec();
    Box::new(move |_| logits.clone())
}

/// SplitMix64, for test inputs and for rules that are not ours.
pub(crate) fn uniform(seed: u64) -> f64 {
    let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}
