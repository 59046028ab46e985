//! Operations on the stream: launches, products and copies within the GPU's memory.

use super::Driver;
use super::calls;
use crate::Result;
use crate::exec::cuda::device::{Address, Launch, Op};
use cudarc::driver::sys;
use std::ffi::c_void;
use std::ptr;

/// The largest pitch of a copy, of any GPU.
const MAX_PITCH: usize = i32::MAX as usize;

impl Driver {
    /// Puts an operation on the stream. `may_overlap` is whether a launch that may begin early does.
    pub(super) fn put(&self, op: &Op, may_overlap: bool) -> Result<()> {
        match op {
            Op::Launch(launch) => self.launch(launch, may_overlap),
            Op::Product(product) => {
                let products = self.products.as_ref().expect("products have been enabled");
                products.multiply(product, self.stream.cast())
            }
            &Op::Copy { from, to, bytes, rows, pitch } if rows > 1 && pitch <= MAX_PITCH => {
                self.copy_rows(from, to, bytes, rows, pitch)
            }
            &Op::Copy { from, to, bytes, rows, pitch } => (0..rows).try_for_each(|row| {
                let [from, to] = [from, to].map(|first| first + (row * pitch) as Address);
                // SAFETY: addresses of this device's memory, which the stream's order keeps apart from other work.
                let status = unsafe { calls::cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream) };
                self.check("cuMemcpyDtoDAsync", status)
            }),
        }
    }

    /// Copies ranges of memory that lie evenly apart, in one call.
    fn copy_rows(
        &self,
        from: Address,
        to: Address,
        bytes: usize,
        rows: usize,
        pitch: usize,
    ) -> Result<()> {
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcHost: ptr::null(),
            srcDevice: from,
            srcArray: ptr::null_mut(),
            srcPitch: pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstHost: ptr::null_mut(),
            dstDevice: to,
            dstArray: ptr::null_mut(),
            dstPitch: pitch,
            WidthInBytes: bytes,
            Height: rows,
        };
        // SAFETY: the description is read during the call; the addresses are of this device's memory, which the stream's
        // order keeps apart from other work.
        let status = unsafe { calls::cuMemcpy2DAsync_v2(&raw const copy, self.stream) };
        self.check("cuMemcpy2DAsync", status)
    }

    fn launch(&self, launch: &Launch, may_overlap: bool) -> Result<()> {
        let mut attribute = overlap_attribute();
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: self.stream,
            attrs: &mut attribute,
            numAttrs: u32::from(launch.overlap && may_overlap && self.overlaps),
        };
        let mut params = [launch.params.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: every kernel takes one struct by value, which `params` holds (the kernels and their mirrors assert
        // its size); the driver copies it before it returns.
        let status = unsafe {
            let function = self.functions[launch.kernel.0 as usize];
            calls::cuLaunchKernelEx(&config, function, params.as_mut_ptr(), ptr::null_mut())
        };
        self.check("cuLaunchKernelEx", status)
    }
}

/// Lets a launch start before the one ahead of it has ended.
fn overlap_attribute() -> sys::CUlaunchAttribute {
    let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    // SAFETY: plain integers and unions of them, for which zero is a value.
    let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
    attribute.id = id;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    attribute
}
