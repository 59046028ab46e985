//! How few tokens a text can be, without splitting it into tokens: most texts that are far too long are
//! known to be so after a fraction of the time that splitting them takes.
//!
//! Whatever the rules of a tokenizer are, its tokens spell the text one after the other. So how far the
//! longest token reaches that could begin at a place bounds how far any does. That is looked up by the next 4
//! bytes, and for tokens of 8 bytes and more by the next 8.

use super::files::Parsed;
use super::spelled::Spelled;
use serde_json::Value;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::iter::Fuse;
use unicode_normalization_alignments::UnicodeNormalization;

/// Bytes that tokens shorter than `LONG` are looked up by.
const SHORT: usize = 4;
/// Bytes that longer tokens are looked up by.
const LONG: usize = 8;
/// Canonical composition leaves at least one byte of so many, singletons and composites taken together.
const SHRINKS: usize = 9;

/// How far tokens reach.
pub(super) struct Fewest {
    rules: Rules,
    added: Spelled,
    /// The longest token of less than `LONG` bytes that begins so.
    short: Table<u32>,
    /// The longest of the others that begins so.
    long: Table<u64>,
    longest: usize,
}

type Table<K> = HashMap<K, usize, BuildHasherDefault<Fold>>;

impl Fewest {
    /// `None` for a tokenizer whose tokens may stand for text that they do not spell. `tokens` are the bytes
    /// that its tokens stand for.
    pub(super) fn new(file: &Parsed<'_>, tokens: impl Iterator<Item = Vec<u8>>) -> Option<Self> {
        let rules = Rules::read(file)?;
        let added = file.section("added_tokens").as_array().map_or(&[][..], Vec::as_slice);
        let contents = added.iter().filter_map(|token| token["content"].as_str());
        let mut fewest = Self {
            rules,
            added: Spelled::new(contents.clone().map(str::to_string)),
            short: Table::default(),
            long: Table::default(),
            longest: 1,
        };
        tokens.chain(contents.map(|content| content.into())).for_each(|token| fewest.add(token));
        Some(fewest)
    }

    fn add(&mut self, token: Vec<u8>) {
        let token = match std::str::from_utf8(&token) {
            Ok(text) => self.rules.spell(text.chars()).collect(),
            Err(_) => token,
        };
        self.put(&token);
        // In front of a text there may be a space that is not in it.
        if let (true, [b' ', rest @ ..]) = (self.rules.adds_space, token.as_slice()) {
            self.put(rest);
        }
    }

    fn put(&mut self, token: &[u8]) {
        let len = token.len();
        self.longest = self.longest.max(len);
        let reach = match (token.first_chunk(), token.first_chunk()) {
            (Some(&begin), _) => self.long.entry(u64::from_le_bytes(begin)).or_default(),
            (None, Some(&begin)) => self.short.entry(u32::from_le_bytes(begin)).or_default(),
            (None, None) => return,
        };
        *reach = len.max(*reach);
    }

    /// No way to write `text` in tokens has fewer; what is above `limit` is not counted.
    pub(super) fn count(&self, text: &str, limit: usize) -> usize {
        let shrinks = if self.rules.composes { SHRINKS } else { 1 };
        if text.len() / (shrinks * self.longest) > limit {
            return limit + 1;
        }
        let mut ahead = Ahead::new(self.spelled(text));
        // So many tokens reach to `end` at most, and one more to `further`.
        let (mut count, mut end, mut further) = (0, 0, 0);
        for start in 0.. {
            let Some(next) = ahead.next() else { break };
            further = further.max(start + self.reach(next));
            if start == end {
                count += 1;
                end = further;
                if count > limit {
                    break;
                }
            }
        }
        count
    }

    /// Bytes of the longest token that may begin here. Behind the end of the text there are zeros.
    fn reach(&self, next: [u8; LONG]) -> usize {
        let [begin @ .., _, _, _, _] = next;
        let long = self.long.get(&u64::from_le_bytes(next));
        let reach = long.or_else(|| self.short.get(&u32::from_le_bytes(begin)));
        reach.copied().unwrap_or(SHORT - 1)
    }

    /// The bytes that tokens spell.
    fn spelled<'a>(&'a self, text: &'a str) -> Box<dyn Iterator<Item = u8> + 'a> {
        if !self.rules.composes {
            return Box::new(self.rules.spell(text.chars()));
        }
        // Added tokens are found before anything is composed.
        let mut rest = text;
        let pieces = std::iter::from_fn(move || {
            let added = self.added.find(rest).unwrap_or(rest.len()..rest.len());
            let piece = (!rest.is_empty()).then(|| (&rest[..added.start], &rest[added.clone()]));
            rest = &rest[added.end..];
            piece
        });
        Box::new(pieces.flat_map(|(piece, added)| {
            let composed = piece.nfc().map(|(letter, _)| letter);
            self.rules.spell(composed.chain(added.chars()))
        }))
    }
}

