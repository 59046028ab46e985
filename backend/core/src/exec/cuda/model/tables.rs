//! The tables that describe the rows of a pass to the device, made from segments on the host.

use super::params::{Row, Tile};
use super::shape::Tiling;
use crate::batch::{PromptBlocks, Segment};
use crate::pages::{PageId, pages_for};

/// How much a pass may hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub rows: usize,
    /// Where blocks of prompts are multiplied as such.
    pub blocks: Option<Blocks>,
    pub sequences: usize,
    /// Query heads of a key head.
    pub group: usize,
}

/// Passes through blocks of prompts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    /// Rows of a pass.
    pub rows: usize,
    pub of_prompts: PromptBlocks,
}

impl Bounds {
    /// The next pass of a segment from its row `first` on, if that row is in a block of its prompt: the row's place there,
    /// and how many rows there are. No more of them get logits than in another pass.
    fn in_blocks(&self, segment: &Segment<'_>, first: usize) -> Option<(usize, usize)> {
        let Blocks { rows, of_prompts } = self.blocks?;
        let position = segment.first_position + first;
        let place = position % of_prompts.len;
        let end = of_prompts.end(segment.prompt_len);
        let rest = end.checked_sub(position).filter(|&rest| rest > 0)?;
        let most = if segment.num_logits > self.rows { self.rows } else { rows };
        Some((place, rest.min(rows - place).min(segment.tokens.len() - first).min(most)))
    }
}

/// The rows of one pass.
#[derive(Debug, PartialEq)]
pub(super) struct Tables {
    /// Of a pass in blocks: the place of the first row in its block.
    pub place: Option<usize>,
    /// In segment order.
    pub rows: Vec<Row>,
    /// Rows of one sequence that attend together.
    pub tiles: Vec<Tile>,
    /// How many these are at most.
    pub tiling: Tiling,
    /// Rows that want logits.
    pub logit_rows: Vec<u32>,
    /// `[sequences][max_pages]`.
    pub pages: Vec<PageId>,
    /// Width of `pages`.
    pub max_pages: usize,
}

/// A part of a segment that fits into a pass.
#[derive(Clone, Copy)]
struct Part<'a> {
    segment: &'a Segment<'a>,
    first: usize,
    len: usize,
}

