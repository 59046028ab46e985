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
    fn new(driver: &mut Driver) -> Result<Self> {
        let memory = driver.pinned(2 * HALF_BYTES)?;
        let marks = [driver.new_mark()?, driver.new_mark()?];
        Ok(Self { memory, marks, half: 0, used: 0 })
    }

    /// Where the next bytes go, of its memory.
    fn free(&self) -> usize {
        self.half * HALF_BYTES + self.used
    }
}

impl Driver {
    /// Copies what `fill` writes to the device, in order with all other work. The memory stays the driver's all the time:
    /// the device may still read it where `fill` panics.
    pub(super) fn stage(&mut self, to: Address, bytes: usize, fill: &mut Fill<'_>) -> Result<()> {
        if self.staging.is_none() {
            self.staging = Some(Staging::new(self)?);
        }
        for offset in (0..bytes).step_by(HALF_BYTES) {
            let len = HALF_BYTES.min(bytes - offset);
            if self.staging().used + len > HALF_BYTES {
                self.turn()?;
            }
            let staging = self.staging();
            let first = staging.free();
            fill(offset, staging.memory.bytes_mut(first..first + len))?;
            staging.used += len.next_multiple_of(ALIGNMENT);
            let staging = self.staging.as_ref().expect("it was made");
            let words = &staging.memory.as_ref()[first / size_of::<u32>()..];
            self.copy(to + offset as Address, words, len)?;
        }
        Ok(())
    }

    /// Goes on in the other half, once all of it was read.
    fn turn(&mut self) -> Result<()> {
        let Staging { marks, half, .. } = *self.staging();
        let other = 1 - half;
        self.put_mark(marks[half])?;
        self.wait_for(marks[other])?;
        let staging = self.staging();
        (staging.half, staging.used) = (other, 0);
        Ok(())
    }

    fn staging(&mut self) -> &mut Staging {
        self.staging.as_mut().expect("it was made")
    }
}
