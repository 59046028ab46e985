//! What drafts from the hidden states of another model, and has no embedding or layers of a decoder's own: of which kind it is.

use super::{EagleConfig, MedusaConfig};
use serde::{Deserialize, Serialize};

/// A head on a target's hidden states.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DraftHead {
    /// Reads every token with the state before it, and drafts on from states of its own.
    Eagle(EagleConfig),
    /// Several, each of which drafts one token from the target's last state.
    Medusa(MedusaConfig),
}
