//! A head on the target's hidden states inside of a step's graph.
//!
//! The graph begins with the known tokens that the head has not run, whose states the host uploads; then the head goes on with
//! its own, one pass a draft. Behind the verification the hidden states of its rows become states, which the host takes in
//! (`draft/head_states.rs`): it alone knows which of them are needed, so no step is launched ahead.

use super::drafter::GraphDrafter;
use super::graph::{FirstRows, Shape, StepGraph, StepLogits, TablesOf};
use super::spread::Spread;
use crate::batch::Segment;
use crate::draft::HeadSegment;
use crate::engine::Limits;
use crate::exec::cuda::device::pod::bytes_of_mut;
use crate::exec::cuda::device::{Device, Op, upload};
use crate::exec::cuda::model::params::{NO_SEQUENCE, Row, Tile};
use crate::exec::cuda::model::shape::Tiling;
use crate::exec::cuda::model::{Eagle, Pass, Taps};
use crate::model::EagleConfig;
use crate::pages::PageId;
use crate::{Error, Result};
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
fn most_rows(limits: &Limits) -> usize {
    limits.max_batch_size * (limits.max_draft_len + 1)
}

impl HeadDrafter {
    pub(crate) fn new(head: Arc<Eagle>, limits: &Limits, device: &mut dyn Device) -> Result<Self> {
        let EagleConfig { taps, target_hidden, .. } = head.config();
        let taps = Taps::alloc(taps, most_rows(limits), *target_hidden, device)?;
        let taps = taps.copied_by(head.join_code());
        let spread = head.spread_code().zip(head.vocab_map()).map(|(code, map)| {
            Spread::alloc(code, map, head.vocab_size(), limits.max_batch_size, device)
        });
        let spread = spread.transpose()?;
        Ok(Self { head, taps, spread })
    }

    /// Bytes that `new` takes on the device.
    pub(crate) fn bytes(eagle: &EagleConfig, vocab_size: usize, limits: &Limits) -> usize {
        let taps = Taps::bytes(eagle.taps.len(), most_rows(limits), eagle.target_hidden);
        let spread = Spread::bytes(vocab_size, limits.max_batch_size);
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

    /// Tells the graph's first pass about its rows: of each sequence some of its last known tokens, or none.
    pub(super) fn tell(
        &self,
        shape: Shape,
        fed: &[HeadSegment<'_>],
        device: &mut dyn Device,
    ) -> Result<()> {
        let (places, width) = (self.most_fed(shape), self.head.width());
        let (_, tile_rows) = self.tiling(shape.sequences, places);
        let nothing = Row { sequence: NO_SEQUENCE, ..Row::default() };
        let mut rows = vec![nothing; shape.sequences * places];
        let mut states = vec![0.0; shape.sequences * places * width];
        let mut tiles = Vec::with_capacity(shape.sequences * places.div_ceil(tile_rows));
        for sequence in 0..shape.sequences {
            let fed = fed.get(sequence);
            let tokens = fed.map_or(&[][..], |fed| fed.tokens);
            // The last known token stands in the last place, which gets logits.
            let (begin, end) = (sequence * places, (sequence + 1) * places);
            let first = end - tokens.len();
            for (idx, &token) in tokens.iter().enumerate() {
                let position = fed.map_or(0, |fed| fed.first_position) + idx;
                let first_seen = self.head.config().first_seen(position) as u32;
                rows[first + idx] =
                    Row { first: first_seen, ..Row::chain(token, position, sequence) };
            }
            if let Some(fed) = fed {
                states[first * width..end * width].copy_from_slice(fed.states);
            }
            for share in (begin..end).step_by(tile_rows) {
                let from = share.max(first);
                let num_rows = (share + tile_rows).min(end).saturating_sub(from);
                tiles.push(Tile { first_row: from as u32, num_rows: num_rows as u32, num_old: 0 });
            }
        }
        let logit_rows: Vec<u32> =
            (1..=shape.sequences).map(|sequence| (sequence * places - 1) as u32).collect();
        let work = self.head.workspace();
        upload(device, work.rows, &rows)?;
        upload(device, work.tiles, &tiles)?;
        upload(device, work.logit_rows, &logit_rows)?;
        upload(device, self.head.states(), &states)
    }

    /// Makes states of the hidden states of all rows that were verified.
    pub(super) fn ops_behind(&self, shape: Shape) -> Vec<Op> {
        let num_rows = shape.sequences * (shape.drafts + 1);
        let stride = self.head.config().target_hidden;
        self.head.fuse(num_rows, |tap| self.taps.place(tap), stride)
    }

    /// The states of all rows that were verified, `[sequence][draft][width]`; waits for the device.
    pub(super) fn states(&self, shape: Shape, device: &mut dyn Device) -> Result<Vec<f32>> {
        let mut states = vec![0.0; shape.sequences * (shape.drafts + 1) * self.head.width()];
        device.read(self.head.states(), bytes_of_mut(&mut states))?;
        Ok(states)
    }

    /// Values of a state.
    pub(super) fn width(&self) -> usize {
        self.head.width()
    }

    /// Runs rows ahead of the graph for their keys and values alone.
    pub(super) fn run(&self, segments: &[HeadSegment<'_>], device: &mut dyn Device) -> Result<()> {
        self.head.forward(segments, device).map(drop)
    }

    /// Decides by what a pass has left.
    fn decide(&self, shape: Shape, pass: u32, step: &StepGraph<'_>, ops: &mut Vec<Op>) {
        let (work, drafted) = (self.head.workspace(), self.head.config().draft_vocab);
        let (values, best) = (work.logits, work.best);
        let mut logits = StepLogits { values, best, stride: drafted, rows_each: 1 };
        if let Some(spread) = &self.spread {
            logits = spread.run(logits, shape.sequences, ops);
        }
        ops.push(Op::Launch(step.sample(logits, shape, pass, shape.sequences)));
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
        self.head.holds(shape.sequences, self.most_fed(shape))
    }

    fn most_fed(&self, shape: Shape) -> usize {
        // All that the step before has brought.
        shape.drafts + 1
    }

    fn copy_page(&self, from: PageId, to: PageId, device: &mut dyn Device) -> Result<()> {
        self.head.copy_page(from, to, device)
    }

    fn catch_up(&self, _: &[Segment<'_>], _: &mut dyn Device) -> Result<()> {
        Err(Error::Unsupported("rows of a head without the states that they come with".into()))
    }

    fn ops(&self, shape: Shape, step: &StepGraph<'_>) -> Vec<Op> {
        let mut ops = Vec::new();
        for pass in 0..shape.from_graph as u32 {
            let places = if pass == 0 { self.most_fed(shape) } else { 1 };
            let (tiling, tile_rows) = self.tiling(shape.sequences, places);
            if pass > 0 {
                let (work, vocab) = (self.head.workspace(), self.head.vocab_size());
                let (window, first) = (self.window(), FirstRows::default());
                let tables = TablesOf { work, vocab, window, tile_rows, first };
                ops.push(Op::Launch(step.rows(&tables, shape, pass)));
            }
            let of_rows = Pass {
                num_rows: shape.sequences * places,
                num_tiles: shape.sequences * places.div_ceil(tile_rows),
                tiling,
                num_logits: shape.sequences,
                pages: step.buffers.pages,
                max_pages: step.max_pages,
            };
            ops.extend(self.head.pass(&of_rows, pass > 0));
            self.decide(shape, pass, step, &mut ops);
        }
        ops
    }

    fn head(&self) -> Option<&HeadDrafter> {
        Some(self)
    }
}
