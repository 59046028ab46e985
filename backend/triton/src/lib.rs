//! Backends for NVIDIA's Triton Inference Server in Rust, without a line of unsafe code: a safe layer over Triton's C
//! backend interface.
//!
//! # A backend on one page
//!
//! A backend named `echo` is a library `libtriton_echo.so`. `Cargo.toml`:
//!
//! ```toml
//! [package]
//! name = "triton-echo"
//! version = "0.1.0"
//! edition = "2024"
//!
//! [lib]
//! name = "triton_echo"
//! crate-type = ["cdylib"]
//!
//! [dependencies]
//! triton-backend = { path = "../triton-backend" }
//! ```
//!
//! `src/lib.rs`, where [`Backend`] is what it does and [`export_backend!`] has Triton find it:
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
//!
//!     fn start(_: &Arc<()>, instance: Instance) -> Result<Instance> {
//!         Ok(instance)
//!     }
//!
//!     fn execute(instance: &Instance, requests: Vec<Request>) {
//!         for mut request in requests {
//!             let start = monotonic_ns();
//!             let sent = request.inputs().and_then(|inputs| request.send(&inputs, true));
//!             if let Err(error) = &sent {
//!                 request.fail(error);
//!             }
//!             let end = monotonic_ns();
//!             let times =
//!                 Times { exec_start: start, compute_start: start, compute_end: end, exec_end: end };
//!             // For Triton's statistics.
//!             let _ = instance.report(&request, sent.is_ok(), times);
//!         }
//!     }
//! }
//!
//! triton_backend::export_backend!(Echo);
//! ```
//!
//! A model that it serves is a folder with a `config.pbtxt` and a folder for each version, which may be empty:
//!
//! ```text
//! backends/echo/libtriton_echo.so
//! models/parrot/config.pbtxt
//! models/parrot/1/
//! ```
//!
//! ```text
//! backend: "echo"
//! input [ { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
//! output [ { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
//! instance_group [ { kind: KIND_CPU } ]
//! ```
//!
//! ```text
//! cargo build --release && cp target/release/libtriton_echo.so backends/echo/
//! tritonserver --backend-directory=$PWD/backends --model-repository=$PWD/models
//! curl localhost:8000/v2/models/parrot/infer \
//!   -d '{"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": ["hello"]}]}'
//! ```
//!
//! `examples/echo.rs` is one with parameters and metrics.
//!
//! # What it sees to
//!
//! * Triton's functions are found at run time in the process that loaded the backend: nothing is linked. It takes
//!   version 1.19 of the interface, as Triton 2.51 has it, or a later 1.x; an older server is refused by name.
//! * No panic crosses into C. A request gets exactly one final response and is released once, even if it is
//!   dropped by a panic. A response factory lives as long as anyone can ask it for cancellation.
//! * An [`Instance`] can be used from any thread, also after Triton has taken it away.
//! * When the server ends, whoever holds requests is told to answer them ([`OnExit`]); when the process exits, no thread of
//!   the backend reaches Triton any more.
//! * Tensors and strings are copied, their memory type is checked, their contents are not trusted.
//!
//! The functions that Triton calls are defined by [`export_backend!`] where it stands, not by this crate: any number of
//! backends can use it in one server, each with its own copy.

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
