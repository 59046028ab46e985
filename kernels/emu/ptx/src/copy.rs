//! Asynchronous copies and the barriers in shared memory that count them. A copy reads its source when it arrives.

use std::collections::BTreeMap;

use crate::cluster::Cluster;
use crate::operation::{Asynchronous, Place, Space};
use crate::peers::SharedAddress;

/// What a policy of the one supported kind looks like.
const POLICY: u64 = 0x12f0_0000_0000_0000;

/// The state that an arrival returns: opaque.
const STATE: u64 = 0x57a7_e000_0000_0000;

/// Most arrivals that a barrier counts.
const MOST_ARRIVALS: u64 = (1 << 20) - 1;

/// A barrier in shared memory.
#[derive(Debug)]
struct Mbarrier {
    /// Arrivals of every phase, and those that this one still wants.
    count: i64,
    pending: i64,
    /// Bytes announced and not here.
    bytes: i64,
    /// Phases that are complete.
    phase: u64,
}

/// What arrives later.
#[derive(Clone, Copy, Debug)]
enum Flight {
    /// Of a thread's group.
    Copy { thread: usize, group: u64, to: SharedAddress, from: u64, bytes: usize },
    /// Behind a thread's copies so far.
    Arrival { thread: usize, at: SharedAddress },
    /// The barrier is of the block that gets the bytes.
    Bulk { to: SharedAddress, from: u64, bytes: usize, at: SharedAddress },
}

/// The copies and barriers of the blocks of a cluster.
pub(crate) struct Copies {
    flights: Vec<Flight>,
    /// The open group of each thread.
    groups: Vec<u64>,
    barriers: BTreeMap<SharedAddress, Mbarrier>,
}

impl Copies {
    pub(crate) fn new(num_threads: usize) -> Self {
        Self { flights: Vec::new(), groups: vec![0; num_threads], barriers: BTreeMap::new() }
    }

    fn barrier(&mut self, at: SharedAddress) -> Result<&mut Mbarrier, String> {
        self.barriers.get_mut(&at).ok_or_else(|| format!("no barrier was initialised at {at}"))
    }

    fn arrive(&mut self, at: SharedAddress) -> Result<(), String> {
        let barrier = self.barrier(at)?;
        barrier.pending -= 1;
        if barrier.pending < 0 {
            return Err(format!("more than {} arrivals in a phase at {at}", barrier.count));
        }
        barrier.complete();
        Ok(())
    }

    /// Whether a flight waits for nothing.
    fn may_land(&self, at: usize) -> bool {
        let Flight::Arrival { thread: own, .. } = self.flights[at] else { return true };
        let is_own =
            |flight: &Flight| matches!(flight, Flight::Copy { thread, .. } if *thread == own);
        !self.flights[..at].iter().any(is_own)
    }
}

impl Mbarrier {
    fn complete(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.pending = self.count;
            self.phase += 1;
        }
    }
}

