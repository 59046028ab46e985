//! The tokens before a position, and what they change about its logits: bias, bans, penalties.
//!
//! Drafted tokens count like generated ones, so every position of a draft is treated exactly as it would be
//! if its prefix had been generated one token at a time.

use super::SamplingParams;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// What stands before the position whose token is wanted.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The prompt, then what was generated.
    pub tokens: &'a [u32],
    /// How many of `tokens` are the prompt.
    pub prompt_len: usize,
    /// Draft tokens that follow `tokens` and are taken as generated here.
    pub drafted: &'a [u32],
}

impl<'a> Context<'a> {
    /// The absolute position of the token that follows.
    pub(crate) fn position(&self) -> usize {
        self.tokens.len() + self.drafted.len()
    }

    fn output(self) -> impl DoubleEndedIterator<Item = u32> + 'a {
        self.tokens[self.prompt_len..].iter().chain(self.drafted).copied()
    }

    fn ends_with(self, suffix: &[u32]) -> bool {
        let mut backwards = self.tokens.iter().chain(self.drafted).rev();
        suffix.iter().rev().all(|token| backwards.next() == Some(token))
    }
}

/// Whether `edit` would leave the logits alone wherever it is asked.
pub(super) fn edits_nothing(params: &SamplingParams) -> bool {
    params.logit_bias.is_empty()
        && params.bad_words.is_empty()
        && params.allowed_tokens.is_none()
        && params.min_tokens == 0
        && !params.penalises()
}

/// Whether the token after `context` may not be one that ends the text.
pub(super) fn holds_back_ends(params: &SamplingParams, context: Context<'_>) -> bool {
    context.position() - context.prompt_len < params.min_tokens
}

/// Applies bias, then bans (negative infinity), then penalties. Tokens beyond the logits are ignored: a
/// drafter's vocabulary may be padded differently.
pub(super) fn edit(
    params: &SamplingParams,
    end_tokens: &[u32],
    context: Context<'_>,
    logits: &mut [f32],
) {
    for &(token, bias) in &*params.logit_bias {
        change(logits, token, |logit| logit + bias);
    }
    if holds_back_ends(params, context) {
        end_tokens.iter().for_each(|&token| ban(logits, token));
    }
    if let Some(allowed) = params.allowed_tokens.as_deref() {
        ban_others(logits, allowed);
    }
    for word in &*params.bad_words {
        if let Some((&last, start)) = word.split_last()
            && context.ends_with(start)
        {
            ban(logits, last);
        }
    }
    if params.penalises() {
        penalise(params, context, logits);
    }
}

/// The repetition penalty on what occurs in prompt or output, then the others on what occurs in the output.
fn penalise(params: &SamplingParams, context: Context<'_>, logits: &mut [f32]) {
    // Occurrences in the output; 0 for a token that is in the prompt only.
    let mut counts: HashMap<u32, u32, BuildHasherDefault<TokenHasher>> = HashMap::default();
    if params.repetition_penalty != 1.0 {
        counts.extend(context.tokens[..context.prompt_len].iter().map(|&token| (token, 0)));
    }
    context.output().for_each(|token| *counts.entry(token).or_default() += 1);
    for (&token, &count) in &counts {
        change(logits, token, |logit| {
            let factor = params.repetition_penalty;
            let logit = if logit > 0.0 { logit / factor } else { logit * factor };
            let logit = logit - params.frequency_penalty * count as f32;
            logit - if count > 0 { params.presence_penalty } else { 0.0 }
        });
    }
}

/// `allowed` is ascending. A drafter's row may end before some of them.
fn ban_others(logits: &mut [f32], allowed: &[u32]) {
    let (mut first, len) = (0, logits.len());
    for &token in allowed.iter().take_while(|&&token| (token as usize) < len) {
        let token = token as usize;
        logits[first..token].fill(f32::NEG_INFINITY);
        first = token + 1;
    }
    logits[first..].fill(f32::NEG_INFINITY);
}

fn ban(logits: &mut [f32], token: u32) {
    change(logits, token, |_| f32::NEG_INFINITY);
}

