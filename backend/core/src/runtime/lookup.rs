//! Which look-up drafts, alone or ahead of a model or a head.

use crate::draft::{Drafter, Ngram, Suffix};
use crate::draft_len::DraftPolicy;
use crate::engine::DrafterKind;
use crate::{Error, Result};

/// Where drafts are looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// Nowhere.
    Off,
    /// In the sequence's own text.
    Ngram,
    /// There, and in what was read and written lately by whoever may share its pages.
    Suffix,
}

impl Lookup {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Off, Self::Ngram, Self::Suffix];

    /// As it is written on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Ngram => "ngram",
            Self::Suffix => "suffix",
        }
    }
}

impl std::str::FromStr for Lookup {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = Self::ALL.into_iter().find(|lookup| lookup.name() == text);
        found.ok_or_else(|| format!("expected one of {}", Self::ALL.map(Self::name).join(", ")))
    }
}

/// Tokens that are looked for beside a model or a head: shorter repeats are right too seldom to beat it.
const MAX_BESIDE: usize = 5;
const MIN_BESIDE: usize = 3;
/// The same without one, unless the engine says otherwise.
const MAX_ALONE: usize = 3;
const MIN_ALONE: usize = 2;

/// Tokens of ended texts that are kept unless the engine says otherwise: some 100 bytes each.
pub const SUFFIX_TOKENS: usize = 1 << 19;

/// A look-up with its sizes.
pub(super) enum Settled {
    Ngram { max: usize, min: usize },
    Suffix { max_tokens: usize, min: usize },
}

impl Settled {
    /// What an engine names and the operator wants. Beside a model the adaptive policy looks up drafts as well.
    pub(super) fn of(
        kind: &DrafterKind,
        wanted: Option<Lookup>,
        policy: DraftPolicy,
    ) -> Result<Option<Self>> {
        let (is_beside, takes_drafts) = (kind.runs_passes(), *kind != DrafterKind::None);
        let usual = match kind {
            DrafterKind::Ngram { .. } => Lookup::Ngram,
            DrafterKind::Suffix { .. } => Lookup::Suffix,
            DrafterKind::Model(_) | DrafterKind::Skip { .. } if policy == DraftPolicy::Adaptive => {
                Lookup::Ngram
            }
            DrafterKind::Model(_) | DrafterKind::Skip { .. } | DrafterKind::None => Lookup::Off,
        };
        let lookup = wanted.unwrap_or(usual);
        if lookup != Lookup::Off && !takes_drafts {
            return Err(Error::Unsupported(format!(
                "lookup {}: the engine was built without a drafter and takes no drafts",
                lookup.name()
            )));
        }
        let (max, min) = if is_beside { (MAX_BESIDE, MIN_BESIDE) } else { (MAX_ALONE, MIN_ALONE) };
        Ok(match (lookup, kind) {
            (Lookup::Off, _) => None,
            (Lookup::Ngram, &DrafterKind::Ngram { max_ngram, min_ngram }) => {
                Some(Self::Ngram { max: max_ngram, min: min_ngram })
            }
            (Lookup::Ngram, _) => Some(Self::Ngram { max, min }),
            (Lookup::Suffix, &DrafterKind::Suffix { max_tokens }) => {
                Some(Self::Suffix { max_tokens, min })
            }
            (Lookup::Suffix, _) => Some(Self::Suffix { max_tokens: SUFFIX_TOKENS, min }),
        })
    }

    /// Two drafters that find the same: the first is to be told of all sequences, the second need not be there.
    pub(super) fn drafters(&self, branches: usize) -> (Box<dyn Drafter>, Box<dyn Drafter>) {
        match *self {
            Self::Ngram { max, min } => {
                let ngram = || Box::new(Ngram::new(max, min).with_branches(branches));
                (ngram(), ngram())
            }
            Self::Suffix { max_tokens, min } => {
                let suffix = Suffix::new(max_tokens, min);
                let reader = suffix.reader();
                (Box::new(suffix), Box::new(reader))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Peer;

    #[test]
    fn the_operators_wish_goes_before_the_engines_drafter() {
        let model =
            DrafterKind::Model(Peer { file: "draft.engine".into(), identity: String::new() });
        let own = DrafterKind::Ngram { max_ngram: 7, min_ngram: 4 };
        let kept = DrafterKind::Suffix { max_tokens: 99 };
        let settled = |kind, wanted, policy| match Settled::of(kind, wanted, policy).unwrap() {
            None => "off".into(),
            Some(Settled::Ngram { max, min }) => format!("{max} to {min}"),
            Some(Settled::Suffix { max_tokens, min }) => format!("{max_tokens} by {min}"),
        };
        use DraftPolicy::{Adaptive, Fixed};
        assert_eq!(settled(&own, None, Fixed), "7 to 4");
        assert_eq!(settled(&own, Some(Lookup::Off), Fixed), "off");
        assert_eq!(settled(&own, Some(Lookup::Suffix), Fixed), "524288 by 2");
        assert_eq!(settled(&kept, None, Fixed), "99 by 2");
        assert_eq!(settled(&kept, Some(Lookup::Ngram), Fixed), "3 to 2");
        assert_eq!(settled(&model, None, Fixed), "off");
        assert_eq!(settled(&model, None, Adaptive), "5 to 3");
        assert_eq!(settled(&model, Some(Lookup::Off), Adaptive), "off");
        assert_eq!(settled(&model, Some(Lookup::Suffix), Fixed), "524288 by 3");
        assert_eq!(settled(&DrafterKind::None, None, Adaptive), "off");
        let refused =
            Settled::of(&DrafterKind::None, Some(Lookup::Suffix), Adaptive).err().unwrap();
        assert!(refused.to_string().contains("lookup suffix"), "{refused}");
    }
}
