//! How requests may wait: what `dynamic_batching` of the model configuration says of its queue. The backend keeps it
//! itself, since requests wait here, where their order, their cancellation and their time can be looked after; Triton's own
//! queue stays empty.

use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;

/// The place in the order of requests that name none, where the configuration has no levels: behind all others.
const LAST_LEVEL: u32 = u32::MAX;

/// Who is served first, and who may wait how long.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueuePolicy {
    /// Levels of priority, from 1, which is served first; 0 lets requests name any.
    levels: u32,
    /// The level of requests that name none.
    default_level: u32,
    /// Of the levels that have none of their own.
    default: LevelPolicy,
    of_level: BTreeMap<u32, LevelPolicy>,
}

/// How requests of one level may wait.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LevelPolicy {
    /// How many may wait at once, if they are bounded.
    pub max_waiting: Option<usize>,
    /// How long each may wait, if that is bounded.
    pub timeout: Option<Duration>,
    /// Whether one whose time is up goes on waiting behind all others of its level; else it is refused.
    pub delays: bool,
    /// Whether a request may set a shorter time.
    pub may_shorten: bool,
}

impl QueuePolicy {
    /// Reads a model configuration, in Triton's JSON.
    pub(super) fn parse(config: &Value) -> Self {
        let batching = &config["dynamic_batching"];
        let of_level = batching["priority_queue_policy"].as_object().into_iter().flatten();
        Self {
            levels: level(&batching["priority_levels"]),
            default_level: level(&batching["default_priority_level"]),
            default: LevelPolicy::parse(&batching["default_queue_policy"]),
            of_level: of_level
                .filter_map(|(level, policy)| {
                    Some((level.parse().ok()?, LevelPolicy::parse(policy)))
                })
                .collect(),
        }
    }

    /// The level of a request: what it names itself, or the server's number, which is 0 where there are no levels.
    pub fn level(&self, named: Option<u32>, of_server: u64) -> u32 {
        let of_server = u32::try_from(of_server).ok();
        let asked = named.filter(|&level| level > 0).or(of_server.filter(|&level| level > 0));
        match (asked, self.levels) {
            (Some(level), levels) if levels == 0 || level <= levels => level,
            (_, 0) => LAST_LEVEL,
            (_, _) => self.default_level,
        }
    }

    /// Whether each level has a queue of its own; else there is one, in the order of what requests name.
    pub fn has_levels(&self) -> bool {
        self.levels > 0
    }

    /// How requests of a level may wait.
    pub fn of(&self, level: u32) -> &LevelPolicy {
        self.of_level.get(&level).unwrap_or(&self.default)
    }
}

impl LevelPolicy {
    fn parse(policy: &Value) -> Self {
        let timeout_us = number(&policy["default_timeout_microseconds"]);
        let max_waiting = number(&policy["max_queue_size"]);
        Self {
            max_waiting: usize::try_from(max_waiting).ok().filter(|&max| max > 0),
            timeout: (timeout_us > 0).then(|| Duration::from_micros(timeout_us)),
            delays: policy["timeout_action"] == "DELAY",
            may_shorten: policy["allow_timeout_override"].as_bool().unwrap_or(false),
        }
    }

    /// How long a request may wait that gives itself `own` time.
    pub fn timeout(&self, own: Option<Duration>) -> Option<Duration> {
        let own = own.filter(|_| self.may_shorten);
        [self.timeout, own].into_iter().flatten().min()
    }
}

/// Protobuf's JSON may write 64-bit numbers as strings.
fn number(value: &Value) -> u64 {
    value.as_u64().or_else(|| value.as_str()?.parse().ok()).unwrap_or(0)
}

fn level(value: &Value) -> u32 {
    u32::try_from(number(value)).unwrap_or(LAST_LEVEL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn levels() -> QueuePolicy {
        QueuePolicy::parse(&json!({ "dynamic_batching": {
            "priority_levels": 3, "default_priority_level": "2",
            "default_queue_policy": { "max_queue_size": 4 },
            "priority_queue_policy": { "1": {
                "timeout_action": "DELAY", "default_timeout_microseconds": "2000", "allow_timeout_override": true,
            } },
        } }))
    }

    #[test]
    fn a_configuration_without_a_queue_bounds_nothing() {
        let policy = QueuePolicy::parse(&json!({}));
        assert_eq!(policy, QueuePolicy::default());
        assert_eq!(*policy.of(1), LevelPolicy::default());
    }

    #[test]
    fn without_levels_a_request_may_name_any_and_comes_last_if_it_does_not() {
        let policy = QueuePolicy::default();
        assert_eq!(policy.level(Some(7), 0), 7);
        assert_eq!(policy.level(Some(0), 0), LAST_LEVEL);
        assert_eq!(policy.level(None, 0), LAST_LEVEL);
    }

    #[test]
    fn with_levels_what_is_none_of_them_is_the_default() {
        let policy = levels();
        let level = |named, of_server| policy.level(named, of_server);
        assert_eq!([level(Some(1), 0), level(Some(3), 1), level(None, 3)], [1, 3, 3]);
        assert_eq!([level(Some(4), 0), level(None, 0), level(Some(0), 9)], [2, 2, 2]);
    }

    #[test]
    fn a_level_has_its_own_policy_or_the_default_one() {
        let policy = levels();
        assert_eq!(policy.of(2).max_waiting, Some(4));
        let first = policy.of(1);
        assert_eq!((first.max_waiting, first.delays), (None, true));
        assert_eq!(first.timeout(None), Some(Duration::from_millis(2)));
    }

    #[test]
    fn a_request_shortens_its_time_only_where_it_may_and_never_lengthens_it() {
        let (short, long) = (Some(Duration::from_millis(1)), Some(Duration::from_secs(1)));
        let policy = levels();
        assert_eq!(policy.of(1).timeout(short), short);
        assert_eq!(policy.of(1).timeout(long), Some(Duration::from_millis(2)));
        assert_eq!(policy.of(2).timeout(short), None);
    }
}
