//! A GPU that several models work on.

use super::Device;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A device that is shared.
#[derive(Clone)]
pub struct Gpu(Arc<Mutex<Box<dyn Device>>>);

impl Gpu {
    /// Shares a device.
    pub fn new(device: Box<dyn Device>) -> Self {
        Self(Arc::new(Mutex::new(device)))
    }

    /// The device. What a panic left behind is as good as before: commands are whole or were not issued.
    pub fn lock(&self) -> MutexGuard<'_, Box<dyn Device>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
