//! A model instance as Triton knows it: its name, its place, and its statistics.
#![allow(unsafe_code)]

use crate::api::{check, functions, into_raw, text, try_functions};
use crate::error::{Code, Error, Result};
use crate::request::Request;
use crate::shutdown::OnExit;
use crate::sys;
use std::ptr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// Where an instance runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// On the CPU.
    Cpu,
    /// On this GPU.
    Gpu(i32),
    /// Where the model wants.
    Model,
}

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// In the machine.
    Cpu,
    /// In the machine, page-locked.
    Pinned,
    /// On this GPU.
    Gpu(i64),
}

/// An instance. Its statistics can be reported from any thread; once Triton has taken the instance away,
/// reports go nowhere.
///
/// ```no_run
/// use triton_backend::{Instance, Request, Times, monotonic_ns};
///
/// fn answer(instance: &Instance, mut request: Request) {
///     let start = monotonic_ns();
///     let sent = request.send(&[], true);
///     let end = monotonic_ns();
///     let times = Times { exec_start: start, compute_start: start, compute_end: end, exec_end: end };
///     // Of interest to Triton's statistics alone, and no reason to fail.
///     let _ = instance.report(&request, sent.is_ok(), times);
/// }
/// ```
#[derive(Clone)]
pub struct Instance(Arc<RwLock<Handle>>);

struct Handle(*mut sys::TRITONBACKEND_ModelInstance);

// SAFETY: Triton's statistics guard themselves by locks; the lock around the handle sees to it that it is not
// used after its end.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// Moments in the life of a request, in nanoseconds of the monotonic clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// It was first worked on; until then it waited.
    pub exec_start: u64,
    /// Computing began.
    pub compute_start: u64,
    /// Computing ended.
    pub compute_end: u64,
    /// Its last response was sent.
    pub exec_end: u64,
}

/// Moments in the life of one of several responses, in nanoseconds of the monotonic clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponseTimes {
    /// Work on it began.
    pub start: u64,
    /// Writing its outputs began; 0 for a response without any.
    pub output_start: u64,
    /// It was sent.
    pub end: u64,
}

impl Instance {
    /// # Safety
    /// `raw` is alive until `end` is called.
    pub(crate) unsafe fn from_raw(raw: *mut sys::TRITONBACKEND_ModelInstance) -> Self {
        Self(Arc::new(RwLock::new(Handle(raw))))
    }

    /// Triton is about to free it.
    pub(crate) fn end(&self) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).0 = ptr::null_mut();
    }

    fn with<T>(
        &self,
        body: impl FnOnce(*mut sys::TRITONBACKEND_ModelInstance) -> Result<T>,
    ) -> Result<T> {
        let handle = self.0.read().unwrap_or_else(PoisonError::into_inner);
        match handle.0.is_null() {
            true => Err(Error::unavailable("the model instance is gone")),
            false => body(handle.0),
        }
    }

    /// Its name.
    pub fn name(&self) -> Result<String> {
        self.with(|raw| {
            let mut name = ptr::null();
            // SAFETY: the instance is alive, and its name with it.
            unsafe {
                check(functions().TRITONBACKEND_ModelInstanceName(raw, &mut name))?;
                Ok(text(name))
            }
        })
    }

    /// Where it is to run.
    pub fn placement(&self) -> Result<Placement> {
        self.with(|raw| {
            let (mut kind, mut device) = (0, 0);
            // SAFETY: the instance is alive.
            unsafe {
                check(functions().TRITONBACKEND_ModelInstanceKind(raw, &mut kind))?;
                check(functions().TRITONBACKEND_ModelInstanceDeviceId(raw, &mut device))?;
            }
            Ok(match kind {
                sys::TRITONSERVER_INSTANCEGROUPKIND_GPU => Placement::Gpu(device),
                sys::TRITONSERVER_INSTANCEGROUPKIND_MODEL => Placement::Model,
                _ => Placement::Cpu,
            })
        })
    }

    /// Has `answer` called when the server has been ending for `limit`, or for half of the time that it gives itself, if
    /// that is less, and when the process exits. It is to answer all requests that the instance holds within the time
    /// that it is given, and the instance is to take no more. It is called as long as the result lives.
    pub fn on_exit(
        &self,
        limit: Duration,
        answer: impl Fn(Duration) + Send + Sync + 'static,
    ) -> OnExit {
        OnExit::new(self.clone(), limit, answer)
    }

    /// Whether its server has been told to end. Then it does not say any more whether it is live.
    pub(crate) fn is_server_exiting(&self) -> bool {
        // Were the way into Triton barred in between, this thread would stop for good, with what its caller has locked.
        let Some(_calling) = try_functions() else { return false };
        let live = self.with(|raw| {
            let (mut model, mut server) = (ptr::null_mut(), ptr::null_mut());
            let mut live = false;
            // SAFETY: the instance is alive, its model and its server with it.
            unsafe {
                check(functions().TRITONBACKEND_ModelInstanceModel(raw, &mut model))?;
                check(functions().TRITONBACKEND_ModelServer(model, &mut server))?;
                Ok(check(functions().TRITONSERVER_ServerIsLive(server, &mut live)))
            }
        });
        matches!(live, Ok(Err(Error { code: Code::Unavailable, .. })))
    }

    /// Reports a request, before it is released, and the batch that it counts as.
    pub fn report(&self, request: &Request, success: bool, times: Times) -> Result<()> {
        self.with(|raw| {
            let Times { exec_start, compute_start, compute_end, exec_end } = times;
            // SAFETY: instance and request are alive.
            unsafe {
                check(functions().TRITONBACKEND_ModelInstanceReportStatistics(
                    raw,
                    request.raw(),
                    success,
                    exec_start,
                    compute_start,
                    compute_end,
                    exec_end,
                ))?;
                if success {
                    // In-flight batching has no batches of requests: each counts as its own.
                    check(functions().TRITONBACKEND_ModelInstanceReportBatchStatistics(
                        raw,
                        1,
                        exec_start,
                        compute_start,
                        compute_end,
                        exec_end,
                    ))?;
                }
            }
            Ok(())
        })
    }

    /// Reports one response of a request that may have many.
    pub fn report_response(
        &self,
        request: &Request,
        times: ResponseTimes,
        error: Option<&Error>,
    ) -> Result<()> {
        self.with(|raw| {
            let statistics = ResponseStatistics::new()?;
            let raw_error = error.map_or(ptr::null_mut(), into_raw);
            // SAFETY: instance, factory and statistics are alive; the error stays ours.
            let reported = unsafe { statistics.report(raw, request, times, raw_error) };
            if !raw_error.is_null() {
                // SAFETY: ours, and deleted once.
                unsafe { functions().TRITONSERVER_ErrorDelete(raw_error) };
            }
            reported
        })
    }

    /// Reports the bytes that it holds of each memory, until it ends.
    pub fn report_memory(&self, held: &[(Memory, usize)]) -> Result<()> {
        self.with(|raw| {
            let held: Result<Vec<_>> =
                held.iter().map(|&(of, bytes)| Usage::new(of, bytes)).collect();
            let held = held?;
            let mut usage: Vec<_> = held.iter().map(|usage| usage.0).collect();
            // SAFETY: instance and attributes are alive; Triton copies the attributes.
            check(unsafe {
                functions().TRITONBACKEND_ModelInstanceReportMemoryUsage(
                    raw,
                    usage.as_mut_ptr(),
                    usage.len() as u32,
                )
            })
        })
    }
}

