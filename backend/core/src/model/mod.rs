//! What a model is, apart from any file or device: its shape, its number formats, its parts, its
//! rotary table and the packed layouts of its weights.

mod config;
pub mod decoder;
mod draft_head;
mod dtype;
mod e4m3;
pub(crate) mod eagle;
pub mod image;
mod kv_scales;
mod layer_skip;
pub(crate) mod medusa;
pub mod panel;
mod rope;
#[cfg(test)]
pub(crate) mod testing;

pub use config::{Family, ModelConfig, RopeScaling};
pub use draft_head::DraftHead;
pub use dtype::Dtype;
pub(crate) use dtype::Scale;
pub use eagle::{EagleConfig, EagleKind, TapNorms};
pub(crate) use kv_scales::HeadScales;
pub use kv_scales::{KvPeaks, KvScales};
pub use layer_skip::LayerSkip;
pub use medusa::MedusaConfig;
pub(crate) use rope::RopeTable;
