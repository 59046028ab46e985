//! What `--draft` says.

use crate::skip::SkipSource;
use spec_core::engine::MAX_SUFFIX_TOKENS;
use spec_core::runtime::SUFFIX_TOKENS;
use std::ffi::OsString;
use std::path::PathBuf;

/// Where draft tokens come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DraftSource {
    /// No speculation.
    None,
    /// Look-up of earlier n-grams, from the longest to the shortest.
    Ngram {
        /// Tokens of the longest.
        max: usize,
        /// Tokens of the shortest.
        min: usize,
    },
    /// Look-up there, and in texts that ended.
    Suffix {
        /// Tokens of those that are kept.
        max_tokens: usize,
    },
    /// The target without some of its layers.
    Skip(SkipSource),
    /// A checkpoint.
    Model(PathBuf),
}

/// Tokens that can be looked up at most: each length has an index of its own.
const MAX_NGRAM: usize = 16;

impl DraftSource {
    /// Look-up as long as nobody says otherwise.
    pub const NGRAM: Self = Self::Ngram { max: 3, min: 2 };

    pub(super) fn parse(text: OsString) -> Result<Self, String> {
        let Some(known) = text.to_str() else { return Ok(Self::Model(text.into())) };
        let (name, sizes) = match known.split_once(':') {
            Some((name, sizes)) => (name, Some(sizes)),
            None => (known, None),
        };
        match (name, sizes) {
            ("none", None) => Ok(Self::None),
            ("ngram", None) => Ok(Self::NGRAM),
            ("ngram", Some(lengths)) => Self::ngram(lengths),
            ("suffix", None) => Ok(Self::Suffix { max_tokens: SUFFIX_TOKENS }),
            ("suffix", Some(size)) => Self::suffix(size),
            ("skip", None) => Ok(Self::Skip(SkipSource::Search)),
            ("skip", Some(file)) => Ok(Self::Skip(SkipSource::File(file.into()))),
            _ => Ok(Self::Model(text.into())),
        }
    }

    /// Look-up in so many tokens of texts that ended, such as `tokens=100000`.
    fn suffix(size: &str) -> Result<Self, String> {
        let number = size.strip_prefix("tokens=").and_then(|number| number.parse().ok());
        match number {
            Some(max_tokens @ 1..=MAX_SUFFIX_TOKENS) => Ok(Self::Suffix { max_tokens }),
            _ => Err(format!("'{size}': expected tokens=N, from 1 to {MAX_SUFFIX_TOKENS}")),
        }
    }

    /// Look-up of lengths such as `max=4,min=2`. One that is not said gives way to the other.
    fn ngram(lengths: &str) -> Result<Self, String> {
        let (mut max, mut min) = (None, None);
        for part in lengths.split(',') {
            let length = match part.split_once('=') {
                Some(("max", length)) if max.is_none() => (&mut max, length),
                Some(("min", length)) if min.is_none() => (&mut min, length),
                _ => {
                    return Err(format!(
                        "'{part}' is not known: expected max=N or min=N, each once"
                    ));
                }
            };
            let value = length.1.parse().map_err(|_| format!("'{part}' has no number"))?;
            *length.0 = Some(value);
        }
        let (max, min): (usize, usize) = match (max, min) {
            (Some(max), min) => (max, min.unwrap_or(max.min(2))),
            (None, min) => (min.unwrap_or(3).max(3), min.unwrap_or(2)),
        };
        match 1 <= min && min <= max && max <= MAX_NGRAM {
            true => Ok(Self::Ngram { max, min }),
            false => {
                Err(format!("max={max} and min={min}: expected 1 <= min <= max <= {MAX_NGRAM}"))
            }
        }
    }
}
