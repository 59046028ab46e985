//! What a full page holds, as a name: its tokens and all that came before them, since keys and values
//! depend on both, and which of these were computed in blocks of a prompt, since their bits depend on
//! that. 256 bits of a cryptographic hash, so that no two texts share a name, by chance or by design.

use super::PAGE_TOKENS;

/// Names the contents of a full page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageKey([u8; 32]);

/// Keep the names of salts apart from those of pages, whatever a client takes as its salt.
const SALT_CONTEXT: &str = "speculative decoding for Triton: salt of the prefix cache";
const ROWS_CONTEXT: &str = "speculative decoding for Triton: rows of one request";

impl PageKey {
    /// What stands in front of the first page of texts with this salt; nothing for the empty one. Texts of different
    /// salts share no page.
    pub(crate) fn of_salt(salt: &[u8]) -> Option<PageKey> {
        (!salt.is_empty()).then(|| Self(blake3::derive_key(SALT_CONTEXT, salt)))
    }

    /// As `of_salt`, of two numbers that nobody else has.
    pub(crate) fn of_pair(name: u64, secret: u64) -> PageKey {
        let pair = [name.to_le_bytes(), secret.to_le_bytes()].concat();
        Self(blake3::derive_key(ROWS_CONTEXT, &pair))
    }

    /// A part of it that may agree with others by chance.
    pub(crate) fn short(&self) -> u64 {
        let [first, ..] = *self.0.as_chunks().0 else { unreachable!("it has 32 bytes") };
        u64::from_le_bytes(first)
    }

    /// The key of a page of `tokens` behind the page of `parent`, or at the start of a text. The first `in_blocks` of
    /// them are computed in blocks.
    fn new(parent: Option<&PageKey>, tokens: &[u32], in_blocks: usize) -> Self {
        assert_eq!(tokens.len(), PAGE_TOKENS, "only full pages have keys");
        let mut hasher = blake3::Hasher::new();
        if let Some(PageKey(parent)) = parent {
            hasher.update(parent);
        }
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        hasher.update(&[in_blocks as u8]);
        Self(*hasher.finalize().as_bytes())
    }

    /// Extends the keys of a text's first pages to all of its full ones. `root` is that of its salt; positions before
    /// `blocks_end` are computed in blocks.
    pub(crate) fn extend(
        keys: &mut Vec<PageKey>,
        root: Option<&PageKey>,
        tokens: &[u32],
        blocks_end: usize,
    ) {
        for (idx, page) in tokens.chunks_exact(PAGE_TOKENS).enumerate().skip(keys.len()) {
            let in_blocks = blocks_end.saturating_sub(idx * PAGE_TOKENS).min(PAGE_TOKENS);
            keys.push(Self::new(keys.last().or(root), page, in_blocks));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn keys(tokens: &[u32]) -> Vec<PageKey> {
        let mut keys = Vec::new();
        PageKey::extend(&mut keys, None, tokens, 0);
        keys
    }

    fn salted(salt: &[u8], tokens: &[u32]) -> Vec<PageKey> {
        let mut keys = Vec::new();
        PageKey::extend(&mut keys, PageKey::of_salt(salt).as_ref(), tokens, 0);
        keys
    }

    proptest! {
        #[test]
        fn keys_agree_exactly_as_far_as_the_texts_do(
            common in prop::collection::vec(0u32..3, 0..70),
            tails in prop::array::uniform2(prop::collection::vec(0u32..3, 0..70)),
        ) {
            let texts = tails.map(|tail| [common.clone(), tail].concat());
            let [a, b] = texts.each_ref().map(|text| keys(text));
            prop_assert_eq!(a.len(), texts[0].len() / PAGE_TOKENS);
            for idx in 0..a.len().min(b.len()) {
                let end = (idx + 1) * PAGE_TOKENS;
                prop_assert_eq!(a[idx] == b[idx], texts[0][..end] == texts[1][..end]);
            }
        }

        #[test]
        fn keys_can_be_extended_as_a_text_grows(
            text in prop::collection::vec(any::<u32>(), 0..100), split in 0usize..100,
        ) {
            let mut grown = keys(&text[..split.min(text.len())]);
            PageKey::extend(&mut grown, None, &text, 0);
            prop_assert_eq!(grown, keys(&text));
        }

        #[test]
        fn keys_agree_as_far_as_the_same_positions_are_computed_in_blocks(
            len in 0usize..100, ends in prop::array::uniform2(0usize..100),
        ) {
            let text = vec![7; len];
            let [a, b] = ends.map(|end| {
                let mut keys = Vec::new();
                PageKey::extend(&mut keys, None, &text, end);
                keys
            });
            for idx in 0..a.len() {
                let in_blocks = ends.map(|end| end.min((idx + 1) * PAGE_TOKENS));
                prop_assert_eq!(a[idx] == b[idx], in_blocks[0] == in_blocks[1]);
            }
        }
    }

    #[test]
    fn the_same_tokens_further_on_are_another_page() {
        let keys = keys(&[7; 3 * PAGE_TOKENS]);
        assert!(keys[0] != keys[1] && keys[1] != keys[2]);
    }

    #[test]
    fn texts_of_different_salts_share_no_page_and_the_empty_salt_is_none() {
        let text = [7; 2 * PAGE_TOKENS];
        let chains = [keys(&text), salted(b"a", &text), salted(b"b", &text)];
        let distinct: std::collections::HashSet<_> = chains.concat().into_iter().collect();
        assert_eq!(distinct.len(), 6);
        assert_eq!(salted(b"", &text), keys(&text));
        assert_eq!(salted(b"a", &text), chains[1]);
        // A salt spelled like a page's tokens is not that page.
        let spelled: Vec<u8> = text[..PAGE_TOKENS].iter().flat_map(|id| id.to_le_bytes()).collect();
        assert_ne!(salted(&spelled, &text[PAGE_TOKENS..]), keys(&text)[1..]);
    }
}
