//! What steps launch, without anything on a GPU: for predictions.

use super::params::{ROWS_THREADS, SAMPLE_SHARED_BYTES, SAMPLE_SLICES, SAMPLE_THREADS};
use super::spread;
use crate::exec::cuda::model::shape::ROW_THREADS;
use crate::exec::cuda::model::{HeadOutline, Outline, Planned};
use spec_kernels::Variant;

impl Outline {
    /// The target's part of a step: of each sequence a token and `drafts` drafts.
    pub fn step(&self, sequences: usize, drafts: usize) -> Vec<Planned> {
        let rows = sequences * (drafts + 1);
        let mut operations = self.decided(sequences, drafts + 1, rows);
        operations.push(plain("accept", 1, ROWS_THREADS, 0, rows));
        operations
    }

    /// A drafter's pass of one row a sequence.
    pub fn draft(&self, sequences: usize) -> Vec<Planned> {
        let mut operations = self.tabled(sequences, 1, sequences);
        if self.maps_vocab() {
            operations.push(spread(sequences, self.vocab_size()));
        }
        operations.push(sampled(sequences));
        operations
    }

    /// The only pass of a drafter that makes so many drafts of each sequence in it, behind as many known tokens and one more.
    pub fn draft_at_once(&self, sequences: usize, drafts: usize) -> Vec<Planned> {
        let mut operations = self.tabled(sequences, 2 * drafts, sequences * drafts);
        if self.maps_vocab() {
            operations.push(spread(sequences * drafts, self.vocab_size()));
        }
        operations.extend((0..drafts).map(|_| sampled(sequences)));
        operations
    }

    /// A pass with its tables before and its decisions after it.
    fn decided(&self, sequences: usize, places: usize, num_logits: usize) -> Vec<Planned> {
        let mut operations = self.tabled(sequences, places, num_logits);
        operations.push(sampled(num_logits));
        operations
    }

    /// A pass with its tables before it.
    fn tabled(&self, sequences: usize, places: usize, num_logits: usize) -> Vec<Planned> {
        let mut operations = vec![plain("rows", 1, ROWS_THREADS, 0, sequences * places)];
        operations.extend(self.pass(sequences, places, num_logits));
        operations
    }
}

impl HeadOutline {
    /// What a head runs in a step's graph for the first draft of each sequence, of which it reads so many known tokens.
    pub fn first_draft(&self, sequences: usize, known: usize) -> Vec<Planned> {
        self.drawn(self.first_pass(sequences, known, sequences), sequences, 1)
    }

    /// And for each draft behind it.
    pub fn draft(&self, sequences: usize) -> Vec<Planned> {
        let tables = plain("rows", 1, ROWS_THREADS, 0, sequences);
        let mut operations = if self.has_tables() { vec![tables] } else { Vec::new() };
        operations.extend(self.later_pass(sequences));
        self.drawn(operations, sequences, 1)
    }

    /// The only pass of a head that makes so many drafts of each sequence in it, behind as many known tokens and one more.
    pub fn draft_at_once(&self, sequences: usize, drafts: usize) -> Vec<Planned> {
        let pass = self.first_pass(sequences, 2 * drafts, sequences * drafts);
        self.drawn(pass, sequences, drafts)
    }

    /// A pass, and what draws so many drafts of each sequence from its logits.
    fn drawn(&self, pass: Vec<Planned>, sequences: usize, drafts: usize) -> Vec<Planned> {
        let mut operations = pass;
        operations.extend(self.mapped_vocab().map(|vocab| spread(sequences * drafts, vocab)));
        operations.extend((0..drafts).map(|_| sampled(sequences)));
        operations
    }
}

fn spread(sequences: usize, vocab_size: usize) -> Planned {
    plain("spread", spread::blocks(sequences, vocab_size), ROW_THREADS, 0, sequences)
}

/// What decides by so many rows of logits.
fn sampled(num_logits: usize) -> Planned {
    let grid = num_logits as u32 * SAMPLE_SLICES;
    plain("sample", grid, SAMPLE_THREADS, SAMPLE_SHARED_BYTES, num_logits)
}

fn plain(kernel: &'static str, grid: u32, threads: u32, shared_bytes: u32, rows: usize) -> Planned {
    let variant = Variant::plain(kernel);
    Planned::Kernel { variant, grid, threads, shared_bytes, ring_bytes: 0, rows, matrix: None }
}
