//! Turns logits into tokens for one request, deterministically given its coupling.

use super::noise::Noise;
use super::{Context, Distribution, SamplingParams, context, select, truncate};
use crate::engine::MAX_DRAFT_LEN;
use std::borrow::Cow;

/// How the randomness of a request is keyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coupling {
    /// By the request's seed: drafter and target draw with the same noise, so the text does not depend on
    /// the drafts.
    Path(u64),
    /// By a key drawn at admission: drafter and target draw independently, and rejection sampling keeps the
    /// target's distribution. Accepts the most.
    Independent(u64),
}

/// Who draws.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// The target, at a position where no draft was kept.
    Target,
    /// A drafter, for a place in its proposal. The first draft is another position in each step, so no draw of a position is
    /// repeated, in this step or a later one.
    Draft {
        /// How far it is from the first draft.
        depth: usize,
        /// Which of its level it is.
        place: usize,
    },
}

/// Turns logits into tokens for one request.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    coupling: Coupling,
    end_tokens: Vec<u32>,
}

impl Sampler {
    /// `params` must be valid and `coupling` must be `Path` if they hold a seed. The end tokens are those
    /// that `min_tokens` holds back.
    pub fn new(params: SamplingParams, coupling: Coupling, end_tokens: Vec<u32>) -> Self {
        Self { params, coupling, end_tokens }
    }

    /// What the request asked for.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// How its randomness is keyed.
    pub fn coupling(&self) -> Coupling {
        self.coupling
    }

    /// What `min_tokens` holds back.
    pub(crate) fn end_tokens(&self) -> &[u32] {
        &self.end_tokens
    }

    /// The distribution of the token after `context`, given its logits: bias, bans (`min_tokens`, bad words),
    /// penalties, temperature, top-k, top-p, min-p, in this order. Greedy gives all to the likeliest token,
    /// the lowest id on ties.
    ///
    /// NaN counts as negative infinity. If nothing is left (everything is banned or not a number), the
    /// likeliest of the allowed tokens by the logits as given gets all, or the first, of those that `min_tokens` does
    /// not hold back if there are any: a request must not bring down its batch.
    pub fn distribution(&self, logits: &[f32], context: Context<'_>) -> Distribution {
        let scores = self.edited(logits, context);
        if !self.params.is_greedy() && select::max(&scores) > f32::NEG_INFINITY {
            return truncate::truncate(&scores, &self.params);
        }
        let likeliest = select::argmax(&scores).map(|idx| idx as u32);
        Distribution::certain(likeliest.unwrap_or_else(|| self.likeliest_allowed(logits, context)))
    }

    /// The likeliest tokens after `context`, so many, best first, by the logits with bias, bans and penalties.
    pub fn ranked(&self, logits: &[f32], context: Context<'_>, num: usize) -> Vec<u32> {
        let mut top = select::top_k(&self.edited(logits, context), num);
        top.retain(|&(_, score)| score > f32::NEG_INFINITY);
        top.sort_unstable_by(select::descending);
        top.into_iter().map(|(token, _)| token).collect()
    }

    fn edited<'a>(&self, logits: &'a [f32], context: Context<'_>) -> Cow<'a, [f32]> {
        let mut scores = Cow::Borrowed(logits);
        if !context::edits_nothing(&self.params) {
            context::edit(&self.params, &self.end_tokens, context, scores.to_mut());
        }
        scores
    }

    fn likeliest_allowed(&self, logits: &[f32], context: Context<'_>) -> u32 {
        let Some(allowed) = self.params.allowed_tokens.as_deref() else {
            return select::argmax(logits).unwrap_or(0) as u32;
        };
        // What ends the text too early comes after what would complete a bad word.
        let is_held_back = context::holds_back_ends(&self.params, context);
        let goes_on = |token: &u32| !(is_held_back && self.end_tokens.contains(token));
        let going_on: Vec<u32> = allowed.iter().copied().filter(goes_on).collect();
        let tokens = if going_on.is_empty() { allowed } else { &going_on };
        let logit = |&token: &u32| logits.get(token as usize).copied().unwrap_or(f32::NAN);
        let their_logits: Vec<f32> = tokens.iter().map(logit).collect();
        tokens[select::argmax(&their_logits).unwrap_or(0)]
    }

    /// Draws the token at `position`. The same arguments always give the same token.
    pub fn draw(&self, dist: &Distribution, position: usize, stream: Stream) -> u32 {
        let noise = match (self.coupling, stream) {
            (Coupling::Path(seed), _) => Noise::new(seed, position, TARGET_LANE),
            (Coupling::Independent(key), Stream::Target) => Noise::new(key, position, TARGET_LANE),
            (Coupling::Independent(key), Stream::Draft { depth, place }) => {
                let nth = depth + place * MAX_DRAFT_LEN;
                Noise::new(key, position, DRAFT_LANE | (nth as u32) << LANE_BITS)
            }
        };
        dist.race(noise)
    }

