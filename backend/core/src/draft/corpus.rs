//! What a model has read and written lately, for drafts: texts that ended, as many tokens of them as there is room for.
//! Only who shares the pages of a text may look things up in it.

use super::text::{BORDER, LONG, Text};
use crate::sequence::Shares;
use std::collections::VecDeque;

/// The texts, the oldest one first; it is dropped first.
#[derive(Debug)]
pub(crate) struct Corpus {
    text: Text,
    /// Where each text ends, behind its border, and who may look at it.
    ends: VecDeque<(usize, Shares)>,
    max_tokens: usize,
}

impl Corpus {
    /// Room for so many tokens, borders among them. The shortest n-grams that are looked for are given.
    pub(crate) fn new(max_tokens: usize, short: usize) -> Self {
        Self { text: Text::new(short), ends: VecDeque::new(), max_tokens }
    }

    /// Takes in a text that ended, but for the beginning that stands here already.
    pub(crate) fn add(&mut self, tokens: &[u32], shares: Shares) {
        let Some(seed) = seed(shares) else { return };
        let known = self.known(tokens, shares, seed);
        if known == tokens.len() {
            return;
        }
        // The n-grams across the place where it goes on differently are new.
        let tokens = &tokens[known.saturating_sub(LONG)..];
        let room = self.max_tokens.saturating_sub(1);
        let tokens = &tokens[tokens.len().saturating_sub(room)..];
        while self.text.tokens().len() + tokens.len() + 1 > self.max_tokens {
            self.drop_oldest();
        }
        self.text.extend(tokens, seed);
        self.text.extend(&[BORDER], seed);
        self.ends.push_back((self.text.end(), shares));
    }

    /// Up to `max` tokens behind the most recent places where the last ones of `known` stood, as [`Text::places`], and how many
    /// of those stood there.
    pub(crate) fn continuations(
        &self,
        known: &[u32],
        level: usize,
        shares: Shares,
        max: usize,
    ) -> Vec<(usize, &[u32])> {
        let Some(seed) = seed(shares) else { return Vec::new() };
        let places = self.text.places(known, level, seed).into_iter();
        let places = places.filter(|&place| self.shares_at(place) == Some(shares));
        let continuation = |place| {
            let rest = self.text.from(place);
            // Texts are long, and looked up in each step.
            let rest = &rest[..rest.len().min(max)];
            let len = rest.iter().position(|&token| token == BORDER).unwrap_or(rest.len());
            (self.text.matching(place, known), &rest[..len])
        };
        places.map(continuation).collect()
    }

    /// How many of a text's first tokens stand here.
    fn known(&self, tokens: &[u32], shares: Shares, seed: u64) -> usize {
        let Some(first) = tokens.get(..LONG) else { return 0 };
        let places = self.text.places(first, 0, seed).into_iter();
        let places = places.filter(|&place| self.shares_at(place) == Some(shares));
        let same = |place| {
            let pairs = self.text.from(place).iter().zip(&tokens[LONG..]);
            LONG + pairs.take_while(|(known, token)| known == token).count()
        };
        places.map(same).max().unwrap_or(0)
    }

    /// Whose the text around a position is. Two keys may have the same seed, by chance.
    fn shares_at(&self, position: usize) -> Option<Shares> {
        let idx = self.ends.partition_point(|&(end, _)| end <= position);
        self.ends.get(idx).map(|&(_, shares)| shares)
    }

    fn drop_oldest(&mut self) {
        let Some((end, shares)) = self.ends.pop_front() else { return };
        if let Some(seed) = seed(shares) {
            self.text.drop_first(end - self.text.begin(), seed);
        }
    }
}

