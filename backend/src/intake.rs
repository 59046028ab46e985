//! Where requests wait to be read: to have their inputs copied and checked, and split into tokens. Triton's thread only
//! leaves them here, so that none of them, however large, keeps it from the next. Large ones are read by a thread of
//! their own, behind which small ones never stand. Those whose clients leave, or whose time is up, are found here too.

use crate::watch::{Verdict, Watch};
use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use triton_backend::{Error, monotonic_ns};

/// Requests of more bytes are large. Reading fewer takes some milliseconds.
const SMALL_BYTES: usize = 16 << 10;
/// How often those that wait are looked after.
const LOOK: Duration = Duration::from_millis(5);
/// Lies between the turns of requests in time and of those that have been delayed.
const DELAY: u64 = 1 << 48;

/// Who reads a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Small,
    Large,
}

/// A request that waits to be read.
pub(crate) struct Unread<T> {
    /// What its client calls it.
    pub(crate) name: String,
    pub(crate) level: u32,
    /// Bytes of all its inputs.
    pub(crate) bytes: usize,
    pub(crate) watch: Watch,
    pub(crate) content: T,
}

/// What a reader is to do.
pub(crate) enum Work<'a, T> {
    /// Read this.
    Read(Unread<T>, Reading<'a, T>),
    /// Answer this with an error: nobody waits for it any more.
    Refuse(Unread<T>, Error),
}

/// A request in the hands of a reader, until this is dropped.
pub(crate) struct Reading<'a, T> {
    intake: &'a Intake<T>,
    id: u64,
}

/// What is remembered of a request that is being read.
struct Known {
    id: u64,
    name: String,
    is_ended: bool,
}

/// Level, then turn.
type Key = (u32, u64);

struct Inside<T> {
    small: BTreeMap<Key, Unread<T>>,
    large: BTreeMap<Key, Unread<T>>,
    reading: Vec<Known>,
    num_arrived: u64,
    looked_at: u64,
    closing: bool,
}

/// The requests of an instance that have not been read.
pub(crate) struct Intake<T> {
    inside: Mutex<Inside<T>>,
    changed: Condvar,
}

