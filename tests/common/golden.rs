//! Recorded outputs of the reference implementation in fp32, and how far an engine is from them.

use super::{data, running};
use safetensors::{SafeTensors, tensor::TensorView};
use spec_core::engine::Engine;
use spec_core::exec::Pool;
use spec_core::runtime::{DraftPolicy, Isa, Request, pages_for};
use spec_core::testing::batch::{Forward, Logits, Segment};
use spec_core::testing::{PageId, cpu};
use std::sync::Arc;

/// Tokens whose log-probabilities are compared at each last position: the reference's likeliest.
pub(crate) const COMPARED_TOKENS: usize = 1000;

/// Prompts recorded for each model.
const NUM_PROMPTS: usize = 4;

/// One recorded prompt.
pub(crate) struct Prompt {
    pub(crate) ids: Vec<u32>,
    /// The likeliest tokens after the last one, best first.
    pub(crate) likeliest: Vec<u32>,
    /// Their logits.
    pub(crate) logits: Vec<f32>,
    /// The likeliest next token at every position.
    pub(crate) argmax: Vec<u32>,
    /// The logarithm of the sum of exponentials of the logits at every position.
    pub(crate) logsumexp: Vec<f32>,
    /// 64 greedy tokens; end tokens do not stop them.
    pub(crate) greedy: Vec<u32>,
}

/// The recorded prompts of a model.
pub(crate) fn prompts(model: &str) -> Vec<Prompt> {
    let bytes = data::bytes(&format!("golden/{model}.safetensors"));
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let prompt = |idx: usize| {
        let tensor = |name: &str| tensors.tensor(&format!("{name}_{idx}")).expect("a tensor");
        Prompt {
            ids: ints(&tensor("ids")),
            likeliest: ints(&tensor("likeliest")),
            logits: floats(&tensor("logits")),
            argmax: ints(&tensor("argmax_all")),
            logsumexp: floats(&tensor("logsumexp_all")),
            greedy: ints(&tensor("greedy")),
        }
    };
    (0..NUM_PROMPTS).map(prompt).collect()
}

fn ints(tensor: &TensorView<'_>) -> Vec<u32> {
    assert_eq!(tensor.dtype(), safetensors::Dtype::I32);
    tensor.data().as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect()
}

pub(crate) fn floats(tensor: &TensorView<'_>) -> Vec<f32> {
    assert_eq!(tensor.dtype(), safetensors::Dtype::F32);
    tensor.data().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

/// A target's own model, without the runtime around it.
pub(crate) fn model(engine: &Engine, num_pages: usize) -> cpu::Model {
    let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let pool = Arc::new(Pool::new(num_cores));
    cpu::Model::load(engine, num_pages, Isa::detect(), pool).expect("loads")
}

/// Logits at every position of a text, from an empty cache.
pub(crate) fn all_logits(model: &mut cpu::Model, tokens: &[u32]) -> Logits {
    let pages: Vec<PageId> = (0..pages_for(tokens.len()) as PageId).collect();
    let segment = Segment {
        tokens,
        first_position: 0,
        pages: &pages,
        prompt_len: 0,
        num_logits: tokens.len(),
        tree: &[],
    };
    model.forward(&[segment]).expect("a forward pass")
}

/// How an engine compares with the reference over all prompts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Distance {
    /// Differences of the log-probabilities of [`COMPARED_TOKENS`] at each last position, ascending.
    pub(crate) log_probs: Vec<f64>,
    /// The largest difference of a recorded logit.
    pub(crate) logit: f64,
    /// The largest difference of a log-sum-exp.
    pub(crate) logsumexp: f64,
    /// Positions, and those whose likeliest token is the same.
    pub(crate) positions: usize,
    pub(crate) same_argmax: usize,
}

impl Distance {
    /// Runs every prompt through the engine's target.
    pub(crate) fn of(engine: &Engine, prompts: &[Prompt]) -> Self {
        let mut model = model(engine, 8);
        let mut distance = Self::default();
        for prompt in prompts {
            distance.add(prompt, &all_logits(&mut model, &prompt.ids));
        }
        distance.log_probs.sort_by(f64::total_cmp);
        distance
    }

    fn add(&mut self, prompt: &Prompt, logits: &Logits) {
        let last = logits.row(prompt.ids.len() - 1);
        let (ours, theirs) = (logsumexp(last), prompt.logsumexp[prompt.ids.len() - 1]);
        for (idx, (&token, &logit)) in prompt.likeliest.iter().zip(&prompt.logits).enumerate() {
            let own = last[token as usize];
            self.logit = self.logit.max(f64::from((own - logit).abs()));
            if idx < COMPARED_TOKENS {
                let (own, logit) = (f64::from(own) - ours, f64::from(logit) - f64::from(theirs));
                self.log_probs.push((own - logit).abs());
            }
        }
        for (position, (&token, &sum)) in prompt.argmax.iter().zip(&prompt.logsumexp).enumerate() {
            let row = logits.row(position);
            self.positions += 1;
            self.same_argmax += usize::from(likeliest(row, 1)[0] == token as usize);
            self.logsumexp = self.logsumexp.max((logsumexp(row) - f64::from(sum)).abs());
        }
    }

    /// Mean difference of a log-probability.
    pub(crate) fn mean(&self) -> f64 {
        self.log_probs.iter().sum::<f64>() / self.log_probs.len() as f64
    }

    /// 99 of 100 differences are at most this.
    pub(crate) fn p99(&self) -> f64 {
        self.log_probs[self.log_probs.len() * 99 / 100]
    }
}

/// The logarithm of the sum of exponentials.
pub(crate) fn logsumexp(row: &[f32]) -> f64 {
    let max = row.iter().fold(f64::NEG_INFINITY, |max, &value| max.max(f64::from(value)));
    max + row.iter().map(|&value| (f64::from(value) - max).exp()).sum::<f64>().ln()
}

/// The tokens with the largest logits, best first.
pub(crate) fn likeliest(row: &[f32], num: usize) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..row.len()).collect();
    let by_logit = |&a: &usize, &b: &usize| row[b].total_cmp(&row[a]).then(a.cmp(&b));
    ids.select_nth_unstable_by(num - 1, by_logit);
    ids.truncate(num);
    ids.sort_by(by_logit);
    ids
}

/// What the engine's runtime generates for every prompt, greedily and without speculation.
pub(crate) fn greedy(engine: &Engine, prompts: &[Prompt]) -> Vec<Vec<u32>> {
    let request = |prompt: &Prompt| Request {
        prompt: prompt.ids.clone().into(),
        max_tokens: prompt.greedy.len(),
        draft_len: Some(0),
        ignore_eos: true,
        ..Request::default()
    };
    let requests: Vec<Request> = prompts.iter().map(request).collect();
    let mut runtime = running::load(engine, &running::options(DraftPolicy::Fixed));
    running::run(&mut runtime, &requests).into_iter().map(|done| done.tokens).collect()
}

/// Tokens before the first that differs.
pub(crate) fn agreement(ours: &[u32], theirs: &[u32]) -> usize {
    ours.iter().zip(theirs).take_while(|(a, b)| a == b).count()
}
