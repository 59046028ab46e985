//! What a backend is: the trait to implement; `export_backend!` makes Triton find it.

use super::error::Result;
use super::instance::{Instance, Placement};
use super::model::Model;
use super::request::Request;
use std::sync::Arc;

/// A backend: what becomes of models, instances and requests.
pub trait Backend: 'static {
    /// What a loaded model keeps, shared by its instances.
    type Model: Send + Sync + 'static;
    /// What an instance keeps.
    type Instance: Send + Sync + 'static;

    /// Where instances run if the configuration does not say, the best first.
    fn placements() -> Vec<Placement>;

    /// Loads a model.
    fn load(model: &Model<'_>) -> Result<Self::Model>;

    /// Starts an instance of a model.
    fn start(model: &Arc<Self::Model>, instance: Instance) -> Result<Self::Instance>;

    /// Takes requests over. Each gets exactly one final response, from here or later from another thread.
    /// Triton calls this for one batch at a time: not returning is how an instance says that it is full.
    fn execute(instance: &Self::Instance, requests: Vec<Request>);

    /// Ends an instance. Requests may be in its hands; all are to be answered before this returns.
    fn stop(instance: Self::Instance);

    /// Whether an instance can serve. Called from any thread, beside everything else.
    fn ready(instance: &Self::Instance) -> Result<()>;
}
