//! Which colour and shape stands for a setting, the same in every plot.

use super::panel::{order_of_drafts, order_of_loads};
use crate::results::Results;
use crate::setting::{Load, Setting};
use spec_build::cli::DraftLen;
use std::mem::discriminant;

/// Colours of `style.css` for ways of drafting: `d1`, `d2`, ...
const DRAFT_COLOURS: usize = 6;
/// Its colours for loads, a ramp: `l1` to `l5`.
const LOAD_COLOURS: usize = 5;
/// Of `auto`, wherever it is drawn.
pub(super) const AUTO_SHAPE: usize = 3;

/// How one series looks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Style {
    /// Of the style sheet.
    pub(super) class: String,
    pub(super) shape: usize,
}

/// The ways of drafting and the loads of all runs.
pub(super) struct Palette<'a> {
    drafts: Vec<&'a Setting>,
    loads: Vec<Load>,
}

impl<'a> Palette<'a> {
    pub(super) fn new(results: &'a Results) -> Self {
        let settings = results.runs.iter().map(|run| &run.setting);
        let mut drafts: Vec<&Setting> = settings.filter(|setting| !setting.is_plain()).collect();
        drafts.sort_by(|a, b| order_of_drafts(a, b));
        drafts.dedup_by(|a, b| order_of_drafts(a, b).is_eq());
        let mut loads: Vec<Load> = results.runs.iter().map(|run| run.setting.load).collect();
        loads.sort_by(order_of_loads);
        loads.dedup_by(|a, b| order_of_loads(a, b).is_eq());
        Self { drafts, loads }
    }

    /// Of a way of drafting.
    pub(super) fn drafts(&self, setting: &Setting) -> Style {
        if setting.is_plain() {
            return Style { class: "plain".into(), shape: 0 };
        }
        let is_auto = |of: &&Setting| of.draft_len == DraftLen::Auto;
        let is_same = |of: &&Setting| order_of_drafts(of, setting).is_eq();
        if is_auto(&setting) && self.drafts.iter().copied().filter(is_auto).count() == 1 {
            return Style { class: "auto".into(), shape: AUTO_SHAPE };
        }
        let at = self.drafts.iter().copied().position(|of| is_same(&of)).unwrap_or(0);
        // Neither the shape of no drafts nor, as long as shapes last, that of `auto`.
        Style { class: draft_class(at), shape: [1, 2, 4, 0, 3][at % 5] }
    }

    /// Of a load: the heavier of its kind, the further from the background.
    pub(super) fn load(&self, load: &Load) -> Style {
        let alike = self.loads.iter().filter(|other| discriminant(*other) == discriminant(load));
        let before = |other: &&Load| order_of_loads(other, load).is_lt();
        let (at, last) = (alike.clone().filter(before).count(), alike.count().saturating_sub(1));
        let step = match last {
            0 => LOAD_COLOURS / 2,
            _ => (at * (LOAD_COLOURS - 1) + last / 2) / last,
        };
        Style { class: format!("l{}", step + 1), shape: [0, 1, 2, 4][at % 4] }
    }
}

/// Of the endpoint in this place.
pub(super) fn endpoint(at: usize) -> Style {
    Style { class: draft_class(at), shape: at }
}

fn draft_class(at: usize) -> String {
    format!("d{}", at % DRAFT_COLOURS + 1)
}

#[cfg(test)]
mod tests {
    use super::super::example;
    use super::*;

    #[test]
    fn settings_look_different() {
        let results = example::sweep();
        let palette = Palette::new(&results);
        let of = |at: usize| palette.drafts(&results.runs[at].setting);
        let styles = [of(0), of(1), of(2), of(3), of(4)];
        for (at, style) in styles.iter().enumerate() {
            assert!(styles[..at].iter().all(|other| other.class != style.class));
            assert!(styles[..at].iter().all(|other| other.shape != style.shape));
        }
        let loads = [1, 4, 16, 64].map(|count| palette.load(&Load::Concurrency(count)).class);
        assert_eq!(loads, ["l1", "l2", "l4", "l5"]);
    }
}
