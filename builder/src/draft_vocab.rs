//! `--draft-vocab`: the tokens that a model drafts. Texts use few of a large vocabulary, and the head takes a large part of a
//! small model's pass; a token that is never drafted costs no more than the rest of its draft.

use crate::checkpoint::{Checkpoint, TokenizerFiles, TokenizerSource};
use crate::tokenizer::GgufTokenizer;
use anyhow::{Context, Result, anyhow, ensure};
use serde::Deserialize;
use spec_core::tokenizer::Tokenizer;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// What `collect` lists its samples in.
const SAMPLES: &str = "samples.jsonl";

/// Bytes of a text that are tokenised at a time: up to the end of a line, or to as many bytes again.
const PIECE_BYTES: usize = 64 << 10;

/// How many tokens are drafted, and where their frequencies come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftVocab {
    len: usize,
    /// A text, or a folder of `collect`; where there is none, tokens with low numbers are held to be frequent.
    counted: Option<PathBuf>,
}

/// What was kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    drafted: usize,
    all: usize,
    /// The share of what was counted.
    share: Option<f64>,
}

/// A line of the list of samples.
#[derive(Deserialize)]
struct Sample {
    prompt_tokens: usize,
    token_ids: Vec<u32>,
}

impl FromStr for DraftVocab {
    type Err = String;

    /// As on the command line: `N`, `N:FILE` or `N:FOLDER`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (len, counted) = match text.split_once(':') {
            Some((len, path)) => (len, Some(PathBuf::from(path))),
            None => (text, None),
        };
        match len.parse() {
            Ok(len) if len > 0 => Ok(Self { len, counted }),
            _ => Err(format!("'{len}' is no number of tokens")),
        }
    }
}

impl DraftVocab {
    /// Has `draft` draft these tokens alone.
    pub(crate) fn apply(&self, draft: &mut Checkpoint) -> Result<Kept> {
        let (all, ends) = (draft.config.vocab_size, &draft.generation.end_tokens);
        ensure!(
            draft.config.draft_head.is_none(),
            "--draft-vocab: a head brings a vocabulary of its own, expected a model"
        );
        ensure!(
            (ends.len() + 1..all).contains(&self.len),
            "--draft-vocab {}: expected {} to {} of the vocabulary's {all} tokens",
            self.len,
            ends.len() + 1,
            all - 1
        );
        let counts = match &self.counted {
            None => vec![0; all],
            Some(path) => counts(path, &draft.tokenizer, all)
                .with_context(|| format!("--draft-vocab: counting tokens of {}", path.display()))?,
        };
        let tokens = most_frequent(&counts, self.len, ends);
        let kept: u64 = tokens.iter().map(|&token| counts[token as usize]).sum();
        let counted: u64 = counts.iter().sum();
        draft.draft_only(tokens)?;
        let share = (counted > 0).then(|| kept as f64 / counted as f64);
        Ok(Kept { drafted: self.len, all, share })
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { drafted, all, share } = self;
        write!(f, "drafts {drafted} of {all} tokens")?;
        match share {
            Some(share) => write!(f, ", {:.2} % of those counted", 100.0 * share),
            None => Ok(()),
        }
    }
}

/// So many tokens, ascending: all of `always`, then those that were seen most often, of the same count the lower ones.
fn most_frequent(counts: &[u64], len: usize, always: &[u32]) -> Vec<u32> {
    let mut tokens: Vec<u32> = (0..counts.len() as u32).collect();
    let key = |token: &u32| (!always.contains(token), u64::MAX - counts[*token as usize], *token);
    tokens.sort_by_cached_key(key);
    tokens.truncate(len);
    tokens.sort_unstable();
    tokens
}

/// How often each of `vocab_size` tokens stands in answers that were collected, or in a text.
fn counts(path: &Path, tokenizer: &TokenizerSource, vocab_size: usize) -> Result<Vec<u64>> {
    let mut counts = vec![0; vocab_size];
    let mut count = |tokens: &[u32]| -> Result<()> {
        for &token in tokens {
            let count = counts.get_mut(token as usize);
            *count.with_context(|| format!("token {token} of {vocab_size}"))? += 1;
        }
        Ok(())
    };
    if path.is_dir() {
        let samples = BufReader::new(File::open(path.join(SAMPLES)).context(SAMPLES)?);
        for (idx, line) in samples.lines().enumerate() {
            let read = || -> Result<Sample> { Ok(serde_json::from_str(&line?)?) };
            let sample = read().with_context(|| format!("{SAMPLES} line {}", idx + 1))?;
            count(sample.token_ids.get(sample.prompt_tokens..).unwrap_or_default())?;
        }
    } else {
        let mut text = BufReader::new(File::open(path)?);
        let tokenizer = open(tokenizer)?;
        let mut num_read = 0;
        loop {
            let piece = next_piece(&mut text)?;
            if piece.is_empty() {
                break;
            }
            let piece = std::str::from_utf8(&piece)
                .map_err(|error| anyhow!("byte {}: no UTF-8", num_read + error.valid_up_to()))?;
            count(&tokenizer.encode(piece, false)?)?;
            num_read += piece.len();
        }
    }
    ensure!(counts.iter().any(|&count| count > 0), "it has no token");
    Ok(counts)
}

