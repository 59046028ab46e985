//! A launch: its clusters one after the other, in an order of a seed; without clusters each block is one. In a cluster every
//! thread runs on its own until it comes to an instruction that threads do together; copies arrive as late as they may, or
//! when the seed wants.

use std::collections::BTreeMap;

use crate::copy::Copies;
use crate::memory::Memory;
use crate::operation::{self, Instruction, LANES};
use crate::parse::Kernel;
use crate::peers::Attendance;
use crate::warpgroup::{Proxies, Share};

/// What shared memory and registers hold before anybody writes them.
const POISON: u8 = 0xff;

/// One kernel over a grid.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// Blocks.
    pub grid: u32,
    /// Threads of a block: whole warps.
    pub block: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// The one parameter.
    pub params: &'a [u8],
    /// Of the order of clusters and warps, and of when copies arrive; 0 is in order, and as late as they may.
    pub seed: u64,
}

/// Runs a launch. The error says which thread did what, or where all of them wait for ever.
pub fn run(kernel: &Kernel, launch: &Launch<'_>, memory: &mut Memory) -> Result<(), String> {
    if launch.params.len() != kernel.params_bytes {
        let (given, own) = (launch.params.len(), kernel.params_bytes);
        return Err(format!("{}: {given} bytes of parameters, expected {own}", kernel.name));
    }
    if !(launch.block as usize).is_multiple_of(LANES) {
        return Err(format!("{}: {} threads are not whole warps", kernel.name, launch.block));
    }
    let (grid, size) = (launch.grid, kernel.cluster);
    if !grid.is_multiple_of(size) {
        return Err(format!("{}: {grid} blocks are not whole clusters of {size}", kernel.name));
    }
    let mut dice = Dice(launch.seed);
    let mut order: Vec<u32> = (0..grid / size).collect();
    dice.shuffle(&mut order);
    let num_registers = kernel.num_slots * launch.block as usize * size as usize;
    let mut registers = vec![0; num_registers];
    for first in order.into_iter().map(|index| index * size) {
        registers.fill(u64::from_le_bytes([POISON; 8]));
        let mut cluster = Cluster::new(kernel, launch, first, memory, &mut registers, &mut dice);
        cluster.run().map_err(|e| match size {
            1 => format!("{}, block {first}: {e}", kernel.name),
            _ => format!("{}, blocks {first} to {}: {e}", kernel.name, first + size - 1),
        })?;
    }
    Ok(())
}

/// A generator of choices; one of seed 0 chooses nothing.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        if self.0 == 0 {
            return 0;
        }
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) as usize % end
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            let other = if self.0 == 0 { at } else { self.below(at + 1) };
            items.swap(at, other);
        }
    }

    pub(crate) fn is_bold(&mut self) -> bool {
        self.0 != 0 && self.below(4) == 0
    }
}

/// What a thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Ready,
    /// At an instruction that its warp does together.
    Meeting,
    /// At a barrier of its block of this number, of so many threads.
    Barrier(u64, u64),
    /// Has arrived at the cluster's barrier, and waits for the others.
    ClusterBarrier,
    Done,
}

pub(crate) struct Thread {
    pub(crate) next: usize,
    pub(crate) state: State,
    pub(crate) steps: u64,
    /// The test of a phase that failed last.
    pub(crate) failed_test: Option<usize>,
}

/// Why a thread stopped.
pub(crate) enum Stop {
    /// Somebody must do something first; whether the thread did anything.
    Waits(bool),
    Meeting,
    Done,
}

/// Blocks that run together.
pub(crate) struct Cluster<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) launch: &'a Launch<'a>,
    pub(crate) memory: &'a mut Memory,
    /// Of each block, by its rank.
    pub(crate) shared: Vec<Vec<u8>>,
    pub(crate) registers: &'a mut [u64],
    /// Those of a block behind those of the one before.
    pub(crate) threads: Vec<Thread>,
    /// Threads of each block that have not ended. With the last one the block gives up its shared memory.
    pub(crate) running: Vec<usize>,
    pub(crate) copies: Copies,
    /// Of each warp.
    pub(crate) shares: Vec<Share>,
    /// Of each warp.
    pub(crate) attendances: Vec<Attendance>,
    pub(crate) proxies: Proxies,
    pub(crate) dice: &'a mut Dice,
}

