//! Where texts spell one of a few strings: the added tokens of a vocabulary.
//!
//! Clients choose the texts, and vocabularies may have hundreds of such strings that begin alike. So no place of a
//! text is compared with each of them: a place costs at most the length of the longest.

use std::ops::Range;

/// Strings to look for.
#[derive(Clone, Debug, Default)]
pub(super) struct Spelled {
    /// Their common beginnings; the first is the empty one.
    nodes: Vec<Node>,
    /// Bytes of the longest.
    longest: usize,
}

/// What one or more of the strings begin with.
#[derive(Clone, Debug, Default)]
struct Node {
    /// The nodes that are a byte longer, by that byte.
    next: Vec<(u8, usize)>,
    /// Whether it is one of the strings.
    is_whole: bool,
}

impl Spelled {
    pub(super) fn new(strings: impl IntoIterator<Item = String>) -> Self {
        let mut spelled = Self { nodes: vec![Node::default()], longest: 0 };
        strings.into_iter().filter(|string| !string.is_empty()).for_each(|s| spelled.put(&s));
        spelled.nodes.iter_mut().for_each(|node| node.next.sort_unstable());
        spelled
    }

    fn put(&mut self, string: &str) {
        let mut node = 0;
        for &byte in string.as_bytes() {
            let known = self.nodes[node].next.iter().find(|(next, _)| *next == byte);
            node = match known {
                Some(&(_, next)) => next,
                None => {
                    let new = self.nodes.len();
                    self.nodes[node].next.push((byte, new));
                    self.nodes.push(Node::default());
                    new
                }
            };
        }
        self.nodes[node].is_whole = true;
        self.longest = self.longest.max(string.len());
    }

    /// The nodes that the beginning of `bytes` leads through.
    fn walk<'a>(&'a self, bytes: &'a [u8]) -> impl Iterator<Item = &'a Node> {
        let mut here = self.nodes.first();
        bytes.iter().map_while(move |&byte| {
            let next = &here?.next;
            let place = next.binary_search_by_key(&byte, |&(byte, _)| byte).ok()?;
            here = self.nodes.get(next[place].1);
            here
        })
    }

    /// The first place where one of them stands, with the longest that does.
    pub(super) fn find(&self, text: &str) -> Option<Range<usize>> {
        let bytes = text.as_bytes();
        let found = |start: usize| {
            let lens = self.walk(&bytes[start..]).zip(1..);
            let len = lens.filter(|(node, _)| node.is_whole).last()?.1;
            Some(start..start + len)
        };
        (0..bytes.len()).find_map(found)
    }

    /// Whether something else, put behind `text`, could end what begins at its end.
    pub(super) fn may_begin_in(&self, text: &str) -> bool {
        let bytes = text.as_bytes();
        let first = bytes.len().saturating_sub(self.longest.saturating_sub(1));
        (first..bytes.len()).any(|start| {
            let rest = bytes.len() - start;
            self.walk(&bytes[start..]).nth(rest - 1).is_some_and(|node| !node.next.is_empty())
        })
    }
}

/// The ends of strings, less than the whole of one, that texts may go on with.
#[derive(Clone, Debug, Default)]
pub(super) struct Ends {
    strings: Vec<String>,
    /// Where in which string an end begins, in the order of the ends. None begins with another: a text that goes on
    /// with both goes on with the shorter.
    ends: Vec<(usize, usize)>,
}

impl Ends {
    pub(super) fn new(strings: impl IntoIterator<Item = String>) -> Self {
        let strings: Vec<String> = strings.into_iter().collect();
        let starts = |(idx, string): (usize, &String)| {
            let starts = string.char_indices().skip(1).map(|(start, _)| start);
            starts.map(|start| (idx, start)).collect::<Vec<_>>()
        };
        let mut ends: Vec<_> = strings.iter().enumerate().flat_map(starts).collect();
        let end = |&(idx, start): &(usize, usize)| &strings[idx][start..];
        ends.sort_unstable_by_key(|at| end(at));
        // In this order, what begins with an end stands behind it.
        ends.dedup_by(|later, kept| end(later).starts_with(end(kept)));
        Self { strings, ends }
    }

