//! The memory of one context: what was allocated, of either kind, and copies that stay inside of it.

use std::collections::BTreeMap;

use spec_emu::Arena;

use crate::fault::{Fault, INVALID_VALUE, OUT_OF_MEMORY, Outcome};

/// The arena gives addresses once only: it spans what is allocated over the life of a context.
const TIMES: usize = 4;

/// What freed memory holds: NaN in every float format.
const POISON: u8 = 0xff;

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Device,
    /// The host's, pinned; the device may see it under the same address.
    Host {
        mapped: bool,
    },
}

/// An allocation.
#[derive(Clone, Copy)]
struct Block {
    bytes: usize,
    kind: Kind,
}

/// Memory of a context.
pub(crate) struct Memory {
    arena: Arena,
    blocks: BTreeMap<u64, Block>,
    total: usize,
}

impl Memory {
    pub(crate) fn new(total: usize) -> Self {
        Self { arena: Arena::new(TIMES * total), blocks: BTreeMap::new(), total }
    }

    /// Bytes that are free, and all.
    pub(crate) fn free_and_total(&self) -> (usize, usize) {
        let used: usize = self.of(|kind| kind == Kind::Device).map(|block| block.bytes).sum();
        (self.total - used, self.total)
    }

    /// New memory, which holds no zeros.
    pub(crate) fn alloc(&mut self, bytes: usize, kind: Kind) -> Outcome<u64> {
        if bytes == 0 {
            return Err(Fault::wrong(INVALID_VALUE, "no bytes are asked for"));
        }
        if kind == Kind::Device && bytes > self.free_and_total().0 {
            return Err(Fault::plain(OUT_OF_MEMORY));
        }
        let address = self.arena.alloc(bytes);
        self.blocks.insert(address, Block { bytes, kind });
        Ok(address)
    }

    /// `address` is what `alloc` gave for device memory, or for the host's.
    pub(crate) fn free(&mut self, address: u64, of_host: bool) -> Outcome {
        let block = self.block(address, of_host)?;
        self.arena.write(address, &vec![POISON; block.bytes]);
        self.blocks.remove(&address);
        Ok(())
    }

    /// Where the device sees the host's memory that begins here.
    pub(crate) fn mapped(&self, address: u64) -> Outcome<u64> {
        match self.block(address, true)?.kind {
            Kind::Host { mapped: true } => Ok(address),
            _ => Err(Fault::wrong(INVALID_VALUE, format!("{address:#x} is not mapped"))),
        }
    }

    /// Whether these bytes are pinned memory of the host; some that lie in other memory of this context are an error.
    pub(crate) fn is_pinned(&self, address: u64, bytes: usize) -> Outcome<bool> {
        match self.around(address) {
            None => Ok(false),
            Some((_, Block { kind: Kind::Device, .. })) => {
                let message = format!("{address:#x} is memory of the device, not of the host");
                Err(Fault::wrong(INVALID_VALUE, message))
            }
            Some(_) => self.check(address, bytes).map(|()| true),
        }
    }

    /// Whether these bytes lie in one allocation.
    pub(crate) fn check(&self, address: u64, bytes: usize) -> Outcome {
        let inside = self
            .around(address)
            .is_some_and(|(start, block)| (address - start) as usize + bytes <= block.bytes);
        let message = || format!("{bytes} bytes at {address:#x} are in no allocation");
        if inside { Ok(()) } else { Err(Fault::wrong(INVALID_VALUE, message())) }
    }

    pub(crate) fn write(&self, to: u64, bytes: &[u8]) -> Outcome {
        self.check(to, bytes.len())?;
        self.arena.write(to, bytes);
        Ok(())
    }

    pub(crate) fn read(&self, from: u64, bytes: usize) -> Outcome<Vec<u8>> {
        self.check(from, bytes)?;
        let mut found = vec![0; bytes];
        self.arena.read(from, &mut found);
        Ok(found)
    }

    /// What was never freed.
    pub(crate) fn left(&self) -> Vec<String> {
        let num_host = self.of(|kind| kind != Kind::Device).count();
        let num_device = self.blocks.len() - num_host;
        let kinds = [(num_device, "of the device"), (num_host, "of the host")];
        let left = kinds.into_iter().filter(|(num, _)| *num > 0);
        left.map(|(num, whose)| format!("{num} pieces of memory {whose}")).collect()
    }

    /// Says where something was written outside of allocations.
    pub(crate) fn check_fences(&self) -> Result<(), String> {
        self.arena.check()
    }

    fn of(&self, is: impl Fn(Kind) -> bool) -> impl Iterator<Item = &Block> {
        self.blocks.values().filter(move |block| is(block.kind))
    }

    fn block(&self, address: u64, of_host: bool) -> Outcome<Block> {
        let found = self.blocks.get(&address).filter(|b| (b.kind != Kind::Device) == of_host);
        let whose = if of_host { "host" } else { "device" };
        let message =
            || format!("{address:#x} is no {whose} memory that was allocated and not freed");
        found.copied().ok_or_else(|| Fault::wrong(INVALID_VALUE, message()))
    }

    /// The allocation that an address lies in.
    fn around(&self, address: u64) -> Option<(u64, Block)> {
        let (start, block) = self.blocks.range(..=address).next_back()?;
        ((address - start) < block.bytes as u64).then_some((*start, *block))
    }
}
