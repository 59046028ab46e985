//! `libtriton_spec.so`: serves the engines of `spec-build` from NVIDIA Triton.
//!
//! `contract` and `parameters` are what clients and operators say; the rest is the life of a request: `serving` takes
//! it, `intake` holds it until it is read, `mailbox` until the engine thread takes it, `engine_thread` computes it, `responder`
//! and `ticket` answer it. While it waits it has a place in the `room`, and a `watch` looks after its client and its
//! time. All that is Triton's is behind `triton_backend`.

pub mod contract;
mod engine_thread;
#[cfg_attr(not(feature = "fault-injection"), path = "no_fault.rs")]
mod fault;
mod intake;
mod mailbox;
mod memory;
mod metrics;
mod model;
pub mod parameters;
mod responder;
mod room;
mod running;
mod serving;
mod ticket;
mod watch;

use crate::model::Model;
use crate::serving::Serving;
use std::sync::Arc;
use triton_backend::{Backend, Instance, Request, Result};

/// The backend "spec".
struct Spec;

impl Backend for Spec {
    type Model = Model;
    type Instance = Serving;

    fn load(model: &triton_backend::Model<'_>) -> Result<Model> {
        Model::load(model)
    }

    fn start(model: &Arc<Model>, instance: Instance) -> Result<Serving> {
        Serving::start(model, instance)
    }

    fn execute(serving: &Serving, requests: Vec<Request>) {
        serving.take(requests);
    }

    fn stop(serving: Serving) {
        serving.stop();
    }

    fn ready(serving: &Serving) -> Result<()> {
        serving.ready()
    }
}

triton_backend::export_backend!(Spec);
