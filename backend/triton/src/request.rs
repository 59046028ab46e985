//! A request in our hands. Whatever happens to it, it gets exactly one final response and is released once:
//! dropping it unanswered answers it with an error.
#![allow(unsafe_code)]

use crate::api::{c_string, check, functions, text};
use crate::error::{Error, Result};
use crate::response::{CancelProbe, ResponseFactory};
use crate::sys;
use crate::tensor::{DataType, Parameter, Tensor};
use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::time::Duration;

/// A request that Triton handed over. It can be moved to another thread and answered there, with one response or, if the
/// model is decoupled, with any number of them.
///
/// ```no_run
/// use triton_backend::{DataType, Error, Request, Result, Tensor};
///
/// /// Counts down from the number in the first input, one response for each.
/// fn count_down(mut request: Request) {
///     if let Err(error) = try_count_down(&mut request) {
///         request.fail(&error);
///     }
/// }
///
/// fn try_count_down(request: &mut Request) -> Result<()> {
///     let (inputs, probe) = (request.inputs()?, request.cancel_probe());
///     let from = inputs.first().map(|input| input.data.as_slice());
///     let from = from.and_then(|data| data.try_into().ok()).map(u32::from_le_bytes);
///     let from = from.ok_or_else(|| Error::invalid_arg("the first input is no single UINT32"))?;
///     for number in (0..=from).rev() {
///         if probe.is_cancelled() {
///             return Err(Error::cancelled());
///         }
///         let output = Tensor {
///             name: "COUNT".into(),
///             datatype: DataType::Uint32,
///             shape: vec![1],
///             data: number.to_le_bytes().to_vec(),
///         };
///         request.send(&[output], number == 0)?;
///     }
///     Ok(())
/// }
/// ```
pub struct Request {
    raw: NonNull<sys::TRITONBACKEND_Request>,
    factory: ResponseFactory,
    answered: bool,
}

// SAFETY: Triton lets a request be used from any thread, from one at a time.
unsafe impl Send for Request {}

impl Request {
    /// Takes over a request. One that responses cannot be made for is released: its client cannot be told.
    ///
    /// # Safety
    /// `raw` is a request that Triton handed to `TRITONBACKEND_ModelInstanceExecute` and nobody released.
    pub(crate) unsafe fn from_raw(raw: NonNull<sys::TRITONBACKEND_Request>) -> Result<Self> {
        // SAFETY: by the contract of this function.
        match unsafe { ResponseFactory::new(raw) } {
            Ok(factory) => Ok(Self { raw, factory, answered: false }),
            Err(error) => {
                // SAFETY: as above.
                unsafe { release(raw) };
                Err(error)
            }
        }
    }

    /// The client's name for it; empty where it gave none.
    pub fn id(&self) -> String {
        let mut id = ptr::null();
        // SAFETY: the request is alive, and so is its id.
        unsafe {
            match check(functions().TRITONBACKEND_RequestId(self.raw(), &mut id)) {
                Ok(()) => text(id),
                Err(_) => String::new(),
            }
        }
    }

    /// Copies of its inputs.
    pub fn inputs(&self) -> Result<Vec<Tensor>> {
        let mut count = 0;
        // SAFETY: the request is alive.
        check(unsafe { functions().TRITONBACKEND_RequestInputCount(self.raw(), &mut count) })?;
        (0..count).map(|idx| self.input(idx)).collect()
    }

    fn input(&self, idx: u32) -> Result<Tensor> {
        self.unread_input(idx)?.read()
    }

    /// Copies of the inputs of these names that are no larger than `max_bytes`; and the bytes of all inputs.
    pub fn small_inputs(&self, names: &[&str], max_bytes: usize) -> Result<(Vec<Tensor>, usize)> {
        let mut count = 0;
        // SAFETY: the request is alive.
        check(unsafe { functions().TRITONBACKEND_RequestInputCount(self.raw(), &mut count) })?;
        let (mut small, mut bytes) = (Vec::new(), 0usize);
        for idx in 0..count {
            let input = self.unread_input(idx)?;
            bytes = bytes.saturating_add(input.bytes);
            if input.bytes <= max_bytes && names.contains(&input.name.as_str()) {
                small.push(input.read()?);
            }
        }
        Ok((small, bytes))
    }

