//! How many requests of a model wait, by level of priority, and how large they are. A request has a place from its arrival
//! until a step takes part of it, wherever it waits in between.

use crate::parameters::{QueuePolicy, WhenFull};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use triton_backend::Error;

/// How often a thread that waits for a place looks whether it still wants one.
const LOOK: Duration = Duration::from_millis(5);

/// Bytes that wait. One request of more finds a place where nobody else waits.
const MAX_BYTES: usize = 64 << 20;
/// Of these the ones that the largest requests leave to others.
const LEFT_TO_OTHERS: usize = 16 << 20;
/// Requests of more bytes are among the largest.
const LARGEST: usize = 1 << 20;
/// Requests of fewer bytes are bounded by their number alone, so that no client's large ones keep them out.
const SMALL: usize = 16 << 10;

/// The places of a model.
#[derive(Debug)]
pub(crate) struct Room {
    policy: QueuePolicy,
    when_full: WhenFull,
    /// Requests that may wait on all levels together.
    max_waiting: usize,
    waiting: Mutex<Waiting>,
    left: Condvar,
}

/// What waits.
#[derive(Debug, Default, PartialEq, Eq)]
struct Waiting {
    /// Numbers of requests, by level.
    levels: BTreeMap<u32, usize>,
    bytes: usize,
}

/// A place that is taken, until this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    room: Arc<Room>,
    level: u32,
    bytes: usize,
}

impl Room {
    pub(crate) fn new(policy: QueuePolicy, max_waiting: usize, when_full: WhenFull) -> Arc<Self> {
        let (waiting, left) = Default::default();
        Arc::new(Self { policy, when_full, max_waiting, waiting, left })
    }

