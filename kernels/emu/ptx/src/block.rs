//! A launch: its blocks one after the other, in an order of a seed. In a block every thread runs on its own until it
//! comes to an instruction that threads do together; copies arrive as late as they may, or when the seed wants.

use std::collections::BTreeMap;

use crate::copy::Copies;
use crate::memory::Memory;
use crate::operation::{self, Instruction, LANES};
use crate::parse::Kernel;
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
    /// Of the order of blocks and warps, and of when copies arrive; 0 is in order, and as late as they may.
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
    let mut dice = Dice(launch.seed);
    let mut order: Vec<u32> = (0..launch.grid).collect();
    dice.shuffle(&mut order);
    let num_registers = kernel.num_slots * launch.block as usize;
    let mut registers = vec![0; num_registers];
    for index in order {
        registers.fill(u64::from_le_bytes([POISON; 8]));
        let mut block = Block::new(kernel, launch, index, memory, &mut registers, &mut dice);
        block.run().map_err(|e| format!("{}, block {index}: {e}", kernel.name))?;
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
    /// At a barrier of this number, of so many threads.
    Barrier(u64, u64),
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

/// A block that runs.
pub(crate) struct Block<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) launch: &'a Launch<'a>,
    pub(crate) memory: &'a mut Memory,
    pub(crate) shared: Vec<u8>,
    pub(crate) registers: &'a mut [u64],
    pub(crate) threads: Vec<Thread>,
    pub(crate) copies: Copies,
    /// Of each warp.
    pub(crate) shares: Vec<Share>,
    pub(crate) proxies: Proxies,
    pub(crate) dice: &'a mut Dice,
}

impl<'a> Block<'a> {
    fn new(
        kernel: &'a Kernel,
        launch: &'a Launch<'a>,
        index: u32,
        memory: &'a mut Memory,
        registers: &'a mut [u64],
        dice: &'a mut Dice,
    ) -> Self {
        for (thread, slots) in registers.chunks_exact_mut(kernel.num_slots).enumerate() {
            slots[operation::THREAD as usize] = thread as u64;
            slots[operation::NUM_THREADS as usize] = launch.block.into();
            slots[operation::BLOCK as usize] = index.into();
            slots[operation::NUM_BLOCKS as usize] = launch.grid.into();
        }
        let thread = |_| Thread { next: 0, state: State::Ready, steps: 0, failed_test: None };
        Self {
            kernel,
            launch,
            memory,
            shared: vec![POISON; launch.shared_bytes as usize],
            registers,
            threads: (0..launch.block).map(thread).collect(),
            copies: Copies::new(launch.block as usize),
            shares: (0..launch.block as usize / LANES).map(|_| Share::default()).collect(),
            proxies: Proxies::new(launch.shared_bytes as usize, launch.block as usize),
            dice,
        }
    }

    fn run(&mut self) -> Result<(), String> {
        let num_warps = self.threads.len() / LANES;
        while self.threads.iter().any(|thread| thread.state != State::Done) {
            let mut has_moved = false;
            let first = self.dice.below(num_warps);
            for warp in 0..num_warps {
                has_moved |= self.run_warp((first + warp) % num_warps)?;
            }
            has_moved |= self.open_barriers();
            if self.dice.is_bold() || !has_moved {
                has_moved |= self.land_some()?;
            }
            if !has_moved {
                return Err(self.stuck());
            }
        }
        self.check_products()?;
        self.land_all()
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
                Ok(true)
            }
            Err(error) => Err(format!("thread {thread}, {}: {error}", self.place_of(thread))),
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
        let mut counts = BTreeMap::<(u64, u64), u64>::new();
        for thread in &self.threads {
            if let State::Barrier(id, count) = thread.state {
                *counts.entry((id, count)).or_default() += 1;
            }
        }
        let mut has_opened = false;
        for ((id, count), arrived) in counts {
            if arrived != count {
                continue;
            }
            has_opened = true;
            let held = |thread: &&mut Thread| thread.state == State::Barrier(id, count);
            for thread in self.threads.iter_mut().filter(held) {
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
            format!("{} threads from {} on at {place}", threads.len(), threads[0])
        };
        format!("all wait: {}", places.iter().map(place).collect::<Vec<_>>().join("; "))
    }
}
