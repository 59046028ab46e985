//! The functions through which Triton calls a backend. Each is a guard around a body: no panic and no Rust error
//! crosses into C. `export_backend!` gives them their C names.
#![allow(unsafe_code)]

use crate::api::{Level, check, functions, into_raw, log, resolve, try_functions};
use crate::backend::Backend;
use crate::barrier;
use crate::error::{Error, Result};
use crate::instance::{Instance, Placement};
use crate::model::Model;
use crate::request::Request;
use crate::{process, sys};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// State of an instance, and its handle to be ended with it.
struct Started<B: Backend> {
    state: B::Instance,
    handle: Instance,
}

/// The handle of an instance that starts, which is ended unless it did: Triton frees an instance that did not.
struct Starting(Option<Instance>);

impl Drop for Starting {
    fn drop(&mut self) {
        self.0.iter().for_each(Instance::end);
    }
}

/// Runs a body whose errors and panics go to Triton. When the process exits no body begins any more, and one that has
/// begun does not return to Triton, whose objects may be gone.
fn guard(body: impl FnOnce() -> Result<()>) -> *mut sys::TRITONSERVER_Error {
    if barrier::is_barred() {
        return into_raw(&exiting());
    }
    let outcome = shield(body);
    barrier::stop_if_barred();
    outcome
}

/// Turns errors and panics into Triton's errors.
fn shield(body: impl FnOnce() -> Result<()>) -> *mut sys::TRITONSERVER_Error {
    let outcome = catch_unwind(AssertUnwindSafe(body));
    match outcome.unwrap_or_else(|panic| Err(Error::internal(panic_message(&*panic)))) {
        Ok(()) => ptr::null_mut(),
        Err(error) => into_raw(&error),
    }
}

fn exiting() -> Error {
    Error::unavailable("the server is exiting")
}

/// What a panic said, as it is told for panics in the functions of [`Backend`].
///
/// ```
/// let panic = std::panic::catch_unwind(|| panic!("no room")).unwrap_err();
/// assert_eq!(triton_backend::panic_message(&*panic), "panic: no room");
/// ```
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panic: {}", text.unwrap_or("without a message"))
}

/// Body of `TRITONBACKEND_Initialize`.
pub fn initialize() -> *mut sys::TRITONSERVER_Error {
    guard(|| {
        resolve()?;
        process::note_exit();
        Ok(())
    })
}

/// Body of `TRITONBACKEND_GetBackendAttribute`.
///
/// # Safety
/// Called by Triton with its own objects, as are all functions below.
pub unsafe fn attributes<B: Backend>(
    attributes: *mut sys::TRITONBACKEND_BackendAttribute,
) -> *mut sys::TRITONSERVER_Error {
    guard(|| {
        resolve()?;
        for placement in B::placements() {
            let (kind, device) = match placement {
                Placement::Cpu => (sys::TRITONSERVER_INSTANCEGROUPKIND_CPU, None),
                Placement::Gpu(idx) => (sys::TRITONSERVER_INSTANCEGROUPKIND_GPU, Some(idx as u64)),
                Placement::Model => (sys::TRITONSERVER_INSTANCEGROUPKIND_MODEL, None),
            };
            let devices = device.as_slice();
            // SAFETY: by the contract of this function; the ids outlive the call.
            check(unsafe {
                functions().TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(
                    attributes,
                    kind,
                    1,
                    devices.as_ptr(),
                    devices.len() as u64,
                )
            })?;
        }
        Ok(())
    })
}

/// Body of `TRITONBACKEND_ModelInitialize`.
///
/// # Safety
/// As above.
pub unsafe fn model_initialize<B: Backend>(
    raw: *mut sys::TRITONBACKEND_Model,
) -> *mut sys::TRITONSERVER_Error {
    guard(|| {
        // SAFETY: the model is alive during the call.
        let state = Arc::new(B::load(&unsafe { Model::from_raw(raw) })?);
        let state = Arc::into_raw(state).cast_mut().cast();
        // SAFETY: the state is taken back in `model_finalize`.
        check(unsafe { functions().TRITONBACKEND_ModelSetState(raw, state) })
    })
}

