//! Rows of a pass, trees of drafts among them.
//!
//! A draft's key and value lie at the slot of its row, whatever its position. The drafts of a tree's first branch
//! follow each other, so slots are positions there. What any other branch attends to is copied together, layer by
//! layer, into pages of its own, where slots are positions too: attention sees nothing but chains, and a draft has the
//! bits that it would have in a chain.

use super::attention::Row;
use super::kv::KvCache;
use crate::batch::Segment;
use crate::pages::{PAGE_TOKENS, PageId, pages_for};

/// One row of a pass.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    pub token: u32,
    pub pages: &'a [PageId],
    /// Where its key and value are stored.
    pub slot: usize,
    pub position: usize,
    pub has_logits: bool,
    /// Which of the pass's branches it is on, if not on a first one.
    branch: Option<usize>,
}

/// A branch of a tree that is not its first.
struct Branch<'a> {
    /// The sequence's pages, and from the page on that holds the first draft's position its own.
    pages: Vec<PageId>,
    /// Pages of the sequence.
    sequence: &'a [PageId],
    /// The first position on its own pages, and the slots in the sequence of this and all later ones.
    first: usize,
    slots: Vec<usize>,
    /// The last draft.
    tail: usize,
}

/// The rows of a pass.
pub(super) struct Inputs<'a> {
    pub rows: Vec<Input<'a>>,
    branches: Vec<Branch<'a>>,
}

