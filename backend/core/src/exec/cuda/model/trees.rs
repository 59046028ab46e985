//! Trees of drafts as chains. The first branch of a tree follows its sequence. Every other branch is computed as a
//! sequence of its own, on pages of its own from the one on that the first draft's position is in: that page's known
//! positions are copied, and drafts that it shares with other branches are computed again. So a draft has the bits that it
//! has in a chain, and the device sees nothing but chains.

use crate::batch::Segment;
use crate::pages::{PAGE_TOKENS, PageId, pages_for};
use crate::{Error, Result};
use std::ops::Range;

/// A branch that is not the first of its tree.
#[derive(Debug)]
struct Branch {
    /// The sequence's pages.
    sequence: Vec<PageId>,
    /// Position of the first draft.
    first_draft: usize,
    /// The drafts, from the root on.
    path: Vec<usize>,
    /// So many of them, the last ones, are on no other branch before it.
    num_own: usize,
    /// The first position on pages of its own, and those pages.
    first_own: usize,
    own: Vec<PageId>,
}

/// A branch as a chain.
#[derive(Debug)]
struct Chain {
    tokens: Vec<u32>,
    first_position: usize,
    pages: Vec<PageId>,
    prompt_len: usize,
    num_logits: usize,
}

/// The chains of a pass.
#[derive(Debug, Default)]
pub(super) struct Chains {
    branches: Vec<Branch>,
    chains: Vec<Chain>,
    /// Pages to copy before the pass, and onto which.
    pub(super) copies: Vec<(PageId, PageId)>,
    /// Of each row that was asked for the row among those of all chains: first branches first, in order.
    pub(super) order: Vec<usize>,
}

