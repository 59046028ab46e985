//! What drafts of a sequence promise, by source; and the record that this is told from.

use super::acceptance::Acceptance;
use super::hit_rate::HitRate;
use crate::batch::Drafted;
use crate::draft_source::{DraftLens, DraftSource, PerSource};

/// What drafts of a sequence promise in the step to come.
#[derive(Clone, Debug)]
pub(super) struct Outlook {
    /// Chance that a look-up finds something, if it is asked; 1 where nobody else could be asked.
    pub(super) hit_rate: f64,
    /// Of each source, if it drafts, the chance that each position is accepted; never rising. As many as may be drafted.
    pub(super) gains: PerSource<Vec<f64>>,
}

impl Outlook {
    /// The chance that a source gets to draft: the model does where the look-up was not asked, or has nothing.
    pub(super) fn share(&self, source: DraftSource, looks_up: bool) -> f64 {
        match source {
            DraftSource::Lookup if looks_up => self.hit_rate,
            DraftSource::Lookup => 0.0,
            DraftSource::Model if looks_up => 1.0 - self.hit_rate,
            DraftSource::Model => 1.0,
        }
    }

    /// Whether what is looked up promises as many tokens as the model's draft of so many, in whose place it comes.
    pub(super) fn prefers_lookup(&self, model_len: usize) -> bool {
        let PerSource { lookup, model } = &self.gains;
        let sum = |gains: &[f64]| gains.iter().sum::<f64>();
        !lookup.is_empty() && sum(lookup) >= sum(&model[..model_len.min(model.len())])
    }
}

/// What became of drafts so far, of a sequence or of all together.
#[derive(Clone, Debug)]
pub(super) struct Record {
    acceptance: PerSource<Acceptance>,
    hits: HitRate,
}

/// What is usual in an engine.
pub(super) struct Usual {
    rates: PerSource<Vec<f64>>,
    hit_rate: f64,
}

impl Record {
    /// Of one sequence, nothing seen.
    pub(super) fn of_sequence(max_draft_len: usize) -> Self {
        let acceptance = |source| Acceptance::of_sequence(max_draft_len, source);
        let acceptance = PerSource {
            lookup: acceptance(DraftSource::Lookup),
            model: acceptance(DraftSource::Model),
        };
        Self { acceptance, hits: HitRate::of_sequence() }
    }

    /// Of all sequences together, nothing seen; `measured` is what was measured of the model's drafts.
    pub(super) fn of_engine(max_draft_len: usize, measured: &[f64]) -> Self {
        let acceptance = |measured| Acceptance::of_engine(max_draft_len, measured);
        let acceptance = PerSource { lookup: acceptance(&[]), model: acceptance(measured) };
        Self { acceptance, hits: HitRate::of_engine() }
    }

    /// Takes in a step that asked for so many drafts, and the one that it verified.
    pub(super) fn add(&mut self, asked: DraftLens, draft: Option<Drafted>) {
        if asked.lookup > 0 {
            self.hits.record(draft.is_some_and(|draft| draft.source == DraftSource::Lookup));
        }
        if let Some(Drafted { source, len, accepted, .. }) = draft {
            self.acceptance.of_mut(source).record(len, accepted);
        }
    }

    pub(super) fn usual(&self) -> Usual {
        let PerSource { lookup, model } = &self.acceptance;
        let rates = PerSource { lookup: lookup.rates(), model: model.rates() };
        Usual { rates, hit_rate: self.hits.usual() }
    }

    /// What drafts promise a sequence that may draft so many tokens: 0 of a source that the engine has not.
    pub(super) fn outlook(&self, usual: &Usual, limits: DraftLens) -> Outlook {
        let gains = |source| -> Vec<f64> {
            let (usual, limit) = (usual.rates.of(source), *limits.of(source));
            self.acceptance.of(source).gains(usual, limit).collect()
        };
        let hit_rate = if limits.model == 0 { 1.0 } else { self.hits.rate(usual.hit_rate) };
        let gains =
            PerSource { lookup: gains(DraftSource::Lookup), model: gains(DraftSource::Model) };
        Outlook { hit_rate, gains }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: DraftLens = DraftLens { lookup: 4, model: 4 };

    fn verified(source: DraftSource, accepted: usize) -> Option<Drafted> {
        Some(Drafted { source, tokens: 4, len: 4, accepted })
    }

    #[test]
    fn acceptance_is_kept_apart_by_source() {
        let mut record = Record::of_sequence(4);
        let usual = Record::of_engine(4, &[]).usual();
        let fresh = record.outlook(&usual, ASKED).gains;
        (0..100).for_each(|_| record.add(ASKED, verified(DraftSource::Lookup, 4)));
        let gains = record.outlook(&usual, ASKED).gains;
        assert!(gains.lookup[3] > 0.9, "{gains:?}");
        assert_eq!(gains.model, fresh.model);
        let before = gains.lookup;
        (0..100).for_each(|_| record.add(ASKED, verified(DraftSource::Model, 0)));
        let gains = record.outlook(&usual, ASKED).gains;
        assert!(gains.model[0] < 0.1, "{gains:?}");
        assert_eq!(gains.lookup, before);
    }

    #[test]
    fn hits_count_where_the_look_up_is_asked() {
        let mut record = Record::of_sequence(4);
        let usual = Record::of_engine(4, &[]).usual();
        let rate = |record: &Record| record.outlook(&usual, ASKED).hit_rate;
        (0..100).for_each(|_| record.add(ASKED, verified(DraftSource::Lookup, 0)));
        let high = rate(&record);
        assert!(high > 0.9);
        let alone = DraftLens { lookup: 0, ..ASKED };
        (0..100).for_each(|_| record.add(alone, verified(DraftSource::Model, 4)));
        assert_eq!(rate(&record), high, "nobody has asked");
        (0..50).for_each(|_| record.add(ASKED, verified(DraftSource::Model, 4)));
        (0..50).for_each(|_| record.add(ASKED, None));
        assert!(rate(&record) < 0.1);
    }

    #[test]
    fn a_source_drafts_where_nobody_before_it_does() {
        let gains = PerSource { lookup: vec![0.9, 0.8], model: vec![0.7, 0.6, 0.5] };
        let outlook = Outlook { hit_rate: 0.25, gains };
        let shares = |looks_up| DraftSource::ALL.map(|source| outlook.share(source, looks_up));
        assert_eq!((shares(true), shares(false)), ([0.25, 0.75], [0.0, 1.0]));
        assert!(outlook.prefers_lookup(2) && !outlook.prefers_lookup(3));
    }

    #[test]
    fn a_look_up_alone_is_worth_what_it_was_when_it_was_asked() {
        let record = Record::of_sequence(4);
        let limits = DraftLens { lookup: 4, model: 0 };
        let outlook = record.outlook(&Record::of_engine(4, &[]).usual(), limits);
        assert_eq!((outlook.hit_rate, outlook.gains.model.len()), (1.0, 0));
    }
}