/// Bytes of a memory, as Triton has them described.
struct Usage(*mut sys::TRITONSERVER_BufferAttributes);

impl Usage {
    fn new(of: Memory, bytes: usize) -> Result<Self> {
        let (kind, id) = match of {
            Memory::Cpu => (sys::TRITONSERVER_MEMORY_CPU, 0),
            Memory::Pinned => (sys::TRITONSERVER_MEMORY_CPU_PINNED, 0),
            Memory::Gpu(number) => (sys::TRITONSERVER_MEMORY_GPU, number),
        };
        let (f, mut raw) = (functions(), ptr::null_mut());
        // SAFETY: the pointer is ours.
        check(unsafe { f.TRITONSERVER_BufferAttributesNew(&mut raw) })?;
        let usage = Self(raw);
        // SAFETY: the attributes are alive.
        unsafe {
            check(f.TRITONSERVER_BufferAttributesSetMemoryType(raw, kind))?;
            check(f.TRITONSERVER_BufferAttributesSetMemoryTypeId(raw, id))?;
            check(f.TRITONSERVER_BufferAttributesSetByteSize(raw, bytes))?;
        }
        Ok(usage)
    }
}

impl Drop for Usage {
    fn drop(&mut self) {
        // SAFETY: ours, and deleted once. An error could not be helped.
        let _ = check(unsafe { functions().TRITONSERVER_BufferAttributesDelete(self.0) });
    }
}

/// Statistics of one response.
struct ResponseStatistics(*mut sys::TRITONBACKEND_ModelInstanceResponseStatistics);

impl ResponseStatistics {
    fn new() -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is ours.
        check(unsafe { functions().TRITONBACKEND_ModelInstanceResponseStatisticsNew(&mut raw) })?;
        Ok(Self(raw))
    }

    /// # Safety
    /// `instance` is alive, `error` is null or alive.
    unsafe fn report(
        &self,
        instance: *mut sys::TRITONBACKEND_ModelInstance,
        request: &Request,
        times: ResponseTimes,
        error: *mut sys::TRITONSERVER_Error,
    ) -> Result<()> {
        let (f, raw) = (functions(), self.0);
        let factory = request.factory().raw();
        // SAFETY: all are alive, by the contract of this function and as the request holds its factory.
        unsafe {
            check(f.TRITONBACKEND_ModelInstanceResponseStatisticsSetModelInstance(raw, instance))?;
            check(f.TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseFactory(raw, factory))?;
            check(
                f.TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseStart(raw, times.start),
            )?;
            check(f.TRITONBACKEND_ModelInstanceResponseStatisticsSetComputeOutputStart(
                raw,
                times.output_start,
            ))?;
            check(f.TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseEnd(raw, times.end))?;
            check(f.TRITONBACKEND_ModelInstanceResponseStatisticsSetError(raw, error))?;
            check(f.TRITONBACKEND_ModelInstanceReportResponseStatistics(raw))
        }
    }
}

impl Drop for ResponseStatistics {
    fn drop(&mut self) {
        // SAFETY: ours, and deleted once. An error could not be helped.
        let _ = check(unsafe {
            functions().TRITONBACKEND_ModelInstanceResponseStatisticsDelete(self.0)
        });
    }
}
