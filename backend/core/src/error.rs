//! The one error type of spec-core. A variant says what the *caller* can do about it; the message
//! names the thing and both values, lowercase, without a full stop.

use std::path::{Path, PathBuf};

/// What went wrong, by remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An engine file is damaged, foreign or from another version: rebuild it.
    #[error("{0}")]
    BadEngine(String),
    /// A checkpoint, tokenizer or config that was given as input is wrong: fix the input.
    #[error("{0}")]
    BadModel(String),
    /// A request field is out of its limits: change the request.
    #[error("{field}: {message}")]
    BadRequest {
        /// The field at fault, as the client spelled it.
        field: &'static str,
        /// What is wrong with it and what is allowed.
        message: String,
    },
    /// The request or model asks for something that this build does not do.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// There is no room now (queue, pages, memory): try later or raise a limit.
    #[error("{0}")]
    Capacity(String),
    /// The operating system refused a file operation.
    #[error("{path}: {source}")]
    Io {
        /// The file concerned.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The compute device failed.
    #[error("device: {0}")]
    Device(String),
}

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An I/O error with the file it concerns.
    pub(crate) fn io(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io { path: path.as_ref().to_path_buf(), source }
    }

    /// A request field that is out of its limits.
    pub fn bad_request(field: &'static str, message: impl Into<String>) -> Self {
        Self::BadRequest { field, message: message.into() }
    }
}
