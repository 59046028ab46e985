//! The tables that describe the rows of a pass to the device, made from segments on the host.

use super::params::{Row, Tile};
use super::shape::{self, Tiling};
use crate::batch::Segment;
use crate::pages::{PageId, pages_for};

/// How much a pass may hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub rows: usize,
    /// Rows of a pass that a library multiplies, where one does.
    pub many: Option<usize>,
    pub sequences: usize,
    /// Query heads of a key head.
    pub group: usize,
}

impl Bounds {
    /// Rows that the rest of a segment gives to a library's pass, if any: it depends on nothing but the segment. No more
    /// rows get logits there than in another pass.
    fn many(&self, segment: &Segment<'_>, rest: usize) -> Option<usize> {
        let most = self.many?;
        let most = if segment.num_logits > self.rows { most.min(self.rows) } else { most };
        Some(rest.min(most)).filter(|&len| len >= shape::MANY_ROWS)
    }
}

/// The rows of one pass.
#[derive(Debug, PartialEq)]
pub(super) struct Tables {
    /// Whether a library multiplies.
    pub is_many: bool,
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

/// Cuts segments into passes, in order; a segment that is cut goes on in the next pass. Passes that a library multiplies
/// hold rows of one segment alone, so that what they compute does not depend on the others.
pub(super) fn passes(segments: &[Segment<'_>], bounds: &Bounds) -> Vec<Tables> {
    let mut passes = Vec::new();
    let mut parts: Vec<Part<'_>> = Vec::new();
    let mut num_rows = 0;
    for segment in segments {
        let mut first = 0;
        while first < segment.tokens.len() {
            if let Some(len) = bounds.many(segment, segment.tokens.len() - first) {
                flush(&mut passes, &mut parts, bounds);
                num_rows = 0;
                let tables = Tables::new(&[Part { segment, first, len }], bounds.group);
                passes.push(Tables { is_many: true, ..tables });
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
        let tiling = Tiling::of(most, group);
        let (rows, tiles, logit_rows, pages) = Default::default();
        let is_many = false;
        let mut tables = Self { rows, tiles, tiling, is_many, logit_rows, pages, max_pages };
        for (sequence, part) in parts.iter().enumerate() {
            tables.add(sequence, part, tiling.rows(group));
        }
        tables
    }

    fn add(&mut self, sequence: usize, part: &Part<'_>, tile_rows: usize) {
        let Segment { tokens, first_position, pages, num_logits, tree } = *part.segment;
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
            self.tiles.push(Tile { first_row: (first_row + first) as u32, num_rows });
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

    proptest! {
        #[test]
        fn every_row_is_in_one_pass_and_one_tile(
            lens in prop::collection::vec((1usize..40, 0usize..50, 0usize..3), 1..8),
            rows in 1usize..50, sequences in 1usize..4, group in 1usize..17,
        ) {
            let tokens: Vec<u32> = (0..40).collect();
            let pages: Vec<PageId> = (100..120).collect();
            let segments: Vec<Segment<'_>> = lens
                .iter()
                .map(|&(len, first_position, logits)| Segment {
                    tokens: &tokens[..len],
                    first_position,
                    pages: &pages,
                    num_logits: logits.min(len),
                    tree: &[],
                })
                .collect();
            let passes = passes(&segments, &Bounds { rows, many: None, sequences, group });
            let mut expected = segments.iter().flat_map(|segment| {
                segment.tokens.iter().enumerate().map(move |(idx, &token)| {
                    let wants = idx >= segment.tokens.len() - segment.num_logits;
                    (token, segment.first_position + idx, wants)
                })
            });
            for pass in &passes {
                prop_assert!(pass.rows.len() <= rows);
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
                    let (token, position, wants) = expected.next().unwrap();
                    prop_assert_eq!((row.token, row.slot, row.base), (token, position as u32, position as u32 + 1));
                    prop_assert_eq!(pass.logit_rows.contains(&(idx as u32)), wants);
                    let page = pass.pages[row.sequence as usize * pass.max_pages + position / 16];
                    prop_assert_eq!(page, pages[position / 16]);
                }
            }
            prop_assert!(expected.next().is_none());
        }
    }

    #[test]
    fn long_chunks_are_cut_by_their_own_length_alone_into_passes_of_their_own() {
        let (tokens, pages): (Vec<u32>, Vec<PageId>) = ((0..700).collect(), (0..100).collect());
        let bounds = Bounds { rows: 256, many: Some(512), sequences: 8, group: 4 };
        let segment = |len: usize, num_logits| Segment {
            tokens: &tokens[..len],
            first_position: 0,
            pages: &pages,
            num_logits,
            tree: &[],
        };
        let cut = |segments: &[Segment<'_>]| -> Vec<(usize, bool)> {
            passes(segments, &bounds).iter().map(|pass| (pass.rows.len(), pass.is_many)).collect()
        };
        assert_eq!(cut(&[segment(192, 1)]), [(192, false)]);
        assert_eq!(cut(&[segment(193, 1)]), [(193, true)]);
        // What is left over is computed as short chunks are, beside others.
        assert_eq!(cut(&[segment(600, 1)]), [(512, true), (88, false)]);
        assert_eq!(cut(&[segment(700, 0)]), [(512, true), (188, false)]);
        let mixed = [segment(5, 5), segment(600, 1), segment(9, 9), segment(230, 1)];
        assert_eq!(cut(&mixed), [(5, false), (512, true), (97, false), (230, true)]);
        // No more logits than there is room for.
        assert_eq!(cut(&[segment(700, 700)]), [(256, true), (256, true), (188, false)]);
    }

    #[test]
    fn without_a_library_no_pass_is_large() {
        let (tokens, pages): (Vec<u32>, Vec<PageId>) = ((0..700).collect(), (0..100).collect());
        let bounds = Bounds { rows: 256, many: None, sequences: 8, group: 4 };
        let segment =
            Segment { tokens: &tokens, first_position: 0, pages: &pages, num_logits: 1, tree: &[] };
        let passes = passes(&[segment], &bounds);
        assert!(passes.iter().all(|pass| !pass.is_many && pass.rows.len() <= 256));
    }
}
