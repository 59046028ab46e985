//! Where texts spell one of a few strings: the added tokens of a vocabulary.

use std::ops::Range;

/// Strings to look for.
#[derive(Clone, Debug, Default)]
pub(super) struct Spelled {
    /// The longest first, none of them empty.
    strings: Vec<String>,
    /// Whether one of them begins with this byte.
    begins: Vec<bool>,
}

impl Spelled {
    pub(super) fn new(strings: impl IntoIterator<Item = String>) -> Self {
        let mut strings: Vec<String> = strings.into_iter().filter(|s| !s.is_empty()).collect();
        strings.sort_by_key(|string| std::cmp::Reverse(string.len()));
        let mut begins = vec![false; 256];
        strings.iter().for_each(|string| begins[usize::from(string.as_bytes()[0])] = true);
        Self { strings, begins }
    }

    /// The first place where one of them stands, with the longest that does.
    pub(super) fn find(&self, text: &str) -> Option<Range<usize>> {
        let bytes = text.as_bytes();
        let starts = (0..bytes.len()).filter(|&start| self.begins[usize::from(bytes[start])]);
        let mut found = starts.filter_map(|start| {
            let here = |string: &&String| bytes[start..].starts_with(string.as_bytes());
            self.strings.iter().find(here).map(|string| start..start + string.len())
        });
        found.next()
    }

    /// Whether `text`, put behind something else, could end what began there: it begins with the end of one
    /// of them or with a middle part, as far as it goes.
    pub(super) fn may_go_on_in(&self, text: &str) -> bool {
        let goes_on = |string: &str| {
            let ends = string.char_indices().skip(1).map(|(start, _)| &string[start..]);
            ends.into_iter().any(|end| text.starts_with(end) || end.starts_with(text))
        };
        !text.is_empty() && self.strings.iter().any(|string| goes_on(string))
    }

    /// Whether something else, put behind `text`, could end what begins at its end.
    pub(super) fn may_begin_in(&self, text: &str) -> bool {
        let begins = |string: &str| {
            let heads = string.char_indices().skip(1).map(|(end, _)| &string[..end]);
            heads.into_iter().any(|head| text.ends_with(head))
        };
        self.strings.iter().any(|string| begins(string))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spelled(strings: &[String]) -> Spelled {
        Spelled::new(strings.iter().cloned())
    }

    #[test]
    fn of_several_at_one_place_the_longest_is_found() {
        let spelled = Spelled::new(["<a", "<ab>", "b>"].map(String::from));
        assert_eq!(spelled.find("x<ab><a"), Some(1..5));
        assert_eq!(spelled.find("x<abb>"), Some(1..3));
        assert_eq!(spelled.find("x<"), None);
        assert!(
            spelled.may_begin_in("x<ab") && spelled.may_begin_in("<") && !spelled.may_begin_in("a")
        );
        assert!(
            spelled.may_go_on_in("ab>x") && spelled.may_go_on_in("a") && !spelled.may_go_on_in("<")
        );
    }

    proptest! {
        #[test]
        fn the_leftmost_place_is_found(
            strings in prop::collection::vec("[<a>é]{1,3}", 0..4), text in "[<a>é]{0,12}",
        ) {
            let spans = (0..=text.len()).flat_map(|start| (start + 1..=text.len()).map(move |end| start..end));
            let is_one = |span: &Range<usize>| {
                let bytes = &text.as_bytes()[span.clone()];
                strings.iter().any(|string| string.as_bytes() == bytes)
            };
            let first = spans.filter(is_one).min_by_key(|span| (span.start, std::cmp::Reverse(span.end)));
            prop_assert_eq!(spelled(&strings).find(&text), first);
        }

        /// What is put together from two texts is no string of ours unless one of them says that it may be.
        #[test]
        fn what_is_put_together_was_foreseen(
            strings in prop::collection::vec("[<a>]{2,4}", 1..4),
            left in "[<a>]{0,4}", right in "[<a>]{0,4}",
        ) {
            let spelled = spelled(&strings);
            let across = (0..left.len()).any(|start| {
                let joined = [&left[start..], &right].concat();
                let reaches = |s: &&String| s.len() > left.len() - start && joined.starts_with(s.as_str());
                strings.iter().find(reaches).is_some()
            });
            if across {
                prop_assert!(spelled.may_begin_in(&left) && spelled.may_go_on_in(&right));
            }
        }
    }
}