impl<'a> Inputs<'a> {
    pub(super) fn new(segments: &[Segment<'a>]) -> Self {
        let mut inputs = Self { rows: Vec::new(), branches: Vec::new() };
        segments.iter().for_each(|segment| inputs.add(segment));
        inputs
    }

    fn add(&mut self, segment: &Segment<'a>) {
        let Segment { tokens, first_position, pages, num_logits, tree, .. } = *segment;
        let num_known = tokens.len() - tree.len();
        let (first_draft, own_branches) = (first_position + num_known, self.branches.len());
        let on_first_branch =
            tree.iter().enumerate().take_while(|(idx, parent)| **parent == idx.checked_sub(1));
        let on_first_branch = on_first_branch.count();
        let mut positions: Vec<usize> = Vec::with_capacity(tree.len());
        for (row, &token) in tokens.iter().enumerate() {
            let slot = first_position + row;
            let mut input = Input {
                token,
                pages,
                slot,
                position: slot,
                has_logits: row + num_logits >= tokens.len(),
                branch: None,
            };
            if let Some(draft) = row.checked_sub(num_known) {
                let parent = tree[draft];
                assert!(parent.is_none_or(|parent| parent < draft), "a draft before its parent");
                input.position = parent.map_or(first_draft, |parent| positions[parent] + 1);
                positions.push(input.position);
                if draft >= on_first_branch {
                    let grown = self.branches[own_branches..]
                        .iter()
                        .position(|branch| Some(branch.tail) == parent);
                    let idx = match grown {
                        Some(idx) => own_branches + idx,
                        None => {
                            let slots = slots(tree, parent, first_draft);
                            let first = first_draft / PAGE_TOKENS * PAGE_TOKENS;
                            let (sequence, pages) = (pages, Vec::new());
                            let tail = draft;
                            self.branches.push(Branch { pages, sequence, first, slots, tail });
                            self.branches.len() - 1
                        }
                    };
                    let branch = &mut self.branches[idx];
                    branch.slots.push(slot);
                    branch.tail = draft;
                    input.branch = Some(idx);
                }
            }
            self.rows.push(input);
        }
    }

    /// Gives every branch pages behind the `num_pages` of the sequences; returns how many.
    pub(super) fn place(&mut self, num_pages: usize) -> usize {
        let mut next = num_pages as PageId;
        for branch in &mut self.branches {
            branch.pages = branch.sequence[..branch.first / PAGE_TOKENS].to_vec();
            for _ in 0..pages_for(branch.slots.len()) {
                branch.pages.push(next);
                next += 1;
            }
        }
        next as usize - num_pages
    }

    /// What the rows attend to.
    pub(super) fn attended<'b>(&'b self, rows: &[Input<'a>]) -> Vec<Row<'b>> {
        let pages = |input: &Input<'a>| -> &'b [PageId] {
            input.branch.map_or(input.pages, |idx| &self.branches[idx].pages)
        };
        let row =
            |input: &Input<'a>| Row { pages: pages(input), first: 0, position: input.position };
        rows.iter().map(row).collect()
    }

    /// How many branches have pages of their own.
    pub(super) fn num_branches(&self) -> usize {
        self.branches.len()
    }

    /// Copies what a branch attends to into its pages: of a layer of `kv` into `own`, whose pages are numbered behind
    /// those of `kv`.
    ///
    /// # Safety
    /// Nobody writes to the sequence's pages of the layer or touches the branch's.
    #[allow(unsafe_code)]
    pub(super) unsafe fn copy_branch(&self, idx: usize, kv: &KvCache, layer: usize, own: &KvCache) {
        let branch = &self.branches[idx];
        let own_pages: Vec<PageId> = branch.pages[branch.first / PAGE_TOKENS..]
            .iter()
            .map(|page| page - kv.num_pages() as PageId)
            .collect();
        for (position, &slot) in branch.slots.iter().enumerate() {
            // SAFETY: as promised by the caller.
            unsafe { own.copy(0, &own_pages, position, kv, layer, branch.sequence, slot) };
        }
    }
}

/// The slots of what a child of `parent` attends to, from the page on that holds the first draft's position.
fn slots(tree: &[Option<usize>], parent: Option<usize>, first_draft: usize) -> Vec<usize> {
    let mut ancestors: Vec<usize> = std::iter::successors(parent, |&draft| tree[draft])
        .map(|draft| first_draft + draft)
        .collect();
    ancestors.reverse();
    let known = first_draft / PAGE_TOKENS * PAGE_TOKENS..first_draft;
    known.chain(ancestors).collect()
}

/// Which slots have to move where, so that the drafts of `path` continue their sequence at `first_draft`.
pub(super) fn moves(first_draft: usize, path: &[usize]) -> impl Iterator<Item = (usize, usize)> {
    let moves = path.iter().enumerate().filter(|(idx, draft)| *idx != **draft);
    // Drafts come after their parents, so no slot is written before it was read.
    moves.map(move |(idx, draft)| (first_draft + draft, first_draft + idx))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_has_no_branches() {
        let segment = Segment {
            tokens: &[1, 2, 3, 4],
            first_position: 14,
            pages: &[5, 6],
            prompt_len: 0,
            num_logits: 3,
            tree: &[None, Some(0)],
        };
        let inputs = Inputs::new(&[segment]);
        assert_eq!(inputs.num_branches(), 0);
        let rows: Vec<_> =
            inputs.rows.iter().map(|row| (row.slot, row.position, row.has_logits)).collect();
        assert_eq!(rows, [(14, 14, false), (15, 15, true), (16, 16, true), (17, 17, true)]);
    }

    #[test]
    fn a_branch_attends_to_its_ancestors_alone() {
        // Known: 18, 19. Drafts: 0 - 1 - 2, 0 - 3 - 4, and 5 beside 0.
        let tree = [None, Some(0), Some(1), Some(0), Some(3), None];
        let segment = Segment {
            tokens: &[0; 8],
            first_position: 18,
            pages: &[7, 8],
            prompt_len: 0,
            num_logits: 7,
            tree: &tree,
        };
        let mut inputs = Inputs::new(&[segment]);
        assert_eq!(inputs.place(10), 2);
        let positions: Vec<_> = inputs.rows.iter().map(|row| row.position).collect();
        assert_eq!(positions, [18, 19, 20, 21, 22, 21, 22, 20]);
        let slots: Vec<_> = inputs.branches.iter().map(|branch| &branch.slots[..]).collect();
        assert_eq!(slots, [&[16, 17, 18, 19, 20, 23, 24][..], &[16, 17, 18, 19, 25]]);
        let rows = inputs.rows.clone();
        let pages: Vec<_> = inputs.attended(&rows).iter().map(|row| row.pages.to_vec()).collect();
        assert_eq!(pages[4], [7, 8], "the first branch stays where it is");
        assert_eq!((&pages[5][..], &pages[6][..]), (&[7, 10][..], &[7, 10][..]));
        assert_eq!(pages[7], [7, 11]);
    }

    #[test]
    fn what_is_kept_moves_to_the_front() {
        assert_eq!(moves(20, &[0, 1]).count(), 0);
        assert!(moves(20, &[0, 3, 4]).eq([(23, 21), (24, 22)]));
    }
}