/// Body of `TRITONBACKEND_ModelFinalize`.
///
/// # Safety
/// As above.
pub unsafe fn model_finalize<B: Backend>(
    raw: *mut sys::TRITONBACKEND_Model,
) -> *mut sys::TRITONSERVER_Error {
    guard(|| {
        let mut state = ptr::null_mut();
        // SAFETY: by the contract; a state that is there came from `model_initialize` and is taken once.
        unsafe {
            check(functions().TRITONBACKEND_ModelState(raw, &mut state))?;
            if !state.is_null() {
                check(functions().TRITONBACKEND_ModelSetState(raw, ptr::null_mut()))?;
                drop(Arc::from_raw(state.cast::<B::Model>()));
            }
        }
        Ok(())
    })
}

/// Body of `TRITONBACKEND_ModelInstanceInitialize`.
///
/// # Safety
/// As above.
pub unsafe fn instance_initialize<B: Backend>(
    raw: *mut sys::TRITONBACKEND_ModelInstance,
) -> *mut sys::TRITONSERVER_Error {
    guard(|| {
        let (mut model, mut state) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: by the contract; the model's state came from `model_initialize` and outlives its instances.
        let model = unsafe {
            check(functions().TRITONBACKEND_ModelInstanceModel(raw, &mut model))?;
            check(functions().TRITONBACKEND_ModelState(model, &mut state))?;
            if state.is_null() {
                return Err(Error::internal("an instance of a model that is not loaded"));
            }
            let state = state.cast_const().cast::<B::Model>();
            Arc::increment_strong_count(state);
            Arc::from_raw(state)
        };
        // SAFETY: `instance_finalize` ends the handle before Triton frees the instance, and `starting` if it does not start.
        let handle = unsafe { Instance::from_raw(raw) };
        let mut starting = Starting(Some(handle.clone()));
        let state = Started::<B> { state: B::start(&model, handle.clone())?, handle };
        let state = Box::into_raw(Box::new(state));
        // SAFETY: the state is taken back in `instance_finalize`, or here if Triton did not take it.
        unsafe {
            let set = check(functions().TRITONBACKEND_ModelInstanceSetState(raw, state.cast()));
            set.inspect_err(|_| B::stop(Box::from_raw(state).state))?;
        }
        starting.0 = None;
        Ok(())
    })
}

/// Body of `TRITONBACKEND_ModelInstanceFinalize`.
///
/// # Safety
/// As above.
pub unsafe fn instance_finalize<B: Backend>(
    raw: *mut sys::TRITONBACKEND_ModelInstance,
) -> *mut sys::TRITONSERVER_Error {
    guard(|| {
        let mut state = ptr::null_mut();
        // SAFETY: by the contract; a state that is there came from `instance_initialize` and is taken once.
        let started = unsafe {
            check(functions().TRITONBACKEND_ModelInstanceState(raw, &mut state))?;
            if state.is_null() {
                return Ok(());
            }
            check(functions().TRITONBACKEND_ModelInstanceSetState(raw, ptr::null_mut()))?;
            Box::from_raw(state.cast::<Started<B>>())
        };
        let Started { state, handle } = *started;
        let stopped = catch_unwind(AssertUnwindSafe(|| B::stop(state)));
        handle.end();
        stopped.map_err(|panic| Error::internal(panic_message(&*panic)))
    })
}

/// The state of an instance that has been started.
///
/// # Safety
/// `raw` is alive, and is not finalized while the result is used.
unsafe fn started<'a, B: Backend>(
    raw: *mut sys::TRITONBACKEND_ModelInstance,
) -> Result<&'a Started<B>> {
    let mut state = ptr::null_mut();
    // SAFETY: by the contract; a state that is there came from `instance_initialize`.
    unsafe {
        check(functions().TRITONBACKEND_ModelInstanceState(raw, &mut state))?;
        state.cast::<Started<B>>().as_ref()
    }
    .ok_or_else(|| Error::unavailable("the model instance is not started"))
}

/// Body of `TRITONBACKEND_ModelInstanceExecute`.
///
/// # Safety
/// As above.
pub unsafe fn execute<B: Backend>(
    raw: *mut sys::TRITONBACKEND_ModelInstance,
    requests: *mut *mut sys::TRITONBACKEND_Request,
    count: u32,
) -> *mut sys::TRITONSERVER_Error {
    if barrier::is_barred() {
        return into_raw(&exiting());
    }
    process::note_exit_signals();
    // An error may be returned only as long as no request has been taken over.
    // SAFETY: Triton does not finalize an instance while it executes.
    let started = match unsafe { started::<B>(raw) } {
        Ok(started) => started,
        Err(error) => return into_raw(&error),
    };
    let mut taken = Vec::with_capacity(count as usize);
    for idx in 0..count as usize {
        // SAFETY: Triton gives `count` requests, and is done with the array, not with them, on return.
        let request = unsafe { NonNull::new(*requests.add(idx)) };
        // SAFETY: the request is alive and ours.
        match request.map(|request| unsafe { Request::from_raw(request) }) {
            Some(Ok(request)) => taken.push(request),
            // Without a factory nothing can be told to this client; the others are served.
            Some(Err(error)) => log(Level::Error, &error.message),
            None => {}
        }
    }
    // Requests that a panic drops are answered by being dropped.
    let served = catch_unwind(AssertUnwindSafe(|| B::execute(&started.state, taken)));
    if let Err(panic) = served {
        log(Level::Error, &panic_message(&*panic));
    }
    barrier::stop_if_barred();
    ptr::null_mut()
}