fn change(logits: &mut [f32], token: u32, how: impl FnOnce(f32) -> f32) {
    if let Some(logit) = logits.get_mut(token as usize) {
        *logit = how(*logit);
    }
}

/// One multiplication a token: contexts are long and are counted anew for every row.
#[derive(Default)]
struct TokenHasher(u64);

impl Hasher for TokenHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u32(u32::from(byte)));
    }

    fn write_u32(&mut self, token: u32) {
        // Fibonacci hashing, folded so that the low bits that pick the bucket are mixed too.
        let product = (self.0 ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = product ^ (product >> 32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VOCAB: usize = 12;

    /// Straight from the definitions, token by token, on the joined context.
    fn naive(
        params: &SamplingParams,
        ends: &[u32],
        prompt: &[u32],
        output: &[u32],
        logits: &[f32],
    ) -> Vec<f32> {
        let all = [prompt, output].concat();
        let edited = logits.iter().enumerate().map(|(id, &logit)| {
            let id = id as u32;
            let same = params.logit_bias.iter().filter(|(token, _)| *token == id);
            let mut logit = same.fold(logit, |logit, (_, bias)| logit + bias);
            if ends.contains(&id) && output.len() < params.min_tokens {
                logit = f32::NEG_INFINITY;
            }
            if params.allowed_tokens.as_ref().is_some_and(|allowed| !allowed.contains(&id)) {
                logit = f32::NEG_INFINITY;
            }
            let completed = [all.clone(), vec![id]].concat();
            if params.bad_words.iter().any(|word| completed.ends_with(word)) {
                logit = f32::NEG_INFINITY;
            }
            if all.contains(&id) {
                let factor = params.repetition_penalty;
                logit = if logit > 0.0 { logit / factor } else { logit * factor };
            }
            let count = output.iter().filter(|&&token| token == id).count();
            logit -= params.frequency_penalty * count as f32;
            if count > 0 {
                logit -= params.presence_penalty;
            }
            logit
        });
        edited.collect()
    }

    fn any_params() -> impl Strategy<Value = SamplingParams> {
        let token = 0..VOCAB as u32;
        let word = prop::collection::vec(token.clone(), 1..4);
        (
            prop_oneof![Just(1.0f32), 0.5f32..2.0],
            prop_oneof![Just(0.0f32), -2f32..2.0],
            prop_oneof![Just(0.0f32), -2f32..2.0],
            prop::collection::vec((token, -3f32..3.0), 0..4),
            prop::collection::vec(word, 0..4),
            0usize..8,
            prop::option::of(prop::collection::btree_set(0..VOCAB as u32 + 3, 1..5)),
        )
            .prop_map(
                |(repetition, presence, frequency, bias, words, min_tokens, allowed)| {
                    SamplingParams {
                        repetition_penalty: repetition,
                        presence_penalty: presence,
                        frequency_penalty: frequency,
                        logit_bias: bias.into(),
                        bad_words: words.into(),
                        allowed_tokens: allowed.map(|allowed| allowed.into_iter().collect()),
                        min_tokens,
                        ..Default::default()
                    }
                },
            )
    }

    proptest! {
        #[test]
        fn each_draft_position_is_edited_as_if_it_had_been_generated(
            params in any_params(),
            prompt in prop::collection::vec(0..VOCAB as u32 + 2, 1..10),
            output in prop::collection::vec(0..VOCAB as u32, 0..10),
            logits in prop::collection::vec(-8f32..8.0, VOCAB),
        ) {
            let ends = [3, 7];
            let expected = naive(&params, &ends, &prompt, &output, &logits);
            for num_drafted in 0..=output.len() {
                let (generated, drafted) = output.split_at(output.len() - num_drafted);
                let tokens = [&prompt[..], generated].concat();
                let context = Context { tokens: &tokens, prompt_len: prompt.len(), drafted };
                let mut edited = logits.clone();
                edit(&params, &ends, context, &mut edited);
                prop_assert_eq!(&edited, &expected);
                if edits_nothing(&params) {
                    prop_assert_eq!(&edited, &logits);
                }
            }
        }
    }
}
