//! Logits over the target's vocabulary, of a drafter that has them for some of its tokens.

use super::graph::StepLogits;
use crate::Result;
use crate::exec::cuda::device::{Address, Device, Kernel, Launch, Op, arrays, upload};
use crate::exec::cuda::model::params::{Best, NOT_DRAFTED, SpreadParams};
use crate::exec::cuda::model::shape::{ROW_THREADS, TILE_OUTPUTS};

/// Puts a drafter's logits where the target's tokens are.
pub(super) struct Spread {
    code: Kernel,
    /// Tokens that drafts are chosen from.
    vocab_size: usize,
    /// u32 a token: which of the drafted ones it is.
    row_of: Address,
    /// f32 `[rows][vocab]`.
    logits: Address,
    /// [`Best`] `[rows][tiles]`.
    best: Address,
}

/// Bytes of the arrays.
fn sizes(vocab_size: usize, num_rows: usize) -> [usize; 3] {
    let tiles = vocab_size.div_ceil(TILE_OUTPUTS);
    [
        vocab_size * size_of::<u32>(),
        num_rows * vocab_size * size_of::<f32>(),
        num_rows * tiles * size_of::<Best>(),
    ]
}

/// Blocks that spread so many rows, a warp for each tile.
pub(super) fn blocks(num_rows: usize, vocab_size: usize) -> u32 {
    let warps = num_rows * vocab_size.div_ceil(TILE_OUTPUTS);
    warps.div_ceil(ROW_THREADS as usize / 32) as u32
}

impl Spread {
    /// For so many rows, of the tokens of `vocab_map`, one a row of the drafter's head. Those that the target does not have are left out.
    pub(super) fn alloc(
        code: Kernel,
        vocab_map: &[u32],
        vocab_size: usize,
        num_rows: usize,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let mut rows = vec![NOT_DRAFTED; vocab_size];
        for (row, &token) in vocab_map.iter().enumerate() {
            if let Some(place) = rows.get_mut(token as usize) {
                *place = row as u32;
            }
        }
        let [row_of, logits, best] = arrays::alloc(sizes(vocab_size, num_rows), device)?;
        upload(device, row_of, &rows)?;
        Ok(Self { code, vocab_size, row_of, logits, best })
    }

    /// Bytes that `alloc` takes.
    pub(super) fn bytes(vocab_size: usize, num_rows: usize) -> usize {
        arrays::total(&sizes(vocab_size, num_rows))
    }

    /// Spreads what a pass has left, and tells where it is then.
    pub(super) fn run(&self, from: StepLogits, num_rows: usize, ops: &mut Vec<Op>) -> StepLogits {
        let &Self { code, vocab_size, row_of, logits, best } = self;
        let params = SpreadParams {
            logits: from.values,
            row_of,
            output: logits,
            best,
            num_rows: num_rows as u32,
            drafted: from.stride as u32,
            vocab: vocab_size as u32,
            unused: 0,
        };
        let grid = blocks(num_rows, vocab_size);
        ops.push(Op::Launch(Launch::new(code, grid, ROW_THREADS, 0, params)));
        StepLogits { values: logits, best, stride: vocab_size, ..from }
    }
}
