//! The operations of a whole speculative step: drafting, verification and acceptance without the host.

use super::buffers::{StepBuffers, StepCapacity};
use super::code::StepCode;
use super::drafter::GraphDrafter;
use super::params::{
    AcceptParams, Best, CACHE_OF_DRAFTS, ROWS_THREADS, RowsParams, SAMPLE_SHARED_BYTES,
    SAMPLE_SLICES, SAMPLE_THREADS, SampleParams, VERIFY,
};
use super::spread::Spread;
use super::state_drafter::StateDrafter;
use crate::exec::cuda::device::{Address, Launch, Op};
use crate::exec::cuda::model::shape::{TILE_OUTPUTS, Tiling};
use crate::exec::cuda::model::{DecoderPart, Extent, Model, Pass, Workspace};

/// What a recorded step is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    /// Places for sequences.
    pub sequences: usize,
    /// Drafts of each.
    pub drafts: usize,
    /// Those that a drafter in the graph proposes, at most. Fewer than `drafts` where the host has found longer ones.
    pub from_graph: usize,
}

/// Sequences and drafts of the steps that are recorded when an engine is loaded, at most: what servers see most of the time.
/// Recording takes a GPU milliseconds, so that with many more loading would take seconds.
const RECORDED_SEQUENCES: usize = 8;
const RECORDED_DRAFTS: usize = 8;

impl Shape {
    /// The steps that are recorded when an engine is loaded; all drafts are the graph's own where it has a drafter.
    pub(super) fn recorded(capacity: &StepCapacity, has_drafter: bool) -> Vec<Self> {
        let most = capacity.places.min(RECORDED_SEQUENCES);
        let mut places: Vec<usize> = (1..=most).map(|count| capacity.places_for(count)).collect();
        places.dedup();
        let drafts = 0..=capacity.drafts.min(RECORDED_DRAFTS);
        let of_drafts = |drafts| {
            let from_graph = if has_drafter { drafts } else { 0 };
            places.iter().map(move |&sequences| Self { sequences, drafts, from_graph })
        };
        drafts.flat_map(of_drafts).collect()
    }
}

/// Logits of the rows of a pass.
#[derive(Clone, Copy)]
pub(super) struct StepLogits {
    /// f32 `[rows][stride]`.
    pub(super) values: Address,
    /// `Best` `[rows][tiles]`.
    pub(super) best: Address,
    /// Tokens of a row.
    pub(super) stride: usize,
    /// Rows of a sequence.
    pub(super) rows_each: usize,
}

impl StepLogits {
    /// Those that a later draft of each sequence comes from.
    fn of_draft(self, draft: usize) -> Self {
        let tiles = self.stride.div_ceil(TILE_OUTPUTS);
        Self {
            values: self.values + (draft * self.stride * size_of::<f32>()) as Address,
            best: self.best + (draft * tiles * size_of::<Best>()) as Address,
            ..self
        }
    }
}

/// Rows of a sequence in a drafter's first pass.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FirstRows {
    /// Places for known tokens.
    pub(super) most_fed: usize,
    /// Rows of masks behind them, a draft each: all drafts but the first come from these, if there are any.
    pub(super) num_masks: usize,
    /// What stands there.
    pub(super) mask_token: u32,
}

impl FirstRows {
    /// Of a step, with masks where the drafter has a token for them.
    pub(super) fn of(shape: Shape, most_fed: usize, mask_token: Option<u32>) -> Self {
        let num_masks = mask_token.map_or(0, |_| shape.from_graph.saturating_sub(1));
        Self { most_fed, num_masks, mask_token: mask_token.unwrap_or(0) }
    }

    pub(super) fn places(&self) -> usize {
        self.most_fed + self.num_masks
    }
}

/// Whose rows the tables of a pass are for.
pub(super) struct TablesOf<'a> {
    pub(super) work: &'a Workspace,
    /// A token beyond is fed as 0.
    pub(super) vocab: usize,
    /// Positions that a row of a head on hidden states sees; 0 of a model.
    pub(super) window: u32,
    /// Most rows of a tile.
    pub(super) tile_rows: usize,
    pub(super) first: FirstRows,
}

/// Who runs a pass.
pub(super) struct ModelPass<'a> {
    pub(super) model: &'a Model,
    pub(super) part: DecoderPart<'a>,
    /// Where it has logits of some tokens.
    pub(super) spread: Option<&'a Spread>,
    /// Of a drafter.
    pub(super) first: FirstRows,
}

