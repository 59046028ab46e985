//! Page-locked memory through which everything else on the host goes to a device: the copy engine reads it when its turn
//! comes, so what is copied may go as soon as it is here, and nobody waits for the device until a half is full.

use super::device::{Address, Device, Mark, Shared};
use crate::Result;

/// One half is filled while the other is read.
const HALF_BYTES: usize = 8 << 20;
/// Where copies are fastest from.
const ALIGNMENT: usize = 256;

/// Two halves, and behind what was read last of each a mark.
pub(super) struct Staging {
    shared: Shared,
    marks: [Mark; 2],
    half: usize,
    /// Bytes of the half that are on their way.
    used: usize,
}

impl Staging {
    pub(super) fn new(device: &mut dyn Device) -> Result<Self> {
        let shared = device.alloc_shared(2 * HALF_BYTES)?;
        let marks = [device.new_mark()?, device.new_mark()?];
        Ok(Self { shared, marks, half: 0, used: 0 })
    }

    /// Copies to the device in order with all other work.
    pub(super) fn write(
        &mut self,
        mut to: Address,
        bytes: &[u8],
        device: &mut dyn Device,
    ) -> Result<()> {
        for piece in bytes.chunks(HALF_BYTES) {
            if self.used + piece.len() > HALF_BYTES {
                self.turn(device)?;
            }
            let first = self.half * HALF_BYTES + self.used;
            self.shared.copy_from(first, piece);
            device.write_shared(to, &self.shared, first..first + piece.len())?;
            self.used += piece.len().next_multiple_of(ALIGNMENT);
            to += piece.len() as Address;
        }
        Ok(())
    }

    /// Goes on in the other half, once all of it was read.
    fn turn(&mut self, device: &mut dyn Device) -> Result<()> {
        device.put_mark(self.marks[self.half])?;
        self.half = 1 - self.half;
        self.used = 0;
        device.wait_for(self.marks[self.half])
    }
}
