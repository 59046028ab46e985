//! What a backend is: the trait to implement; `export_backend!` has Triton find it.

use crate::error::Result;
use crate::instance::{Instance, Placement};
use crate::model::Model;
use crate::request::Request;
use std::sync::Arc;

/// A backend: what becomes of models, instances and requests. The [documentation of the crate](crate) has one;
/// [`export_backend!`](crate::export_backend) has Triton find it.
pub trait Backend: 'static {
    /// What a loaded model keeps, shared by its instances.
    type Model: Send + Sync + 'static;
    /// What an instance keeps.
    type Instance: Send + Sync + 'static;

    /// Where instances run if the configuration does not say, the best first.
    fn placements() -> Vec<Placement> {
        vec![Placement::Cpu]
    }

    /// Loads a model. An error keeps it from being served and is what the operator reads.
    fn load(model: &Model<'_>) -> Result<Self::Model>;

    /// Starts an instance of a model.
    fn start(model: &Arc<Self::Model>, instance: Instance) -> Result<Self::Instance>;

    /// Takes requests over. Each gets exactly one final response, from here or later from another thread.
    /// Triton calls this for one batch at a time: not returning is how an instance says that it is full.
    fn execute(instance: &Self::Instance, requests: Vec<Request>);

    /// Ends an instance. Requests may be in its hands; all are to be answered before this returns.
    fn stop(instance: Self::Instance) {
        drop(instance);
    }

    /// Whether an instance can serve. Called from any thread, beside everything else.
    fn ready(_instance: &Self::Instance) -> Result<()> {
        Ok(())
    }
}
