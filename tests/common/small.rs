//! Models as small as the CUDA kernels take, tokens for them, and passes over those.

use super::tiny::{self, Sizes};
use spec_core::testing::PageId;
use spec_core::testing::batch::{Forward, Logits, Segment};

/// What the kernels are written for, as small as that goes.
pub(crate) const SMALL: Sizes =
    Sizes { hidden: 96, head_dim: 64, num_heads: 4, num_kv_heads: 2, ff: 160, qk_norm: false };
/// Wider heads, with norms, as in Qwen3; three query heads a key head.
pub(crate) const NORMED: Sizes =
    Sizes { hidden: 128, head_dim: 128, num_heads: 3, num_kv_heads: 1, ff: 96, qk_norm: true };

/// So many tokens, in no order that repeats soon.
pub(crate) fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * i + 7 * i + 3) % (tiny::VOCAB as u32)).collect()
}

/// Logits of all rows, computed in parts.
pub(crate) fn in_parts(model: &mut dyn Forward, tokens: &[u32], parts: &[usize]) -> Vec<Vec<f32>> {
    in_parts_of_prompt(model, tokens, parts, 0)
}

/// The same of a prompt of this length, where a device may compute it in blocks.
pub(crate) fn in_parts_of_prompt(
    model: &mut dyn Forward,
    tokens: &[u32],
    parts: &[usize],
    prompt_len: usize,
) -> Vec<Vec<f32>> {
    let pages: Vec<PageId> = (0..tokens.len().div_ceil(16) as u32).rev().collect();
    let (mut first, mut rows) = (0, Vec::new());
    for len in parts {
        let tokens = &tokens[first..first + len];
        let segment = Segment {
            tokens,
            first_position: first,
            pages: &pages,
            prompt_len,
            num_logits: *len,
            tree: &[],
        };
        let logits: Logits = model.forward(&[segment]).expect("a pass");
        rows.extend((0..*len).map(|row| logits.row(row).to_vec()));
        first += len;
    }
    rows
}