impl Cluster<'_> {
    /// Whether the thread goes on: a test that fails lets others run first.
    pub(crate) fn asynchronous(
        &mut self,
        thread: usize,
        operation: &Asynchronous,
    ) -> Result<bool, String> {
        match operation {
            Asynchronous::Init { at, count } => self.init(thread, at, self.get(thread, *count))?,
            Asynchronous::Arrive { at, state, bytes } => {
                let (at, bytes) = (self.own(thread, at)?, self.get(thread, *bytes) as u32);
                self.copies.barrier(at)?.bytes += i64::from(bytes);
                self.copies.arrive(at)?;
                self.set(thread, *state, STATE);
            }
            Asynchronous::ArriveAtPeer(at) => {
                let at = self.in_cluster(thread, self.address(thread, at))?;
                self.check_is_running(at)?;
                self.copies.arrive(at)?;
            }
            Asynchronous::Test { to, at, parity } => {
                let (at, parity) = (self.own(thread, at)?, self.get(thread, *parity));
                if parity > 1 {
                    return Err(format!("{parity} is no parity"));
                }
                let is_complete = self.copies.barrier(at)?.phase % 2 != parity;
                self.set(thread, *to, is_complete.into());
                return Ok(is_complete);
            }
            Asynchronous::Policy(to) => self.set(thread, *to, POLICY),
            Asynchronous::Bulk { to, from, bytes, at, mask, policy } => {
                if policy.is_some_and(|policy| self.get(thread, policy) != POLICY) {
                    return Err("a hint that is no policy".into());
                }
                let bytes = self.get(thread, *bytes) as u32 as usize;
                let from = self.address(thread, from);
                for (to, at) in self.destinations(thread, to, at, *mask)? {
                    aligned(to, from, bytes)?;
                    self.check_is_running(to)?;
                    self.copies.barrier(at)?;
                    self.copies.flights.push(Flight::Bulk { to, from, bytes, at });
                }
            }
            Asynchronous::Copy { to, from, bytes } => {
                let bytes = self.get(thread, *bytes) as u32 as usize;
                let (to, from) = (self.own(thread, to)?, self.address(thread, from));
                aligned(to, from, 16)?;
                if bytes > 16 {
                    return Err(format!("{bytes} bytes of 16 are read"));
                }
                let group = self.copies.groups[thread];
                self.copies.flights.push(Flight::Copy { thread, group, to, from, bytes });
            }
            Asynchronous::Fence => self.proxies.fence(thread),
            Asynchronous::Commit => self.copies.groups[thread] += 1,
            Asynchronous::Wait(pending) => self.wait(thread, *pending)?,
            Asynchronous::ArriveBehind { at, is_counted } => {
                let at = self.own(thread, at)?;
                self.copies.barrier(at)?.pending += i64::from(!is_counted);
                self.copies.flights.push(Flight::Arrival { thread, at });
            }
        }
        Ok(true)
    }

    fn init(&mut self, thread: usize, at: &Place, count: u64) -> Result<(), String> {
        let address = self.address(thread, at);
        if count == 0 || count > MOST_ARRIVALS {
            return Err(format!("a barrier of {count} arrivals"));
        }
        self.bytes(thread, Space::Shared, address, 8)?;
        let at = self.own(thread, at)?;
        let count = count as i64;
        let barrier = Mbarrier { count, pending: count, bytes: 0, phase: 0 };
        self.copies.barriers.insert(at, barrier);
        Ok(())
    }

    /// Lands a thread's groups but for the newest closed ones.
    fn wait(&mut self, thread: usize, pending: u64) -> Result<(), String> {
        let end = self.copies.groups[thread].saturating_sub(pending);
        let is_due = |flight: &Flight| match *flight {
            Flight::Copy { thread: other, group, .. } => other == thread && group < end,
            _ => false,
        };
        while let Some(at) = self.copies.flights.iter().position(is_due) {
            self.land(at)?;
        }
        Ok(())
    }

    fn land(&mut self, at: usize) -> Result<(), String> {
        match self.copies.flights.remove(at) {
            Flight::Copy { thread, to, from, bytes, .. } => {
                let mut sixteen = [0; 16];
                if bytes > 0 {
                    sixteen[..bytes].copy_from_slice(self.memory.slice(from, bytes)?);
                }
                self.shared_bytes(to, 16)?.copy_from_slice(&sixteen);
                self.proxies.store(thread, to, 16);
            }
            Flight::Arrival { at, .. } => self.copies.arrive(at)?,
            Flight::Bulk { to, from, bytes, at } => {
                self.check_is_running(to)?;
                let copied = self.memory.slice(from, bytes)?.to_vec();
                self.shared_bytes(to, bytes)?.copy_from_slice(&copied);
                self.proxies.copied(to, bytes);
                let barrier = self.copies.barrier(at)?;
                barrier.bytes -= bytes as i64;
                barrier.complete();
            }
        }
        Ok(())
    }

    /// Lands flights that may, up to one that threads can see without waiting for it; whether there were any.
    pub(crate) fn land_some(&mut self) -> Result<bool, String> {
        let mut has_landed = false;
        while let Some(chosen) = self.choose() {
            has_landed = true;
            let is_seen = !matches!(self.copies.flights[chosen], Flight::Copy { .. });
            self.land(chosen)?;
            if is_seen {
                break;
            }
        }
        Ok(has_landed)
    }

    /// One of the flights that may land, from a place on that the seed chooses.
    fn choose(&mut self) -> Option<usize> {
        let num = self.copies.flights.len();
        let first = if num == 0 { 0 } else { self.dice.below(num) };
        (first..num).chain(0..first).find(|&at| self.copies.may_land(at))
    }

    /// A block that ends lands its threads' copies; one to it that others count must not be on its way.
    pub(crate) fn land_all(&mut self, rank: usize) -> Result<(), String> {
        let is_coming =
            |flight: &&Flight| matches!(flight, Flight::Bulk { to, .. } if to.rank == rank);
        if let Some(bulk) = self.copies.flights.iter().find(is_coming) {
            return Err(format!("the block ends before {bulk:?}"));
        }
        // An arrival stands behind the copies that it waits for.
        let is_own = |flight: &Flight| match *flight {
            Flight::Copy { to, .. } => to.rank == rank,
            Flight::Arrival { at, .. } => at.rank == rank,
            Flight::Bulk { .. } => false,
        };
        while let Some(at) = self.copies.flights.iter().position(is_own) {
            self.land(at)?;
        }
        Ok(())
    }
}

fn aligned(to: SharedAddress, from: u64, bytes: usize) -> Result<(), String> {
    let is_aligned = [to.offset, from, bytes as u64].iter().all(|value| value.is_multiple_of(16));
    let message = || format!("a copy of {bytes} bytes from {from:#x} to {to} is not aligned to 16");
    if is_aligned { Ok(()) } else { Err(message()) }
}
