//! Arrays that lie one behind the other in one allocation.

use super::{Address, Device};
use crate::Result;

/// Of each array, as of what a device allocates.
const ALIGNMENT: usize = 256;

/// Bytes that an array takes.
pub(in crate::exec::cuda) fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

/// Bytes that arrays of these sizes take.
pub(in crate::exec::cuda) fn total(sizes: &[usize]) -> usize {
    sizes.iter().copied().map(aligned).sum()
}

/// Allocates arrays of these sizes, zeroed, in their order.
pub(in crate::exec::cuda) fn alloc<const N: usize>(
    sizes: [usize; N],
    device: &mut dyn Device,
) -> Result<[Address; N]> {
    let mut next = device.alloc(total(&sizes))?;
    Ok(sizes.map(|bytes| {
        let address = next;
        next += aligned(bytes) as Address;
        address
    }))
}
