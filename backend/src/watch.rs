//! What is looked after for as long as a request is open: whether its client is still there, and its time.

use crate::parameters::LevelPolicy;
use std::time::Duration;
use triton_backend::Error;

/// Tells whether a client has gone away.
pub(crate) type Probe = Box<dyn Fn() -> bool + Send>;

/// Looks after one request. Times are on the monotonic clock, in nanoseconds.
pub(crate) struct Watch {
    is_cancelled: Probe,
    /// When it must have ended.
    deadline: Option<u64>,
    /// When it must have been begun.
    start_by: Option<u64>,
    /// Whether it goes on waiting behind the others then; else it is refused.
    delays: bool,
}

/// What is to become of a request that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It goes on.
    Stays,
    /// It goes behind the others of its level, once.
    Delayed,
    /// It ends with this error.
    Ends(Error),
}

impl Watch {
    /// Of a request that arrived at `arrival` and allows itself the time `own`, where the model allows `limit`.
    pub(crate) fn new(
        is_cancelled: Probe,
        arrival: u64,
        own: Option<Duration>,
        limit: Option<Duration>,
        level: &LevelPolicy,
    ) -> Self {
        let after = |time: Option<Duration>| {
            let ns = u64::try_from(time?.as_nanos()).unwrap_or(u64::MAX);
            Some(arrival.saturating_add(ns))
        };
        Self {
            is_cancelled,
            deadline: after([own, limit].into_iter().flatten().min()),
            start_by: after(level.timeout(own)),
            delays: level.delays,
        }
    }

    /// Looks while it waits.
    pub(crate) fn look_waiting(&mut self, now: u64) -> Verdict {
        if let Some(error) = self.look_unplaced(now) {
            return Verdict::Ends(error);
        }
        match self.start_by.take_if(|start_by| *start_by <= now) {
            Some(_) => Verdict::Delayed,
            None => Verdict::Stays,
        }
    }

    /// Looks while it waits for a place among those that wait, where it cannot be delayed yet.
    pub(crate) fn look_unplaced(&self, now: u64) -> Option<Error> {
        let expired = || {
            Error::unavailable(
                "Request timeout expired: it has waited longer than the queue allows",
            )
        };
        let ends = !self.delays && self.start_by.is_some_and(|start_by| start_by <= now);
        self.look(now).or_else(|| ends.then(expired))
    }

    /// Looks while it runs.
    pub(crate) fn look(&self, now: u64) -> Option<Error> {
        if (self.is_cancelled)() {
            return Some(Error::cancelled());
        }
        self.deadline.filter(|&deadline| deadline <= now).map(|_| {
            Error::unavailable("Request timeout expired: it was not finished in the time it had")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use triton_backend::Code;

    const SECOND: Option<Duration> = Some(Duration::from_secs(1));
    const MINUTE: Option<Duration> = Some(Duration::from_secs(60));

    fn watch(own: Option<Duration>, limit: Option<Duration>, level: LevelPolicy) -> Watch {
        Watch::new(Box::new(|| false), 1_000, own, limit, &level)
    }

    fn ends_at(watch: &Watch) -> Option<u64> {
        (0..100).map(|secs| secs * 1_000_000_000 + 1_000).find(|&at| watch.look(at).is_some())
    }

    #[test]
    fn the_lesser_of_the_two_limits_counts() {
        let plain = LevelPolicy::default();
        assert_eq!(ends_at(&watch(SECOND, MINUTE, plain)), Some(1_000_001_000));
        assert_eq!(ends_at(&watch(MINUTE, SECOND, plain)), Some(1_000_001_000));
        assert_eq!(ends_at(&watch(None, SECOND, plain)), Some(1_000_001_000));
        assert_eq!(ends_at(&watch(None, None, plain)), None);
        assert_eq!(ends_at(&watch(Some(Duration::MAX), None, plain)), None);
    }

    #[test]
    fn the_time_of_the_queue_counts_only_while_it_waits() {
        let mut watch =
            watch(None, None, LevelPolicy { timeout: SECOND, ..LevelPolicy::default() });
        assert_eq!(watch.look_waiting(1_000_000_999), Verdict::Stays);
        assert_eq!(watch.look(u64::MAX), None);
        let Verdict::Ends(error) = watch.look_waiting(1_000_001_000) else { panic!("it stays") };
        assert_eq!(error.code, Code::Unavailable);
        assert!(error.message.contains("timeout"), "{error}");
    }

    #[test]
    fn what_waits_for_a_place_is_ended_by_the_time_of_the_queue_but_not_delayed() {
        let level = LevelPolicy { timeout: SECOND, ..LevelPolicy::default() };
        let error = watch(None, None, level).look_unplaced(1_000_001_000).unwrap();
        assert!(error.message.contains("timeout"), "{error}");
        let mut watch = watch(None, None, LevelPolicy { delays: true, ..level });
        assert_eq!(watch.look_unplaced(2_000_000_000), None);
        assert_eq!(watch.look_waiting(2_000_000_000), Verdict::Delayed, "once it has a place");
    }

    #[test]
    fn one_that_is_delayed_is_delayed_once() {
        let level = LevelPolicy { timeout: SECOND, delays: true, ..LevelPolicy::default() };
        let mut watch = watch(None, MINUTE, level);
        assert_eq!(watch.look_waiting(2_000_000_000), Verdict::Delayed);
        assert_eq!(watch.look_waiting(3_000_000_000), Verdict::Stays);
        assert!(matches!(watch.look_waiting(70_000_000_000), Verdict::Ends(_)));
    }

    #[test]
    fn a_client_that_has_gone_is_told_from_one_that_is_late() {
        let level = LevelPolicy::default();
        let mut watch = Watch::new(Box::new(|| true), 0, SECOND, None, &level);
        assert_eq!(watch.look_waiting(u64::MAX), Verdict::Ends(Error::cancelled()));
    }
}
