//! Whether drafts are still right as often as they were: of the first token of a draft, lately against before. Unlike
//! accepted by drafted tokens it does not change with the length of drafts, which follows the load.

use std::fmt;
use triton_backend::Level;

/// Drafts that are looked at together: some hundred answers' worth of a busy model, some of a quiet one.
const WINDOW: u64 = 500;
/// Windows that make up what is usual, before anything is said.
const LEARNED: u64 = 6;
/// Weight of a window in what is usual: the last forty or so count.
const WEIGHT: f64 = 0.025;
/// Share of the usual below which drafts have come to be worth less; and above which they are as before.
const LOST: f64 = 0.7;
const REGAINED: f64 = 0.85;

/// How often the first token of a draft is right.
#[derive(Clone, Debug, Default)]
pub(super) struct Acceptance {
    /// Drafts of the window that is filling, and those whose first token was right.
    drafts: u64,
    right: u64,
    windows: u64,
    /// Of windows in which nothing was wrong.
    usual: f64,
    has_drifted: bool,
}

/// What has come of a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Change {
    has_drifted: bool,
    rate: f64,
    usual: f64,
}

impl Acceptance {
    /// Takes in the drafts of a text. Tells when their acceptance has left what is usual, or has come back.
    pub(super) fn count(&mut self, drafts: u64, right: u64) -> Option<Change> {
        self.drafts += drafts;
        self.right += right;
        if self.drafts < WINDOW {
            return None;
        }
        let rate = self.right as f64 / self.drafts as f64;
        (self.drafts, self.right) = (0, 0);
        self.take(rate)
    }

    fn take(&mut self, rate: f64) -> Option<Change> {
        let usual = self.usual;
        let share = if self.has_drifted { REGAINED } else { LOST };
        let is_less = self.windows >= LEARNED && rate < share * usual;
        if !is_less {
            self.windows += 1;
            // At first the mean of all.
            let weight = WEIGHT.max(1.0 / self.windows as f64);
            self.usual += weight * (rate - usual);
        }
        let changed = is_less != self.has_drifted;
        self.has_drifted = is_less;
        changed.then_some(Change { has_drifted: is_less, rate, usual })
    }
}

impl Change {
    /// How it weighs in the log.
    pub(super) fn level(self) -> Level {
        if self.has_drifted { Level::Warn } else { Level::Info }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { has_drifted, rate, usual } = self;
        let [rate, usual] = [rate, usual].map(|share| 100.0 * share);
        match has_drifted {
            true => write!(
                f,
                "drafts fit less than they did: their first token was right in {rate:.0} % of the last {WINDOW}, usually \
                 in {usual:.0} %. Texts stay right and come slower: other prompts, another template or temperature?"
            ),
            false => write!(
                f,
                "drafts fit as before again: their first token was right in {rate:.0} % of the last {WINDOW}, usually in \
                 {usual:.0} %"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many windows in texts of ten drafts each, of which so many percent are right; what was told.
    fn feed(acceptance: &mut Acceptance, windows: u64, percent: u64) -> Vec<Change> {
        let texts = 0..windows * WINDOW / 10;
        // Tens of texts, so that every window has the share.
        texts
            .filter_map(|text| {
                acceptance.count(10, percent / 10 + u64::from(text % 10 < percent % 10))
            })
            .collect()
    }

    #[test]
    fn a_drop_is_told_once_and_so_is_its_end() {
        let mut acceptance = Acceptance::default();
        assert_eq!(feed(&mut acceptance, 20, 80), []);
        let dropped = feed(&mut acceptance, 5, 40);
        assert_eq!(dropped.len(), 1, "{dropped:?}");
        assert!(dropped[0].has_drifted && dropped[0].level() == Level::Warn);
        assert_eq!(
            dropped[0].to_string(),
            "drafts fit less than they did: their first token was right in 40 % of the last 500, usually in 80 %. Texts \
             stay right and come slower: other prompts, another template or temperature?"
        );
        assert_eq!(feed(&mut acceptance, 5, 62), [], "neither as low nor as before");
        let back = feed(&mut acceptance, 5, 75);
        assert_eq!(back.len(), 1, "{back:?}");
        assert!(!back[0].has_drifted && back[0].level() == Level::Info);
    }

    #[test]
    fn nothing_is_said_before_what_is_usual_is_known() {
        let mut acceptance = Acceptance::default();
        assert_eq!(feed(&mut acceptance, 3, 90), []);
        assert_eq!(feed(&mut acceptance, LEARNED - 3, 20), []);
    }

    #[test]
    fn small_and_slow_changes_are_followed_in_silence() {
        let mut acceptance = Acceptance::default();
        feed(&mut acceptance, 10, 80);
        assert_eq!(feed(&mut acceptance, 1, 60), [], "three quarters of the usual");
        for percent in (30..80).rev() {
            assert_eq!(feed(&mut acceptance, 20, percent), [], "at {percent} %");
        }
    }

    #[test]
    fn texts_without_drafts_are_no_drop() {
        let mut acceptance = Acceptance::default();
        feed(&mut acceptance, 10, 80);
        assert!((0..10_000).all(|_| acceptance.count(0, 0).is_none()));
    }
}
