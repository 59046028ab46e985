//! What steps launch, without anything on a GPU: for predictions.

use super::params::{ROWS_THREADS, SAMPLE_SHARED_BYTES, SAMPLE_SLICES, SAMPLE_THREADS};
use crate::exec::cuda::model::{Outline, Planned};
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
        self.decided(sequences, 1, sequences)
    }

    /// A pass with its tables before and its decisions after it.
    fn decided(&self, sequences: usize, places: usize, num_logits: usize) -> Vec<Planned> {
        let mut operations = vec![plain("rows", 1, ROWS_THREADS, 0, sequences * places)];
        operations.extend(self.pass(sequences, places, num_logits));
        let grid = num_logits as u32 * SAMPLE_SLICES;
        operations.push(plain("sample", grid, SAMPLE_THREADS, SAMPLE_SHARED_BYTES, num_logits));
        operations
    }
}

fn plain(kernel: &'static str, grid: u32, threads: u32, shared_bytes: u32, rows: usize) -> Planned {
    let variant = Variant::plain(kernel);
    Planned::Kernel { variant, grid, threads, shared_bytes, ring_bytes: 0, rows }
}