    fn unread_input(&self, idx: u32) -> Result<UnreadInput<'_>> {
        let mut raw = ptr::null_mut();
        let (mut name, mut datatype, mut shape) = (ptr::null(), 0, ptr::null());
        let (mut num_dims, mut bytes, mut num_buffers) = (0, 0, 0);
        // SAFETY: the request is alive, and its inputs with it.
        unsafe {
            check(functions().TRITONBACKEND_RequestInputByIndex(self.raw(), idx, &mut raw))?;
            check(functions().TRITONBACKEND_InputProperties(
                raw,
                &mut name,
                &mut datatype,
                &mut shape,
                &mut num_dims,
                &mut bytes,
                &mut num_buffers,
            ))?;
            Ok(UnreadInput {
                raw,
                name: text(name),
                datatype: DataType::from_raw(datatype)?,
                shape: slice(shape, num_dims as usize).to_vec(),
                bytes: usize::try_from(bytes).unwrap_or(usize::MAX),
                num_buffers,
                _request: PhantomData,
            })
        }
    }

    /// Its parameters that are numbers, truth values or text.
    pub fn parameters(&self) -> Result<Vec<(String, Parameter)>> {
        let mut parameters = Vec::new();
        self.each_parameter(|parameter| parameters.extend(parameter.read()))?;
        Ok(parameters)
    }

    /// Those of these names that are no longer than `max_bytes`; and the bytes of all.
    pub fn small_parameters(
        &self,
        names: &[&str],
        max_bytes: usize,
    ) -> Result<(Vec<(String, Parameter)>, usize)> {
        let (mut small, mut bytes) = (Vec::new(), 0usize);
        self.each_parameter(|parameter| {
            let len = parameter.len();
            bytes = bytes.saturating_add(len);
            if len <= max_bytes && names.contains(&parameter.name.as_str()) {
                small.extend(parameter.read());
            }
        })?;
        Ok((small, bytes))
    }

    fn each_parameter(&self, mut look: impl FnMut(UnreadParameter<'_>)) -> Result<()> {
        let mut count = 0;
        // SAFETY: the request is alive.
        check(unsafe { functions().TRITONBACKEND_RequestParameterCount(self.raw(), &mut count) })?;
        for idx in 0..count {
            let (mut key, mut kind, mut value) = (ptr::null(), 0, ptr::null());
            // SAFETY: the request is alive, and its parameters with it.
            unsafe {
                check(functions().TRITONBACKEND_RequestParameter(
                    self.raw(),
                    idx,
                    &mut key,
                    &mut kind,
                    &mut value,
                ))?;
                look(UnreadParameter { name: text(key), kind, value, _request: PhantomData });
            }
        }
        Ok(())
    }

    /// Names of the outputs that the client wants.
    pub fn wanted_outputs(&self) -> Result<Vec<String>> {
        let mut count = 0;
        // SAFETY: the request is alive.
        check(unsafe { functions().TRITONBACKEND_RequestOutputCount(self.raw(), &mut count) })?;
        let name = |idx| {
            let mut name = ptr::null();
            // SAFETY: the request is alive, and its outputs' names with it.
            unsafe {
                check(functions().TRITONBACKEND_RequestOutputName(self.raw(), idx, &mut name))?;
                Ok(text(name))
            }
        };
        (0..count).map(name).collect()
    }

    /// The level of priority that the server gives it: from 1, which goes first, or 0 where the model's configuration has
    /// no levels.
    pub fn priority(&self) -> u64 {
        let mut priority = 0;
        // SAFETY: the request is alive. A request of a backend and one of a client are the same object of Triton's, and
        // only the latter's interface tells the priority.
        let asked = check(unsafe {
            functions()
                .TRITONSERVER_InferenceRequestPriorityUInt64(self.raw().cast(), &mut priority)
        });
        asked.map_or(0, |()| priority)
    }

    /// Tells who traces it what happened when, by the clock of [`monotonic_ns`](crate::monotonic_ns). Of names that end
    /// with `_START` and `_END` OpenTelemetry gets a span; others are events. Does nothing where nobody traces it, or in a
    /// server that cannot.
    pub fn trace(&self, activities: impl FnOnce() -> Vec<(String, u64)>) {
        let mut trace = ptr::null_mut();
        // SAFETY: the request is alive.
        let asked =
            check(unsafe { functions().TRITONBACKEND_RequestTrace(self.raw(), &mut trace) });
        if asked.is_err() || trace.is_null() {
            return;
        }
        for (name, at) in activities() {
            let name = c_string(&name);
            // SAFETY: the request holds its trace, and Triton copies the name. A trace that takes no activities says so,
            // and nothing depends on it.
            let _ = check(unsafe {
                functions().TRITONSERVER_InferenceTraceReportActivity(trace, at, name.as_ptr())
            });
        }
    }

    /// How long the client wants to wait, if it said so.
    pub fn timeout(&self) -> Option<Duration> {
        let mut us = 0;
        // SAFETY: the request is alive.
        let asked = check(unsafe {
            functions().TRITONBACKEND_InferenceRequestTimeoutMicroseconds(self.raw(), &mut us)
        });
        (asked.is_ok() && us > 0).then(|| Duration::from_micros(us))
    }

    /// Tells whether the client still wants it; can be asked from another thread, and after the end.
    pub fn cancel_probe(&self) -> CancelProbe {
        self.factory.cancel_probe()
    }

    /// Sends a response, the last one if `is_final`. If the outputs cannot be written, the client is told so
    /// and nothing may follow.
    pub fn send(&mut self, outputs: &[Tensor], is_final: bool) -> Result<()> {
        assert!(!self.answered, "nothing follows a final response");
        let response = self.factory.build(outputs).inspect_err(|error| self.fail(error))?;
        // Triton owns it now and passes the flag on, even if it says that sending failed.
        self.answered = is_final;
        response.send(is_final, None)
    }

    /// Ends it with an error.
    pub fn fail(&mut self, error: &Error) {
        if !self.answered {
            self.answered = true;
            self.factory.send_error(error);
        }
    }

    /// Whether its final response is out.
    pub fn is_answered(&self) -> bool {
        self.answered
    }

    pub(crate) fn factory(&self) -> &ResponseFactory {
        &self.factory
    }

    pub(crate) fn raw(&self) -> *mut sys::TRITONBACKEND_Request {
        self.raw.as_ptr()
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.fail(&Error::internal("the backend gave up on this request"));
        // SAFETY: ours, and released once.
        unsafe { release(self.raw) };
    }
}

