//! Devices and their primary contexts.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Once;

use super::put;
use crate::config::NUM_SMS;
use crate::fault::{self, Fault, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, SUCCESS, Status};
use crate::machine::{self, call};
use crate::table::Handle;

/// CUDA 13.0.
const VERSION: c_int = 13_000;

/// Attributes of devices, of `CUdevice_attribute`.
const NUM_MULTIPROCESSORS: c_uint = 16;
const CAPABILITY_MAJOR: c_uint = 75;
const CAPABILITY_MINOR: c_uint = 76;

extern "C" fn at_exit() {
    machine::at_exit();
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> Status {
    static ONCE: Once = Once::new();
    // SAFETY: the function is part of this library, which takes it along when it is unloaded.
    ONCE.call_once(|| _ = unsafe { libc::atexit(at_exit) });
    if flags == 0 { machine::init() } else { INVALID_VALUE }
}

/// NVRTC asks whatever driver it finds for such tables, and crashes where it cannot ask. There are none.
///
/// # Safety
/// As the driver's; so below.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetExportTable(table: *mut *const c_void, _id: *const c_void) -> Status {
    // SAFETY: the caller's pointer, as the interface asks; so in all that follow.
    unsafe { put(table, ptr::null()) }.map_or(INVALID_VALUE, |()| NOT_FOUND)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Status {
    // SAFETY: as above.
    unsafe { put(version, VERSION) }.map_or(INVALID_VALUE, |()| SUCCESS)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(status: Status, name: *mut *const c_char) -> Status {
    let found = fault::name(status).map_or(std::ptr::null(), std::ffi::CStr::as_ptr);
    // SAFETY: as above.
    match unsafe { put(name, found) } {
        Ok(()) if !found.is_null() => SUCCESS,
        _ => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Status {
    call("cuDeviceGetCount", |machine| {
        // SAFETY: as above.
        unsafe { put(count, machine.devices.len() as c_int) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Status {
    call("cuDeviceGet", |machine| {
        machine.device(ordinal)?;
        // SAFETY: as above.
        unsafe { put(device, ordinal) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> Status {
    call("cuDeviceGetName", |machine| {
        machine.device(device)?;
        let (major, minor) = machine.config.capability;
        let text = format!("emulated GPU {device} of compute capability {major}.{minor}\0");
        if name.is_null() || usize::try_from(len).is_ok_and(|len| len < text.len()) {
            return Err(Fault::wrong(INVALID_VALUE, format!("{len} bytes for a name")));
        }
        // SAFETY: the caller has so many bytes for it.
        unsafe { name.copy_from_nonoverlapping(text.as_ptr().cast(), text.len()) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: c_uint,
    device: c_int,
) -> Status {
    call("cuDeviceGetAttribute", |machine| {
        machine.device(device)?;
        let (major, minor) = machine.config.capability;
        let found = match attribute {
            NUM_MULTIPROCESSORS => NUM_SMS,
            CAPABILITY_MAJOR => major as c_int,
            CAPABILITY_MINOR => minor as c_int,
            _ => {
                let message = format!("attribute {attribute} of devices is not emulated");
                return Err(Fault::wrong(NOT_SUPPORTED, message));
            }
        };
        // SAFETY: as above.
        unsafe { put(value, found) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) -> Status {
    call("cuDevicePrimaryCtxRetain", |machine| {
        let found = machine.retain(device)?;
        // SAFETY: as above.
        unsafe { put(context, found) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> Status {
    call("cuDevicePrimaryCtxRelease", |machine| machine.release(device))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: Handle) -> Status {
    machine::set_current(context)
}