    /// A place for a request of so many bytes on a level, if there is one. Where Triton is to be held back while there is none, this waits for one, and
    /// asks `unwanted` now and then.
    pub(crate) fn enter(
        self: &Arc<Self>,
        level: u32,
        bytes: usize,
        mut unwanted: impl FnMut() -> Option<Error>,
    ) -> Result<Place, Error> {
        loop {
            let mut waiting = self.lock();
            let Some(full) = self.full(&waiting, level).or_else(|| too_large(&waiting, bytes))
            else {
                *waiting.levels.entry(level).or_default() += 1;
                waiting.bytes += bytes;
                return Ok(Place { room: Arc::clone(self), level, bytes });
            };
            if self.when_full == WhenFull::Refuse {
                return Err(full);
            }
            // Whoever leaves in between is seen a moment later.
            drop(self.left.wait_timeout(waiting, LOOK));
            if let Some(error) = unwanted() {
                return Err(error);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why there is no place, if there is none. What is held back waits in Triton's queue, which has bounds of its own.
    fn full(&self, waiting: &Waiting, level: u32) -> Option<Error> {
        let levels = &waiting.levels;
        let all = levels.values().sum();
        let (here, whose) = match self.policy.has_levels() {
            true => (levels.get(&level).copied().unwrap_or(0), "their priority"),
            false => (all, "dynamic_batching"),
        };
        let of_level = match self.when_full {
            WhenFull::Refuse => self.policy.of(level).max_waiting,
            WhenFull::HoldBack => None,
        };
        let full = |count: usize, max: usize, whose: &str| {
            (count >= max).then(|| {
                Error::unavailable(format!(
                    "Exceeds maximum queue size: {count} requests wait, max_queue_size of {whose} is {max}"
                ))
            })
        };
        full(all, self.max_waiting, "the model").or_else(|| full(here, of_level?, whose))
    }

    pub(crate) fn policy(&self) -> &QueuePolicy {
        &self.policy
    }
}

/// Why a request of so many bytes has no place beside what waits, if it has none.
fn too_large(waiting: &Waiting, bytes: usize) -> Option<Error> {
    let limit = if bytes > LARGEST { MAX_BYTES - LEFT_TO_OTHERS } else { MAX_BYTES };
    let all = waiting.bytes.saturating_add(bytes);
    (bytes > SMALL && waiting.bytes > 0 && all > limit).then(|| {
        Error::unavailable(format!(
            "Exceeds maximum queue size: {} bytes of requests wait, {bytes} more are over {limit}",
            waiting.bytes
        ))
    })
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut waiting = self.room.lock();
        waiting.bytes -= self.bytes;
        if let Some(count) = waiting.levels.get_mut(&self.level) {
            *count -= 1;
            if *count == 0 {
                waiting.levels.remove(&self.level);
            }
        }
        drop(waiting);
        self.room.left.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameters::Settings;
    use serde_json::json;

    fn room(max_waiting: usize, policy: serde_json::Value, when_full: WhenFull) -> Arc<Room> {
        let config = json!({ "dynamic_batching": policy });
        Room::new(Settings::parse(&config).unwrap().queue, max_waiting, when_full)
    }

    fn enter(room: &Arc<Room>, level: u32) -> Result<Place, Error> {
        enter_with(room, level, 1)
    }

    fn enter_with(room: &Arc<Room>, level: u32, bytes: usize) -> Result<Place, Error> {
        room.enter(level, bytes, || panic!("nothing is waited for"))
    }

    #[test]
    fn bytes_are_bounded_and_the_largest_requests_leave_some_to_others() {
        let room = room(10, json!({}), WhenFull::Refuse);
        // One of any size gets in alone.
        drop(enter_with(&room, 1, 2 * MAX_BYTES).unwrap());
        let _first = enter_with(&room, 1, 30 << 20).unwrap();
        let full = enter_with(&room, 1, 30 << 20).unwrap_err().message;
        assert!(
            full.starts_with("Exceeds maximum queue size: 31457280 bytes of requests wait"),
            "{full}"
        );
        let _second = enter_with(&room, 1, 18 << 20).unwrap();
        assert!(enter_with(&room, 1, LARGEST + 1).is_err());
        let others: Vec<_> =
            std::iter::from_fn(|| enter_with(&room, 1, LARGEST).ok()).take(9).collect();
        assert_eq!(others.len(), 8, "as many as the number of requests allows");
    }

    #[test]
    fn small_requests_get_in_however_much_the_large_ones_take() {
        let room = room(10, json!({}), WhenFull::Refuse);
        let _largest = enter_with(&room, 1, 2 * MAX_BYTES).unwrap();
        assert!(enter_with(&room, 1, SMALL + 1).is_err());
        enter_with(&room, 1, SMALL).unwrap();
    }

    #[test]
    fn a_place_is_free_again_when_it_is_left() {
        let room = room(2, json!({}), WhenFull::Refuse);
        let places = [enter(&room, 1).unwrap(), enter(&room, 2).unwrap()];
        let full = enter(&room, 3).unwrap_err().message;
        assert_eq!(
            full,
            "Exceeds maximum queue size: 2 requests wait, max_queue_size of the model is 2"
        );
        drop(places);
        assert_eq!(*room.waiting.lock().unwrap(), Waiting::default());
        enter(&room, 3).unwrap();
    }

    #[test]
    fn each_level_has_the_bound_of_the_configuration() {
        let policy =
            json!({ "priority_levels": 2, "default_queue_policy": { "max_queue_size": 1 } });
        let room = room(10, policy, WhenFull::Refuse);
        let _places = [enter(&room, 1).unwrap(), enter(&room, 2).unwrap()];
        let full = enter(&room, 2).unwrap_err().message;
        assert!(full.ends_with("1 requests wait, max_queue_size of their priority is 1"), "{full}");
    }

    #[test]
    fn without_levels_there_is_one_queue_whatever_priorities_requests_name() {
        let policy = json!({ "default_queue_policy": { "max_queue_size": 2 } });
        let room = room(10, policy, WhenFull::Refuse);
        let _places = [enter(&room, 1).unwrap(), enter(&room, 2).unwrap()];
        let full = enter(&room, 3).unwrap_err().message;
        assert!(
            full.ends_with("2 requests wait, max_queue_size of dynamic_batching is 2"),
            "{full}"
        );
    }

    #[test]
    fn who_is_held_back_waits_until_a_place_is_left_or_is_not_wanted_any_more() {
        let policy = json!({ "default_queue_policy": { "max_queue_size": 1 } });
        let room = room(2, policy, WhenFull::HoldBack);
        let places = [enter(&room, 1).unwrap(), enter(&room, 1).unwrap()];
        let gone = room.enter(1, 1, || Some(Error::cancelled())).unwrap_err();
        assert_eq!(gone, Error::cancelled());
        let mut places = Some(places);
        let entered = room.enter(1, 1, || {
            places = None;
            None
        });
        entered.unwrap();
    }
}
