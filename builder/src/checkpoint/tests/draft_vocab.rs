//! Models that draft some tokens alone.

use super::super::names;
use super::super::testing::{Folder, tiny_config};
use super::{open, read};

const TOKENS: [u32; 4] = [2, 40, 7, 47];

fn opened(tied: bool) -> super::Checkpoint {
    let mut config = tiny_config("llama", "LlamaForCausalLM");
    config["tie_word_embeddings"] = tied.into();
    open(&Folder::new(config)).unwrap()
}

#[test]
fn the_head_has_the_rows_of_these_tokens() {
    for tied in [true, false] {
        let mut checkpoint = opened(tied);
        let table = if tied { names::EMBED } else { names::HEAD };
        let (whole, embed) = (read(&checkpoint, table), read(&checkpoint, names::EMBED));
        let width = checkpoint.config.hidden_size;
        checkpoint.draft_only(TOKENS.to_vec()).unwrap();
        let config = &checkpoint.config;
        assert_eq!((config.draft_vocab, config.tied_head), (Some(4), false));
        let rows = TOKENS.map(|token| &whole[token as usize * width..][..width]);
        assert_eq!(read(&checkpoint, names::HEAD), rows.concat(), "tied: {tied}");
        assert_eq!(read(&checkpoint, names::VOCAB_MAP), TOKENS.map(|token| token as f32));
        assert_eq!(read(&checkpoint, names::EMBED), embed, "all tokens are read");
        let head = checkpoint.tensor(names::HEAD).unwrap();
        let mut part = vec![0.0; 2 * width];
        head.part(1..3).unwrap().read(0..2, &mut part).unwrap();
        assert_eq!(part, rows[1..3].concat());
        let names: Vec<&str> = checkpoint.tensors().map(|(name, _)| name).collect();
        let expected = names::expected(&checkpoint.config, false);
        assert!(expected.iter().all(|tensor| names.contains(&tensor.name.as_str())), "{names:?}");
        assert_eq!(names.len(), expected.len());
    }
}

#[test]
fn tokens_that_it_does_not_have_are_refused() {
    let mut checkpoint = opened(true);
    let error = checkpoint.draft_only(vec![3, 48]).unwrap_err().to_string();
    assert_eq!(error, "token 48 is outside of the vocabulary of 48");
    assert!(checkpoint.draft_only(Vec::new()).is_err());
    let mut checkpoint = opened(false);
    checkpoint.draft_only(vec![3]).unwrap();
    let error = checkpoint.draft_only(vec![3]).unwrap_err().to_string();
    assert_eq!(error, "it drafts some tokens alone already");
}
