//! A text that grows at its end and may be dropped at its beginning, and where its n-grams stand.

use super::ngram::hash;
use std::collections::{HashMap, VecDeque};

/// Tokens of the n-grams that are looked for first.
pub(super) const LONG: usize = 8;

/// Earlier places of one n-gram that are looked at, the most recent ones.
pub(super) const MAX_PLACES: usize = 32;

/// Tokens before a place that are compared at most: what agrees on so many is as good as what agrees on more.
const MAX_MATCH: usize = 32;

/// Stands between texts, and is no token.
pub(super) const BORDER: u32 = u32::MAX;

/// The text. Positions are counted from its first token, also once that is dropped.
#[derive(Debug)]
pub(super) struct Text {
    tokens: Vec<u32>,
    /// How many of them are dropped.
    dropped: usize,
    /// Position of the first of them.
    start: usize,
    /// The longer ones first.
    grams: [Grams; 2],
}

/// Where the n-grams of one length end.
#[derive(Debug)]
struct Grams {
    len: usize,
    /// The last place of each.
    latest: HashMap<u64, usize>,
    /// For every position that is not dropped, how far before it the same n-gram ended; 0 where it did not.
    back: VecDeque<u32>,
}

impl Text {
    /// An empty one, of which n-grams of [`LONG`] and of `short` tokens are known.
    pub(super) fn new(short: usize) -> Self {
        let grams = |len| Grams { len, latest: HashMap::new(), back: VecDeque::new() };
        Self { tokens: Vec::new(), dropped: 0, start: 0, grams: [grams(LONG), grams(short)] }
    }

    /// What is not dropped.
    pub(super) fn tokens(&self) -> &[u32] {
        &self.tokens[self.dropped..]
    }

    /// Position behind the last token.
    pub(super) fn end(&self) -> usize {
        self.start + self.tokens.len()
    }

    /// Position of the first token that is not dropped.
    pub(super) fn begin(&self) -> usize {
        self.start + self.dropped
    }

    /// The tokens from a position on. Panics if they are dropped.
    pub(super) fn from(&self, position: usize) -> &[u32] {
        &self.tokens[position - self.start..]
    }

    /// How many tokens before a place are the last ones of `known`.
    pub(super) fn matching(&self, place: usize, known: &[u32]) -> usize {
        let before = &self.tokens()[..place - self.begin()];
        let pairs = before.iter().rev().zip(known.iter().rev()).take(MAX_MATCH);
        pairs.take_while(|(here, known)| here == known).count()
    }

    /// Adds tokens. N-grams of different seeds are different ones; none reaches across a border.
    pub(super) fn extend(&mut self, tokens: &[u32], seed: u64) {
        for &token in tokens {
            self.tokens.push(token);
            let end = self.end();
            for grams in &mut self.grams {
                grams.back.push_back(0);
                if let Some(gram) = gram(&self.tokens[self.dropped..], grams.len) {
                    let before = grams.latest.insert(hash(seed, gram), end);
                    let back = before.and_then(|before| u32::try_from(end - before).ok());
                    grams.back[end - self.start - self.dropped - 1] = back.unwrap_or(0);
                }
            }
        }
    }

    /// Drops the first tokens, which were all added with this seed.
    pub(super) fn drop_first(&mut self, num_tokens: usize, seed: u64) {
        let begin = self.begin();
        for grams in &mut self.grams {
            for len in 1..=num_tokens {
                let Some(gram) = gram(&self.tokens[self.dropped..self.dropped + len], grams.len)
                else {
                    continue;
                };
                // A later one is none of these.
                let key = hash(seed, gram);
                if grams.latest.get(&key) == Some(&(begin + len)) {
                    grams.latest.remove(&key);
                }
            }
            grams.back.drain(..num_tokens);
        }
        self.dropped += num_tokens;
        // Each token is moved once a time that as many were dropped.
        if self.dropped > self.tokens.len() / 2 {
            self.tokens.drain(..self.dropped);
            self.start += self.dropped;
            self.dropped = 0;
        }
    }

    /// The most recent places behind the last tokens of `known`, the last one first: behind so many as the longer n-grams
    /// have (`level` 0) or the shorter ones (1). Where nothing follows is none.
    pub(super) fn places(&self, known: &[u32], level: usize, seed: u64) -> Vec<usize> {
        let grams = &self.grams[level];
        let Some(gram) = gram(known, grams.len) else { return Vec::new() };
        let mut places = Vec::new();
        let mut next = grams.latest.get(&hash(seed, gram)).copied();
        while let Some(end) = next.filter(|&end| end >= self.begin() + grams.len) {
            // Only what stands there counts: hashes may agree by chance.
            let goes_on = self.from(end).first().is_some_and(|&token| token != BORDER);
            if goes_on && self.from(end - grams.len).starts_with(gram) {
                places.push(end);
                if places.len() == MAX_PLACES {
                    break;
                }
            }
            let back = grams.back[end - self.begin() - 1] as usize;
            next = (back > 0).then(|| end - back);
        }
        places
    }
}

/// The last tokens, if there are so many in one text.
fn gram(tokens: &[u32], len: usize) -> Option<&[u32]> {
    let gram = &tokens[tokens.len().checked_sub(len)?..];
    (!gram.contains(&BORDER)).then_some(gram)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn places_are_those_of_a_backward_scan_of_what_is_not_dropped(
            parts in prop::collection::vec((prop::collection::vec(0u32..3, 1..30), any::<bool>()), 1..12),
            short in 1usize..5, query in 0usize..100,
        ) {
            let mut text = Text::new(short);
            let mut all = Vec::new();
            // Where what is not dropped begins, and each part that can be.
            let (mut begin, mut first) = (0, 0);
            for (part, drops) in &parts {
                let part = [&part[..], &[BORDER]].concat();
                text.extend(&part, 0);
                all.extend(part);
                if *drops {
                    let len = 1 + all[begin..].iter().position(|&token| token == BORDER).unwrap();
                    text.drop_first(len, 0);
                    begin += len;
                    first += 1;
                }
                prop_assert_eq!((text.begin(), text.end()), (begin, all.len()));
                prop_assert_eq!(text.tokens(), &all[begin..]);
                let known = &all[..all.len() - 1 - query.min(all.len() - 1)];
                for (level, len) in [(0, LONG), (1, short)] {
                    let Some(gram) = gram(known, len) else { continue };
                    let ends = (begin + len..all.len()).rev();
                    let ends = ends.filter(|&end| all[end - len..end] == *gram && all[end] != BORDER);
                    let expected: Vec<usize> = ends.take(MAX_PLACES).collect();
                    prop_assert_eq!(text.places(known, level, 0), expected);
                }
            }
            prop_assert!(first <= parts.len());
            // Nothing is remembered of what is gone.
            text.drop_first(text.tokens().len(), 0);
            prop_assert!(text.grams.iter().all(|grams| grams.latest.is_empty() && grams.back.is_empty()));
        }
    }

    #[test]
    fn seeds_keep_texts_apart() {
        let mut text = Text::new(2);
        text.extend(&[1, 2, 3, BORDER], 5);
        text.extend(&[1, 2, 4, BORDER], 6);
        assert_eq!(text.places(&[1, 2], 1, 5), [2]);
        assert_eq!(text.places(&[1, 2], 1, 6), [6]);
        assert!(text.places(&[1, 2], 1, 7).is_empty());
    }
}
