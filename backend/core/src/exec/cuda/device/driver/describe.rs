//! What a GPU and its driver are, as the driver tells it.
#![allow(unsafe_code)]

use super::calls::{self as calls, check};
use crate::Result;
use crate::exec::cuda::device::Description;
use cudarc::driver::sys;
use std::ffi::CStr;

/// Driver branch that came with CUDA 13.0, for systems that do not tell theirs.
const DRIVER_OF_CUDA_13: u32 = 580;

/// What this GPU is.
///
/// # Safety
/// `device` comes from `cuDeviceGet`.
pub(super) unsafe fn describe(device: sys::CUdevice) -> Result<Description> {
    use sys::CUdevice_attribute as Attribute;
    let mut name = [0; 256];
    // SAFETY: the driver writes at most the length given, with its terminator.
    unsafe { check("cuDeviceGetName", calls::cuDeviceGetName(name.as_mut_ptr(), 256, device))? };
    let attribute = |which| -> Result<u32> {
        let mut value = 0;
        // SAFETY: a pointer to a local.
        check("cuDeviceGetAttribute", unsafe {
            calls::cuDeviceGetAttribute(&mut value, which, device)
        })?;
        Ok(value as u32)
    };
    // SAFETY: the driver ended the name with a zero.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    Ok(Description {
        name,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        driver: driver_branch()?,
        num_sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
    })
}

/// The branch that the kernel module tells, or the one that the library's CUDA version came with, if that is newer: a
/// compatibility package may stand in front of an older module.
fn driver_branch() -> Result<u32> {
    let told = std::fs::read_to_string("/sys/module/nvidia/version").ok();
    let branch = told.and_then(|text| text.split('.').next()?.trim().parse().ok());
    let mut version = 0;
    // SAFETY: a pointer to a local.
    check("cuDriverGetVersion", unsafe { calls::cuDriverGetVersion(&mut version) })?;
    let at_least = if version >= 13_000 { DRIVER_OF_CUDA_13 } else { 0 };
    Ok(branch.unwrap_or(0).max(at_least))
}
