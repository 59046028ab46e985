//! A head on the target's hidden states inside of a step's graph.
//!
//! The graph begins with the known tokens that the head has not run, whose states the host uploads; then the head goes on with
//! its own, one pass a draft, or has read the rows of all drafts in the first one, if it was made for that. Behind the
//! verification the hidden states of its rows become states, which the host takes in (`draft/head_states.rs`).

use super::drafter::{GraphDrafter, most_logits};
use super::graph::{FirstRows, Shape, StepGraph, StepLogits, TablesOf};
use super::spread::Spread;
use super::state_drafter::StateDrafter;
use crate::batch::Segment;
use crate::draft::HeadSegment;
use crate::engine::Limits;
use crate::exec::cuda::device::{Address, Device, Op, upload};
use crate::exec::cuda::model::params::{NO_SEQUENCE, Row, Tile};
use crate::exec::cuda::model::shape::Tiling;
use crate::exec::cuda::model::{Eagle, Pass, Taps};
use crate::model::EagleConfig;
use crate::pages::PageId;
use crate::{Error, Result};
use std::iter;
use std::sync::Arc;

/// A head as the drafter.
pub(crate) struct HeadDrafter {
    head: Arc<Eagle>,
    /// Hidden states of the rows that are verified.
    taps: Taps,
    /// Where it drafts other tokens than the first ones.
    spread: Option<Spread>,
}

/// Rows that a step verifies at most.
pub(super) fn most_rows(limits: &Limits) -> usize {
    limits.max_batch_size * (limits.max_draft_len + 1)
}

impl HeadDrafter {
    pub(crate) fn new(head: Arc<Eagle>, limits: &Limits, device: &mut dyn Device) -> Result<Self> {
        let num_logits = most_logits(head.config().mask_token, limits);
        let EagleConfig { taps, target_hidden, .. } = head.config();
        let taps = Taps::alloc(taps, most_rows(limits), *target_hidden, device)?;
        let taps = taps.copied_by(head.join_code());
        let spread = head
            .spread_code()
            .zip(head.vocab_map())
            .map(|(code, map)| Spread::alloc(code, map, head.vocab_size(), num_logits, device));
        let spread = spread.transpose()?;
        Ok(Self { head, taps, spread })
    }

    /// Bytes that `new` takes on the device.
    pub(crate) fn bytes(eagle: &EagleConfig, vocab_size: usize, limits: &Limits) -> usize {
        let taps = Taps::bytes(eagle.taps.len(), most_rows(limits), eagle.target_hidden);
        let spread = Spread::bytes(vocab_size, most_logits(eagle.mask_token, limits));
        taps + if eagle.maps_vocab { spread } else { 0 }
    }

    /// Where the target's pass keeps the hidden states of its rows.
    pub(super) fn taps(&self) -> &Taps {
        &self.taps
    }

    fn tiling(&self, sequences: usize, places: usize) -> (Tiling, usize) {
        let group = self.head.group();
        let tiling = Tiling::of(sequences, places, group);
        (tiling, tiling.rows(group))
    }

    /// Positions that a row sees, as the kernels are told.
    fn window(&self) -> u32 {
        let window = self.head.config().window;
        window.map_or(u32::MAX, |window| u32::try_from(window).unwrap_or(u32::MAX))
    }

    /// Rows of a sequence in the first pass.
    fn first_rows(&self, shape: Shape) -> FirstRows {
        FirstRows::of(shape, self.most_fed(shape), self.head.config().mask_token)
    }

