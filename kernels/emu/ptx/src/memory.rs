//! Memory as arenas of bytes: device memory by allocation, each access inside one of them.

/// Where generic addresses of shared memory begin.
pub(crate) const SHARED_WINDOW: u64 = 1 << 62;

/// Device memory: allocations at addresses that the caller chose.
#[derive(Debug, Default)]
pub struct Memory {
    /// By address.
    allocations: Vec<Allocation>,
    /// The allocation that was found last.
    last: usize,
}

#[derive(Debug)]
struct Allocation {
    start: u64,
    bytes: Vec<u8>,
}

impl Memory {
    /// Adds memory that holds these bytes.
    pub fn put(&mut self, start: u64, bytes: Vec<u8>) {
        let at = self.allocations.partition_point(|other| other.start < start);
        self.allocations.insert(at, Allocation { start, bytes });
    }

    /// Addresses and contents of all allocations.
    pub fn contents(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.allocations.iter().map(|allocation| (allocation.start, &*allocation.bytes))
    }

    /// Bytes of an allocation.
    pub fn slice(&mut self, address: u64, len: usize) -> Result<&mut [u8], String> {
        if !self.allocations.get(self.last).is_some_and(|found| found.has(address, len)) {
            let next = self.allocations.partition_point(|other| other.start <= address);
            self.last = next.wrapping_sub(1);
        }
        match self.allocations.get_mut(self.last) {
            Some(found) if found.has(address, len) => {
                let at = (address - found.start) as usize;
                Ok(&mut found.bytes[at..at + len])
            }
            _ => Err(format!("{len} bytes at {address:#x} are in no allocation")),
        }
    }
}

impl Allocation {
    fn has(&self, address: u64, len: usize) -> bool {
        address.checked_sub(self.start).is_some_and(|at| at + len as u64 <= self.bytes.len() as u64)
    }
}
