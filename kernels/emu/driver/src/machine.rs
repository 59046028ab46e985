//! All devices of the process, which context each thread works in, and the guard that every call goes through.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use crate::config::Config;
use crate::context::Context;
use crate::fault::{
    Fault, INVALID_CONTEXT, INVALID_DEVICE, NOT_INITIALIZED, Outcome, SUCCESS, Status, UNKNOWN,
};
use crate::table::{self, Handle};

/// The machine, from `cuInit` on.
pub(crate) struct Machine {
    pub(crate) config: Config,
    pub(crate) devices: Vec<Device>,
}

/// A GPU.
#[derive(Default)]
pub(crate) struct Device {
    /// How often the primary context is held, while it is.
    num_held: usize,
    primary: Option<(Handle, Context)>,
}

static MACHINE: Mutex<Option<Machine>> = Mutex::new(None);

thread_local! {
    /// The context that the thread works in; 0 is none.
    static CURRENT: Cell<Handle> = const { Cell::new(0) };
}

/// Tells on stderr what was done wrong.
pub(crate) fn complain(what: &str) {
    eprintln!("emulated libcuda: {what}");
}

/// Runs the body of a call: nothing leaves it but a status.
pub(crate) fn call(name: &str, body: impl FnOnce(&mut Machine) -> Outcome) -> Status {
    guarded(name, |machine| {
        body(
            machine
                .as_mut()
                .ok_or_else(|| Fault::wrong(NOT_INITIALIZED, "cuInit was not called"))?,
        )
    })
}

/// The same for a call that works in the thread's context.
pub(crate) fn in_context(
    name: &str,
    body: impl FnOnce(&mut Context, &mut Config) -> Outcome,
) -> Status {
    call(name, |machine| {
        let current = CURRENT.get();
        let none = || Fault::wrong(INVALID_CONTEXT, "the thread has no context");
        let Machine { config, devices } = machine;
        let mut contexts = devices.iter_mut().filter_map(|device| device.primary.as_mut());
        let (_, context) = contexts.find(|(handle, _)| *handle == current).ok_or_else(none)?;
        match context.sticky {
            Some(status) => Err(Fault::plain(status)),
            None => body(context, config),
        }
    })
}

/// `cuInit`.
pub(crate) fn init() -> Status {
    guarded("cuInit", |machine| {
        if machine.is_none() {
            let config = Config::from_env().map_err(|message| Fault::wrong(UNKNOWN, message))?;
            let devices = (0..config.num_devices).map(|_| Device::default()).collect();
            *machine = Some(Machine { config, devices });
        }
        Ok(())
    })
}

/// `cuCtxSetCurrent`.
pub(crate) fn set_current(context: Handle) -> Status {
    call("cuCtxSetCurrent", |machine| {
        let mut contexts = machine.devices.iter().filter_map(|device| device.primary.as_ref());
        let found = contexts.find(|(handle, _)| *handle == context);
        match found {
            None if context != 0 => {
                let message = format!("there is no context {context:#x}");
                Err(Fault::wrong(INVALID_CONTEXT, message))
            }
            Some((_, Context { sticky: Some(status), .. })) => Err(Fault::plain(*status)),
            _ => {
                CURRENT.set(context);
                Ok(())
            }
        }
    })
}

/// Says what is still held when the process ends.
pub(crate) fn at_exit() {
    let machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    for (ordinal, device) in machine.iter().flat_map(|machine| machine.devices.iter().enumerate()) {
        if device.num_held > 0 {
            let count = device.num_held;
            complain(&format!("the context of device {ordinal} is held {count} times at the end"));
        }
    }
}

impl Machine {
    /// The device of a number.
    pub(crate) fn device(&mut self, ordinal: i32) -> Outcome<&mut Device> {
        let found = usize::try_from(ordinal).ok().and_then(|idx| self.devices.get_mut(idx));
        found.ok_or_else(|| Fault::wrong(INVALID_DEVICE, format!("there is no device {ordinal}")))
    }

    /// Holds a device's primary context, which is made for the first that does.
    pub(crate) fn retain(&mut self, ordinal: i32) -> Outcome<Handle> {
        let (capability, bytes) = (self.config.capability, self.config.memory_bytes);
        let device = self.device(ordinal)?;
        device.num_held += 1;
        let new = || (table::fresh(), Context::new(capability, bytes));
        Ok(device.primary.get_or_insert_with(new).0)
    }

    /// Lets it go. With the last one it must be empty; after a kernel has failed it is emptied anyhow.
    pub(crate) fn release(&mut self, ordinal: i32) -> Outcome {
        let device = self.device(ordinal)?;
        let none = || Fault::wrong(INVALID_CONTEXT, "the context is not held");
        device.num_held = device.num_held.checked_sub(1).ok_or_else(none)?;
        if device.num_held > 0 {
            return Ok(());
        }
        let (_, context) = device.primary.take().ok_or_else(none)?;
        let fences = context.memory.check_fences();
        let left = if context.sticky.is_none() { context.left() } else { Vec::new() };
        let wrong = |message: String| Err(Fault::wrong(SUCCESS, message));
        match fences {
            Err(message) => wrong(message),
            Ok(()) if !left.is_empty() => wrong(format!("never freed: {}", left.join(", "))),
            Ok(()) => Ok(()),
        }
    }
}

/// Nothing leaves the body but a status; what was done wrong is told.
fn guarded(name: &str, body: impl FnOnce(&mut Option<Machine>) -> Outcome) -> Status {
    let guarded = catch_unwind(AssertUnwindSafe(|| {
        let mut machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
        let failing = machine.as_mut().and_then(|machine| machine.config.failing.as_mut());
        match failing.and_then(|failing| failing.of(name)) {
            Some(status) => Err(Fault::plain(status)),
            None => body(&mut machine),
        }
    }));
    match guarded {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(fault)) => {
            if let Some(wrong) = fault.wrong {
                complain(&format!("{name}: {wrong}"));
            }
            fault.status
        }
        // The panic has told what it is about.
        Err(_) => {
            complain(&format!("{name}: panicked"));
            UNKNOWN
        }
    }
}
