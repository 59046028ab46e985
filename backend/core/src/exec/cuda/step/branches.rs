//! Drafts that branch inside of a step's graph. Each branch is a chain with a place of its own, as if it were another sequence
//! that had become the same text: the known tokens that a step runs, and the drafts, are on pages of its own, so that every row
//! has the bits that it has in a chain. It drafts what the first one drafts, up to the fork where it takes another choice of the
//! drafter, and goes on from there. Behind the step the pages of the branch that the target goes along are copied to where the
//! sequence's are.
//!
//! Only drafts that are drawn as the target draws its tokens branch so: then one branch at most is right, and nothing of a
//! distribution has to be taken away for the others.

use super::Steps;
use super::answers::{Answers, Settled};
use super::buffers::MAX_WORDS;
use super::entry::StepEntry;
use super::forks::{Fork, Forks, Verified};
use super::graph::Shape;
use super::input::StepInput;
use super::issue::Launched;
use super::params::{MAX_FED, StepResult};
use crate::Result;
use crate::engine::Limits;
use crate::pages::{PAGE_TOKENS, PageId, pages_for};
use std::cmp::Reverse;
use std::ops::Range;

/// One step in so many gives each draft a branch more than is held to pay: what was right once need not stay so.
const TRIAL_STEPS: u32 = 64;

/// The branches of all steps.
#[derive(Clone, Debug)]
pub(super) struct Branches {
    /// Of a draft, at most.
    most: usize,
    /// Pages that no sequence has.
    pages: Range<PageId>,
    /// Those of one place.
    pages_each: usize,
    /// What they have been worth.
    forks: Forks,
}

/// A branch's pages.
#[derive(Clone, Debug)]
pub(super) struct BranchPages {
    /// All of them: first those that it shares with its sequence.
    pub(super) all: Vec<PageId>,
    /// How many those are.
    shared: usize,
    /// Known tokens whose keys and values it finds, of the target and of the drafter.
    found: [usize; 2],
}

/// Pages to copy, and onto which.
pub(super) type Copies = Vec<(PageId, PageId)>;

/// The limits of steps with a place for each branch: one sequence has room for all of its own.
pub(crate) fn step_limits(limits: &Limits, most: usize) -> Limits {
    Limits { max_batch_size: limits.max_batch_size.max(most), ..limits.clone() }
}

/// Pages that the branches of a step take, in the caches of all models.
pub(crate) fn branch_pages(limits: &Limits, most: usize) -> usize {
    let places = step_limits(limits, most).max_batch_size;
    if most > 1 { places * pages_each(limits) } else { 0 }
}

/// The first row may be that of a head's oldest known token, at the end of a page.
fn pages_each(limits: &Limits) -> usize {
    let fed = MAX_FED.max(limits.max_draft_len + 1);
    pages_for(PAGE_TOKENS - 1 + fed + limits.max_draft_len)
}

impl Branches {
    pub(super) fn new(limits: &Limits, most: usize, pages: Range<PageId>) -> Self {
        let forks = Forks::new(limits.max_draft_len, most);
        Self { most, pages, pages_each: pages_each(limits), forks }
    }

    /// Whether drafts branch at all.
    pub(super) fn any(&self) -> bool {
        self.most > 1
    }

    /// Where the branches of a draft, but the first, would part from it in the step with this number, were there room: where
    /// lengths adapt, each must be worth its rows.
    pub(super) fn wanted(&self, part: &StepEntry<'_>, step: u32) -> Vec<Fork> {
        let (len, branching) = (part.draft_len(), part.entry.branching);
        if len == 0 || part.num_fed == 0 {
            return Vec::new();
        }
        let most = branching.width.min(self.most).min(branching.max_tokens / len);
        if most < 2 {
            return Vec::new();
        }
        let rows = branching.min_likelihood * (len + 1) as f32;
        let by_worth = self.forks.by_worth(len);
        let pay = by_worth.iter().take_while(|worth| rows <= worth.tokens).count();
        let tried = usize::from(step.is_multiple_of(TRIAL_STEPS));
        let wanted = by_worth.iter().take((pay + tried).min(most - 1));
        wanted.map(|worth| worth.fork).collect()
    }

