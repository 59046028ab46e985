//! Responses and what makes them. A factory is deleted when the last of its owners is gone: one that leaks
//! would keep its model from ever being unloaded, one that dies early would crash the server.
#![allow(unsafe_code)]

use crate::api::{c_string, check, functions, into_raw};
use crate::error::{Error, Result};
use crate::sys;
use crate::tensor::Tensor;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// Makes the responses of one request.
pub(crate) struct ResponseFactory(Arc<Handle>);

struct Handle(NonNull<sys::TRITONBACKEND_ResponseFactory>);

// SAFETY: Triton's factory may be used from any thread; `ResponseFactory`, which makes responses, is owned
// by one request and takes turns by that; asking for cancellation is an atomic read.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: ours, and deleted once. An error could not be helped.
        let _ = check(unsafe { functions().TRITONBACKEND_ResponseFactoryDelete(self.0.as_ptr()) });
    }
}

/// Asks whether a client still wants its answer.
#[derive(Clone)]
pub struct CancelProbe(Arc<Handle>);

impl CancelProbe {
    /// Whether the client cancelled or went away.
    pub fn is_cancelled(&self) -> bool {
        let mut cancelled = false;
        // SAFETY: the factory lives as long as this.
        let asked = check(unsafe {
            functions().TRITONBACKEND_ResponseFactoryIsCancelled(self.0.0.as_ptr(), &mut cancelled)
        });
        asked.is_ok() && cancelled
    }
}

impl ResponseFactory {
    /// # Safety
    /// `request` is alive.
    pub(crate) unsafe fn new(request: NonNull<sys::TRITONBACKEND_Request>) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: by the contract of this function.
        check(unsafe { functions().TRITONBACKEND_ResponseFactoryNew(&mut raw, request.as_ptr()) })?;
        let raw = NonNull::new(raw).ok_or_else(|| Error::internal("a null response factory"))?;
        Ok(Self(Arc::new(Handle(raw))))
    }

    pub(crate) fn cancel_probe(&self) -> CancelProbe {
        CancelProbe(Arc::clone(&self.0))
    }

    /// A response with these outputs, to be sent.
    pub(crate) fn build(&self, outputs: &[Tensor]) -> Result<Response> {
        let mut response = self.response()?;
        for output in outputs {
            response.add(output)?;
        }
        Ok(response)
    }

    /// Sends the final response, an error. A client that cannot be told anything gets the final flag alone.
    pub(crate) fn send_error(&self, error: &Error) {
        let sent = self.response().and_then(|response| response.send(true, Some(error)));
        if sent.is_err() {
            // SAFETY: the factory is alive. If this fails too, Triton itself is at its end.
            let _ = check(unsafe {
                functions().TRITONBACKEND_ResponseFactorySendFlags(self.raw(), FINAL)
            });
        }
    }

    pub(crate) fn raw(&self) -> *mut sys::TRITONBACKEND_ResponseFactory {
        self.0.0.as_ptr()
    }

    fn response(&self) -> Result<Response> {
        let mut raw = ptr::null_mut();
        // SAFETY: the factory is alive.
        check(unsafe { functions().TRITONBACKEND_ResponseNewFromFactory(&mut raw, self.raw()) })?;
        Ok(Response { raw })
    }
}

const FINAL: u32 = sys::TRITONSERVER_RESPONSE_COMPLETE_FINAL;

/// A response that has not been sent; dropping it takes it back.
pub(crate) struct Response {
    raw: *mut sys::TRITONBACKEND_Response,
}

impl Response {
    fn add(&mut self, tensor: &Tensor) -> Result<()> {
        let name = c_string(&tensor.name);
        let mut output = ptr::null_mut();
        let (mut buffer, mut device) = (ptr::null_mut(), 0);
        let mut memory = sys::TRITONSERVER_MEMORY_CPU;
        // SAFETY: the response is alive and not sent; name and shape outlive the call.
        unsafe {
            check(functions().TRITONBACKEND_ResponseOutput(
                self.raw,
                &mut output,
                name.as_ptr(),
                tensor.datatype as u32,
                tensor.shape.as_ptr(),
                tensor.shape.len() as u32,
            ))?;
            check(functions().TRITONBACKEND_OutputBuffer(
                output,
                &mut buffer,
                tensor.data.len() as u64,
                &mut memory,
                &mut device,
            ))?;
        }
        if memory == sys::TRITONSERVER_MEMORY_GPU {
            let message = format!("output '{}' is asked for in GPU memory", tensor.name);
            return Err(Error::unsupported(message));
        }
        if !tensor.data.is_empty() {
            // SAFETY: Triton gave a buffer of the size asked for, in host memory.
            unsafe {
                ptr::copy_nonoverlapping(tensor.data.as_ptr(), buffer.cast(), tensor.data.len());
            }
        }
        Ok(())
    }

    /// Hands it to Triton, whatever comes of it.
    pub(crate) fn send(self, is_final: bool, error: Option<&Error>) -> Result<()> {
        let raw_error = error.map_or(ptr::null_mut(), into_raw);
        let flags = if is_final { FINAL } else { 0 };
        let raw = std::mem::ManuallyDrop::new(self).raw;
        // SAFETY: the response is alive and sent once; the error stays ours and is deleted once.
        unsafe {
            let sent = check(functions().TRITONBACKEND_ResponseSend(raw, flags, raw_error));
            if !raw_error.is_null() {
                functions().TRITONSERVER_ErrorDelete(raw_error);
            }
            sent
        }
    }
}

impl Drop for Response {
    fn drop(&mut self) {
        // SAFETY: ours, not sent, and deleted once. An error could not be helped.
        let _ = check(unsafe { functions().TRITONBACKEND_ResponseDelete(self.raw) });
    }
}
