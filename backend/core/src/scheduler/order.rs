//! Who goes before whom: by priority, then by turn.
//!
//! Requests take turns as they come. The rows of one request do not all come before the next one: each takes the turn of
//! one more request behind its own, so that a request of many rows shares the engine with those that come after it, row
//! by row, and none of either waits for ever. In the same way a prompt that takes many steps gives way: with every step's
//! worth of tokens that it has been given, its turn for the next ones is one later.

use super::Scheduler;
use crate::sequence::{Sequence, SequenceId};

/// Place in the order of service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    /// Lower goes first.
    pub(super) priority: u32,
    pub(super) turn: u64,
    /// Tells sequences of one turn apart.
    pub(super) arrival: u64,
}

/// More turns than are ever taken: who is delayed is behind all others.
const DELAY: u64 = 1 << 62;

impl Scheduler {
    /// The place of a sequence that arrives now.
    pub(super) fn next_key(&mut self, sequence: &Sequence) -> Key {
        self.num_arrived += 1;
        let row = sequence.limits.row;
        self.num_requests += u64::from(row == 0);
        Key {
            priority: sequence.limits.priority,
            turn: self.num_requests + row as u64,
            arrival: self.num_arrived,
        }
    }

    /// The place of a running sequence among those whose prompts are to be computed.
    pub(super) fn prompt_key(&self, key: Key, sequence: &Sequence) -> Key {
        let computed = sequence.computed - sequence.found.min(sequence.computed);
        Key { turn: key.turn + (computed / self.config.max_num_tokens) as u64, ..key }
    }

    /// Puts a sequence that waits for its first turn behind all others of its priority.
    pub(crate) fn delay(&mut self, id: SequenceId) {
        let Some(&key) = self.keys.get(&id) else { return };
        let waits = self.waiting.get(&key).is_some_and(|sequence| !sequence.is_paused());
        if let Some(sequence) = waits.then(|| self.waiting.remove(&key)).flatten() {
            let key = Key { turn: key.turn.saturating_add(DELAY), ..key };
            self.keys.insert(id, key);
            self.waiting.insert(key, sequence);
        }
    }
}