    /// The pages of the branch at a place of the step.
    pub(super) fn pages(&self, place: usize, part: &StepEntry<'_>) -> BranchPages {
        let len = part.entry.tokens.len();
        let found = [len - 1, len - part.num_fed.max(1)];
        let shared = found[1] / PAGE_TOKENS;
        let first = self.pages.start as usize + place * self.pages_each;
        let num_own = pages_for(len + part.draft_len()) - shared;
        assert!(num_own <= self.pages_each, "{num_own} pages, a branch has {}", self.pages_each);
        let own = (first..first + num_own).map(|page| page as PageId);
        let all = part.entry.pages[..shared].iter().copied().chain(own).collect();
        BranchPages { all, shared, found }
    }
}

impl BranchPages {
    /// What the target's cache needs of the sequence's pages, and what the drafter's does.
    pub(super) fn copies(&self, sequence: &[PageId]) -> [Copies; 2] {
        self.found.map(|found| self.between(sequence, &self.all, found))
    }

    /// Gives the sequence what the branch knows of its first `len` positions.
    pub(super) fn kept(&self, sequence: &[PageId], len: usize) -> Copies {
        self.between(&self.all, sequence, len)
    }

    /// The pages of the branch that hold positions before `end`.
    fn between(&self, from: &[PageId], to: &[PageId], end: usize) -> Copies {
        let pages = self.shared..pages_for(end).max(self.shared);
        from[pages.clone()].iter().copied().zip(to[pages].iter().copied()).collect()
    }
}

/// A place of a step: a sequence, or one of the branches of its drafts.
#[derive(Clone, Copy)]
pub(super) struct Branch<'p, 'a> {
    pub(super) place: usize,
    pub(super) part: &'p StepEntry<'a>,
    /// Its place among the sequence's own: the first one has the sequence's pages.
    pub(super) nth: usize,
}

/// The places of all that get tokens.
pub(super) fn branches<'p, 'a>(parts: &'p [StepEntry<'a>]) -> impl Iterator<Item = Branch<'p, 'a>> {
    let sampling = parts.iter().filter(|part| part.entry.samples());
    let each = sampling.flat_map(|part| (0..part.num_branches()).map(move |nth| (part, nth)));
    each.enumerate().map(|(place, (part, nth))| Branch { place, part, nth })
}

