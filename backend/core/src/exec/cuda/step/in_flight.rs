//! A step on its way on the device. Where nobody has to look at what it brings, the next one begins before it is told:
//! the device goes on from where it is. It is taken for the step that is asked for next if it turns out to be that; if
//! not, no text changes and time is lost, since what it wrote lies behind everything that is valid.

use super::graph::Shape;
use super::input::looks_back;
use super::page_table::PageTable;
use super::params::StepResult;
use crate::batch::Entry;
use crate::pages::pages_for;
use crate::sequence::SequenceId;

/// By how much the confidence that drafting asks for may have changed: it follows costs, which never rest.
const CONFIDENCE_DRIFT: f32 = 0.05;

/// One sequence of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) id: SequenceId,
    /// Known tokens at its beginning, once that is known.
    pub(super) len: usize,
    /// Drafts of the graph at most, but for the end of the text.
    pub(super) draft_len: usize,
    pub(super) min_confidence: f32,
    /// Whether the host has brought its drafts: it alone knows whether there are any for the next step.
    pub(super) is_given: bool,
}

impl Place {
    /// Drafts that are asked for in a step from `len` tokens on.
    fn drafts_from(&self, len: usize, max_len: usize) -> usize {
        self.draft_len.min(max_len.saturating_sub(len + 1))
    }

    /// Whether the entry is what this place does.
    fn is_for(&self, entry: &Entry<'_>) -> bool {
        let len = entry.tokens.len();
        let does_same = self.len == len && entry.computed + 1 == len && entry.chunk == 1;
        does_same && len < entry.max_len && entry.given.is_empty()
    }

    /// Whether the next step of the entry is known to be like this one, and has pages.
    fn goes_on(&self, entry: &Entry<'_>) -> bool {
        let (len, max_len) = (entry.tokens.len(), entry.max_len);
        let drafts_same = entry.draft_lens.model == self.drafts_from(len, max_len);
        let drift = (entry.min_confidence - self.min_confidence).abs();
        // A drafter that was told to catch up does that when the host says what it has missed.
        let catches_up = entry.speculates && entry.draft_lens.model == 0;
        // All drafts accepted and a token more, then drafts again.
        let end = (len + 2 * self.draft_len + 1).min(max_len);
        let has_pages = pages_for(end) <= entry.pages.len();
        let is_given = self.is_given || !entry.given.is_empty();
        let is_free = !is_given && !looks_back(entry) && !catches_up;
        is_free && drafts_same && drift <= CONFIDENCE_DRIFT && has_pages
    }
}

/// What is on its way.
#[derive(Clone, Debug)]
pub(super) struct InFlight {
    pub(super) number: u32,
    pub(super) shape: Shape,
    pub(super) places: Vec<Place>,
}

impl InFlight {
    /// The place that does what an entry asks for, if there is one. `pages` is what the device knows.
    pub(super) fn place_of(&self, entry: &Entry<'_>, pages: &PageTable) -> Option<usize> {
        let place = self.places.iter().position(|place| place.id == entry.id)?;
        let written =
            pages_for((entry.tokens.len() + self.places[place].draft_len).min(entry.max_len));
        let has_same_pages =
            entry.pages.get(..written).is_some_and(|own| pages.begins_with(place, own));
        (has_same_pages && self.places[place].is_for(entry)).then_some(place)
    }