/// Cuts segments into passes, in order; a segment that is cut goes on in the next pass. Passes in blocks hold rows of one
/// prompt alone.
pub(super) fn passes(segments: &[Segment<'_>], bounds: &Bounds) -> Vec<Tables> {
    let mut passes = Vec::new();
    let mut parts: Vec<Part<'_>> = Vec::new();
    let mut num_rows = 0;
    for segment in segments {
        let mut first = 0;
        while first < segment.tokens.len() {
            if let Some((place, len)) = bounds.in_blocks(segment, first) {
                flush(&mut passes, &mut parts, bounds);
                num_rows = 0;
                let tables = Tables::new(&[Part { segment, first, len }], bounds.group);
                passes.push(Tables { place: Some(place), ..tables });
                first += len;
                continue;
            }
            if num_rows == bounds.rows || parts.len() == bounds.sequences {
                flush(&mut passes, &mut parts, bounds);
                num_rows = 0;
            }
            let len = (segment.tokens.len() - first).min(bounds.rows - num_rows);
            parts.push(Part { segment, first, len });
            num_rows += len;
            first += len;
        }
    }
    flush(&mut passes, &mut parts, bounds);
    passes
}

/// Makes a pass of what has been collected, if there is anything.
fn flush(passes: &mut Vec<Tables>, parts: &mut Vec<Part<'_>>, bounds: &Bounds) {
    if !parts.is_empty() {
        passes.push(Tables::new(parts, bounds.group));
        parts.clear();
    }
}

impl Tables {
    fn new(parts: &[Part<'_>], group: usize) -> Self {
        let end = |part: &Part<'_>| part.segment.first_position + part.first + part.len;
        let max_pages = parts.iter().map(|part| pages_for(end(part))).max().unwrap_or(0);
        let most = parts.iter().map(|part| part.len).max().unwrap_or(0);
        let tiling = Tiling::of(parts.len(), most, group);
        let (rows, tiles, logit_rows, pages) = Default::default();
        let place = None;
        let mut tables = Self { rows, tiles, tiling, place, logit_rows, pages, max_pages };
        for (sequence, part) in parts.iter().enumerate() {
            tables.add(sequence, part, tiling.rows(group));
        }
        tables
    }

    fn add(&mut self, sequence: usize, part: &Part<'_>, tile_rows: usize) {
        let Segment { tokens, first_position, pages, num_logits, tree, .. } = *part.segment;
        assert!(tree.is_empty(), "a tree of {} drafts, but chains were promised", tree.len());
        let first_row = self.rows.len();
        for idx in part.first..part.first + part.len {
            if idx >= tokens.len() - num_logits {
                self.logit_rows.push(self.rows.len() as u32);
            }
            self.rows.push(Row::chain(tokens[idx], first_position + idx, sequence));
        }
        for first in (0..part.len).step_by(tile_rows) {
            let num_rows = tile_rows.min(part.len - first) as u32;
            // A branch of a tree sees positions that its trunk writes in this pass.
            let num_old = 0;
            self.tiles.push(Tile { first_row: (first_row + first) as u32, num_rows, num_old });
        }
        let used = pages_for(first_position + part.first + part.len);
        self.pages.extend_from_slice(&pages[..used]);
        self.pages.resize((sequence + 1) * self.max_pages, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OF_PROMPTS: PromptBlocks = PromptBlocks { len: 512, least: 129 };

    fn blocks(rows: usize) -> Option<Blocks> {
        Some(Blocks { rows, of_prompts: OF_PROMPTS })
    }

    proptest! {
        #[test]
        fn every_row_is_in_one_pass_and_one_tile(
            lens in prop::collection::vec(
                // A few rows, or about as many as blocks have.
                prop_oneof![
                    (1usize..40, 0usize..50, 0usize..3, 0usize..90),
                    (1usize..1700, 0usize..1500, 0usize..3, 0usize..3000),
                ],
                1..6,
            ),
            rows in 1usize..50, sequences in 1usize..4, group in 1usize..17,
            num_blocks in prop::option::of(1usize..5),
        ) {
            let block_rows = num_blocks.map(|num| num * OF_PROMPTS.len);
            let blocks = block_rows.and_then(blocks);
            let tokens: Vec<u32> = (0..1700).collect();
            let pages: Vec<PageId> = (100..400).collect();
            let segments: Vec<Segment<'_>> = lens
                .iter()
                .map(|&(len, first_position, logits, prompt_len)| Segment {
                    tokens: &tokens[..len],
                    first_position,
                    pages: &pages,
                    prompt_len,
                    num_logits: logits.min(len),
                    tree: &[],
                })
                .collect();
            let passes = passes(&segments, &Bounds { rows, blocks, sequences, group });
            let mut expected = segments.iter().flat_map(|segment| {
                segment.tokens.iter().enumerate().map(move |(idx, &token)| {
                    let wants = idx >= segment.tokens.len() - segment.num_logits;
                    let position = segment.first_position + idx;
                    let is_in = blocks.is_some() && position < OF_PROMPTS.end(segment.prompt_len);
                    (token, position, wants, is_in.then_some(position % OF_PROMPTS.len))
                })
            });
            for pass in &passes {
                match (pass.place, block_rows) {
                    (Some(place), Some(rows)) => prop_assert!(place + pass.rows.len() <= rows),
                    (place, _) => prop_assert!(place.is_none() && pass.rows.len() <= rows),
                }
                prop_assert!(pass.logit_rows.len() <= rows);
                prop_assert_eq!(pass.pages.len() % pass.max_pages, 0);
                prop_assert!(pass.pages.len() / pass.max_pages <= sequences);
                let tiled = pass.tiles.iter().map(|tile| tile.num_rows as usize).sum::<usize>();
                prop_assert_eq!(tiled, pass.rows.len());
                for tile in &pass.tiles {
                    let rows = &pass.rows[tile.first_row as usize..][..tile.num_rows as usize];
                    prop_assert!(rows.len() <= pass.tiling.rows(group));
                    prop_assert!(rows.iter().all(|row| row.sequence == rows[0].sequence));
                }
                for (idx, row) in pass.rows.iter().enumerate() {
                    let (token, position, wants, place) = expected.next().unwrap();
                    prop_assert_eq!((row.token, row.slot, row.base), (token, position as u32, position as u32 + 1));
                    prop_assert_eq!(pass.logit_rows.contains(&(idx as u32)), wants);
                    prop_assert_eq!(pass.place.map(|first| (first + idx) % OF_PROMPTS.len), place);
                    let page = pass.pages[row.sequence as usize * pass.max_pages + position / 16];
                    prop_assert_eq!(page, pages[position / 16]);
                }
            }
            prop_assert!(expected.next().is_none());
        }
    }

    #[test]
    fn prompts_are_cut_where_their_blocks_end() {
        let (tokens, pages): (Vec<u32>, Vec<PageId>) = ((0..1100).collect(), (0..100).collect());
        let bounds = Bounds { rows: 256, blocks: blocks(512), sequences: 8, group: 4 };
        let segment = |first_position: usize, len: usize, prompt_len, num_logits| Segment {
            tokens: &tokens[..len],
            first_position,
            pages: &pages,
            prompt_len,
            num_logits,
            tree: &[],
        };
        let cut = |segments: &[Segment<'_>]| -> Vec<(usize, Option<usize>)> {
            passes(segments, &bounds).iter().map(|pass| (pass.rows.len(), pass.place)).collect()
        };
        assert_eq!(cut(&[segment(0, 128, 128, 1)]), [(128, None)]);
        assert_eq!(cut(&[segment(0, 129, 129, 1)]), [(129, Some(0))]);
        // Of a prompt that is in blocks to its end the last row is too, also alone, and what was generated is not.
        assert_eq!(cut(&[segment(511, 1, 512, 1)]), [(1, Some(511))]);
        assert_eq!(cut(&[segment(500, 14, 512, 3)]), [(12, Some(500)), (2, None)]);
        assert_eq!(cut(&[segment(0, 600, 600, 1)]), [(512, Some(0)), (88, None)]);
        // What was computed before does not matter, nor what comes later.
        assert_eq!(cut(&[segment(500, 30, 1100, 0)]), [(12, Some(500)), (18, Some(0))]);
        assert_eq!(cut(&[segment(500, 100, 600, 1)]), [(12, Some(500)), (88, None)]);
        let mixed = [
            segment(700, 5, 700, 5),
            segment(0, 600, 600, 1),
            segment(9, 9, 9, 9),
            segment(0, 230, 230, 1),
        ];
        assert_eq!(cut(&mixed), [(5, None), (512, Some(0)), (97, None), (230, Some(0))]);
        let wide = Bounds { blocks: blocks(1024), ..bounds };
        let cut = |segment| {
            passes(&[segment], &wide)
                .iter()
                .map(|pass| (pass.rows.len(), pass.place))
                .collect::<Vec<_>>()
        };
        assert_eq!(cut(segment(500, 1000, 3000, 0)), [(524, Some(500)), (476, Some(0))]);
        // No more logits than there is room for.
        assert_eq!(cut(segment(0, 700, 1100, 700))[..2], [(256, Some(0)), (256, Some(256))]);
    }

    #[test]
    fn without_blocks_no_pass_is_large() {
        let (tokens, pages): (Vec<u32>, Vec<PageId>) = ((0..700).collect(), (0..100).collect());
        let bounds = Bounds { rows: 256, blocks: None, sequences: 8, group: 4 };
        let segment = Segment {
            tokens: &tokens,
            first_position: 0,
            pages: &pages,
            prompt_len: 700,
            num_logits: 1,
            tree: &[],
        };
        let passes = passes(&[segment], &bounds);
        assert!(passes.iter().all(|pass| pass.place.is_none() && pass.rows.len() <= 256));
    }
}
