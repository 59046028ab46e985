//! Page-locked memory through which everything else on the host goes to a device: the copy engine reads it when its turn
//! comes, so what is copied may go as soon as it is here, and nobody waits for the device until a half is full.

use super::Driver;
use super::pinned::Pinned;
use crate::Result;
use crate::exec::cuda::device::{Address, Device, Fill, Mark};

/// One half is filled while the other is read.
const HALF_BYTES: usize = 8 << 20;
/// Where copies are fastest from.
const ALIGNMENT: usize = 256;

/// Two halves, and behind what was read last of each a mark.
pub(super) struct Staging {
    memory: Pinned,
    marks: [Mark; 2],
    half: usize,
    /// Bytes of the half that are on their way.
    used: usize,
}

impl Staging {
    pub(super) fn new(driver: &mut Driver) -> Result<Self> {
        let memory = driver.pinned(2 * HALF_BYTES)?;
        let marks = [driver.new_mark()?, driver.new_mark()?];
        Ok(Self { memory, marks, half: 0, used: 0 })
    }

    /// Copies what `fill` writes to the device, in order with all other work.
    pub(super) fn write_with(
        &mut self,
        to: Address,
        bytes: usize,
        fill: &mut Fill<'_>,
        driver: &mut Driver,
    ) -> Result<()> {
        for offset in (0..bytes).step_by(HALF_BYTES) {
            let len = HALF_BYTES.min(bytes - offset);
            if self.used + len > HALF_BYTES {
                self.turn(driver)?;
            }
            let first = self.half * HALF_BYTES + self.used;
            fill(offset, self.memory.bytes_mut(first..first + len))?;
            let words = &self.memory.as_ref()[first / size_of::<u32>()..];
            driver.copy(to + offset as Address, words, len)?;
            self.used += len.next_multiple_of(ALIGNMENT);
        }
        Ok(())
    }

    /// Goes on in the other half, once all of it was read.
    fn turn(&mut self, driver: &mut Driver) -> Result<()> {
        driver.put_mark(self.marks[self.half])?;
        let other = 1 - self.half;
        driver.wait_for(self.marks[other])?;
        (self.half, self.used) = (other, 0);
        Ok(())
    }
}