    /// A uniform variate between 0 and 1, both excluded, that decides on the `nth` draft for `position`.
    pub(crate) fn coin(&self, position: usize, nth: usize) -> f64 {
        let (Coupling::Path(key) | Coupling::Independent(key)) = self.coupling;
        Noise::new(key, position, COIN_LANE).uniform(nth as u32)
    }
}

const TARGET_LANE: u32 = 0;
const DRAFT_LANE: u32 = 1;
const COIN_LANE: u32 = 2;
/// Above these stands the place in a proposal.
const LANE_BITS: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn sampler(params: SamplingParams) -> Sampler {
        Sampler::new(params, Coupling::Independent(11), vec![0])
    }

    fn context(tokens: &[u32]) -> Context<'_> {
        Context { tokens, prompt_len: 1, drafted: &[] }
    }

    #[test]
    fn greedy_takes_the_likeliest_after_edits_and_the_lowest_id_on_ties() {
        let logits = [1.0, f32::NAN, 3.0, 3.0];
        let greedy = sampler(SamplingParams::default());
        assert_eq!(greedy.distribution(&logits, context(&[9])).log_prob(2), 0.0);
        let biased = SamplingParams { logit_bias: [(0, 5.0)].into(), ..Default::default() };
        assert_eq!(sampler(biased).distribution(&logits, context(&[9])).log_prob(0), 0.0);
    }

    #[test]
    fn when_everything_is_banned_the_likeliest_token_is_taken_as_it_is() {
        for temperature in [0.0, 1.0] {
            let bad_words: Arc<[_]> = [vec![0], vec![1]].into();
            let few = SamplingParams {
                temperature,
                bad_words: Arc::clone(&bad_words),
                allowed_tokens: Some([0, 7].into()),
                ..Default::default()
            };
            assert_eq!(sampler(few).distribution(&[1.0, 2.0], context(&[9])).log_prob(0), 0.0);
            let banned = sampler(SamplingParams { temperature, bad_words, ..Default::default() });
            assert_eq!(banned.distribution(&[1.0, 2.0], context(&[9])).log_prob(1), 0.0);
            let nothing = [f32::NAN, f32::NEG_INFINITY];
            assert_eq!(banned.distribution(&nothing, context(&[9])).log_prob(0), 0.0);
        }
    }

    #[test]
    fn a_bad_word_goes_before_an_end_that_is_too_early() {
        let params = SamplingParams {
            bad_words: [vec![1, 1]].into(),
            allowed_tokens: Some([0, 1].into()),
            min_tokens: 3,
            ..Default::default()
        };
        let logits = [2.0, 1.0, 5.0];
        let token = |tokens| {
            let drawn = sampler(params.clone()).distribution(&logits, context(tokens));
            (0..3).find(|&token| drawn.log_prob(token) == 0.0)
        };
        assert_eq!(token(&[9, 1]), Some(1), "after one token, of three");
        assert_eq!(token(&[9, 1, 1, 1]), Some(0), "after three");
    }

    #[test]
    fn end_tokens_are_held_back_until_min_tokens_counting_drafts() {
        let held = sampler(SamplingParams { min_tokens: 3, ..Default::default() });
        let logits = [5.0, 1.0];
        let with = |drafted: &[u32]| {
            let dist =
                held.distribution(&logits, Context { tokens: &[9, 1], prompt_len: 1, drafted });
            held.draw(&dist, 2 + drafted.len(), Stream::Target)
        };
        assert_eq!(with(&[]), 1);
        assert_eq!(with(&[1]), 1);
        assert_eq!(with(&[1, 1]), 0);
    }

    #[test]
    fn streams_share_noise_on_a_path_and_only_there() {
        let params = SamplingParams { temperature: 1.0, ..Default::default() };
        let same = |coupling| {
            let sampler = Sampler::new(params.clone(), coupling, vec![]);
            let dist = sampler.distribution(&[0.0; 50], context(&[9]));
            let draw = |position, stream| sampler.draw(&dist, position, stream);
            let count = |a, b| (0..100).filter(|&at| draw(at, a) == draw(at, b)).count();
            // The other place in a proposal is that of an earlier step, whose proposal began earlier.
            let draft = |depth, place| Stream::Draft { depth, place };
            [
                count(Stream::Target, draft(0, 0)),
                count(draft(1, 0), draft(0, 0)),
                count(draft(0, 1), draft(0, 0)),
            ]
        };
        assert_eq!(same(Coupling::Path(4)), [100; 3]);
        assert!(same(Coupling::Independent(4)).iter().all(|&count| count < 15));
    }
}
