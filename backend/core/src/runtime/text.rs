//! From a sequence's tokens to the text that may be shown: whole characters only, and nothing that
//! could still become a stop string.

use crate::Result;
use crate::tokenizer::{Detokenizer, StopMatcher, Tokenizer};
use std::sync::Arc;

/// What of a sequence's tokens is its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextRules {
    /// It ends before the first of these.
    pub stops: Arc<[String]>,
    /// It ends with the stop string instead.
    pub includes_stop: bool,
    /// Special tokens are no text.
    pub skips_special: bool,
    /// Stop strings that end within the text of so many first tokens do not count.
    pub min_tokens: usize,
    /// It goes on from a text: its first token is no first word, which some vocabularies write without their space.
    pub goes_on: bool,
}

impl Default for TextRules {
    fn default() -> Self {
        Self {
            stops: Arc::default(),
            includes_stop: false,
            skips_special: true,
            min_tokens: 0,
            goes_on: false,
        }
    }
}

/// Text that became final.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextChunk {
    /// The text.
    pub text: String,
    /// Whether a stop string was met: nothing follows.
    pub stopped: bool,
}

/// The text of one sequence, as it grows. Clones share the stop strings.
#[derive(Clone)]
pub struct TextStream {
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// Tokens in whose text no stop string that ends there counts, of those that are to come.
    num_free: usize,
}

impl TextStream {
    /// A text at its start.
    pub fn new(rules: &TextRules) -> Self {
        let stops = StopMatcher::new(&rules.stops);
        Self {
            detokenizer: match rules.goes_on {
                true => Detokenizer::behind_text(rules.skips_special),
                false => Detokenizer::new(rules.skips_special),
            },
            stops: if rules.includes_stop { stops.including() } else { stops },
            num_free: rules.min_tokens,
        }
    }

    /// Takes the next token.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<TextChunk> {
        let text = self.detokenizer.push(tokenizer, token)?;
        let outcome = self.stops.push(&text, self.num_free == 0);
        self.num_free = self.num_free.saturating_sub(1);
        Ok(TextChunk { text: outcome.emit, stopped: outcome.stopped })
    }

    /// What was held back, once no token follows.
    pub fn finish(&mut self) -> TextChunk {
        let text = self.detokenizer.finish();
        let mut outcome = self.stops.push(&text, self.num_free == 0);
        if !outcome.stopped {
            outcome.emit.push_str(&self.stops.finish());
        }
        TextChunk { text: outcome.emit, stopped: outcome.stopped }
    }
}