    /// Tells the graph's first pass about its rows: of each sequence some of its last known tokens, or none, and how many drafts
    /// they are to bring.
    pub(super) fn tell(
        &self,
        shape: Shape,
        fed: &[(HeadSegment<'_>, usize)],
        device: &mut dyn Device,
    ) -> Result<()> {
        let (first_rows, width) = (self.first_rows(shape), self.head.width());
        let places = first_rows.places();
        let (_, tile_rows) = self.tiling(shape.sequences, places);
        let nothing = Row { sequence: NO_SEQUENCE, ..Row::default() };
        let mut rows = vec![nothing; shape.sequences * places];
        let mut states = vec![0.0; shape.sequences * places * width];
        let mut tiles = Vec::with_capacity(shape.sequences * places.div_ceil(tile_rows));
        let mut logit_rows = Vec::with_capacity(shape.sequences * (first_rows.num_masks + 1));
        for sequence in 0..shape.sequences {
            let begin = sequence * places;
            // The last known token always stands in the same place, which gets logits, as the masks behind it do.
            let known_end = begin + first_rows.most_fed;
            let fed = fed.get(sequence);
            let first = known_end - fed.map_or(0, |(fed, _)| fed.tokens.len());
            let mut end = first;
            for (token, state) in
                fed.into_iter().flat_map(|(fed, drafts)| self.rows_of(fed, *drafts))
            {
                let position = fed.map_or(0, |(fed, _)| fed.first_position) + end - first;
                let first_seen = self.head.config().first_seen(position) as u32;
                rows[end] = Row { first: first_seen, ..Row::chain(token, position, sequence) };
                states[end * width..][..width].copy_from_slice(state);
                end += 1;
            }
            for share in (begin..begin + places).step_by(tile_rows) {
                let from = share.max(first);
                let num_rows = (share + tile_rows).min(end).saturating_sub(from);
                tiles.push(Tile { first_row: from as u32, num_rows: num_rows as u32, num_old: 0 });
            }
            logit_rows.extend(known_end as u32 - 1..(begin + places) as u32);
        }
        let work = self.head.workspace();
        upload(device, work.rows, &rows)?;
        upload(device, work.tiles, &tiles)?;
        upload(device, work.logit_rows, &logit_rows)?;
        upload(device, self.head.states(), &states)
    }

    /// The tokens of a sequence's rows, and what each comes with: known ones, and behind them a mask for each draft but the first.
    fn rows_of<'a>(
        &'a self,
        fed: &HeadSegment<'a>,
        drafts: usize,
    ) -> impl Iterator<Item = (u32, &'a [f32])> {
        let known = fed.tokens.iter().copied().zip(fed.states.chunks_exact(self.head.width()));
        let asks = !fed.tokens.is_empty();
        let num_masks = if asks { drafts.saturating_sub(1) } else { 0 };
        let mask = self.head.mask().map(|mask| (mask.token, &mask.state[..]));
        known.chain(mask.into_iter().flat_map(move |mask| iter::repeat_n(mask, num_masks)))
    }

    /// Makes states of the hidden states of all rows that were verified.
    pub(super) fn ops_behind(&self, num_rows: usize) -> Vec<Op> {
        let stride = self.head.config().target_hidden;
        self.head.fuse(num_rows, |tap| self.taps.place(tap), stride)
    }

    /// Where these, and those that the first pass begins with, are.
    pub(super) fn states(&self) -> Address {
        self.head.states()
    }

    /// Values of a state.
    pub(super) fn width(&self) -> usize {
        self.head.width()
    }

    /// Runs rows ahead of the graph for their keys and values alone.
    pub(super) fn run(&self, segments: &[HeadSegment<'_>], device: &mut dyn Device) -> Result<()> {
        self.head.forward(segments, device).map(drop)
    }
}

impl GraphDrafter for HeadDrafter {
    fn vocab_size(&self) -> usize {
        match &self.spread {
            Some(_) => self.head.vocab_size(),
            None => self.head.config().draft_vocab,
        }
    }

    fn holds(&self, shape: Shape) -> bool {
        self.head.holds(shape.sequences, self.first_rows(shape).places())
    }

    fn most_fed(&self, shape: Shape) -> usize {
        // All that the step before has brought.
        shape.drafts + 1
    }

    fn drafts_at_once(&self) -> bool {
        self.head.config().mask_token.is_some()
    }

    fn copy_page(&self, from: PageId, to: PageId, device: &mut dyn Device) -> Result<()> {
        self.head.copy_page(from, to, device)
    }

    fn catch_up(&self, _: &[Segment<'_>], _: &mut dyn Device) -> Result<()> {
        Err(Error::Unsupported("rows of a head without the states that they come with".into()))
    }

    fn ops(&self, shape: Shape, step: &StepGraph<'_>) -> Vec<Op> {
        let mut ops = Vec::new();
        let first = self.first_rows(shape);
        let (work, vocab) = (self.head.workspace(), self.head.vocab_size());
        for pass in 0..(shape.from_graph - first.num_masks) as u32 {
            let (places, rows_each) =
                if pass == 0 { (first.places(), first.num_masks + 1) } else { (1, 1) };
            let (tiling, tile_rows) = self.tiling(shape.sequences, places);
            if pass > 0 {
                let tables = TablesOf { work, vocab, window: self.window(), tile_rows, first };
                ops.push(Op::Launch(step.rows(&tables, shape, pass)));
            }
            let num_logits = shape.sequences * rows_each;
            let of_rows = Pass {
                num_rows: shape.sequences * places,
                num_tiles: shape.sequences * places.div_ceil(tile_rows),
                tiling,
                num_logits,
                pages: step.buffers.pages,
                max_pages: step.max_pages,
            };
            ops.extend(self.head.pass(&of_rows, pass > 0));
            let (values, best) = (work.logits, work.best);
            let stride = self.head.config().draft_vocab;
            let mut logits = StepLogits { values, best, stride, rows_each };
            if let Some(spread) = &self.spread {
                logits = spread.run(logits, num_logits, &mut ops);
            }
            step.draw(logits, shape, pass, &mut ops);
        }
        ops
    }

    fn state_drafter(&self) -> Option<StateDrafter<'_>> {
        Some(StateDrafter::Head(self))
    }
}
