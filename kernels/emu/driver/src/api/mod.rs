//! The C functions, by the names under which they are looked up. Types are written out as the interface documents them,
//! by hand: handles are numbers here, and enumerations are integers.
#![allow(unsafe_code, non_snake_case)]

mod code;
mod device;
mod memory;
mod stream;

use crate::fault::{Fault, INVALID_VALUE, Outcome};

/// Writes a result.
///
/// # Safety
/// `to` is null or where a value can be written.
unsafe fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(Fault::wrong(INVALID_VALUE, "a null pointer for a result"));
    }
    // SAFETY: the caller says so.
    unsafe { to.write(value) };
    Ok(())
}

/// Refuses other flags than are emulated.
fn expect_flags(flags: u64, known: &[u64]) -> Outcome {
    match known.contains(&flags) {
        true => Ok(()),
        false => Err(Fault::wrong(INVALID_VALUE, format!("flags {flags:#x} are not emulated"))),
    }
}
