//! Errors with Triton's codes. They cross into C in one place, `into_raw` beside the function table.

/// Triton's error codes, as clients see them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Code {
    /// Nothing better fits.
    Unknown = 0,
    /// A fault of ours (HTTP 500).
    Internal = 1,
    /// The thing asked for does not exist (HTTP 404).
    NotFound = 2,
    /// The request is wrong (HTTP 400).
    InvalidArg = 3,
    /// Not now: try again (HTTP 503).
    Unavailable = 4,
    /// Not built (HTTP 501).
    Unsupported = 5,
    /// It is there already (HTTP 409).
    AlreadyExists = 6,
    /// The client went away or asked to stop (HTTP 400, gRPC CANCELLED).
    Cancelled = 7,
}

impl Code {
    /// The code with this number in Triton's C interface.
    pub(crate) fn from_raw(raw: u32) -> Self {
        match raw {
            1 => Self::Internal,
            2 => Self::NotFound,
            3 => Self::InvalidArg,
            4 => Self::Unavailable,
            5 => Self::Unsupported,
            6 => Self::AlreadyExists,
            7 => Self::Cancelled,
            _ => Self::Unknown,
        }
    }
}

/// What went wrong, for the client or the server's log.
///
/// ```
/// use triton_backend::{Code, Error};
///
/// // HTTP 404, gRPC NOT_FOUND.
/// let error = Error::new(Code::NotFound, "there is no voice 'tenor'");
/// assert_eq!(error.to_string(), "there is no voice 'tenor'");
/// assert_eq!(Error::invalid_arg("too long").code, Code::InvalidArg);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// What the caller can do about it.
    pub code: Code,
    /// One line for people.
    pub message: String,
}

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error with a code.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// The request is wrong.
    pub fn invalid_arg(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArg, message)
    }

    /// A fault of ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Code::Internal, message)
    }

    /// Not now.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(Code::Unavailable, message)
    }

    /// Not built.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(Code::Unsupported, message)
    }

    /// The client wants no more of it.
    pub fn cancelled() -> Self {
        Self::new(Code::Cancelled, "Request was cancelled")
    }
}
