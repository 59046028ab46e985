//! The tables that describe the rows of a pass to the device, made from segments on the host.

use super::params::{Row, Tile};
use crate::batch::Segment;
use crate::pages::{PageId, pages_for};

/// How much a pass may hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Rows.
    pub rows: usize,
    /// Sequences.
    pub sequences: usize,
    /// Query rows of a tile.
    pub tile_rows: usize,
}

/// The rows of one pass.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Tables {
    /// In segment order.
    pub rows: Vec<Row>,
    /// Rows of one sequence that attend together.
    pub tiles: Vec<Tile>,
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

/// Cuts segments into passes, in order; a segment that is cut goes on in the next pass.
pub(super) fn passes(segments: &[Segment<'_>], bounds: &Bounds) -> Vec<Tables> {
    let mut passes = Vec::new();
    let mut parts: Vec<Part<'_>> = Vec::new();
    let mut num_rows = 0;
    for segment in segments {
        let mut first = 0;
        while first < segment.tokens.len() {
            if num_rows == bounds.rows || parts.len() == bounds.sequences {
                passes.push(Tables::new(&parts, bounds.tile_rows));
                parts.clear();
                num_rows = 0;
            }
            let len = (segment.tokens.len() - first).min(bounds.rows - num_rows);
            parts.push(Part { segment, first, len });
            num_rows += len;
            first += len;
        }
    }
    if !parts.is_empty() {
        passes.push(Tables::new(&parts, bounds.tile_rows));
    }
    passes
}

impl Tables {
    fn new(parts: &[Part<'_>], tile_rows: usize) -> Self {
        let end = |part: &Part<'_>| part.segment.first_position + part.first + part.len;
        let max_pages = parts.iter().map(|part| pages_for(end(part))).max().unwrap_or(0);
        let mut tables = Self { max_pages, ..Self::default() };
        for (sequence, part) in parts.iter().enumerate() {
            tables.add(sequence, part, tile_rows);
        }
        tables
    }

    fn add(&mut self, sequence: usize, part: &Part<'_>, tile_rows: usize) {
        let Segment { tokens, first_position, pages, num_logits } = *part.segment;
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
            rows in 1usize..50, sequences in 1usize..4, tile_rows in 1usize..17,
        ) {
            let tokens: Vec<u32> = (0..40).collect();
            let pages: Vec<PageId> = (100..120).collect();
            let segments: Vec<Segment<'_>> = lens
                .iter()
                .map(|&(len, first_position, logits)| Segment {
                    tokens: &tokens[..len], first_position, pages: &pages, num_logits: logits.min(len),
                })
                .collect();
            let passes = passes(&segments, &Bounds { rows, sequences, tile_rows });
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
                    prop_assert!(rows.len() <= tile_rows);
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
}