impl<'a> Cluster<'a> {
    fn new(
        kernel: &'a Kernel,
        launch: &'a Launch<'a>,
        first: u32,
        memory: &'a mut Memory,
        registers: &'a mut [u64],
        dice: &'a mut Dice,
    ) -> Self {
        let (size, block) = (kernel.cluster as usize, launch.block as usize);
        for (thread, slots) in registers.chunks_exact_mut(kernel.num_slots).enumerate() {
            let rank = (thread / block) as u32;
            slots[operation::THREAD as usize] = (thread % block) as u64;
            slots[operation::NUM_THREADS as usize] = launch.block.into();
            slots[operation::BLOCK as usize] = (first + rank).into();
            slots[operation::NUM_BLOCKS as usize] = launch.grid.into();
            slots[operation::RANK as usize] = rank.into();
        }
        let thread = |_| Thread { next: 0, state: State::Ready, steps: 0, failed_test: None };
        let (num_threads, shared_bytes) = (size * block, launch.shared_bytes as usize);
        let num_warps = num_threads / LANES;
        Self {
            kernel,
            launch,
            memory,
            shared: vec![vec![POISON; shared_bytes]; size],
            registers,
            threads: (0..num_threads).map(thread).collect(),
            running: vec![block; size],
            copies: Copies::new(num_threads),
            shares: (0..num_warps).map(|_| Share::default()).collect(),
            attendances: vec![Attendance::Away; num_warps],
            proxies: Proxies::new(size, shared_bytes, num_threads),
            dice,
        }
    }

    fn run(&mut self) -> Result<(), String> {
        let num_warps = self.threads.len() / LANES;
        while self.running.iter().any(|&threads| threads > 0) {
            let mut has_moved = false;
            let first = self.dice.below(num_warps);
            for warp in 0..num_warps {
                has_moved |= self.run_warp((first + warp) % num_warps)?;
            }
            has_moved |= self.open_barriers();
            has_moved |= self.open_cluster_barrier();
            if self.dice.is_bold() || !has_moved {
                has_moved |= self.land_some()?;
            }
            if !has_moved {
                return Err(self.stuck());
            }
        }
        self.check_products()
    }

    /// Runs a warp as far as it gets on its own; whether it got anywhere.
    fn run_warp(&mut self, warp: usize) -> Result<bool, String> {
        let lanes = warp * LANES..(warp + 1) * LANES;
        let mut has_moved = false;
        loop {
            for thread in lanes.clone() {
                if self.threads[thread].state == State::Ready {
                    has_moved |= self.run_thread(thread)?;
                }
            }
            if !self.meet(lanes.clone())? {
                return Ok(has_moved);
            }
            has_moved = true;
        }
    }

    fn run_thread(&mut self, thread: usize) -> Result<bool, String> {
        match self.run_to_stop(thread) {
            Ok(Stop::Waits(has_moved)) => Ok(has_moved),
            Ok(Stop::Meeting) => {
                self.threads[thread].state = State::Meeting;
                Ok(true)
            }
            Ok(Stop::Done) => {
                self.threads[thread].state = State::Done;
                self.end_thread_of(self.rank_of(thread))?;
                Ok(true)
            }
            Err(error) => {
                let (name, place) = (self.name_of(thread), self.place_of(thread));
                Err(format!("thread {name}, {place}: {error}"))
            }
        }
    }

    /// With its last thread a block has ended.
    fn end_thread_of(&mut self, rank: usize) -> Result<(), String> {
        if self.running[rank] == 1 {
            self.land_all(rank)?;
        }
        self.running[rank] -= 1;
        Ok(())
    }

    /// What errors call a thread.
    fn name_of(&self, thread: usize) -> String {
        let number = thread % self.launch.block as usize;
        match self.running.len() {
            1 => number.to_string(),
            _ => format!("{number} of rank {}", self.rank_of(thread)),
        }
    }

    /// Where a thread is.
    pub(crate) fn place_of(&self, thread: usize) -> String {
        match self.kernel.code.get(self.threads[thread].next) {
            Some(Instruction { line, text, .. }) => format!("line {line}: {text}"),
            None => "behind the end".into(),
        }
    }

    /// Lets go whom a barrier held back, if all are there.
    fn open_barriers(&mut self) -> bool {
        let mut counts = BTreeMap::<(usize, u64, u64), u64>::new();
        for (at, thread) in self.threads.iter().enumerate() {
            if let State::Barrier(id, count) = thread.state {
                *counts.entry((self.rank_of(at), id, count)).or_default() += 1;
            }
        }
        let mut has_opened = false;
        for ((rank, id, count), arrived) in counts {
            if arrived != count {
                continue;
            }
            has_opened = true;
            let first = rank * self.launch.block as usize;
            let own = &mut self.threads[first..first + self.launch.block as usize];
            let held = |thread: &&mut Thread| thread.state == State::Barrier(id, count);
            for thread in own.iter_mut().filter(held) {
                thread.state = State::Ready;
                thread.next += 1;
            }
        }
        has_opened
    }

    /// Who waits where.
    fn stuck(&self) -> String {
        let mut places = BTreeMap::<String, Vec<usize>>::new();
        for (at, thread) in self.threads.iter().enumerate() {
            let place = match thread.state {
                State::Done => "done".into(),
                _ => self.place_of(at),
            };
            places.entry(place).or_default().push(at);
        }
        let place = |(place, threads): (&String, &Vec<usize>)| {
            let first = self.name_of(threads[0]);
            format!("{} threads from {first} on at {place}", threads.len())
        };
        format!("all wait: {}", places.iter().map(place).collect::<Vec<_>>().join("; "))
    }
}
