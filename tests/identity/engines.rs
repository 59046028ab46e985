//! SmolLM2 in INT8 with drafters of every kind; none where the model is not there.

use crate::common::cache;
use crate::common::models::{self, Recipe, SMOLLM2};
use serde_json::json;
use spec_core::engine::Engine;
use spec_core::model::Dtype;
use std::fs;
use std::path::Path;

/// Layers of the poor drafter, of the model's 30: with 12 hardly any draft is right.
const FEW_LAYERS: usize = 22;

/// Drafts by look-up.
pub(crate) fn ngram() -> Option<Engine> {
    Some(Recipe::ngram(models::hf(SMOLLM2)?, Dtype::Int8).engine("smollm2-135m-int8-ngram"))
}

/// Does not draft.
pub(crate) fn no_drafter() -> Option<Engine> {
    let hf = models::hf(SMOLLM2)?;
    Some(Recipe::plain(hf, Dtype::Int8).engine("smollm2-135m-int8"))
}

/// Drafts with the same weights in a narrower format: most drafts are right.
pub(crate) fn good_drafter(dtype: Dtype) -> Option<Engine> {
    let whole = models::hf(SMOLLM2)?;
    let recipe = Recipe::model(whole.clone(), dtype, whole, Dtype::Fp8);
    Some(recipe.engine(&format!("smollm2-135m-{dtype}-by-fp8")))
}

/// Drafts with the model's first layers only, and a sixth of its tokens: most drafts are wrong.
pub(crate) fn poor_drafter() -> Option<Engine> {
    let cut = models::first_layers(SMOLLM2, FEW_LAYERS)?;
    let recipe = Recipe::model(models::hf(SMOLLM2)?, Dtype::Int8, cut, Dtype::Int4);
    let recipe = recipe.with_draft_vocab("8192");
    Some(recipe.engine("smollm2-135m-int8-by-cut-int4-of-8192"))
}

/// Drafts with the model's own layers but for some MLPs: many drafts are wrong.
pub(crate) fn skipping() -> Option<Engine> {
    let whole = models::hf(SMOLLM2)?;
    let layers = json!({ "attention": [], "mlp": [2, 5, 7, 12, 16, 20, 24] }).to_string();
    let write = |dir: &Path| {
        fs::create_dir_all(dir).expect("a new folder");
        fs::write(dir.join("skip_layers.json"), &layers).expect("writes");
    };
    let file = cache::folder("skip_layers", &[&layers], write).join("skip_layers.json");
    let recipe = Recipe::skipping(whole, Dtype::Int8, file);
    Some(recipe.engine("smollm2-135m-int8-skipping"))
}