impl<T> Intake<T> {
    pub(crate) fn new() -> Self {
        let inside = Inside {
            small: BTreeMap::new(),
            large: BTreeMap::new(),
            reading: Vec::new(),
            num_arrived: 0,
            looked_at: 0,
            closing: false,
        };
        Self { inside: Mutex::new(inside), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inside<T>> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves a request to be read, or gives it back with the reason why not.
    pub(crate) fn push(&self, unread: Unread<T>) -> Result<(), Box<(Unread<T>, Error)>> {
        let mut inside = self.lock();
        if inside.closing {
            let error = Error::unavailable("the model instance is being taken away");
            return Err(Box::new((unread, error)));
        }
        inside.num_arrived += 1;
        let key = (unread.level, inside.num_arrived);
        inside.lane(unread.lane()).insert(key, unread);
        drop(inside);
        self.changed.notify_all();
        Ok(())
    }

    /// What the reader of a lane is to do next; waits for it. `None` once no more can come.
    pub(crate) fn next(&self, lane: Lane) -> Option<Work<'_, T>> {
        let mut inside = self.lock();
        loop {
            if let Some((unread, error)) = inside.unwanted(monotonic_ns()) {
                // It may have been the last one that somebody waits for.
                self.changed.notify_all();
                return Some(Work::Refuse(unread, error));
            }
            if let Some(((_, id), unread)) = inside.lane(lane).pop_first() {
                let known = Known { id, name: unread.name.clone(), is_ended: false };
                inside.reading.push(known);
                return Some(Work::Read(unread, Reading { intake: self, id }));
            }
            if inside.closing {
                return None;
            }
            // Who waits is looked after by whichever reader has the time.
            let waits = !inside.small.is_empty() || !inside.large.is_empty();
            inside = match waits {
                true => {
                    let waited = self.changed.wait_timeout(inside, LOOK);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                false => self.changed.wait(inside).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Marks the requests of this name that are being read, and gives those that wait.
    pub(crate) fn end_named(&self, name: &str) -> Vec<Unread<T>> {
        let mut inside = self.lock();
        inside.reading.iter_mut().filter(|known| known.name == name).for_each(Known::end);
        self.changed.notify_all();
        inside.take(|unread| unread.name == name)
    }

    /// Takes no more.
    pub(crate) fn close(&self) {
        self.lock().closing = true;
        self.changed.notify_all();
    }

    /// Waits until all is read, but no longer than `limit`; gives what is left.
    pub(crate) fn drain(&self, limit: Duration) -> Vec<Unread<T>> {
        let inside = self.lock();
        let waited = self.changed.wait_timeout_while(inside, limit, |inside| !inside.is_empty());
        let (mut inside, _) = waited.unwrap_or_else(PoisonError::into_inner);
        inside.take(|_| true)
    }
}

impl<T> Inside<T> {
    fn lane(&mut self, lane: Lane) -> &mut BTreeMap<Key, Unread<T>> {
        match lane {
            Lane::Small => &mut self.small,
            Lane::Large => &mut self.large,
        }
    }

    fn is_empty(&self) -> bool {
        self.small.is_empty() && self.large.is_empty() && self.reading.is_empty()
    }

    /// One that nobody waits for any more. Delays those that are to be delayed.
    fn unwanted(&mut self, now: u64) -> Option<(Unread<T>, Error)> {
        if now < self.looked_at + LOOK.as_nanos() as u64 {
            return None;
        }
        for lane in [Lane::Small, Lane::Large] {
            let waiting = self.lane(lane);
            let mut delayed = Vec::new();
            let mut ends = None;
            for (&key, unread) in waiting.iter_mut() {
                match unread.watch.look_waiting(now) {
                    Verdict::Stays => {}
                    Verdict::Delayed => delayed.push(key),
                    Verdict::Ends(error) => {
                        ends = Some((key, error));
                        break;
                    }
                }
            }
            for key in delayed {
                if let Some(unread) = waiting.remove(&key) {
                    waiting.insert((key.0, key.1 | DELAY), unread);
                }
            }
            if let Some((key, error)) = ends
                && let Some(unread) = waiting.remove(&key)
            {
                return Some((unread, error));
            }
        }
        // All have been looked at; until then this is asked again at once.
        self.looked_at = now;
        None
    }

    fn take(&mut self, wanted: impl Fn(&Unread<T>) -> bool) -> Vec<Unread<T>> {
        let mut taken = Vec::new();
        for lane in [Lane::Small, Lane::Large] {
            let waiting = self.lane(lane);
            let keys: Vec<Key> =
                waiting.iter().filter(|(_, unread)| wanted(unread)).map(|(&key, _)| key).collect();
            taken.extend(keys.iter().filter_map(|key| waiting.remove(key)));
        }
        taken
    }
}

impl<T> Unread<T> {
    fn lane(&self) -> Lane {
        if self.bytes > SMALL_BYTES { Lane::Large } else { Lane::Small }
    }
}

impl Known {
    fn end(&mut self) {
        self.is_ended = true;
    }
}

impl<T> Reading<'_, T> {
    /// Whether its client has asked to end it in the meantime.
    pub(crate) fn is_ended(&self) -> bool {
        self.intake.lock().reading.iter().any(|known| known.id == self.id && known.is_ended)
    }
}

impl<T> Drop for Reading<'_, T> {
    fn drop(&mut self) {
        let mut inside = self.intake.lock();
        if let Some(idx) = inside.reading.iter().position(|known| known.id == self.id) {
            inside.reading.swap_remove(idx);
        }
        drop(inside);
        self.intake.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameters::LevelPolicy;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;
    use std::thread;

    type Numbers = Intake<usize>;

    fn watch(cancelled: &Arc<AtomicBool>, level: LevelPolicy) -> Watch {
        let cancelled = Arc::clone(cancelled);
        Watch::new(Box::new(move || cancelled.load(Ordering::SeqCst)), 0, None, None, &level)
    }

    fn unread(content: usize, level: u32, bytes: usize) -> Unread<usize> {
        let watch = watch(&Arc::default(), LevelPolicy::default());
        Unread { name: format!("name {content}"), level, bytes, watch, content }
    }

    fn push(intake: &Numbers, content: usize, level: u32, bytes: usize) {
        assert!(intake.push(unread(content, level, bytes)).is_ok());
    }

    fn refusal(intake: &Numbers, bytes: usize) -> String {
        match intake.push(unread(0, 1, bytes)) {
            Ok(()) => panic!("it is taken"),
            Err(back) => back.1.message,
        }
    }

    /// What is next on a lane, and is read at once.
    fn read(intake: &Numbers, lane: Lane) -> Option<usize> {
        match intake.next(lane)? {
            Work::Read(unread, _) => Some(unread.content),
            Work::Refuse(unread, error) => panic!("{} is refused: {error}", unread.content),
        }
    }

    #[test]
    fn small_and_large_requests_are_read_apart_each_by_level_and_arrival() {
        let intake = Numbers::new();
        for (content, level, bytes) in
            [(1, 2, 10), (2, 2, SMALL_BYTES + 1), (3, 1, 10), (4, 2, 10), (5, 1, SMALL_BYTES + 1)]
        {
            push(&intake, content, level, bytes);
        }
        intake.close();
        let all = |lane| std::iter::from_fn(|| read(&intake, lane)).collect::<Vec<_>>();
        assert_eq!((all(Lane::Small), all(Lane::Large)), (vec![3, 1, 4], vec![5, 2]));
    }

    #[test]
    fn a_reader_waits_for_what_comes() {
        let intake = Arc::new(Numbers::new());
        let (sender, receiver) = channel();
        let other = Arc::clone(&intake);
        let reader = thread::spawn(move || {
            while let Some(content) = read(&other, Lane::Small) {
                sender.send(content).unwrap();
            }
        });
        push(&intake, 7, 1, 1);
        assert_eq!(receiver.recv().unwrap(), 7);
        intake.close();
        reader.join().unwrap();
    }

    #[test]
    fn those_whose_clients_leave_are_found_while_they_wait() {
        let intake = Numbers::new();
        let left: Arc<AtomicBool> = Arc::default();
        let leaves = watch(&left, LevelPolicy::default());
        assert!(intake.push(Unread { watch: leaves, ..unread(1, 1, SMALL_BYTES + 1) }).is_ok());
        left.store(true, Ordering::SeqCst);
        // It stands on the other lane, and is found all the same.
        match intake.next(Lane::Small) {
            Some(Work::Refuse(unread, error)) => {
                assert_eq!((unread.content, error), (1, Error::cancelled()));
            }
            _ => panic!("it is not found"),
        }
    }

    #[test]
    fn one_that_is_delayed_goes_behind_those_that_come_later() {
        let intake = Numbers::new();
        let timeout = Some(Duration::from_nanos(1));
        let level = LevelPolicy { timeout, delays: true, ..LevelPolicy::default() };
        let delayed = watch(&Arc::default(), level);
        assert!(intake.push(Unread { watch: delayed, ..unread(1, 1, 1) }).is_ok());
        push(&intake, 2, 1, 1);
        assert_eq!(read(&intake, Lane::Small), Some(2));
        push(&intake, 3, 1, 1);
        assert_eq!([read(&intake, Lane::Small), read(&intake, Lane::Small)], [Some(3), Some(1)]);
    }

    #[test]
    fn a_name_ends_what_waits_and_marks_what_is_read() {
        let intake = Numbers::new();
        push(&intake, 1, 1, 1);
        push(&intake, 2, 1, 1);
        let Some(Work::Read(_, first)) = intake.next(Lane::Small) else { panic!("none") };
        assert!(intake.end_named("name 1").is_empty() && first.is_ended());
        let ended = intake.end_named("name 2");
        assert_eq!(ended.iter().map(|unread| unread.content).collect::<Vec<_>>(), [2]);
        assert!(intake.end_named("name 3").is_empty());
        drop(first);
    }

    #[test]
    fn what_cannot_be_read_in_time_is_given_back_when_it_closes() {
        let intake = Numbers::new();
        push(&intake, 1, 1, 1);
        intake.close();
        assert_eq!(refusal(&intake, 1), "the model instance is being taken away");
        assert_eq!(intake.drain(Duration::from_millis(1)).len(), 1);
        assert!(intake.next(Lane::Small).is_none());
    }
}
