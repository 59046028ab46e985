//! What Triton knows of a model while it is loaded.
#![allow(unsafe_code)]

use crate::api::{check, functions, text};
use crate::error::Result;
use crate::message::Message;
use crate::sys;
use serde_json::Value;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::ptr;

/// Version of the configuration's JSON.
const CONFIG_VERSION: u32 = 1;

/// A model that is being loaded.
///
/// ```no_run
/// use triton_backend::{Error, Model, Result};
///
/// /// parameters { key: "max_bytes" value { string_value: "4096" } }
/// fn max_bytes(model: &Model<'_>) -> Result<usize> {
///     let config = model.config()?;
///     let text = config["parameters"]["max_bytes"]["string_value"].as_str().unwrap_or("1024");
///     let refusal = |_| Error::invalid_arg(format!("parameter 'max_bytes' is '{text}', no number"));
///     text.parse().map_err(refusal)
/// }
/// ```
pub struct Model<'a> {
    raw: *mut sys::TRITONBACKEND_Model,
    _loading: PhantomData<&'a ()>,
}

impl Model<'_> {
    /// # Safety
    /// `raw` is alive for as long as the result is used.
    pub(crate) unsafe fn from_raw(raw: *mut sys::TRITONBACKEND_Model) -> Self {
        Self { raw, _loading: PhantomData }
    }

    /// Its name.
    pub fn name(&self) -> Result<String> {
        let mut name = ptr::null();
        // SAFETY: the model is alive, and its name with it.
        unsafe {
            check(functions().TRITONBACKEND_ModelName(self.raw, &mut name))?;
            Ok(text(name))
        }
    }

    /// The version that is loaded.
    pub fn version(&self) -> Result<u64> {
        let mut version = 0;
        // SAFETY: the model is alive.
        check(unsafe { functions().TRITONBACKEND_ModelVersion(self.raw, &mut version) })?;
        Ok(version)
    }

    /// The folder of the version that is loaded.
    pub fn folder(&self) -> Result<PathBuf> {
        let (mut kind, mut location) = (0, ptr::null());
        // SAFETY: the model is alive, and its location with it.
        let location = unsafe {
            check(functions().TRITONBACKEND_ModelRepository(self.raw, &mut kind, &mut location))?;
            text(location)
        };
        Ok(PathBuf::from(location).join(self.version()?.to_string()))
    }

    /// Its configuration, with Triton's defaults filled in.
    pub fn config(&self) -> Result<Value> {
        let mut message = ptr::null_mut();
        // SAFETY: the model is alive; the message is ours.
        unsafe {
            check(functions().TRITONBACKEND_ModelConfig(self.raw, CONFIG_VERSION, &mut message))?;
            Message::from_raw(message).to_json()
        }
    }

    /// Whether what the configuration leaves open is to be filled in.
    pub fn auto_completes(&self) -> Result<bool> {
        let mut completes = false;
        // SAFETY: the model is alive.
        check(unsafe {
            functions().TRITONBACKEND_ModelAutoCompleteConfig(self.raw, &mut completes)
        })?;
        Ok(completes)
    }

    /// Changes the configuration: inputs, outputs, batch size and decoupling; Triton ignores other changes.
    pub fn set_config(&self, config: &Value) -> Result<()> {
        let message = Message::from_json(config)?;
        // SAFETY: the model is alive; Triton reads the message and leaves it to us.
        check(unsafe {
            functions().TRITONBACKEND_ModelSetConfig(self.raw, CONFIG_VERSION, message.as_raw())
        })
    }
}
