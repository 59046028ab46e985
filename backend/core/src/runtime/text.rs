//! From a sequence's tokens to the text that may be shown: whole characters only, and nothing that
//! could still become a stop string.

use crate::Result;
use crate::tokenizer::{Detokenizer, StopMatcher, Tokenizer};

/// Text that became final.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextChunk {
    /// The text.
    pub text: String,
    /// Whether a stop string was met: nothing follows.
    pub stopped: bool,
}

/// The text of one sequence, as it grows.
pub struct TextStream {
    detokenizer: Detokenizer,
    stops: StopMatcher,
}

impl TextStream {
    /// A stream that ends at the first of `stops`.
    pub fn new(stops: &[String], skip_special: bool) -> Self {
        Self { detokenizer: Detokenizer::new(skip_special), stops: StopMatcher::new(stops) }
    }

    /// Takes the next token.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<TextChunk> {
        let text = self.detokenizer.push(tokenizer, token)?;
        let outcome = self.stops.push(&text);
        Ok(TextChunk { text: outcome.emit, stopped: outcome.stopped })
    }

    /// What was held back, once no token follows.
    pub fn finish(&mut self) -> TextChunk {
        let text = self.detokenizer.finish();
        let mut outcome = self.stops.push(&text);
        if !outcome.stopped {
            outcome.emit.push_str(&self.stops.finish());
        }
        TextChunk { text: outcome.emit, stopped: outcome.stopped }
    }
}
