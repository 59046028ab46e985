//! JSON on its way to and from Triton.
#![allow(unsafe_code)]

use crate::api::{check, functions};
use crate::error::{Error, Result};
use crate::sys;
use serde_json::Value;
use std::ptr;

/// A message of ours.
pub(crate) struct Message(*mut sys::TRITONSERVER_Message);

impl Message {
    /// Takes over a message.
    ///
    /// # Safety
    /// `raw` is a message that the caller owns.
    pub(crate) unsafe fn from_raw(raw: *mut sys::TRITONSERVER_Message) -> Self {
        Self(raw)
    }

    pub(crate) fn from_json(value: &Value) -> Result<Self> {
        let text = value.to_string();
        let mut raw = ptr::null_mut();
        // SAFETY: Triton copies the text.
        check(unsafe {
            functions().TRITONSERVER_MessageNewFromSerializedJson(
                &mut raw,
                text.as_ptr().cast(),
                text.len(),
            )
        })?;
        Ok(Self(raw))
    }

    pub(crate) fn to_json(&self) -> Result<Value> {
        let (mut base, mut len) = (ptr::null(), 0);
        // SAFETY: the message is alive.
        check(unsafe {
            functions().TRITONSERVER_MessageSerializeToJson(self.0, &mut base, &mut len)
        })?;
        // SAFETY: Triton gives `len` bytes that live as long as the message.
        let bytes = unsafe { std::slice::from_raw_parts(base.cast::<u8>(), len) };
        serde_json::from_slice(bytes)
            .map_err(|e| Error::internal(format!("Triton's model configuration: {e}")))
    }

    pub(crate) fn as_raw(&self) -> *mut sys::TRITONSERVER_Message {
        self.0
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        // SAFETY: ours, and deleted once. An error could not be helped.
        let _ = check(unsafe { functions().TRITONSERVER_MessageDelete(self.0) });
    }
}
