//! How often a model without some of its layers says what the whole one has said: by this layers to skip are compared.

use super::{Isa, Model, Pinning, Pool};
use crate::batch::{Forward, Segment};
use crate::engine::{Device, Engine};
use crate::model::LayerSkip;
use crate::pages::{PAGE_TOKENS, PageId, pages_for};
use crate::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// A text that the whole model has written from a place on.
#[derive(Clone, Debug)]
pub struct Written {
    /// All of it.
    pub tokens: Vec<u32>,
    /// The prompt's tokens.
    pub prompt_len: usize,
}

impl Written {
    /// Whether drafts of so many tokens can be tried in it.
    pub fn has_place(&self, depth: usize) -> bool {
        starts(self, depth).next().is_some()
    }
}

/// Drafts at some places of such texts.
pub struct SkipTrial {
    model: Model,
    places: Vec<Place>,
    depth: usize,
}

/// Where drafts begin: the first position of a page, which is the place's own. What is computed there is never read by
/// another place, so all of them go together and one trial after the other.
struct Place {
    /// The last known token, then those that drafts have to hit.
    tokens: Vec<u32>,
    first_position: usize,
    pages: Vec<PageId>,
}

/// What drafts of a number of tokens, from one to as many as were tried, would be worth.
#[derive(Clone, Debug, PartialEq)]
pub struct Agreement {
    /// The share of places where so many drafts are right.
    pub accepted: Vec<f64>,
    /// The same between how many are right and how sure the drafter was of the right ones: few places tell more by that.
    pub expected: Vec<f64>,
}

impl SkipTrial {
    /// With drafts of `depth` tokens at `max_places` places of the texts at most, spread over all of them. The engine is one
    /// for CPUs.
    pub fn new(
        engine: &Engine,
        texts: &[Written],
        depth: usize,
        max_places: usize,
        threads: Option<usize>,
    ) -> Result<Self> {
        if engine.manifest().device != Device::Cpu {
            let message = "layers to skip are searched with an engine for CPUs";
            return Err(Error::Unsupported(message.into()));
        }
        let all: Vec<(usize, usize)> = texts
            .iter()
            .enumerate()
            .flat_map(|(text, written)| starts(written, depth).map(move |start| (text, start)))
            .collect();
        let chosen = all.iter().step_by(all.len().div_ceil(max_places.max(1)).max(1));
        let mut num_pages = 0;
        let mut take_pages = |count: usize| -> Vec<PageId> {
            num_pages += count;
            (num_pages - count..num_pages).map(|page| page as PageId).collect()
        };
        let own: Vec<Vec<PageId>> =
            texts.iter().map(|text| take_pages(pages_for(text.tokens.len()))).collect();
        let places = chosen.map(|&(text, start)| Place {
            tokens: texts[text].tokens[start..=start + depth].to_vec(),
            first_position: start,
            pages: [&own[text][..start / PAGE_TOKENS], &take_pages(1)].concat(),
        });
        let places: Vec<Place> = places.collect();
        if places.is_empty() {
            return Err(Error::Unsupported("texts without a place to draft at".into()));
        }
        let pool = Arc::new(Pool::on_machine(threads, Pinning::Auto));
        let mut model = Model::load(engine, num_pages, Isa::detect(), pool)?;
        for (text, pages) in texts.iter().zip(&own) {
            let segment = Segment {
                tokens: &text.tokens,
                first_position: 0,
                pages,
                prompt_len: 0,
                num_logits: 0,
                tree: &[],
            };
            model.forward(&[segment])?;
        }
        Ok(Self { model, places, depth })
    }

    /// How many places there are.
    pub fn num_places(&self) -> usize {
        self.places.len()
    }

    /// Tries what drafts without these layers would be worth.
    pub fn judge(&self, skip: &LayerSkip) -> Result<Agreement> {
        let segments = self.places.iter().map(|place| Segment {
            tokens: &place.tokens[..self.depth],
            first_position: place.first_position,
            pages: &place.pages,
            prompt_len: 0,
            num_logits: self.depth,
            tree: &[],
        });
        let mut part = self.model.without(skip.clone(), self.places.len() * self.depth);
        let logits = part.forward(&segments.collect::<Vec<_>>())?;
        let mut agreement =
            Agreement { accepted: vec![0.0; self.depth], expected: vec![0.0; self.depth] };
        let share = 1.0 / self.places.len() as f64;
        for (idx, place) in self.places.iter().enumerate() {
            let (mut is_right, mut sure) = (true, 1.0);
            for draft in 0..self.depth {
                let row = logits.row(idx * self.depth + draft);
                let (is_hit, likelihood) = hit(row, place.tokens[draft + 1] as usize);
                is_right &= is_hit;
                sure *= 0.5 * (f64::from(u8::from(is_hit)) + likelihood);
                agreement.accepted[draft] += if is_right { share } else { 0.0 };
                agreement.expected[draft] += share * sure;
            }
        }
        Ok(agreement)
    }
}

/// Where drafts may begin in a text: all that they have to hit was written by the model.
fn starts(text: &Written, depth: usize) -> impl Iterator<Item = usize> + use<> {
    let last = text.tokens.len().saturating_sub(depth);
    let range: Range<usize> = text.prompt_len.saturating_sub(1)..last;
    range.filter(|start| start.is_multiple_of(PAGE_TOKENS))
}

/// Whether a token is the likeliest one, and how likely it is.
fn hit(logits: &[f32], token: usize) -> (bool, f64) {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from((logit - best).exp())).sum();
    (logits[token] == best, f64::from((logits[token] - best).exp()) / sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_begin_where_a_page_does_and_have_something_to_hit() {
        let text = |len, prompt_len| Written { tokens: vec![0; len], prompt_len };
        let at = |len, prompt_len| starts(&text(len, prompt_len), 4).collect::<Vec<_>>();
        assert_eq!(at(70, 17), [16, 32, 48, 64], "behind the prompt's last token");
        assert_eq!(at(68, 18), [32, 48], "drafts at 64 would have three tokens to hit");
        assert_eq!(at(69, 18), [32, 48, 64]);
        assert!(at(20, 20).is_empty());
    }

    #[test]
    fn a_token_is_as_likely_as_its_share() {
        let (is_best, share) = hit(&[0.0, 3f32.ln(), f32::NEG_INFINITY], 1);
        assert!(is_best && (share - 0.75).abs() < 1e-6);
        let (is_best, share) = hit(&[0.0, 3f32.ln(), f32::NEG_INFINITY], 0);
        assert!(!is_best && (share - 0.25).abs() < 1e-6);
    }
}
