//! A safe layer over Triton's C backend interface: enough to write a whole backend without a line of unsafe
//! code.
//!
//! Implement [`Backend`] and export it from a cdylib named `libtriton_NAME.so`:
//!
//! ```standalone_crate
//! use std::sync::Arc;
//! use triton_backend::{Backend, Instance, Model, Request, Result, Times, monotonic_ns};
//!
//! /// Answers every request with its own inputs.
//! struct Echo;
//!
//! impl Backend for Echo {
//!     type Model = ();
//!     type Instance = Instance;
//!
//!     fn load(_: &Model<'_>) -> Result<()> {
//!         Ok(())
//!     }
//!     fn start(_: &Arc<()>, instance: Instance) -> Result<Instance> {
//!         Ok(instance)
//!     }
//!     fn execute(instance: &Instance, requests: Vec<Request>) {
//!         for mut request in requests {
//!             let start = monotonic_ns();
//!             let sent = request.inputs().and_then(|inputs| request.send(&inputs, true));
//!             if let Err(error) = &sent {
//!                 request.fail(error);
//!             }
//!             let times = Times { exec_start: start, compute_start: start, ..Times::default() };
//!             let end = monotonic_ns();
//!             let times = Times { compute_end: end, exec_end: end, ..times };
//!             let _ = instance.report(&request, sent.is_ok(), times);
//!         }
//!     }
//! }
//!
//! triton_backend::export_backend!(Echo);
//! ```
//!
//! What it sees to:
//! * Triton's functions are found at run time in the process that loaded the backend: nothing is linked.
//! * No panic crosses into C. A request gets exactly one final response and is released once, even if it is
//!   dropped by a panic. A response factory lives as long as anyone can ask it for cancellation.
//! * An [`Instance`] can be used from any thread, also after Triton has taken it away.
//! * When the server ends, whoever holds requests is told to answer them ([`OnExit`]); when the process exits, no thread of
//!   the backend reaches Triton any more.
//! * Tensors and strings are copied, their memory type is checked, their contents are not trusted.

mod api;
mod backend;
mod barrier;
mod entry;
mod error;
mod instance;
mod message;
mod metric;
mod model;
mod process;
mod request;
mod response;
mod shutdown;
mod sys;
mod tensor;

pub use api::{Level, log, monotonic_ns};
pub use backend::Backend;
pub use entry::panic_message;
pub use error::{Code, Error, Result};
pub use instance::{Instance, Memory, Placement, ResponseTimes, Times};
pub use metric::{Family, Kind, Metric};
pub use model::Model;
pub use request::Request;
pub use response::CancelProbe;
pub use shutdown::OnExit;
pub use tensor::{DataType, Parameter, Tensor};

/// What `export_backend!` is made of.
#[doc(hidden)]
pub mod __export {
    pub use crate::entry::{
        attributes, execute, initialize, instance_finalize, instance_initialize, model_finalize,
        model_initialize, ready,
    };
    pub use crate::sys::{
        TRITONBACKEND_Backend, TRITONBACKEND_BackendAttribute, TRITONBACKEND_Model,
        TRITONBACKEND_ModelInstance, TRITONBACKEND_Request, TRITONSERVER_Error,
    };
}
