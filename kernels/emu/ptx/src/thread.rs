//! A thread on its own: one instruction after the other, up to one that it cannot do alone.

use crate::cluster::{Cluster, Stop};
use crate::operation::{Operation, Place, Slot, Source, Space};

/// Instructions of a thread before it is believed to run for ever.
const MOST_STEPS: u64 = 200_000_000;

impl Cluster<'_> {
    pub(crate) fn run_to_stop(&mut self, thread: usize) -> Result<Stop, String> {
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
                    _ => self.bytes(thread, *space, address, bytes * to.len())?,
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
                let place = self.bytes(thread, *space, address, bytes * values.len())?;
                for (element, value) in place.chunks_exact_mut(*bytes).zip(given) {
                    element.copy_from_slice(&value.to_le_bytes()[..*bytes]);
                }
                if let Some(at) = self.in_space(thread, *space, address)? {
                    self.proxies.store(thread, at, bytes * values.len());
                }
            }
            Operation::Update { space, update, old, at, value } => {
                let address = get(slots, &at.base).wrapping_add(at.offset);
                let value = get(slots, value) as u32;
                let place = self.bytes(thread, *space, address, 4)?;
                let before = number(place);
                place.copy_from_slice(&update(before as u32, value).to_le_bytes());
                self.registers[first + *old as usize] = before;
            }
            Operation::Map { to, address, rank } => {
                let (address, rank) = (get(slots, address), get(slots, rank));
                self.registers[first + *to as usize] = self.map(thread, address, rank)?;
            }
            _ => unreachable!("other operations are handled by the caller"),
        }
        Ok(())
    }

    /// Memory at an aligned address.
    pub(crate) fn bytes(
        &mut self,
        thread: usize,
        space: Space,
        address: u64,
        len: usize,
    ) -> Result<&mut [u8], String> {
        if !address.is_multiple_of(len as u64) {
            return Err(format!("{len} bytes at {address:#x}, which is not aligned"));
        }
        match self.in_space(thread, space, address)? {
            Some(at) => self.shared_bytes(at, len),
            None if space == Space::Param => Err("parameters are only read".into()),
            None => self.memory.slice(address, len),
        }
    }

    fn param(&self, address: u64, len: usize) -> Result<&[u8], String> {
        let found = self.launch.params.get(address as usize..).and_then(|from| from.get(..len));
        found.ok_or_else(|| format!("{len} bytes at {address} of the parameters"))
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