/// What a tokenizer does to a text before its tokens spell it.
#[derive(Clone, Copy, Debug, Default)]
struct Rules {
    /// Canonical composition of what stands between added tokens.
    composes: bool,
    /// Its letter for spaces.
    space: Option<char>,
    /// Whether it puts a space in front.
    adds_space: bool,
}

impl Rules {
    /// `None` where too little is known about them, or they leave out text.
    fn read(file: &Parsed<'_>) -> Option<Self> {
        let mut rules = Self::default();
        let is_known = rules.read_normalizer(file.section("normalizer"))
            && rules.read_pre_tokenizer(file.section("pre_tokenizer"))
            && spells_all(file.section("model"));
        let added = file.section("added_tokens").as_array();
        let takes_more = |token: &Value| {
            ["lstrip", "rstrip", "single_word"].iter().any(|flag| token[flag] == true)
        };
        let takes_more = added.into_iter().flatten().any(takes_more);
        (is_known && !takes_more).then_some(rules)
    }

    fn read_normalizer(&mut self, json: &Value) -> bool {
        match json["type"].as_str() {
            None => json.is_null(),
            Some("NFC") => {
                self.composes = true;
                true
            }
            Some("Prepend") => {
                self.adds_space = true;
                true
            }
            Some("Replace") => {
                json["pattern"]["String"] == " " && self.read_space(&json["content"])
            }
            Some("Sequence") => {
                let steps = json["normalizers"].as_array();
                steps.is_some_and(|steps| steps.iter().all(|step| self.read_normalizer(step)))
            }
            Some(_) => false,
        }
    }

    fn read_pre_tokenizer(&mut self, json: &Value) -> bool {
        match json["type"].as_str() {
            None => json.is_null(),
            Some("Digits") => true,
            Some("Split") => json["behavior"] != "Removed",
            Some("ByteLevel") => {
                self.adds_space |= json["add_prefix_space"] != false;
                true
            }
            Some("Metaspace") => {
                self.adds_space = true;
                self.read_space(&json["replacement"])
            }
            Some("Sequence") => {
                let steps = json["pretokenizers"].as_array();
                steps.is_some_and(|steps| steps.iter().all(|step| self.read_pre_tokenizer(step)))
            }
            Some(_) => false,
        }
    }

    fn read_space(&mut self, json: &Value) -> bool {
        let mut letters = json.as_str().unwrap_or_default().chars();
        let space = letters.next().filter(|_| letters.next().is_none());
        let is_other = self.space.is_some() && self.space != space;
        self.space = space;
        space.is_some() && !is_other
    }

    fn spell(self, letters: impl Iterator<Item = char>) -> impl Iterator<Item = u8> {
        letters.flat_map(move |letter| {
            let mut bytes = [0; 4];
            let letter = if Some(letter) == self.space { ' ' } else { letter };
            let len = letter.encode_utf8(&mut bytes).len();
            bytes.into_iter().take(len)
        })
    }
}

/// Whether every text has tokens, none of which is a stand-in for what has none.
fn spells_all(model: &Value) -> bool {
    let affixes = ["continuing_subword_prefix", "end_of_word_suffix"];
    let has_none = affixes.iter().all(|affix| model[affix].as_str().is_none_or(str::is_empty));
    let has_all = model["byte_fallback"] == true || model["unk_token"].is_null();
    model["type"] == "BPE" && has_none && has_all
}

/// The next bytes at each place of a text.
struct Ahead<I> {
    bytes: Fuse<I>,
    next: [u8; LONG],
    /// How many of `next` are bytes of the text.
    len: usize,
}

impl<I: Iterator<Item = u8>> Ahead<I> {
    fn new(bytes: I) -> Self {
        let mut ahead = Self { bytes: bytes.fuse(), next: [0; LONG], len: 0 };
        while ahead.len < LONG && ahead.fill(ahead.len) {
            ahead.len += 1;
        }
        ahead
    }

    fn fill(&mut self, place: usize) -> bool {
        let byte = self.bytes.next();
        self.next[place] = byte.unwrap_or(0);
        byte.is_some()
    }

    /// Those at the next place, unless the text ends there.
    fn next(&mut self) -> Option<[u8; LONG]> {
        if self.len == 0 {
            return None;
        }
        let here = self.next;
        self.next.copy_within(1.., 0);
        if !self.fill(LONG - 1) {
            self.len -= 1;
        }
        Some(here)
    }
}

/// One multiplication a key: there is a look-up for each byte of a text.
#[derive(Default)]
struct Fold(u64);

impl Hasher for Fold {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u32(&mut self, key: u32) {
        self.write_u64(u64::from(key));
    }

    fn write_u64(&mut self, key: u64) {
        let product = u128::from(self.0 ^ key) * 0x9E37_79B9_7F4A_7C15;
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
