//! One request and what came back.

use crate::results::Speculation;
use std::time::Instant;

/// What an endpoint is asked.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Index of the prompt.
    pub prompt: usize,
    /// Draws tokens, where the temperature is above 0.
    pub seed: u64,
    /// Differs between measurements, so that none finds the KV cache of another.
    pub cache_salt: String,
}

/// What one request brought.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Index of the prompt.
    pub prompt: usize,
    /// When it was sent.
    pub sent: Instant,
    /// When tokens came, and how many: at least one each.
    pub came: Vec<(Instant, usize)>,
    /// Tokens of the prompt, where the endpoint tells.
    pub input_tokens: usize,
    /// Of the text or of its tokens: equal for equal answers of one endpoint.
    pub text_hash: u64,
    /// None where the endpoint does not tell.
    pub speculation: Option<Speculation>,
    /// Why there is no whole answer.
    pub failure: Option<String>,
}

impl Answer {
    /// Nothing yet.
    pub fn new(ask: &Ask) -> Self {
        Self {
            prompt: ask.prompt,
            sent: Instant::now(),
            came: Vec::new(),
            input_tokens: 0,
            text_hash: 0,
            speculation: None,
            failure: None,
        }
    }

    /// Tokens of the answer.
    pub fn tokens(&self) -> usize {
        self.came.iter().map(|(_, tokens)| tokens).sum()
    }

    /// When it ended: when its last token came.
    pub fn ended(&self) -> Instant {
        self.came.last().map_or(self.sent, |&(at, _)| at)
    }

    /// Milliseconds to the first token. None without any.
    pub fn first_token_ms(&self) -> Option<f64> {
        self.came.first().map(|&(at, _)| millis(self.sent, at))
    }

    /// Milliseconds a token, from the first response to the last. None where all tokens came at once.
    pub fn per_token_ms(&self) -> Option<f64> {
        let (&(first, at_once), &(last, _)) = (self.came.first()?, self.came.last()?);
        let later = self.tokens() - at_once;
        (later > 0).then(|| millis(first, last) / later as f64)
    }

    /// Milliseconds between responses.
    pub fn between_ms(&self) -> impl Iterator<Item = f64> {
        self.came.windows(2).map(|pair| millis(pair[0].0, pair[1].0))
    }

    /// Milliseconds to the last token.
    pub fn whole_ms(&self) -> f64 {
        millis(self.sent, self.ended())
    }
}

/// Milliseconds from one time to a later one.
pub fn millis(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_token_is_as_long_as_those_behind_the_first_response_take() {
        let ask = Ask { prompt: 0, seed: 0, cache_salt: String::new() };
        let mut answer = Answer::new(&ask);
        assert_eq!(
            (answer.first_token_ms(), answer.per_token_ms(), answer.whole_ms()),
            (None, None, 0.0)
        );
        let at = |ms| answer.sent + Duration::from_millis(ms);
        let came = vec![(at(50), 2), (at(60), 1), (at(90), 3)];
        answer.came = came;
        assert_eq!((answer.tokens(), answer.first_token_ms()), (6, Some(50.0)));
        assert_eq!((answer.per_token_ms(), answer.whole_ms()), (Some(10.0), 90.0));
        assert_eq!(answer.between_ms().collect::<Vec<_>>(), [10.0, 30.0]);
    }
}
