//! Whether a drafter's tokens mean the same to the target.
//!
//! Draft tokens are passed as ids, so both tokenizers must give every id the same token. Rows of
//! the embeddings behind the last real token are padding and may differ in number; which tokens are special is the target's to say.

use anyhow::{Result, bail, ensure};
use spec_core::tokenizer::Tokenizer;

/// Checks that the tokenizers agree on every real token, and that both models have a row for each.
/// `target_vocab` and `draft_vocab` are the rows of the embeddings, padding included.
pub fn check_pair(
    target: &Tokenizer,
    draft: &Tokenizer,
    target_vocab: usize,
    draft_vocab: usize,
) -> Result<()> {
    for (name, tokenizer, rows) in [("target", target, target_vocab), ("draft", draft, draft_vocab)]
    {
        let real = tokenizer.vocab_size();
        ensure!(real <= rows, "the {name}'s tokenizer has {real} ids, its embedding {rows} rows");
    }
    let ids = target.vocab_size().max(draft.vocab_size()) as u32;
    for id in 0..ids {
        let (ours, theirs) = (target.id_to_token(id), draft.id_to_token(id));
        if ours != theirs {
            bail!(
                "target and draft do not share a vocabulary: token {id} is {} in the target and {} in \
                 the draft ({} and {} tokens)",
                shown(ours),
                shown(theirs),
                target.vocab_size(),
                draft.vocab_size(),
            );
        }
    }
    Ok(())
}

fn shown(token: Option<String>) -> String {
    token.map_or("missing".to_string(), |token| format!("{token:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::GgufTokenizer;
    use std::path::Path;

    /// Three letters and then the given control tokens.
    fn tokenizer(control: &[&str]) -> Tokenizer {
        let mut tokens: Vec<String> = ["a", "b", "ab"].map(String::from).into();
        tokens.extend(control.iter().map(|token| token.to_string()));
        let mut token_types = vec![1; 3];
        token_types.resize(tokens.len(), 3);
        build(tokens, token_types)
    }

    fn build(tokens: Vec<String>, token_types: Vec<i32>) -> Tokenizer {
        let source = GgufTokenizer {
            model: "gpt2".into(),
            pre: "gpt-2".into(),
            tokens,
            token_types,
            merges: vec!["a b".into()],
            ..GgufTokenizer::default()
        };
        let files = source.build().expect("builds");
        Tokenizer::parse(&files.tokenizer, Path::new("tokenizer.json")).expect("parses")
    }

    fn refusal(target: &Tokenizer, draft: &Tokenizer) -> String {
        check_pair(target, draft, 100, 100).expect_err("is refused").to_string()
    }

    #[test]
    fn the_same_tokens_may_be_padded_differently() {
        let (target, draft) = (tokenizer(&["<end>"]), tokenizer(&["<end>"]));
        check_pair(&target, &draft, 152_064, 151_936).expect("is a pair");
        check_pair(&target, &draft, 4, 4).expect("is a pair");
    }

    #[test]
    fn the_first_differing_token_is_named() {
        assert_eq!(
            refusal(&tokenizer(&["<x>", "<end>", "<z>"]), &tokenizer(&["<x>", "<stop>", "<y>"])),
            "target and draft do not share a vocabulary: token 4 is \"<end>\" in the target and \
             \"<stop>\" in the draft (6 and 6 tokens)"
        );
    }

    #[test]
    fn a_shorter_and_a_longer_draft_vocabulary_are_refused() {
        let (short, long) = (tokenizer(&["<x>"]), tokenizer(&["<x>", "<y>"]));
        assert!(refusal(&long, &short).contains("\"<y>\" in the target and missing in the draft"));
        assert!(refusal(&short, &long).contains("missing in the target and \"<y>\" in the draft"));
    }

    /// GGUF files call more tokens special than the checkpoints that they are made of.
    #[test]
    fn a_token_may_be_special_on_one_side_only() {
        let tokens: Vec<String> = ["a", "b", "ab", "<x>"].map(String::from).into();
        let user_defined = build(tokens, vec![1, 1, 1, 4]);
        check_pair(&tokenizer(&["<x>"]), &user_defined, 100, 100).expect("is a pair");
    }

    #[test]
    fn an_embedding_with_too_few_rows_is_refused() {
        let tokenizer = tokenizer(&["<x>"]);
        let error = check_pair(&tokenizer, &tokenizer, 4, 3).expect_err("is refused");
        assert_eq!(error.to_string(), "the draft's tokenizer has 4 ids, its embedding 3 rows");
    }
}