/// What a step is made of.
pub(crate) struct StepGraph<'a> {
    pub(super) target: &'a Model,
    pub(super) drafter: Option<&'a dyn GraphDrafter>,
    /// Tokens that both models have.
    pub(super) draft_vocab: usize,
    pub(super) code: &'a StepCode,
    pub(super) buffers: &'a StepBuffers,
    pub(super) max_pages: usize,
    /// Known tokens of a sequence that the device has.
    pub(super) last_len: usize,
}

impl StepGraph<'_> {
    /// The operations of a step: its draft part, then its verify part. What the one leaves is in memory before the other
    /// begins, so the host may come between. So may it in front of the target's head.
    pub(super) fn step(&self, shape: Shape, extent: Extent) -> Vec<Op> {
        let draft = if extent.has_layers() { self.draft(shape) } else { Vec::new() };
        [draft, self.verify(shape, extent)].concat()
    }

    fn draft(&self, shape: Shape) -> Vec<Op> {
        match self.drafter {
            Some(drafter) if shape.from_graph > 0 => drafter.ops(shape, self),
            _ => Vec::new(),
        }
    }

    fn verify(&self, shape: Shape, extent: Extent) -> Vec<Op> {
        let from_states = self.drafter.and_then(|drafter| drafter.state_drafter());
        let taps = from_states.map(StateDrafter::taps);
        let mut ops = Vec::new();
        let part = DecoderPart { extent, taps, ..DecoderPart::default() };
        let first = FirstRows::default();
        let target = ModelPass { model: self.target, part, spread: None, first };
        self.pass(&target, shape, VERIFY, &mut ops);
        if extent.has_head() {
            ops.push(Op::Launch(self.accept(shape)));
            ops.extend(from_states.into_iter().flat_map(|drafter| drafter.ops_behind(shape)));
        }
        ops
    }

    /// One forward pass, with its tables before and its decisions after it.
    pub(super) fn pass(&self, of: &ModelPass<'_>, shape: Shape, pass: u32, ops: &mut Vec<Op>) {
        let &ModelPass { model, part, spread, first } = of;
        let (places, rows_each) = match pass {
            VERIFY => (shape.drafts + 1, shape.drafts + 1),
            0 => (first.places(), first.num_masks + 1),
            _ => (1, 1),
        };
        let config = model.config();
        let group = config.num_heads / config.num_kv_heads;
        let tiling = Tiling::of(shape.sequences, places, group);
        let tile_rows = tiling.rows(group);
        let num_logits = shape.sequences * rows_each;
        let work = model.workspace();
        let tables = TablesOf { work, vocab: config.vocab_size, window: 0, tile_rows, first };
        ops.push(Op::Launch(self.rows(&tables, shape, pass)));
        let pass_of_rows = Pass {
            num_rows: shape.sequences * places,
            num_tiles: shape.sequences * places.div_ceil(tile_rows),
            tiling,
            num_logits,
            pages: self.buffers.pages,
            max_pages: self.max_pages,
        };
        ops.extend(model.pass_of(&pass_of_rows, part));
        if !part.extent.has_head() {
            return;
        }
        let stride = config.num_logits();
        let mut logits = StepLogits { values: work.logits, best: work.best, stride, rows_each };
        if let Some(spread) = spread {
            logits = spread.run(logits, num_logits, ops);
        }
        if pass == VERIFY {
            let logits = StepLogits { rows_each: 1, ..logits };
            ops.push(Op::Launch(self.sample(logits, shape, VERIFY, num_logits)));
            return;
        }
        self.draw(logits, shape, pass, ops);
    }

    /// Draws the drafts of a pass, one behind the other where it has the logits of several.
    pub(super) fn draw(&self, logits: StepLogits, shape: Shape, pass: u32, ops: &mut Vec<Op>) {
        for draft in 0..logits.rows_each {
            let (pass, logits) = (pass + draft as u32, logits.of_draft(draft));
            ops.push(Op::Launch(self.sample(logits, shape, pass, shape.sequences)));
        }
    }

    /// The tables of a pass.
    pub(super) fn rows(&self, of: &TablesOf<'_>, shape: Shape, pass: u32) -> Launch {
        let buffers = self.buffers;
        let &TablesOf { work, vocab, window, tile_rows, first } = of;
        let params = RowsParams {
            sequences: buffers.sequences,
            last_tokens: buffers.last_tokens,
            drafting: buffers.drafting,
            drafts: buffers.drafts,
            rows: work.rows,
            tiles: work.tiles,
            head_rows: work.logit_rows,
            pass,
            num_sequences: shape.sequences as u32,
            max_drafts: shape.drafts as u32,
            vocab: vocab as u32,
            tile_rows: tile_rows as u32,
            window,
            last_len: self.last_len as u32,
            most_fed: first.most_fed as u32,
            num_masks: first.num_masks as u32,
            mask_token: first.mask_token,
        };
        Launch::new(self.code.rows, 1, ROWS_THREADS, 0, params)
    }

    /// What decides by the logits of a pass, or by those of one draft of it.
    fn sample(&self, logits: StepLogits, shape: Shape, pass: u32, num_rows: usize) -> Launch {
        let buffers = self.buffers;
        let logits_stride = logits.stride as u32;
        let draft_vocab = self.draft_vocab as u32;
        let params = SampleParams {
            sequences: buffers.sequences,
            words: buffers.words,
            logits: logits.values,
            best: logits.best,
            scores: buffers.scores,
            draft_weights: buffers.draft_weights,
            draft_distributions: buffers.draft_distributions,
            target_weights: buffers.target_weights,
            drafting: buffers.drafting,
            drafts: buffers.drafts,
            choices: buffers.choices,
            parts: buffers.parts,
            pass,
            max_drafts: shape.drafts as u32,
            vocab: if pass == VERIFY { logits_stride } else { draft_vocab },
            draft_vocab,
            logits_stride,
            row_step: logits.rows_each as u32,
        };
        let grid = num_rows as u32 * SAMPLE_SLICES;
        Launch::new(self.code.sample, grid, SAMPLE_THREADS, SAMPLE_SHARED_BYTES, params)
    }

    fn accept(&self, shape: Shape) -> Launch {
        let buffers = self.buffers;
        let answer = buffers.answer;
        let drafter = self.drafter;
        let params = AcceptParams {
            sequences: buffers.sequences,
            last_tokens: buffers.last_tokens,
            drafting: buffers.drafting,
            drafts: buffers.drafts,
            choices: buffers.choices,
            step: buffers.step,
            answers: buffers.answers.address(),
            answer_bytes: answer.bytes as u32,
            tokens_offset: answer.tokens as u32,
            done_offset: answer.done as u32,
            num_sequences: shape.sequences as u32,
            max_drafts: shape.drafts as u32,
            last_len: self.last_len as u32,
            // The target runs the last one.
            most_fed: drafter.map_or(1, |drafter| drafter.most_fed(shape)) as u32,
            draft_cache: drafter.map_or(CACHE_OF_DRAFTS, |drafter| drafter.cache()),
        };
        Launch::new(self.code.accept, 1, ROWS_THREADS, 0, params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(sequences: usize, drafts: usize, has_drafter: bool) -> Vec<(usize, usize, usize)> {
        let capacity = StepCapacity {
            sequences,
            places: sequences,
            drafts,
            max_pages: 1,
            vocab_size: 1,
            draft_vocab: 1,
            hidden_size: 1,
        };
        let shapes = Shape::recorded(&capacity, has_drafter).into_iter();
        shapes
            .map(|Shape { sequences, drafts, from_graph }| (sequences, drafts, from_graph))
            .collect()
    }

    /// Passes have room for the sequences of the limits: a step of these must not be rounded up to the places of branches.
    #[test]
    fn a_step_has_no_more_places_than_passes_hold_sequences() {
        let some = |sequences, places| StepCapacity {
            sequences,
            places,
            drafts: 8,
            max_pages: 1,
            vocab_size: 1,
            draft_vocab: 1,
            hidden_size: 1,
        };
        let places = |capacity: StepCapacity, counts: &[usize]| {
            counts.iter().map(|&count| capacity.places_for(count)).collect::<Vec<_>>()
        };
        assert_eq!(places(some(3, 4), &[1, 2, 3, 4]), [1, 2, 3, 4]);
        assert_eq!(places(some(9, 16), &[5, 8, 9, 10, 16]), [8, 8, 9, 16, 16]);
        assert_eq!(places(some(64, 64), &[3, 33, 64]), [4, 64, 64]);
    }

    #[test]
    fn steps_that_are_recorded_are_those_that_come() {
        assert_eq!(recorded(1, 0, false), [(1, 0, 0)]);
        assert_eq!(
            recorded(3, 1, false),
            [(1, 0, 0), (2, 0, 0), (3, 0, 0), (1, 1, 0), (2, 1, 0), (3, 1, 0)]
        );
        let many = recorded(64, 20, true);
        assert_eq!(many.len(), 4 * 9);
        assert!(
            many.contains(&(8, 8, 8)) && many.contains(&(4, 3, 3)) && many.contains(&(1, 0, 0))
        );
    }
}