/// What a text goes on with: at least [`PIECE_BYTES`] but at its end, where nothing is left. Ends with a line, or, where that is
/// long, with a whole character.
fn next_piece(text: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut piece = Vec::new();
    text.by_ref().take(PIECE_BYTES as u64).read_to_end(&mut piece)?;
    if piece.len() < PIECE_BYTES || piece.ends_with(b"\n") {
        return Ok(piece);
    }
    text.by_ref().take(PIECE_BYTES as u64).read_until(b'\n', &mut piece)?;
    // A character has up to three bytes behind its first one.
    for _ in 0..3 {
        let next = text.fill_buf()?.first().copied();
        let Some(byte) = next.filter(|byte| byte & 0xC0 == 0x80) else { break };
        piece.push(byte);
        text.consume(1);
    }
    Ok(piece)
}

fn open(source: &TokenizerSource) -> Result<Tokenizer> {
    match source {
        TokenizerSource::Gguf(metadata) => {
            let files = GgufTokenizer::from(&**metadata).build()?;
            Ok(Tokenizer::parse(&files.tokenizer, Path::new("tokenizer.json"))?)
        }
        TokenizerSource::Files(TokenizerFiles { tokenizer, .. }) => {
            let path = tokenizer.as_ref().context("there is no tokenizer.json")?;
            let json = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
            Ok(Tokenizer::parse(&json, path)?)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_says_how_many_and_counted_in_what() {
        let of = |len, counted: Option<&str>| DraftVocab { len, counted: counted.map(Into::into) };
        assert_eq!(DraftVocab::from_str("16384"), Ok(of(16384, None)));
        assert_eq!(DraftVocab::from_str("7:a:b.txt"), Ok(of(7, Some("a:b.txt"))));
        for wrong in ["", "0", "-1", "many", ":a.txt"] {
            assert!(DraftVocab::from_str(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_most_frequent_tokens_are_kept_and_those_that_end_a_text() {
        let counts = [5, 0, 7, 0, 1, 0];
        assert_eq!(most_frequent(&counts, 3, &[]), [0, 2, 4]);
        assert_eq!(most_frequent(&counts, 3, &[5]), [0, 2, 5]);
        assert_eq!(most_frequent(&counts, 5, &[5]), [0, 1, 2, 4, 5]);
        assert_eq!(most_frequent(&[0; 4], 2, &[3]), [0, 3], "low numbers where nothing is counted");
    }

    #[test]
    fn a_text_is_cut_behind_lines() {
        let line = "é".repeat(PIECE_BYTES / 4) + "\n";
        let text = line.repeat(7) + "end";
        let found = pieces(&text);
        assert_eq!(found.concat(), text);
        assert!(found.len() > 2 && found.iter().rev().skip(1).all(|piece| piece.ends_with('\n')));
        assert_eq!(pieces(""), [""; 0]);
        assert_eq!(pieces("a"), ["a"]);
    }

    #[test]
    fn a_text_of_one_line_is_cut_between_characters() {
        // At an odd place, so that the bytes that are read at a time end inside of one.
        let text = "a".to_owned() + &"é".repeat(3 * PIECE_BYTES);
        let found = pieces(&text);
        assert_eq!(found.concat(), text);
        assert!(found.iter().all(|piece| piece.len() <= 2 * PIECE_BYTES + 1), "{}", found.len());
    }

    /// Read a few bytes at a time.
    fn pieces(text: &str) -> Vec<String> {
        let mut reader = BufReader::with_capacity(7, text.as_bytes());
        let next = || {
            let piece = next_piece(&mut reader).expect("reads");
            (!piece.is_empty()).then(|| String::from_utf8(piece).expect("whole characters"))
        };
        std::iter::from_fn(next).collect()
    }
}
