//! Logits over a target's vocabulary, of a drafter that has them for some of its tokens.

/// Puts a drafter's logits where the target's tokens are.
pub(super) struct Spread {
    /// The token of each logit; none where they are the first ones.
    map: Option<Vec<u32>>,
    /// A row over the target's vocabulary: what is never drafted stays as it is.
    row: Vec<f32>,
}

impl Spread {
    /// For a target of `vocab_size` tokens.
    pub(super) fn new(map: Option<Vec<u32>>, vocab_size: usize) -> Self {
        Self { map, row: vec![f32::NEG_INFINITY; vocab_size] }
    }

    /// The row's logits of all of the target's tokens. Those that the target does not have are left out.
    pub(super) fn over_vocab<'a>(&'a mut self, logits: &'a [f32]) -> &'a [f32] {
        match &self.map {
            None if logits.len() >= self.row.len() => return &logits[..self.row.len()],
            None => self.row[..logits.len()].copy_from_slice(logits),
            Some(map) => {
                for (&token, &logit) in map.iter().zip(logits) {
                    if let Some(place) = self.row.get_mut(token as usize) {
                        *place = logit;
                    }
                }
            }
        }
        &self.row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: f32 = f32::NEG_INFINITY;

    #[test]
    fn logits_stand_at_their_tokens() {
        let mut mapped = Spread::new(Some(vec![3, 9, 0]), 5);
        assert_eq!(mapped.over_vocab(&[1.0, 2.0, 3.0]), [3.0, NONE, NONE, 1.0, NONE]);
        assert_eq!(mapped.over_vocab(&[4.0, 5.0, 6.0]), [6.0, NONE, NONE, 4.0, NONE]);
        let mut first = Spread::new(None, 5);
        assert_eq!(first.over_vocab(&[1.0, 2.0]), [1.0, 2.0, NONE, NONE, NONE]);
        assert_eq!(first.over_vocab(&[1.0; 8]), [1.0; 5], "the others are padding");
    }
}
