//! `libtriton_spec.so`: serves the engines of `spec-build` from NVIDIA Triton.
//!
//! `triton` is a safe layer over Triton's C interface, `contract` and `parameters` are what clients and operators
//! say; the rest is the life of a request: `serving` takes it, `mailbox` holds it, `engine` computes it,
//! `responder` and `ticket` answer it.

pub mod contract;
mod engine;
#[cfg(feature = "fault-injection")]
mod fault;
mod mailbox;
mod metrics;
mod model;
pub mod parameters;
mod responder;
mod serving;
mod ticket;
pub mod triton;

use crate::model::Model;
use crate::serving::Serving;
use crate::triton::{Backend, Instance, Placement, Request, Result};
use std::sync::Arc;

/// The backend "spec".
struct Spec;

impl Backend for Spec {
    type Model = Model;
    type Instance = Serving;

    fn placements() -> Vec<Placement> {
        vec![Placement::Cpu]
    }

    fn load(model: &triton::Model<'_>) -> Result<Model> {
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

export_backend!(Spec);