/// Keeps the n-grams of those apart that share nothing; none for who shares with nobody.
fn seed(shares: Shares) -> Option<u64> {
    match shares {
        Shares::NoOne => None,
        Shares::All => Some(0),
        Shares::Behind(key) => Some(key.short()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::PageKey;
    use proptest::prelude::*;

    const SHORT: usize = 2;

    fn salted(salt: &str) -> Shares {
        Shares::Behind(PageKey::of_salt(salt.as_bytes()).unwrap())
    }

    /// All texts, and a scan over each.
    #[derive(Default)]
    struct Naive(Vec<(Vec<u32>, Shares)>);

    impl Naive {
        fn continuations(
            &self,
            known: &[u32],
            len: usize,
            shares: Shares,
            max: usize,
        ) -> Vec<(usize, &[u32])> {
            let mut found = Vec::new();
            if known.len() < len || shares == Shares::NoOne {
                return found;
            }
            let gram = &known[known.len() - len..];
            for (text, _) in self.0.iter().rev().filter(|(_, of)| *of == shares) {
                for end in
                    (len..text.len()).rev().filter(|&end| text[end - len..].starts_with(gram))
                {
                    let mut lens = (len..=end.min(known.len()).min(32)).rev();
                    let longest = lens.find(|&len| known.ends_with(&text[end - len..end]));
                    found.push((longest.unwrap(), &text[end..text.len().min(end + max)]));
                }
            }
            found.truncate(super::super::text::MAX_PLACES);
            found
        }

        /// The tokens of a text from where it differs from all that are here.
        fn added(&self, text: &[u32], shares: Shares) -> Vec<u32> {
            let starts = self.0.iter().filter(|(_, of)| *of == shares).flat_map(|(other, _)| {
                (0..other.len().saturating_sub(LONG)).map(move |start| &other[start..])
            });
            let same = |other: &[u32]| other.iter().zip(text).take_while(|(a, b)| a == b).count();
            let known = starts.map(same).filter(|&known| known >= LONG).max().unwrap_or(0);
            match known == text.len() {
                true => Vec::new(),
                false => text[known.saturating_sub(LONG)..].to_vec(),
            }
        }
    }

    fn shares() -> impl Strategy<Value = Shares> {
        prop_oneof![Just(Shares::All), Just(Shares::NoOne), Just(salted("a")), Just(salted("b"))]
    }

    proptest! {
        #[test]
        fn continuations_are_what_a_scan_finds_whatever_was_dropped(
            texts in prop::collection::vec((prop::collection::vec(0u32..3, 0..40), shares()), 1..12),
            max_tokens in 20usize..200,
        ) {
            let mut corpus = Corpus::new(max_tokens, SHORT);
            let mut naive = Naive::default();
            for (text, of) in &texts {
                let added = naive.added(text, *of);
                // Which places are looked at is bounded: what is known of a beginning may be less than there is.
                let beginning = &text[..text.len().min(LONG)];
                prop_assume!(naive.continuations(beginning, LONG, *of, 1).len() < 32);
                corpus.add(text, *of);
                let added = &added[added.len().saturating_sub(max_tokens - 1)..];
                if !added.is_empty() && *of != Shares::NoOne {
                    naive.0.push((added.to_vec(), *of));
                }
                while naive.0.iter().map(|(text, _)| text.len() + 1).sum::<usize>() > max_tokens {
                    naive.0.remove(0);
                }
                prop_assert!(corpus.text.tokens().len() <= max_tokens);
                for (level, len) in [(0, LONG), (1, SHORT)] {
                    for known in [&text[..], &text[..text.len() / 2]] {
                        for shares in [Shares::All, Shares::NoOne, salted("a"), salted("b")] {
                            for max in [3, usize::MAX >> 1] {
                                let found = corpus.continuations(known, level, shares, max);
                                let expected = naive.continuations(known, len, shares, max);
                                prop_assert_eq!(&found, &expected, "{} of {:?}", len, known);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_beginning_that_stands_here_is_not_taken_in_again() {
        let mut corpus = Corpus::new(1000, SHORT);
        let prompt: Vec<u32> = (0..100).collect();
        let text = |answer: u32| [&prompt[..], &[answer; 5]].concat();
        corpus.add(&text(500), Shares::All);
        assert_eq!(corpus.text.tokens().len(), 106);
        corpus.add(&text(600), Shares::All);
        assert_eq!(corpus.text.tokens().len(), 106 + LONG + 5 + 1);
        corpus.add(&text(500), Shares::All);
        assert_eq!(corpus.text.tokens().len(), 106 + LONG + 5 + 1);
        assert_eq!(
            corpus.continuations(&prompt, 0, Shares::All, 9),
            [(LONG, &[600; 5][..]), (32, &[500; 5])]
        );
        // Nobody else sees it, and takes it in as new.
        assert!(corpus.continuations(&prompt, 0, salted("a"), 9).is_empty());
        corpus.add(&text(500), salted("a"));
        assert_eq!(corpus.continuations(&prompt, 0, salted("a"), 9), [(32, &[500; 5][..])]);
    }

    #[test]
    fn a_long_text_leaves_its_end() {
        let mut corpus = Corpus::new(50, SHORT);
        let text: Vec<u32> = (0..100).collect();
        corpus.add(&text, Shares::All);
        assert_eq!(corpus.text.tokens().len(), 50);
        assert_eq!(corpus.continuations(&text[..97], 0, Shares::All, 9), [(32, &text[97..])]);
        assert!(corpus.continuations(&text[..40], 0, Shares::All, 9).is_empty());
    }
}
