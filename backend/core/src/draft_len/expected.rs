//! What a step with some draft lengths is expected to bring and to take, over who finds something in a text and who does
//! not.

use super::allocate::Batch;
use super::cost::Costs;
use crate::draft_source::{DraftLens, DraftSource};

/// Expectations of a step. Times are taken at the expected number of rows, which is right as far as they grow evenly; and
/// a model that runs at all is taken to run as many passes as its longest draft has, or one.
pub(super) struct Expected<'a> {
    batch: Batch<'a>,
    pub(super) lens: Vec<DraftLens>,
    /// Rows that have to be there: of the longer draft of each sequence.
    pub(super) num_extra: usize,
    /// Tokens that the step brings.
    pub(super) tokens: f64,
    /// Rows of drafts.
    rows: f64,
    /// Positions of the cache that all rows read.
    positions: f64,
    /// Passes of the model, if it runs.
    passes: usize,
    /// Rows of a sequence in each.
    rows_of_pass: usize,
    /// Sequences that the model drafts for.
    drafting: f64,
    /// Positions of the cache that one row of each of them reads.
    draft_positions: f64,
    /// Sequences that the model drafts for in any case,
    num_certain: usize,
    /// and the chance that all others that it may draft for find something before.
    all_hit: f64,
    /// Milliseconds of the model's passes.
    drafts_ms: f64,
}

impl<'a> Expected<'a> {
    /// Without any draft, of a step whose model runs so many passes where it drafts.
    pub(super) fn new(batch: Batch<'a>, passes: usize) -> Self {
        Self {
            batch,
            lens: vec![DraftLens::default(); batch.outlooks.len()],
            num_extra: 0,
            tokens: (batch.num_alike * batch.outlooks.len()) as f64,
            rows: 0.0,
            positions: (batch.num_alike * batch.positions.iter().sum::<usize>()) as f64,
            passes: if batch.at_once { passes.min(1) } else { passes },
            rows_of_pass: if batch.at_once { passes.max(1) } else { 1 },
            drafting: 0.0,
            draft_positions: 0.0,
            num_certain: 0,
            all_hit: 1.0,
            drafts_ms: 0.0,
        }
    }

    /// Has a source draft a token more for a sequence.
    pub(super) fn add(&mut self, costs: &Costs, idx: usize, source: DraftSource) {
        let outlook = &self.batch.outlooks[idx];
        let before = self.lens[idx];
        *self.lens[idx].of_mut(source) += 1;
        let lens = self.lens[idx];
        self.num_extra += self.batch.num_alike * (lens.longest() - before.longest());
        let begins_to_look_up = source == DraftSource::Lookup && lens.lookup == 1;
        if begins_to_look_up && lens.model > 0 {
            // What it finds comes in place of what the model would have drafted.
            let gain: f64 = outlook.gains.model[..lens.model].iter().sum();
            self.put(idx, -outlook.hit_rate, self.batch.model_rows(lens.model), gain);
            self.num_certain -= self.batch.num_alike;
            self.draft(costs, idx, -outlook.hit_rate, outlook.hit_rate);
        }
        let share = outlook.share(source, lens.lookup > 0);
        let rows = match source {
            DraftSource::Model => {
                self.batch.model_rows(lens.model) - self.batch.model_rows(before.model)
            }
            DraftSource::Lookup => 1.0,
        };
        self.put(idx, share, rows, outlook.gains.of(source)[*before.of(source)]);
        if source == DraftSource::Model && lens.model == 1 {
            match lens.lookup {
                0 => {
                    self.num_certain += self.batch.num_alike;
                    self.draft(costs, idx, share, 1.0);
                }
                _ => self.draft(costs, idx, share, outlook.hit_rate),
            }
        }
    }

    /// Rows of a sequence, in this share of the steps.
    fn put(&mut self, idx: usize, share: f64, rows: f64, gain: f64) {
        let share = share * self.batch.num_alike as f64;
        self.tokens += share * gain;
        self.rows += share * rows;
        self.positions += share * rows * self.batch.positions[idx] as f64;
    }

    /// The model drafts for a sequence in this share of the steps more.
    fn draft(&mut self, costs: &Costs, idx: usize, share: f64, hit_rate: f64) {
        let share = share * self.batch.num_alike as f64;
        self.drafting += share;
        self.draft_positions += share * self.batch.positions[idx] as f64;
        self.all_hit *= hit_rate.powf(self.batch.num_alike as f64);
        let runs = if self.num_certain > 0 { 1.0 } else { 1.0 - self.all_hit };
        // Sequences of a step in which it runs.
        let drafting = (self.drafting / runs).round() as usize;
        let positions = (self.draft_positions / runs).round() as usize;
        self.drafts_ms =
            self.passes as f64 * runs * costs.pass_ms(drafting * self.rows_of_pass, positions);
    }

    /// Tokens that one row more would have to bring, to be worth its time: as many as come in that time otherwise.
    pub(super) fn row_worth(&self, costs: &Costs) -> f64 {
        let rows = self.batch.base_rows + self.rows.round() as usize;
        let target_ms = self.batch.target_ms(costs);
        // Over two rows: kernels take some numbers of rows for the price of one less.
        let row_ms = (target_ms(rows + 2) - target_ms(rows)) / 2.0;
        row_ms * self.tokens / self.ms(costs)
    }

    /// The same of a pass of the model for one sequence, with the row that it leads to.
    pub(super) fn pass_worth(&self, costs: &Costs) -> f64 {
        let pass_ms = costs.pass_ms(1, self.batch.positions.iter().sum());
        self.row_worth(costs) + pass_ms * self.tokens / self.ms(costs)
    }

    /// Milliseconds that the step takes for its sequences.
    pub(super) fn ms(&self, costs: &Costs) -> f64 {
        self.ms_by(self.batch.target_ms(costs), costs)
    }

    /// The same, by what [`Batch::target_ms`] tells.
    pub(super) fn ms_by(&self, target_ms: impl Fn(usize) -> f64, costs: &Costs) -> f64 {
        let whole = self.rows.floor();
        let (rows, part) = (self.batch.base_rows + whole as usize, self.rows - whole);
        let below = target_ms(rows);
        let target = if part > 0.0 { below + part * (target_ms(rows + 1) - below) } else { below };
        target + costs.target_position_ms() * self.positions + self.drafts_ms
    }
}
