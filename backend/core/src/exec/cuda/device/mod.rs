//! What the executor needs of a GPU, so that the same executor runs on the CUDA driver and, in the tests, on an
//! emulator. Work is issued in order to one queue; `read`, `wait` and `wait_for` wait for it, and `write` where there is no
//! room for what it copies.

pub(super) mod arrays;
mod cublas;
mod driver;
mod gpu;
mod library;
mod op;
pub(crate) mod pod;
mod search_path;
mod shared;

pub use driver::{Driver, is_present};
pub use gpu::Gpu;
pub use op::{Launch, Op, Product, ProductShape};
pub use search_path::SearchPath;
pub use shared::Shared;

use crate::Result;
use pod::{Pod, bytes_of};
use std::ops::Range;

/// An address in the device's memory.
pub type Address = u64;

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Compute capability, such as (9, 0).
    pub capability: (u32, u32),
    /// Branch of the driver, such as 580.
    pub driver: u32,
    /// Streaming multiprocessors.
    pub num_sms: u32,
}

/// A loaded kernel of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(pub u32);

/// A recorded sequence of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Graph(pub u32);

/// A place in the queue of work that can be waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(pub u32);

/// Memory that a device has allocated and not freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Bytes of the GPU.
    pub device: usize,
    /// Page-locked bytes of the machine.
    pub pinned: usize,
}

/// Writes a piece of what is copied: it gets the piece's offset, and its memory.
pub type Fill<'a> = dyn FnMut(usize, &mut [u8]) -> Result<()> + 'a;

/// Bytes of a piece where a device does not say otherwise.
const PIECE_BYTES: usize = 8 << 20;

/// Memory that a device takes for what its library works in.
pub(crate) const PRODUCT_BYTES: usize = 32 << 20;

impl Description {
    /// Whether there is hardware for products of FP8 with FP8.
    pub fn multiplies_fp8(&self) -> bool {
        self.capability >= (8, 9)
    }
}

/// A GPU.
pub trait Device: Send {
    /// What it is.
    fn describe(&self) -> &Description;

    /// Bytes that can still be allocated.
    fn available_bytes(&self) -> Result<usize>;

    /// What was allocated so far; nothing where a device keeps no account.
    fn held(&self) -> Held {
        Held::default()
    }

    /// Whether other devices with the same number use its memory as their own, as those of a driver in one process do.
    fn shares_memory(&self) -> bool {
        false
    }

    /// Zeroed memory, aligned to 256, that lives as long as the device.
    fn alloc(&mut self, bytes: usize) -> Result<Address>;

    /// Zeroed memory that the host sees too, of `bytes` bytes or some more, a whole number of words. The device holds on
    /// to it until it is dropped.
    fn alloc_shared(&mut self, bytes: usize) -> Result<Shared>;

    /// Copies to the device.
    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<()>;

    /// Copies `bytes` bytes to the device that `fill` writes, piece by piece in order: from where they come straight to
    /// where they are copied from. What was copied before a piece that fails stays.
    fn write_with(&mut self, to: Address, bytes: usize, fill: &mut Fill<'_>) -> Result<()> {
        let mut piece = vec![0; bytes.min(PIECE_BYTES)];
        for offset in (0..bytes).step_by(PIECE_BYTES) {
            let piece = &mut piece[..PIECE_BYTES.min(bytes - offset)];
            fill(offset, piece)?;
            self.write(to + offset as Address, piece)?;
        }
        Ok(())
    }

    /// Copies to the device from memory that both see, bytes `from.start .. from.end` of it, when their turn comes:
    /// they stay as they are until they were waited for. The memory is this device's, and the range one of words.
    fn write_shared(&mut self, to: Address, shared: &Shared, from: Range<usize>) -> Result<()>;

    /// Waits for all work, then copies from the device.
    fn read(&mut self, from: Address, out: &mut [u8]) -> Result<()>;

    /// Loads the code of a kernel variant that will use up to `shared_bytes` of dynamic shared memory.
    /// `entry` is its function.
    fn load(
        &mut self,
        variant: &str,
        entry: &str,
        code: &[u8],
        shared_bytes: u32,
    ) -> Result<Kernel>;

    /// Issues an operation. The shape of a product has been enabled.
    fn issue(&mut self, op: &Op) -> Result<()>;

    /// Gets what products of these shapes take: a library, `PRODUCT_BYTES`, and a way to compute each. The error says
    /// what is missing.
    fn enable_products(&mut self, shapes: &[ProductShape]) -> Result<()>;

    /// Makes a graph of operations; nothing runs.
    fn record(&mut self, ops: &[Op]) -> Result<Graph>;

    /// Issues a graph.
    fn replay(&mut self, graph: Graph) -> Result<()>;

    /// A mark that stands nowhere yet; it lives as long as the device.
    fn new_mark(&mut self) -> Result<Mark>;

    /// Puts a mark behind all that is issued.
    fn put_mark(&mut self, mark: Mark) -> Result<()>;

    /// Waits until all work ahead of a mark is done, at the place where it was put last.
    fn wait_for(&mut self, mark: Mark) -> Result<()>;

    /// Waits until all issued work is done.
    fn wait(&mut self) -> Result<()>;
}

/// Copies values to the device, if there are any.
pub(in crate::exec::cuda) fn upload<T: Pod>(
    device: &mut dyn Device,
    to: Address,
    values: &[T],
) -> Result<()> {
    if values.is_empty() { Ok(()) } else { device.write(to, bytes_of(values)) }
}
