//! What must hold of tables and of sequences that a step leaves.

use super::{Outcome, TILE_ROWS};
use crate::world::World;
use spec_core::testing::batch::{DraftLens, Entry};
use spec_core::testing::cuda::step::params::*;
use spec_core::testing::cuda::step::{Branched, Planned, StepInput};

pub(super) fn ensure(holds: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(message()) }
}

/// Tiles hold each active row of a sequence once, and no other.
pub(super) fn check_tiles(rows: &[Row], per_sequence: usize, tiles: &[Tile]) -> Result<(), String> {
    let num_tiles = per_sequence.div_ceil(TILE_ROWS);
    for (sequence, tiles) in tiles.chunks(num_tiles).enumerate() {
        let mut held = Vec::new();
        for tile in tiles {
            ensure(tile.num_rows as usize <= TILE_ROWS, || format!("{tile:?} is too large"))?;
            let first = tile.first_row as usize;
            let own = &rows[sequence * per_sequence..(sequence + 1) * per_sequence];
            let oldest = own.iter().filter(|row| row.sequence != NO_SEQUENCE).map(|row| row.slot);
            let is_old = tile.num_rows == 0 || Some(tile.num_old) == oldest.min();
            ensure(is_old, || format!("{tile:?} does not know what is older than the pass"))?;
            held.extend(first..first + tile.num_rows as usize);
        }
        let own = sequence * per_sequence..(sequence + 1) * per_sequence;
        let active: Vec<usize> = own.filter(|&row| rows[row].sequence != NO_SEQUENCE).collect();
        ensure(held == active, || format!("tiles hold rows {held:?}, not {active:?}"))?;
        let is_own = |&row: &usize| rows[row].sequence as usize == sequence;
        ensure(active.iter().all(is_own), || format!("rows of others in place {sequence}"))?;
    }
    Ok(())
}

/// The sequence is left as the host would tell the next step of it, with the last known tokens.
pub(super) fn check_next(
    world: &World,
    entry: &Entry<'_>,
    outcome: &Outcome,
    before: &StepSequence,
    (found, last_tokens): (&StepSequence, &[u32]),
) -> Result<(), String> {
    let tokens = [entry.tokens, &outcome.tokens[..]].concat();
    let left = entry.max_len.saturating_sub(tokens.len());
    let draft_len = entry.draft_lens.model.min(left.saturating_sub(1));
    let draft_lens = DraftLens { lookup: 0, model: draft_len };
    let next = Entry { tokens: &tokens, draft_lens, given: &[], ..*entry };
    let unseen = tokens.len() - outcome.draft_computed;
    let planned = Planned {
        num_fed: if draft_len > 0 { unseen } else { 0 },
        draft_computed: outcome.draft_computed,
        draft_len,
        num_given: 0,
        branch: Branched::Alone,
        has_run: false,
    };
    let mut input = StepInput::new(world.most_fed());
    input.push(&next, planned);
    let told = input.sequences[0];
    let last_tokens = &last_tokens[last_tokens.len() - world.most_fed()..];
    let is_known = left == 0 || last_tokens == input.last_tokens;
    ensure(is_known, || format!("{last_tokens:?} known, not {:?}", input.last_tokens))?;
    // What edits logits stays as it was uploaded; places that have come to their end stay unused.
    let expected = StepSequence {
        history: before.history,
        biases: before.biases,
        bad_words: before.bad_words,
        end_tokens: before.end_tokens,
        // It goes on as it was, whichever branch that is.
        coupling: before.coupling,
        fork_depth: before.fork_depth,
        fork_rank: before.fork_rank,
        ..told
    };
    let is_right = if left == 0 { found.len == 0 } else { *found == expected };
    ensure(is_right, || format!("left as {found:?}, not {expected:?}"))
}