/// # Safety
/// `raw` is a request of ours that nobody released.
unsafe fn release(raw: NonNull<sys::TRITONBACKEND_Request>) {
    let all = sys::TRITONSERVER_REQUEST_RELEASE_ALL;
    // SAFETY: by the contract of this function. An error would mean that it was released before: there is
    // nothing to do about it.
    let _ = check(unsafe { functions().TRITONBACKEND_RequestRelease(raw.as_ptr(), all) });
}

/// Triton gives null for what is empty.
///
/// # Safety
/// `base` is null or points to `len` values that live as long as the result is used.
unsafe fn slice<'a, T>(base: *const T, len: usize) -> &'a [T] {
    if base.is_null() || len == 0 {
        return &[];
    }
    // SAFETY: by the contract of this function.
    unsafe { std::slice::from_raw_parts(base, len) }
}

/// An input whose elements have not been copied.
struct UnreadInput<'a> {
    raw: *mut sys::TRITONBACKEND_Input,
    name: String,
    datatype: DataType,
    shape: Vec<i64>,
    bytes: usize,
    num_buffers: u32,
    _request: PhantomData<&'a Request>,
}

impl UnreadInput<'_> {
    fn read(self) -> Result<Tensor> {
        let mut data = Vec::with_capacity(self.bytes);
        (0..self.num_buffers).try_for_each(|idx| self.append_buffer(idx, &mut data))?;
        Ok(Tensor { name: self.name, datatype: self.datatype, shape: self.shape, data })
    }

    fn append_buffer(&self, idx: u32, data: &mut Vec<u8>) -> Result<()> {
        let (mut base, mut bytes) = (ptr::null(), 0);
        let (mut memory, mut device) = (sys::TRITONSERVER_MEMORY_CPU, 0);
        // SAFETY: the request is alive, and its inputs and their buffers with it.
        unsafe {
            check(functions().TRITONBACKEND_InputBuffer(
                self.raw,
                idx,
                &mut base,
                &mut bytes,
                &mut memory,
                &mut device,
            ))?;
            if memory == sys::TRITONSERVER_MEMORY_GPU {
                let name = &self.name;
                return Err(Error::unsupported(format!(
                    "input '{name}' lies in GPU memory: send it from host memory"
                )));
            }
            data.extend_from_slice(slice(base.cast(), bytes as usize));
        }
        Ok(())
    }
}

/// A parameter whose text has not been copied.
struct UnreadParameter<'a> {
    name: String,
    kind: u32,
    /// To a value of this kind, or to the first byte of a C string for text; or null.
    value: *const c_void,
    _request: PhantomData<&'a Request>,
}

impl UnreadParameter<'_> {
    /// Bytes of its text, those of its name included.
    fn len(&self) -> usize {
        let is_text = self.kind == sys::TRITONSERVER_PARAMETER_STRING && !self.value.is_null();
        // SAFETY: the request is alive, and its parameters with it; text ends with a zero.
        let text = is_text.then(|| unsafe { CStr::from_ptr(self.value.cast()) });
        self.name.len() + text.map_or(0, CStr::count_bytes)
    }

    fn read(self) -> Option<(String, Parameter)> {
        if self.value.is_null() {
            return None;
        }
        // SAFETY: the request is alive, its parameters with it, and a value has the type that is named.
        let value = unsafe {
            match self.kind {
                sys::TRITONSERVER_PARAMETER_STRING => {
                    Parameter::String(text(self.value.cast::<c_char>()))
                }
                sys::TRITONSERVER_PARAMETER_INT => Parameter::Int(*self.value.cast::<i64>()),
                sys::TRITONSERVER_PARAMETER_BOOL => Parameter::Bool(*self.value.cast::<bool>()),
                sys::TRITONSERVER_PARAMETER_DOUBLE => Parameter::Double(*self.value.cast::<f64>()),
                _ => return None,
            }
        };
        Some((self.name, value))
    }
}
