//! What the blocks of a cluster have to do with each other: places in each other's shared memory, and the barrier that all of
//! their warps come to.

use std::fmt::{self, Display, Formatter};

use crate::cluster::{Cluster, State};
use crate::memory::SHARED_WINDOW;
use crate::operation::{LANES, Place, Source, Space};
use crate::parse::SHARED_START;

/// Bits of an address that say where in a block's shared memory. Those above say of which block: 0 is the own one, all others
/// are a rank and 1.
const OFFSET_BITS: u32 = 24;

/// A place in the shared memory of one of a cluster's blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SharedAddress {
    pub(crate) rank: usize,
    /// The address that the block itself has for it.
    pub(crate) offset: u64,
}

impl Display for SharedAddress {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} of rank {}", self.offset, self.rank)
    }
}

/// Where a warp is between two phases of the cluster's barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attendance {
    Away,
    Arrived,
    /// All others have arrived too, and it has not waited for that yet.
    Complete,
}

impl Cluster<'_> {
    pub(crate) fn rank_of(&self, thread: usize) -> usize {
        thread / self.launch.block as usize
    }

    /// The number of a warp in its block.
    pub(crate) fn warp_in_block(&self, warp: usize) -> usize {
        warp % (self.launch.block as usize / LANES)
    }

    /// What an address of any block's shared memory is to a thread.
    pub(crate) fn in_cluster(&self, thread: usize, address: u64) -> Result<SharedAddress, String> {
        let offset = address & ((1 << OFFSET_BITS) - 1);
        let rank = match address >> OFFSET_BITS {
            0 => self.rank_of(thread),
            above => above as usize - 1,
        };
        if rank < self.shared.len() {
            return Ok(SharedAddress { rank, offset });
        }
        let blocks = self.shared.len();
        Err(format!("{address:#x} of shared memory is in none of the cluster's {blocks} blocks"))
    }

    /// What an address is to a thread that can only mean its own block.
    pub(crate) fn in_block(&self, thread: usize, address: u64) -> Result<SharedAddress, String> {
        let (at, own) = (self.in_cluster(thread, address)?, self.rank_of(thread));
        if at.rank == own { Ok(at) } else { Err(format!("{at}, expected one of rank {own}")) }
    }

    /// What an address of a space is to a thread, if it is one of shared memory.
    pub(crate) fn in_space(
        &self,
        thread: usize,
        space: Space,
        address: u64,
    ) -> Result<Option<SharedAddress>, String> {
        match space {
            Space::Shared => self.in_block(thread, address).map(Some),
            Space::Generic if address >= SHARED_WINDOW => {
                self.in_block(thread, address & !SHARED_WINDOW).map(Some)
            }
            Space::Generic | Space::Global | Space::Param => Ok(None),
        }
    }

    /// A place in the shared memory of a thread's block.
    pub(crate) fn own(&self, thread: usize, place: &Place) -> Result<SharedAddress, String> {
        self.in_block(thread, self.address(thread, place))
    }

    /// Shared memory.
    pub(crate) fn shared_bytes(
        &mut self,
        at: SharedAddress,
        len: usize,
    ) -> Result<&mut [u8], String> {
        let total = self.launch.shared_bytes;
        let start = at.offset.checked_sub(SHARED_START);
        let shared = &mut self.shared[at.rank];
        let found = start.and_then(|start| shared.get_mut(start as usize..)?.get_mut(..len));
        found.ok_or_else(|| {
            format!(
                "{len} bytes of shared memory at {at}, where a block has {total} from {SHARED_START:#x}"
            )
        })
    }

    /// The address that the cluster's blocks have for a place as in a thread's own block, in the block of a rank.
    pub(crate) fn map(&self, thread: usize, address: u64, rank: u64) -> Result<u64, String> {
        if address >> OFFSET_BITS != 0 {
            let own = self.rank_of(thread);
            return Err(format!(
                "{address:#x} is not in the window of its own block, of rank {own}"
            ));
        }
        let blocks = self.shared.len();
        if rank >= blocks as u64 {
            return Err(format!("rank {rank} of a cluster of {blocks} blocks"));
        }
        Ok(address | (rank + 1) << OFFSET_BITS)
    }

    /// Where a bulk copy goes to, and the barrier there that counts it.
    pub(crate) fn destinations(
        &self,
        thread: usize,
        to: &Place,
        at: &Place,
        mask: Option<Source>,
    ) -> Result<Vec<(SharedAddress, SharedAddress)>, String> {
        let Some(mask) = mask else {
            let to = self.in_cluster(thread, self.address(thread, to))?;
            let at = self.in_cluster(thread, self.address(thread, at))?;
            if to.rank != at.rank {
                return Err(format!("a copy to {to} that a barrier at {at} counts"));
            }
            return Ok(vec![(to, at)]);
        };
        let (to, at) = (self.own(thread, to)?, self.own(thread, at)?);
        let (mask, blocks) = (self.get(thread, mask), self.shared.len());
        if mask == 0 || mask >> blocks != 0 {
            return Err(format!("a copy to the mask {mask:#x} of a cluster of {blocks} blocks"));
        }
        let of = |rank| (SharedAddress { rank, ..to }, SharedAddress { rank, ..at });
        Ok((0..blocks).filter(|rank| mask >> rank & 1 != 0).map(of).collect())
    }

    /// A place is there for others as long as threads of its block run.
    pub(crate) fn check_is_running(&self, at: SharedAddress) -> Result<(), String> {
        if self.running[at.rank] > 0 {
            return Ok(());
        }
        Err(format!("the block of rank {} has ended, and its shared memory with it: {at}", at.rank))
    }

    /// A warp comes to the cluster's barrier, and goes on.
    pub(crate) fn arrive_at_cluster(&mut self, first: usize) -> Result<(), String> {
        let attendance = &mut self.attendances[first / LANES];
        if *attendance != Attendance::Away {
            return Err("arrives twice at the cluster's barrier without a wait between".into());
        }
        *attendance = Attendance::Arrived;
        Ok(())
    }

    /// A warp goes on if all have come to the cluster's barrier, or is held back.
    pub(crate) fn wait_for_cluster(&mut self, first: usize) -> Result<(), String> {
        match self.attendances[first / LANES] {
            Attendance::Away => {
                return Err("waits at the cluster's barrier without having arrived".into());
            }
            Attendance::Arrived => {
                let lanes = &mut self.threads[first..first + LANES];
                lanes.iter_mut().for_each(|thread| thread.state = State::ClusterBarrier);
            }
            Attendance::Complete => self.pass_cluster(first / LANES),
        }
        Ok(())
    }

    fn pass_cluster(&mut self, warp: usize) {
        self.attendances[warp] = Attendance::Away;
        for thread in &mut self.threads[warp * LANES..(warp + 1) * LANES] {
            thread.state = State::Ready;
            thread.next += 1;
        }
    }

    /// Completes a phase of the cluster's barrier if all warps that have not ended are there; whether they were.
    pub(crate) fn open_cluster_barrier(&mut self) -> bool {
        if !self.attendances.contains(&Attendance::Arrived) {
            return false;
        }
        let num_warps = self.attendances.len();
        let warps: Vec<usize> = (0..num_warps).filter(|&warp| !self.has_ended(warp)).collect();
        let is_there = |&warp: &usize| self.attendances[warp] == Attendance::Arrived;
        if warps.is_empty() || !warps.iter().all(is_there) {
            return false;
        }
        for warp in warps {
            self.attendances[warp] = Attendance::Complete;
            if self.threads[warp * LANES].state == State::ClusterBarrier {
                self.pass_cluster(warp);
            }
        }
        true
    }

    fn has_ended(&self, warp: usize) -> bool {
        let lanes = &self.threads[warp * LANES..(warp + 1) * LANES];
        lanes.iter().all(|thread| thread.state == State::Done)
    }
}