impl Steps {
    /// Lets drafts branch, the first ones first, as far as a step has room; the step for all of them.
    pub(super) fn branch(&self, parts: &mut [StepEntry<'_>], shape: Shape) -> Shape {
        if !self.branches.any() {
            return shape;
        }
        let with = |places| Shape { sequences: self.capacity.places_for(places), ..shape };
        let mut places = branches(parts).count();
        let words_of = |part: &StepEntry<'_>| StepInput::num_words(part.entry);
        let mut words: usize = branches(parts).map(|branch| words_of(branch.part)).sum();
        for part in parts.iter_mut().filter(|part| part.entry.samples()) {
            for fork in self.branches.wanted(part, self.number) {
                words += words_of(part);
                let has_room = places < self.capacity.places && words <= MAX_WORDS;
                if !has_room || !self.holds(with(places + 1)) {
                    return with(places);
                }
                places += 1;
                part.forks.push(fork);
            }
        }
        with(places)
    }

    /// Whether the passes of a step have room for its rows.
    pub(super) fn holds(&self, shape: Shape) -> bool {
        let drafter = self.on.drafter.as_ref();
        self.on.target.holds(shape.sequences, shape.drafts + 1)
            && drafter.is_none_or(|drafter| drafter.holds(shape))
    }

    /// Gives branches their pages: of each place, but that of the first one.
    pub(super) fn branch_pages(&self, parts: &[StepEntry<'_>]) -> Result<Vec<Option<BranchPages>>> {
        let mut all = Vec::new();
        for Branch { place, part, nth } in branches(parts) {
            let pages = (nth > 0).then(|| self.branches.pages(place, part));
            if let Some(pages) = &pages {
                self.copy(pages.copies(part.entry.pages))?;
            }
            all.push(pages);
        }
        Ok(all)
    }

    /// Copies pages of the target and pages of the drafter; does not wait.
    fn copy(&self, [of_target, of_drafter]: [Copies; 2]) -> Result<()> {
        let device = &mut **self.on.gpu.lock();
        for (from, to) in of_target {
            self.on.target.copy_page(from, to, device)?;
        }
        let Some(drafter) = &self.on.drafter else { return Ok(()) };
        of_drafter.into_iter().try_for_each(|(from, to)| drafter.copy_page(from, to, device))
    }

    /// Has each sequence go on from the branch that the target went along, and tells which place that was.
    pub(super) fn settle(
        &mut self,
        launched: &Launched<'_>,
        answers: &Answers,
    ) -> Result<Vec<Settled>> {
        let mut settled = Vec::new();
        let mut first = 0;
        for part in launched.parts.iter().filter(|part| part.entry.samples()) {
            let results = &answers.results[first..][..part.num_branches()];
            let verified = |result: &StepResult| Verified {
                drafted: result.drafted as usize,
                accepted: result.accepted as usize,
            };
            let verified: Vec<Verified> = results.iter().map(verified).collect();
            let others: Vec<_> =
                part.forks.iter().copied().zip(verified[1..].iter().copied()).collect();
            self.branches.forks.record(part.draft_len(), verified[0], &others);
            // Of those that are right as far the first one, whose pages need no copies if it is among them.
            let accepted = |nth: &usize| (verified[*nth].accepted, Reverse(*nth));
            let nth = (0..verified.len()).max_by_key(accepted).unwrap_or(0);
            let place = first + nth;
            if nth > 0 {
                let known = part.entry.tokens.len() + verified[nth].accepted;
                let kept = self.branches.pages(place, part).kept(part.entry.pages, known);
                self.copy([kept.clone(), kept])?;
            }
            settled.push(Settled {
                place,
                drafted: verified.iter().map(|branch| branch.drafted).sum(),
                depth: verified.iter().map(|branch| branch.drafted).max().unwrap_or(0),
            });
            first += part.num_branches();
        }
        Ok(settled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Entry;
    use crate::draft_source::{Branching, DraftLens};
    use crate::sampling::{Coupling, Sampler, SamplingParams};
    use crate::sequence::Shares;

    const TOKENS: [u32; 64] = [1; 64];
    const PAGES: [PageId; 4] = [70, 71, 72, 73];
    const DRAFTS: usize = 4;

    fn limits() -> Limits {
        Limits { max_draft_len: DRAFTS, max_batch_size: 2, max_seq_len: 64, max_num_tokens: 64 }
    }

    /// What `check` says to a sequence of `len` known tokens, of which the drafter reads the last `num_fed`.
    fn with<T>(
        len: usize,
        num_fed: usize,
        branching: Branching,
        check: impl FnOnce(&Branches, &StepEntry<'_>) -> T,
    ) -> T {
        let sampler = Sampler::new(SamplingParams::default(), Coupling::Path(3), Vec::new());
        let entry = Entry {
            id: 5,
            tokens: &TOKENS[..len],
            prompt_len: 2,
            max_len: 64,
            computed: len - 1,
            chunk: 1,
            draft_computed: len - num_fed,
            is_read: true,
            speculates: true,
            draft_lens: DraftLens::both(DRAFTS),
            branching,
            given: &[],
            min_confidence: 0.0,
            pages: &PAGES,
            prompt_rows: 0,
            shares: Shares::All,
            sampler: &sampler,
        };
        let part = StepEntry {
            entry: &entry,
            given: Vec::new(),
            asks_graph: true,
            drafter_rows: len - num_fed..len,
            num_fed,
            has_run: false,
            forks: Vec::new(),
        };
        let first = 100;
        let pages = first..first + branch_pages(&limits(), 4) as PageId;
        check(&Branches::new(&limits(), 4, pages), &part)
    }

    fn pages(len: usize, num_fed: usize) -> BranchPages {
        let branching = Branching { width: 4, ..Branching::CHAIN };
        with(len, num_fed, branching, |branches, part| branches.pages(1, part))
    }

    #[test]
    fn a_branch_has_pages_of_its_own_from_the_first_row_on() {
        // Of place 1: places have two pages each, for up to 5 known tokens and 4 drafts from any position on.
        let own = pages(30, 2);
        assert_eq!(own.all, [70, 102, 103]);
        // The target finds positions up to 28, the drafter up to 27: of both some are on the page that is shared no more.
        assert_eq!(own.copies(&PAGES), [vec![(71, 102)], vec![(71, 102)]]);
        // The first row of the drafter is at the end of a page, all others on the next one.
        let own = pages(17, 2);
        assert_eq!(own.all, [102, 103]);
        assert_eq!(own.copies(&PAGES), [vec![(70, 102)], vec![(70, 102)]]);
        // Of the page that a first row begins nothing is found.
        let own = pages(34, 2);
        assert_eq!(own.all, [70, 71, 102]);
        assert_eq!(own.copies(&PAGES), [vec![(72, 102)], vec![]]);
        let own = pages(33, 1);
        assert_eq!(own.copies(&PAGES), [vec![], vec![]]);
        // A head reads many tokens again, which are the target's all the same.
        let own = pages(34, 5);
        assert_eq!(own.all, [70, 102, 103]);
        assert_eq!(own.copies(&PAGES), [vec![(71, 102), (72, 103)], vec![(71, 102)]]);
    }

    #[test]
    fn what_a_branch_knows_goes_to_the_sequences_pages() {
        let own = pages(30, 2);
        assert_eq!(own.kept(&PAGES, 32), [(102, 71)]);
        assert_eq!(own.kept(&PAGES, 33), [(102, 71), (103, 72)]);
    }

    #[test]
    fn lengths_that_adapt_branch_where_that_is_worth_the_rows() {
        let wanted = |width, min_likelihood, step| {
            let branching = Branching { width, min_likelihood, ..Branching::CHAIN };
            with(30, 2, branching, |branches, part| branches.wanted(part, step))
        };
        let of_rank = |rank, depth| Fork { depth, rank };
        let best = [of_rank(1, 0), of_rank(1, 1), of_rank(2, 0)];
        assert_eq!([1, 2, 4, 9].map(|width| wanted(width, 0.0, 1).len()), [0, 1, 3, 3]);
        assert_eq!(wanted(4, 0.0, 1), best);
        let in_all = |max_tokens| {
            let branching = Branching { width: 4, max_tokens, min_likelihood: 0.0 };
            with(30, 2, branching, |branches, part| branches.wanted(part, 1).len())
        };
        assert_eq!([4, 7, 8, 15, 16, 99].map(in_all), [0, 0, 1, 2, 3, 3], "of four tokens each");
        // Five rows each, and 0.30, 0.18 and 0.15 tokens.
        assert_eq!([0.029, 0.035, 0.06, 0.1].map(|least| wanted(4, least, 1).len()), [3, 2, 1, 0]);
        let branching = Branching { width: 4, ..Branching::CHAIN };
        let asked = with(30, 0, branching, |branches, part| branches.wanted(part, 1));
        assert_eq!(asked, [], "who does not draft does not branch");
        let tried =
            [TRIAL_STEPS - 1, TRIAL_STEPS, TRIAL_STEPS + 1].map(|step| wanted(3, 1.0, step).len());
        assert_eq!(tried, [0, 1, 0], "one more is tried now and then");
        assert_eq!(wanted(1, 1.0, TRIAL_STEPS), []);
    }
}
