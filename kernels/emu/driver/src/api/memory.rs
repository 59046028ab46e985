//! Memory and copies.

use std::ffi::{c_uchar, c_uint, c_void};
use std::slice;

use super::{expect_flags, put};
use crate::fault::{Fault, INVALID_VALUE, Status};
use crate::machine::in_context;
use crate::memory::Kind;
use crate::stream::Work;
use crate::table::Handle;

/// `CU_MEMHOSTALLOC_DEVICEMAP`.
const MAPPED: u64 = 2;

/// # Safety
/// As the driver's; so below.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Status {
    in_context("cuMemGetInfo", |context, _| {
        let (found, all) = context.memory.free_and_total();
        // SAFETY: the caller's pointers, as the interface asks; so in all that follow.
        unsafe {
            put(free, found)?;
            put(total, all)
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> Status {
    in_context("cuMemAlloc", |context, _| {
        context.not_in_capture("an allocation")?;
        let found = context.memory.alloc(bytes, Kind::Device)?;
        // SAFETY: as above.
        unsafe { put(address, found) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> Status {
    free("cuMemFree", address, false)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(host: *mut u64, bytes: usize, flags: c_uint) -> Status {
    in_context("cuMemHostAlloc", |context, _| {
        context.not_in_capture("an allocation")?;
        expect_flags(flags.into(), &[0, MAPPED])?;
        let mapped = u64::from(flags) == MAPPED;
        let found = context.memory.alloc(bytes, Kind::Host { mapped })?;
        // SAFETY: as above.
        unsafe { put(host, found) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(host: u64) -> Status {
    free("cuMemFreeHost", host, true)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostGetDevicePointer_v2(
    address: *mut u64,
    host: u64,
    flags: c_uint,
) -> Status {
    in_context("cuMemHostGetDevicePointer", |context, _| {
        expect_flags(flags.into(), &[0])?;
        let found = context.memory.mapped(host)?;
        // SAFETY: as above.
        unsafe { put(address, found) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(to: u64, value: c_uchar, bytes: usize, stream: Handle) -> Status {
    in_context("cuMemsetD8Async", |context, _| {
        context.memory.check(to, bytes)?;
        context.streams.get_mut(stream)?.push(Work::Fill { to, value, bytes })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    bytes: usize,
    stream: Handle,
) -> Status {
    in_context("cuMemcpyHtoDAsync", |context, _| {
        // SAFETY: the caller's memory, as long as it says.
        let data = unsafe { slice::from_raw_parts(from.cast(), bytes) };
        context.write(to, from as u64, data, stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) -> Status {
    in_context("cuMemcpyDtoDAsync", |context, _| {
        context.memory.check(to, bytes)?;
        context.memory.check(from, bytes)?;
        context.streams.get_mut(stream)?.push(Work::Copy { to, from, bytes })
    })
}

/// `CUDA_MEMCPY2D`, of which what is not of linear memory of the device must be zero.
#[repr(C)]
#[derive(Clone, Copy)]
struct Side {
    x: usize,
    y: usize,
    memory_type: c_uint,
    host: u64,
    device: u64,
    array: u64,
    pitch: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Copy2d {
    from: Side,
    to: Side,
    width: usize,
    height: usize,
}

/// `CU_MEMORYTYPE_DEVICE`.
const ON_DEVICE: u64 = 2;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpy2DAsync_v2(copy: *const Copy2d, stream: Handle) -> Status {
    in_context("cuMemcpy2DAsync", |context, _| {
        // SAFETY: the caller's description.
        let Copy2d { from, to, width, height } = unsafe { *copy };
        for Side { x, y, memory_type, host, array, pitch, .. } in [from, to] {
            expect_flags(memory_type.into(), &[ON_DEVICE])?;
            expect_flags(x as u64 | y as u64 | host | array, &[0])?;
            if pitch < width || pitch > i32::MAX as usize {
                let wrong = format!("a pitch of {pitch} for {width} bytes");
                return Err(Fault::wrong(INVALID_VALUE, wrong));
            }
        }
        for row in 0..height {
            let at = |side: Side| side.device + (row * side.pitch) as u64;
            let (to, from) = (at(to), at(from));
            context.memory.check(to, width)?;
            context.memory.check(from, width)?;
            context.streams.get_mut(stream)?.push(Work::Copy { to, from, bytes: width })?;
        }
        Ok(())
    })
}

/// Does not wait for streams that were made not to block.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) -> Status {
    in_context("cuMemcpyDtoH", |context, config| {
        context.not_in_capture("a copy to the host")?;
        context.wait_for_all(true, &mut config.failing)?;
        let data = context.memory.read(from, bytes)?;
        // SAFETY: the caller has room for so many bytes.
        unsafe { to.cast::<u8>().copy_from_nonoverlapping(data.as_ptr(), bytes) };
        Ok(())
    })
}

/// Waits for all work, which may use the memory.
fn free(call: &str, address: u64, is_host: bool) -> Status {
    in_context(call, |context, config| {
        context.not_in_capture("freeing memory")?;
        context.wait_for_all(false, &mut config.failing)?;
        context.memory.free(address, is_host)
    })
}
