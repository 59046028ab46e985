//! How many requests of a model wait, by level of priority. A request has a place from its arrival until a step takes
//! part of it, wherever it waits in between.

use crate::parameters::QueuePolicy;
use crate::triton::Error;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The places of a model.
#[derive(Debug)]
pub(crate) struct Room {
    policy: QueuePolicy,
    /// Requests that may wait on all levels together.
    max_waiting: usize,
    waiting: Mutex<BTreeMap<u32, usize>>,
}

/// A place that is taken, until this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    room: Arc<Room>,
    level: u32,
}

impl Room {
    pub(crate) fn new(policy: QueuePolicy, max_waiting: usize) -> Arc<Self> {
        Arc::new(Self { policy, max_waiting, waiting: Mutex::default() })
    }

    /// A place on a level, if there is one.
    pub(crate) fn enter(self: &Arc<Self>, level: u32) -> Result<Place, Error> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let (all, here) = (waiting.values().sum::<usize>(), waiting.get(&level).copied());
        let here = here.unwrap_or(0);
        let bounds = [
            (all, Some(self.max_waiting), "max_queue_size of the model is"),
            (here, self.policy.of(level).max_waiting, "max_queue_size of their priority is"),
        ];
        for (count, max, whose) in bounds {
            if let Some(max) = max.filter(|&max| count >= max) {
                return Err(Error::unavailable(format!(
                    "Exceeds maximum queue size: {count} requests wait, {whose} {max}"
                )));
            }
        }
        waiting.insert(level, here + 1);
        Ok(Place { room: Arc::clone(self), level })
    }

    pub(crate) fn policy(&self) -> &QueuePolicy {
        &self.policy
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut waiting = self.room.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = waiting.get_mut(&self.level) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.level);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn room(max_waiting: usize, policy: serde_json::Value) -> Arc<Room> {
        let config = json!({ "dynamic_batching": policy });
        Room::new(crate::parameters::Settings::parse(&config).unwrap().queue, max_waiting)
    }

    #[test]
    fn a_place_is_free_again_when_it_is_left() {
        let room = room(2, json!({}));
        let places = [room.enter(1).unwrap(), room.enter(2).unwrap()];
        let full = room.enter(3).unwrap_err().message;
        assert_eq!(
            full,
            "Exceeds maximum queue size: 2 requests wait, max_queue_size of the model is 2"
        );
        drop(places);
        assert_eq!(*room.waiting.lock().unwrap(), BTreeMap::new());
        room.enter(3).unwrap();
    }

    #[test]
    fn each_level_has_the_bound_of_the_configuration() {
        let room = room(10, json!({ "default_queue_policy": { "max_queue_size": 1 } }));
        let _places = [room.enter(1).unwrap(), room.enter(2).unwrap()];
        let full = room.enter(2).unwrap_err().message;
        assert!(full.ends_with("1 requests wait, max_queue_size of their priority is 1"), "{full}");
    }
}
