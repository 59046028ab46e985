//! A launch: its blocks one after the other, in an order of a seed. In a block every thread runs on its own until it
//! comes to an instruction that threads do together; copies arrive as late as they may, or when the seed wants.

use std::collections::BTreeMap;

use crate::copy::Copies;
use crate::memory::{Memory, SHARED_WINDOW};
use crate::operation::{self, Instruction, LANES, Operation, Place, Slot, Source, Space};
use crate::parse::{Kernel, SHARED_START};

/// Instructions of a thread before it is believed to run for ever.
const MOST_STEPS: u64 = 200_000_000;

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
    if launch.block as usize % LANES != 0 {
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
    steps: u64,
    /// The test of a phase that failed last.
    failed_test: Option<usize>,
}

/// Why a thread stopped.
enum Stop {
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
                has_moved |= self.land_one()?;
            }
            if !has_moved {
                return Err(self.stuck());
            }
        }
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

    fn run_to_stop(&mut self, thread: usize) -> Result<Stop, String> {
        let kernel = self.kernel;
        let first_slot = thread * kernel.num_slots;
        let begun_at = self.threads[thread].next;
        loop {
            let at = self.threads[thread].next;
            let instruction = kernel.code.get(at).ok_or("runs past the end")?;
            self.threads[thread].steps += 1;
            if self.threads[thread].steps > MOST_STEPS {
                return Err(format!("no end after {MOST_STEPS} instructions"));
            }
            self.threads[thread].next = at + 1;
            if let Some((slot, wanted)) = instruction.guard
                && (self.registers[first_slot + slot as usize] != 0) != wanted
            {
                continue;
            }
            match &instruction.operation {
                Operation::Nothing => (),
                Operation::Exit => return Ok(Stop::Done),
                Operation::Branch(target) => self.threads[thread].next = *target,
                Operation::Together(_) => {
                    self.threads[thread].next = at;
                    return Ok(Stop::Meeting);
                }
                Operation::Asynchronous(operation) => {
                    let went_on = self.asynchronous(thread, operation).inspect_err(|_| {
                        self.threads[thread].next = at;
                    })?;
                    let before = self.threads[thread].failed_test;
                    self.threads[thread].failed_test = (!went_on).then_some(at);
                    if !went_on {
                        let is_spinning = before == Some(at) && begun_at == at + 1;
                        return Ok(Stop::Waits(!is_spinning));
                    }
                }
                operation => self.compute(thread, operation).inspect_err(|_| {
                    self.threads[thread].next = at;
                })?,
            }
        }
    }

    #[inline]
    fn compute(&mut self, thread: usize, operation: &Operation) -> Result<(), String> {
        let first = thread * self.kernel.num_slots;
        let slots = &mut self.registers[first..first + self.kernel.num_slots];
        let get = |slots: &[u64], source: &Source| match source {
            Source::Slot(slot) => slots[*slot as usize],
            Source::Value(value) => *value,
        };
        match operation {
            Operation::One(function, to, a) => {
                slots[*to as usize] = function(get(slots, a));
            }
            Operation::Two(function, to, [a, b]) => {
                slots[*to as usize] = function(get(slots, a), get(slots, b));
            }
            Operation::Three(function, to, [a, b, c]) => {
                slots[*to as usize] = function(get(slots, a), get(slots, b), get(slots, c));
            }
            Operation::Insert { to, from, bits } => {
                let [a, b, at, len] = from.map(|source| get(slots, &source));
                slots[*to as usize] = insert(a, b, at as u8, len as u8, *bits);
            }
            Operation::Join { to, parts, bits } => {
                let mask = u64::MAX >> (64 - bits);
                let join = |whole, part| whole << bits | get(slots, part) & mask;
                slots[*to as usize] = parts.iter().rev().fold(0, join);
            }
            Operation::Split { to, from, bits } => {
                let whole = get(slots, from);
                for (part, to) in to.iter().enumerate() {
                    let shifted = whole >> (part as u32 * bits);
                    slots[*to as usize] = shifted & u64::MAX >> (64 - bits);
                }
            }
            Operation::Load { space, bytes, to, from } => {
                let address = get(slots, &from.base).wrapping_add(from.offset);
                let mut values = [0; 4];
                let found = match space {
                    Space::Param => self.param(address, bytes * to.len())?,
                    _ => self.bytes(*space, address, bytes * to.len())?,
                };
                for (value, element) in values.iter_mut().zip(found.chunks_exact(*bytes)) {
                    *value = number(element);
                }
                for (to, value) in to.iter().zip(values) {
                    self.registers[first + *to as usize] = value;
                }
            }
            Operation::Store { space, bytes, to, values } => {
                let address = get(slots, &to.base).wrapping_add(to.offset);
                let mut given = [0; 4];
                for (given, value) in given.iter_mut().zip(values) {
                    *given = get(slots, value);
                }
                let place = self.bytes(*space, address, bytes * values.len())?;
                for (element, value) in place.chunks_exact_mut(*bytes).zip(given) {
                    element.copy_from_slice(&value.to_le_bytes()[..*bytes]);
                }
            }
            Operation::Update { space, update, old, at, value } => {
                let address = get(slots, &at.base).wrapping_add(at.offset);
                let value = get(slots, value) as u32;
                let place = self.bytes(*space, address, 4)?;
                let before = number(place);
                place.copy_from_slice(&update(before as u32, value).to_le_bytes());
                self.registers[first + *old as usize] = before;
            }
            _ => unreachable!("other operations are handled by the caller"),
        }
        Ok(())
    }

    /// Memory at an aligned address.
    pub(crate) fn bytes(
        &mut self,
        space: Space,
        address: u64,
        len: usize,
    ) -> Result<&mut [u8], String> {
        if !address.is_multiple_of(len as u64) {
            return Err(format!("{len} bytes at {address:#x}, which is not aligned"));
        }
        match space {
            Space::Global => self.memory.slice(address, len),
            Space::Generic if address < SHARED_WINDOW => self.memory.slice(address, len),
            Space::Shared | Space::Generic => self.shared_bytes(address & !SHARED_WINDOW, len),
            Space::Param => Err("parameters are only read".into()),
        }
    }

    fn param(&self, address: u64, len: usize) -> Result<&[u8], String> {
        let found = self.launch.params.get(address as usize..).and_then(|from| from.get(..len));
        found.ok_or_else(|| format!("{len} bytes at {address} of the parameters"))
    }

    /// Shared memory.
    pub(crate) fn shared_bytes(&mut self, address: u64, len: usize) -> Result<&mut [u8], String> {
        let total = self.shared.len();
        let start = address.checked_sub(SHARED_START);
        let found = start.and_then(|start| self.shared.get_mut(start as usize..)?.get_mut(..len));
        found.ok_or_else(|| {
            format!("{len} bytes at {address:#x} of shared memory, which has {total} from {SHARED_START:#x}")
        })
    }

    pub(crate) fn get(&self, thread: usize, source: Source) -> u64 {
        match source {
            Source::Slot(slot) => self.registers[thread * self.kernel.num_slots + slot as usize],
            Source::Value(value) => value,
        }
    }

    pub(crate) fn set(&mut self, thread: usize, slot: Slot, value: u64) {
        self.registers[thread * self.kernel.num_slots + slot as usize] = value;
    }

    pub(crate) fn address(&self, thread: usize, place: &Place) -> u64 {
        self.get(thread, place.base).wrapping_add(place.offset)
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

/// `bfi`: the low bits of `a`, so many, in `b` from a bit on.
fn insert(a: u64, b: u64, at: u8, len: u8, bits: u32) -> u64 {
    let all = u64::MAX >> (64 - bits);
    let len = u32::from(len).min(bits);
    if len == 0 || u32::from(at) >= bits {
        return b & all;
    }
    let mask = (u64::MAX >> (64 - len)) << at & all;
    (b & !mask | a << at & mask) & all
}

/// A little-endian number of up to 8 bytes.
fn number(bytes: &[u8]) -> u64 {
    let mut eight = [0; 8];
    eight[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(eight)
}