impl Chains {
    /// `scratch` is pages that nobody uses.
    pub(super) fn new(segments: &[Segment<'_>], scratch: Range<PageId>) -> Result<Self> {
        let mut chains = Self::default();
        let mut free = scratch.clone();
        // Rows of the branches come behind all others.
        let on_first = |segment: &Segment<'_>| segment.tokens.len() - num_aside(segment.tree);
        let mut next_aside: usize = segments.iter().map(on_first).sum();
        let mut next = 0;
        for segment in segments {
            let num_first = on_first(segment);
            chains.order.extend(next..next + num_first);
            next += num_first;
            let own_branches = chains.branches.len();
            chains.add_branches(segment);
            let mut places = vec![0; num_aside(segment.tree)];
            for idx in own_branches..chains.branches.len() {
                next_aside += chains.add_chain(idx, segment, &mut free, &scratch)?;
                let Branch { path, num_own, .. } = &chains.branches[idx];
                for (behind, node) in path.iter().rev().take(*num_own).enumerate() {
                    let aside = segment.tree.len() - places.len();
                    places[node - aside] = next_aside - 1 - behind;
                }
            }
            chains.order.extend(places);
        }
        Ok(chains)
    }

    /// Gathers the branches of a tree.
    fn add_branches(&mut self, segment: &Segment<'_>) {
        let Segment { tokens, first_position, pages, tree, .. } = *segment;
        let first_draft = first_position + tokens.len() - tree.len();
        let own = self.branches.len();
        for node in tree.len() - num_aside(tree)..tree.len() {
            let parent = tree[node];
            let grown = self.branches[own..]
                .iter_mut()
                .find(|branch| branch.path.last() == parent.as_ref());
            match grown {
                Some(branch) => {
                    branch.path.push(node);
                    branch.num_own += 1;
                }
                None => {
                    let mut path: Vec<usize> =
                        std::iter::successors(Some(node), |&node| tree[node]).collect();
                    path.reverse();
                    self.branches.push(Branch {
                        sequence: pages.to_vec(),
                        first_draft,
                        path,
                        num_own: 1,
                        first_own: first_draft / PAGE_TOKENS * PAGE_TOKENS,
                        own: Vec::new(),
                    });
                }
            }
        }
    }

    /// Gives a branch its pages, and makes it a chain of so many rows.
    fn add_chain(
        &mut self,
        idx: usize,
        segment: &Segment<'_>,
        free: &mut Range<PageId>,
        scratch: &Range<PageId>,
    ) -> Result<usize> {
        let Segment { tokens, first_position, prompt_len, num_logits, tree, .. } = *segment;
        let branch = &mut self.branches[idx];
        let Branch { first_own, first_draft, num_own, .. } = *branch;
        let num_pages = pages_for(first_draft + branch.path.len() - first_own);
        branch.own = free.take(num_pages).collect();
        if branch.own.len() < num_pages {
            let message = format!("a tree of drafts that needs more than {} pages", scratch.len());
            return Err(Error::Unsupported(message));
        }
        let start = first_position.max(first_own);
        if start > first_own {
            let shared = branch.sequence[first_own / PAGE_TOKENS];
            self.copies.push((shared, branch.own[0]));
        }
        let drafts = &tokens[tokens.len() - tree.len()..];
        let known = &tokens[start - first_position..first_draft - first_position];
        let path = branch.path.iter().map(|&node| drafts[node]);
        let wanted = branch.path.iter().filter(|&&node| tree.len() - node <= num_logits);
        let tokens: Vec<u32> = known.iter().copied().chain(path).collect();
        let pages = [&branch.sequence[..first_own / PAGE_TOKENS], &branch.own].concat();
        let (num_logits, num_rows) = (wanted.count().min(num_own), tokens.len());
        self.chains.push(Chain { tokens, first_position: start, pages, prompt_len, num_logits });
        Ok(num_rows)
    }

    /// All of them: of each segment what is not on another branch, then those branches.
    pub(super) fn segments<'a>(&'a self, segments: &[Segment<'a>]) -> Vec<Segment<'a>> {
        let first = segments.iter().map(|segment| {
            let aside = num_aside(segment.tree);
            Segment {
                tokens: &segment.tokens[..segment.tokens.len() - aside],
                num_logits: segment.num_logits.saturating_sub(aside),
                tree: &[],
                ..*segment
            }
        });
        let others = self.chains.iter().map(|chain| Segment {
            tokens: &chain.tokens,
            first_position: chain.first_position,
            pages: &chain.pages,
            prompt_len: chain.prompt_len,
            num_logits: chain.num_logits,
            tree: &[],
        });
        first.chain(others).collect()
    }

    /// Pages to copy, and onto which, so that the drafts of `path` continue their sequence.
    pub(super) fn kept(
        &self,
        pages: &[PageId],
        first_draft: usize,
        path: &[usize],
    ) -> Vec<(PageId, PageId)> {
        if path.iter().copied().eq(0..path.len()) {
            return Vec::new();
        }
        let is_it = |branch: &&Branch| {
            branch.first_draft == first_draft
                && branch.path.starts_with(path)
                && branch.sequence == pages
        };
        let branch = self.branches.iter().find(is_it).expect("a path of the last pass's trees");
        let num_pages = pages_for(first_draft + path.len() - branch.first_own);
        let onto = &pages[branch.first_own / PAGE_TOKENS..];
        branch.own.iter().copied().zip(onto.iter().copied()).take(num_pages).collect()
    }
}

/// Drafts that are not on the first branch.
fn num_aside(tree: &[Option<usize>]) -> usize {
    let on_first =
        tree.iter().enumerate().take_while(|(node, parent)| **parent == node.checked_sub(1));
    tree.len() - on_first.count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 0 - 1 - 2, 0 - 3 - 4, and 5 beside 0.
    const TREE: [Option<usize>; 6] = [None, Some(0), Some(1), Some(0), Some(3), None];

    fn segment<'a>(tokens: &'a [u32], pages: &'a [PageId]) -> Segment<'a> {
        let num_logits = TREE.len() + 1;
        Segment { tokens, first_position: 18, pages, prompt_len: 0, num_logits, tree: &TREE }
    }

    #[test]
    fn branches_are_chains_on_pages_of_their_own() {
        let tokens = [70, 71, 10, 11, 12, 13, 14, 15];
        let segments =
            [segment(&tokens, &[7, 8]), Segment { tree: &[], ..segment(&tokens[..2], &[9, 6]) }];
        let chains = Chains::new(&segments, 40..50).unwrap();
        let told: Vec<_> = chains
            .segments(&segments)
            .iter()
            .map(|s| (s.tokens.to_vec(), s.first_position, s.pages.to_vec(), s.num_logits))
            .collect();
        assert_eq!(
            told,
            [
                (vec![70, 71, 10, 11, 12], 18, vec![7, 8], 4),
                (vec![70, 71], 18, vec![9, 6], 7),
                (vec![70, 71, 10, 13, 14], 18, vec![7, 40], 2),
                (vec![70, 71, 15], 18, vec![7, 41], 1),
            ]
        );
        // Positions 16 and 17 are known.
        assert_eq!(chains.copies, [(8, 40), (8, 41)]);
        assert_eq!(chains.order, [0, 1, 2, 3, 4, 10, 11, 14, 5, 6]);
    }

    #[test]
    fn a_chunk_that_begins_before_the_page_needs_no_copy() {
        let tokens: Vec<u32> = (0..20).collect();
        let first = Segment { first_position: 4, ..segment(&tokens, &[7, 8]) };
        let chains = Chains::new(&[first], 40..50).unwrap();
        assert!(chains.copies.is_empty());
        let starts: Vec<_> = chains.chains.iter().map(|chain| chain.first_position).collect();
        assert_eq!(starts, [16, 16]);
        assert_eq!(chains.chains[0].tokens, [12, 13, 14, 17, 18]);
    }

    #[test]
    fn what_is_kept_is_copied_back_page_by_page() {
        let (tokens, pages) = ([1; 8], [7, 8]);
        let chains = Chains::new(&[segment(&tokens, &pages)], 40..50).unwrap();
        assert_eq!(chains.kept(&pages, 20, &[0, 1]), []);
        assert_eq!(chains.kept(&pages, 20, &[0, 3]), [(40, 8)]);
        assert_eq!(chains.kept(&pages, 20, &[5]), [(41, 8)]);
    }

    #[test]
    fn too_many_branches_are_refused() {
        let error = Chains::new(&[segment(&[1; 8], &[7, 8])], 40..41).unwrap_err();
        assert!(error.to_string().contains("more than 1 pages"), "{error}");
    }
}
