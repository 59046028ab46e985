//! A safe layer over Triton's C backend interface. It knows nothing of models or of speculation.

mod error;
mod tensor;

pub use error::{Code, Error, Result};
pub use tensor::{DataType, Parameter, Tensor};