    /// Whether `text`, put behind something else, could end what began there: it begins with the end of one
    /// of the strings or with a middle part, as far as it goes.
    pub(super) fn may_go_on_in(&self, text: &str) -> bool {
        let end = |&(idx, start): &(usize, usize)| &self.strings[idx][start..];
        let place = self.ends.partition_point(|at| end(at) < text);
        let (before, behind) = self.ends.split_at(place);
        !text.is_empty()
            && (before.last().is_some_and(|at| text.starts_with(end(at)))
                || behind.first().is_some_and(|at| end(at).starts_with(text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spelled(strings: &[String]) -> Spelled {
        Spelled::new(strings.iter().cloned())
    }

    fn ends(strings: &[String]) -> Ends {
        Ends::new(strings.iter().cloned())
    }

    #[test]
    fn of_several_at_one_place_the_longest_is_found() {
        let strings = ["<a", "<ab>", "b>"].map(String::from);
        let (spelled, ends) = (spelled(&strings), ends(&strings));
        assert_eq!(spelled.find("x<ab><a"), Some(1..5));
        assert_eq!(spelled.find("x<abb>"), Some(1..3));
        assert_eq!(spelled.find("x<"), None);
        assert!(
            spelled.may_begin_in("x<ab") && spelled.may_begin_in("<") && !spelled.may_begin_in("a")
        );
        assert!(ends.may_go_on_in("ab>x") && ends.may_go_on_in("a") && !ends.may_go_on_in("<"));
    }

    #[test]
    fn nothing_is_found_where_there_is_nothing_to_find() {
        let none = [String::new()];
        assert_eq!(spelled(&none).find("x"), None);
        assert!(!spelled(&none).may_begin_in("x") && !ends(&none).may_go_on_in("x"));
        assert_eq!(Spelled::default().find("x"), None);
        assert!(
            !spelled(&["<a".into()]).may_begin_in("") && !ends(&["<a".into()]).may_go_on_in("")
        );
    }

    /// A vocabulary of many that begin alike costs a text what one of few does.
    #[test]
    fn many_strings_have_few_nodes_and_ends_to_look_at() {
        let names: Vec<String> = (0..256).map(|n| format!("<|reserved_{n}|>")).collect();
        let spelled = spelled(&names);
        let visited = |text: &str| -> usize {
            (0..text.len()).map(|start| spelled.walk(&text.as_bytes()[start..]).count()).sum()
        };
        assert_eq!(visited(&"<".repeat(1000)), 1000);
        assert_eq!(visited(&"<|reserved_".repeat(100)), 1100);
        assert!(spelled.nodes.iter().all(|node| node.next.len() <= 11));
        let ends = ends(&names);
        assert!(ends.ends.len() < names.concat().len());
    }

    /// As it is said, string by string.
    fn naive_may_go_on_in(strings: &[String], text: &str) -> bool {
        let goes_on = |string: &String| {
            let mut ends = string.char_indices().skip(1).map(|(start, _)| &string[start..]);
            ends.any(|end| text.starts_with(end) || end.starts_with(text))
        };
        !text.is_empty() && strings.iter().any(goes_on)
    }

    fn naive_may_begin_in(strings: &[String], text: &str) -> bool {
        let begins = |string: &String| {
            let mut heads = string.char_indices().skip(1).map(|(end, _)| &string[..end]);
            heads.any(|head| text.ends_with(head))
        };
        strings.iter().any(begins)
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

        #[test]
        fn both_ends_of_a_text_are_seen_as_if_each_string_were_compared(
            strings in prop::collection::vec("[<aé☃>]{0,5}", 0..6), text in "[<aé☃>]{0,7}",
        ) {
            prop_assert_eq!(spelled(&strings).may_begin_in(&text), naive_may_begin_in(&strings, &text));
            prop_assert_eq!(ends(&strings).may_go_on_in(&text), naive_may_go_on_in(&strings, &text));
        }

        /// What is put together from two texts is no string of ours unless both of them say that it may be.
        #[test]
        fn what_is_put_together_was_foreseen(
            strings in prop::collection::vec("[<a>]{2,4}", 1..4),
            left in "[<a>]{0,4}", right in "[<a>]{0,4}",
        ) {
            let (spelled, ends) = (spelled(&strings), ends(&strings));
            let across = (0..left.len()).any(|start| {
                let joined = [&left[start..], &right].concat();
                let reaches = |s: &&String| s.len() > left.len() - start && joined.starts_with(s.as_str());
                strings.iter().find(reaches).is_some()
            });
            if across {
                prop_assert!(spelled.may_begin_in(&left) && ends.may_go_on_in(&right));
            }
        }
    }
}