/// Body of `TRITONBACKEND_ModelInstanceReady`.
///
/// # Safety
/// As above.
pub unsafe fn ready<B: Backend>(
    raw: *mut sys::TRITONBACKEND_ModelInstance,
) -> *mut sys::TRITONSERVER_Error {
    // A frontend asks, and is waited for when the process exits: this must return in any case.
    let Some(_calling) = try_functions() else { return into_raw(&exiting()) };
    // SAFETY: Triton asks only between start and end of an instance.
    shield(|| B::ready(&unsafe { started::<B>(raw) }?.state))
}

/// Exports a backend: the C functions by which Triton finds it. Once in a cdylib, at its root or anywhere else.
///
/// ```standalone_crate
/// use std::sync::Arc;
/// use triton_backend::{Backend, Error, Instance, Model, Request, Result};
///
/// /// Refuses every request.
/// struct Closed;
///
/// impl Backend for Closed {
///     type Model = ();
///     type Instance = ();
///
///     fn load(_: &Model<'_>) -> Result<()> {
///         Ok(())
///     }
///     fn start(_: &Arc<()>, _: Instance) -> Result<()> {
///         Ok(())
///     }
///     fn execute(_: &(), requests: Vec<Request>) {
///         for mut request in requests {
///             request.fail(&Error::unavailable("closed"));
///         }
///     }
/// }
///
/// triton_backend::export_backend!(Closed);
/// ```
#[macro_export]
macro_rules! export_backend {
    ($backend:ty) => {
        #[allow(unsafe_code)]
        const _: () = {
            use $crate::__export;

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_Initialize(
                _: *mut __export::TRITONBACKEND_Backend,
            ) -> *mut __export::TRITONSERVER_Error {
                __export::initialize()
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_GetBackendAttribute(
                _: *mut __export::TRITONBACKEND_Backend,
                attributes: *mut __export::TRITONBACKEND_BackendAttribute,
            ) -> *mut __export::TRITONSERVER_Error {
                // SAFETY: Triton passes its own object; so below.
                unsafe { __export::attributes::<$backend>(attributes) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelInitialize(
                model: *mut __export::TRITONBACKEND_Model,
            ) -> *mut __export::TRITONSERVER_Error {
                // SAFETY: as above.
                unsafe { __export::model_initialize::<$backend>(model) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelFinalize(
                model: *mut __export::TRITONBACKEND_Model,
            ) -> *mut __export::TRITONSERVER_Error {
                // SAFETY: as above.
                unsafe { __export::model_finalize::<$backend>(model) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelInstanceInitialize(
                instance: *mut __export::TRITONBACKEND_ModelInstance,
            ) -> *mut __export::TRITONSERVER_Error {
                // SAFETY: as above.
                unsafe { __export::instance_initialize::<$backend>(instance) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelInstanceFinalize(
                instance: *mut __export::TRITONBACKEND_ModelInstance,
            ) -> *mut __export::TRITONSERVER_Error {
                // SAFETY: as above.
                unsafe { __export::instance_finalize::<$backend>(instance) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelInstanceExecute(
                instance: *mut __export::TRITONBACKEND_ModelInstance,
                requests: *mut *mut __export::TRITONBACKEND_Request,
                count: u32,
            ) -> *mut __export::TRITONSERVER_Error {
                // SAFETY: as above.
                unsafe { __export::execute::<$backend>(instance, requests, count) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelInstanceReady(
                instance: *mut __export::TRITONBACKEND_ModelInstance,
            ) -> *mut __export::TRITONSERVER_Error {
                // SAFETY: as above.
                unsafe { __export::ready::<$backend>(instance) }
            }
        };
    };
}
