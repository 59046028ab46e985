//! Modules, functions and launches.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::slice;

use super::put;
use crate::code::Module;
use crate::context::Config;
use crate::cubin::Cubin;
use crate::fault::{Fault, INVALID_IMAGE, INVALID_VALUE, NOT_SUPPORTED, Outcome, Status};
use crate::machine::in_context;
use crate::table::Handle;

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
const OVERLAP: c_uint = 6;

/// `CUlaunchConfig`.
#[repr(C)]
struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: Handle,
    attributes: *const Attribute,
    num_attributes: c_uint,
}

/// `CUlaunchAttribute`: the value is one of many, in 64 bytes.
#[repr(C)]
struct Attribute {
    id: c_uint,
    padding: [c_uint; 1],
    value: [c_int; 16],
}

/// # Safety
/// As the driver's; so below.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut Handle, image: *const c_void) -> Status {
    in_context("cuModuleLoadData", |context, config| {
        context.not_in_capture("loading code")?;
        // SAFETY: the caller's image is whole, or no image at all, of which only a header is read.
        let cubin = unsafe { Cubin::read(image.cast()) };
        let cubin = cubin.map_err(|message| Fault::wrong(INVALID_IMAGE, message))?;
        let loaded = Module::new(cubin, context.capability, config)?;
        // SAFETY: the caller's pointer, as the interface asks; so in all that follow.
        unsafe { put(module, context.modules.put(loaded)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: Handle) -> Status {
    in_context("cuModuleUnload", |context, _| {
        context.not_in_capture("unloading code")?;
        context.unload(module)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    function: *mut Handle,
    module: Handle,
    name: *const c_char,
) -> Status {
    in_context("cuModuleGetFunction", |context, _| {
        // SAFETY: a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let found = context.modules.get(module)?.function(module, &name)?;
        // SAFETY: as above.
        unsafe { put(function, context.functions.put(found)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncSetAttribute(function: Handle, attribute: c_uint, value: c_int) -> Status {
    in_context("cuFuncSetAttribute", |context, _| {
        let capability = context.capability;
        context.functions.get_mut(function)?.set(attribute, value, capability)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernelEx(
    config: *const LaunchConfig,
    function: Handle,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Status {
    in_context("cuLaunchKernelEx", |context, _| {
        if config.is_null() || params.is_null() || !extra.is_null() {
            return Err(Fault::wrong(INVALID_VALUE, "a null pointer, or `extra`"));
        }
        // SAFETY: the caller's, as the interface asks.
        let config = unsafe { &*config };
        // SAFETY: likewise.
        let overlap = unsafe { overlaps(config) }?;
        let bytes = context.functions.get(function)?.kernel.param_bytes;
        // SAFETY: the kernels of this project take one parameter; the caller's is as long as the kernel's.
        let params = unsafe { slice::from_raw_parts((*params).cast::<u8>(), bytes) }.to_vec();
        let &LaunchConfig { grid, block, shared_bytes, stream, .. } = config;
        let config = Config { grid, block, shared_bytes, overlap };
        context.launch(stream, function, &config, params)
    })
}

/// Whether the launch may begin before the one ahead of it has ended.
///
/// # Safety
/// The attributes are as many as the configuration says.
unsafe fn overlaps(config: &LaunchConfig) -> Outcome<bool> {
    if config.num_attributes == 0 {
        return Ok(false);
    }
    // SAFETY: the caller says so.
    let attributes =
        unsafe { slice::from_raw_parts(config.attributes, config.num_attributes as usize) };
    match attributes {
        [Attribute { id: OVERLAP, value, .. }] => Ok(value[0] != 0),
        _ => {
            let ids: Vec<_> = attributes.iter().map(|attribute| attribute.id).collect();
            let message = format!("attributes {ids:?} of launches are not emulated");
            Err(Fault::wrong(NOT_SUPPORTED, message))
        }
    }
}
