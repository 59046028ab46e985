//! How many requests of a model wait, by level of priority. A request has a place from its arrival until a step takes
//! part of it, wherever it waits in between.

use crate::parameters::{QueuePolicy, WhenFull};
use crate::triton::Error;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often a thread that waits for a place looks whether it still wants one.
const LOOK: Duration = Duration::from_millis(5);

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

/// Numbers of requests that wait, by level.
type Waiting = BTreeMap<u32, usize>;

/// A place that is taken, until this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    room: Arc<Room>,
    level: u32,
}

impl Room {
    pub(crate) fn new(policy: QueuePolicy, max_waiting: usize, when_full: WhenFull) -> Arc<Self> {
        let (waiting, left) = Default::default();
        Arc::new(Self { policy, when_full, max_waiting, waiting, left })
    }

    /// A place on a level, if there is one. Where Triton is to be held back while there is none, this waits for one, and
    /// asks `unwanted` now and then.
    pub(crate) fn enter(
        self: &Arc<Self>,
        level: u32,
        mut unwanted: impl FnMut() -> Option<Error>,
    ) -> Result<Place, Error> {
        loop {
            let mut waiting = self.lock();
            let Some(full) = self.full(&waiting, level) else {
                *waiting.entry(level).or_default() += 1;
                return Ok(Place { room: Arc::clone(self), level });
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
        let (all, here) = (waiting.values().sum(), waiting.get(&level).copied().unwrap_or(0));
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
        full(all, self.max_waiting, "the model").or_else(|| full(here, of_level?, "their priority"))
    }

    pub(crate) fn policy(&self) -> &QueuePolicy {
        &self.policy
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut waiting = self.room.lock();
        if let Some(count) = waiting.get_mut(&self.level) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.level);
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
        room.enter(level, || panic!("nothing is waited for"))
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
        assert_eq!(*room.waiting.lock().unwrap(), Waiting::new());
        enter(&room, 3).unwrap();
    }

    #[test]
    fn each_level_has_the_bound_of_the_configuration() {
        let policy = json!({ "default_queue_policy": { "max_queue_size": 1 } });
        let room = room(10, policy, WhenFull::Refuse);
        let _places = [enter(&room, 1).unwrap(), enter(&room, 2).unwrap()];
        let full = enter(&room, 2).unwrap_err().message;
        assert!(full.ends_with("1 requests wait, max_queue_size of their priority is 1"), "{full}");
    }

    #[test]
    fn who_is_held_back_waits_until_a_place_is_left_or_is_not_wanted_any_more() {
        let policy = json!({ "default_queue_policy": { "max_queue_size": 1 } });
        let room = room(2, policy, WhenFull::HoldBack);
        let places = [enter(&room, 1).unwrap(), enter(&room, 1).unwrap()];
        let gone = room.enter(1, || Some(Error::cancelled())).unwrap_err();
        assert_eq!(gone, Error::cancelled());
        let mut places = Some(places);
        let entered = room.enter(1, || {
            places = None;
            None
        });
        entered.unwrap();
    }
}