    /// Whether the step after this one may begin before this one is told: it has the same sequences in the same
    /// places, and at least one goes on for sure.
    pub(super) fn goes_on(&self, entries: &[&Entry<'_>]) -> bool {
        let is_same = self.places.len() == entries.len()
            && self.places.iter().zip(entries).all(|(place, entry)| place.id == entry.id);
        let mut pairs = self.places.iter().zip(entries);
        let is_needed = entries.iter().any(|entry| entry.tokens.len() + 1 < entry.max_len);
        is_same && is_needed && pairs.all(|(place, entry)| place.goes_on(entry))
    }

    /// The step after this one. Where it begins is not known yet.
    pub(super) fn next(&self) -> Self {
        Self { number: self.number.wrapping_add(1), shape: self.shape, places: self.places.clone() }
    }

    /// Takes in what the step before has brought.
    pub(super) fn begin_after(&mut self, before: &[StepResult]) {
        for (place, result) in self.places.iter_mut().zip(before) {
            place.len += result.num_tokens as usize;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft_source::{Branching, DraftLens};
    use crate::pages::PageId;
    use crate::sampling::{Coupling, Sampler, SamplingParams};

    const TOKENS: [u32; 30] = [1; 30];
    const DRAFTS: usize = 4;
    /// Enough for 64 positions.
    const PAGES: [PageId; 4] = [7, 8, 9, 10];

    /// Whatever is looked up, only the model's length is the graph's.
    fn model(len: usize) -> DraftLens {
        DraftLens { lookup: DRAFTS, model: len }
    }

    fn sampler() -> Sampler {
        Sampler::new(SamplingParams::default(), Coupling::Path(3), Vec::new())
    }

    fn entry<'a>(sampler: &'a Sampler, pages: &'a [PageId]) -> Entry<'a> {
        Entry {
            id: 5,
            tokens: &TOKENS,
            prompt_len: 2,
            max_len: 60,
            computed: 29,
            chunk: 1,
            draft_computed: 28,
            is_read: true,
            speculates: true,
            draft_lens: DraftLens::both(DRAFTS),
            branching: Branching::CHAIN,
            given: &[],
            min_confidence: 0.5,
            pages,
            prompt_rows: 0,
            shares: crate::sequence::Shares::All,
            sampler,
        }
    }

    fn flight() -> InFlight {
        let place =
            Place { id: 5, len: 30, draft_len: DRAFTS, min_confidence: 0.5, is_given: false };
        let shape = Shape { sequences: 1, drafts: DRAFTS, from_graph: DRAFTS };
        InFlight { number: 1, shape, places: vec![place] }
    }

    fn table(pages: &[PageId]) -> PageTable {
        let mut table = PageTable::new(2, 4);
        table.update([(0, pages)].into_iter());
        table
    }

    #[test]
    fn a_step_on_its_way_is_taken_by_whom_it_is_for() {
        let (sampler, flight) = (sampler(), flight());
        let asked = entry(&sampler, &PAGES);
        let place = |entry: &Entry<'_>| flight.place_of(entry, &table(&PAGES));
        assert_eq!(place(&asked), Some(0));
        assert_eq!(
            place(&Entry { draft_lens: DraftLens::both(2), ..asked }),
            Some(0),
            "drafts never change a text"
        );
        assert_eq!(place(&Entry { id: 6, ..asked }), None, "another sequence");
        assert_eq!(place(&Entry { tokens: &TOKENS[1..], ..asked }), None, "another length");
        assert_eq!(place(&Entry { computed: 16, chunk: 14, ..asked }), None, "computed anew");
        assert_eq!(place(&Entry { given: &[3], ..asked }), None, "given drafts");
        assert_eq!(place(&Entry { max_len: 30, ..asked }), None, "at its end");
    }

    /// It may write to its drafts' positions: 30 to 33, of the second and the third page.
    #[test]
    fn a_step_on_its_way_is_taken_on_the_pages_that_it_writes_to() {
        let (sampler, flight) = (sampler(), flight());
        let place = |own: &[PageId], known: &[PageId]| {
            flight.place_of(&entry(&sampler, own), &table(known)).is_some()
        };
        assert!(place(&PAGES[..3], &PAGES), "a page more is known");
        assert!(place(&PAGES, &PAGES[..3]), "a page more is lent");
        assert!(!place(&PAGES[..2], &PAGES), "a page is taken back");
        assert!(!place(&[7, 8, 11], &PAGES), "another page is lent in its place");
        assert!(!place(&[7, 3, 9], &PAGES), "what was computed stands elsewhere");
    }

    #[test]
    fn the_next_step_begins_if_it_is_known_to_be_alike() {
        let (sampler, flight) = (sampler(), flight());
        let asked = entry(&sampler, &PAGES);
        let goes_on = |entry: &Entry<'_>| flight.goes_on(&[entry]);
        assert!(goes_on(&asked));
        assert!(goes_on(&Entry { min_confidence: 0.52, ..asked }), "costs never rest");
        assert!(!goes_on(&Entry { min_confidence: 0.6, ..asked }), "another confidence");
        assert!(!goes_on(&Entry { draft_lens: model(3), ..asked }), "other drafts");
        assert!(!goes_on(&Entry { id: 6, ..asked }), "another sequence");
        assert!(!flight.goes_on(&[&asked, &asked]), "one sequence more");
        assert!(!flight.goes_on(&[]), "one sequence less");
        assert!(goes_on(&Entry { max_len: 33, draft_lens: model(2), ..asked }), "near its end");
        assert!(
            !goes_on(&Entry { max_len: 31, draft_lens: model(0), ..asked }),
            "nothing follows for sure"
        );
        // All accepted and drafted again, positions up to 38 are written: three pages, or no more than the text has.
        assert!(goes_on(&Entry { pages: &PAGES[..3], ..asked }));
        assert!(!goes_on(&Entry { pages: &PAGES[..2], ..asked }), "too few pages");
        assert!(goes_on(&Entry { pages: &PAGES[..2], max_len: 32, draft_lens: model(1), ..asked }));
    }

    #[test]
    fn where_the_host_has_a_say_the_next_step_waits() {
        let params = SamplingParams { presence_penalty: 0.5, ..SamplingParams::default() };
        let penalised = Sampler::new(params, Coupling::Path(3), Vec::new());
        assert!(!flight().goes_on(&[&entry(&penalised, &PAGES)]), "newest tokens change logits");
        let sampler = sampler();
        let asked = entry(&sampler, &PAGES);
        let mut plain = flight();
        plain.places[0].draft_len = 0;
        let resting = Entry { speculates: false, draft_lens: model(0), ..asked };
        assert!(plain.goes_on(&[&resting]));
        assert!(!plain.goes_on(&[&Entry { speculates: true, ..resting }]), "a drafter catches up");
        plain.places[0].is_given = true;
        assert!(!plain.goes_on(&[&resting]), "what the host finds next is not known");
        assert!(!flight().goes_on(&[&Entry { given: &[1], ..asked }]), "drafts are given");
    }

    #[test]
    fn a_step_begins_where_the_one_before_it_has_ended() {
        let before = flight();
        let mut next = before.next();
        assert_eq!(next.number, 2);
        next.begin_after(&[StepResult { num_tokens: 3, ..StepResult::default() }]);
        assert_eq!(next.places[0].len, 33);
    }
}
