//! A model folder as `spec-build` writes it: `NAME/config.pbtxt` and, in the newest version folder,
//! the engines and the tokenizer.

use crate::engine::Engine;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// File name of the target's engine in a version folder.
pub const TARGET_FILE: &str = "target.engine";
/// File name of the drafter's engine in a version folder.
pub const DRAFT_FILE: &str = "draft.engine";

/// An opened model folder.
pub struct ModelFolder {
    /// The version folder.
    pub path: PathBuf,
    /// The target's engine; it names its drafter.
    pub target: Engine,
    /// The tokenizer of both models.
    pub tokenizer: Tokenizer,
}

impl ModelFolder {
    /// Opens a model folder or one of its version folders.
    pub fn open(path: &Path) -> Result<Self> {
        let path = version_folder(path)?;
        let target = Engine::open(path.join(TARGET_FILE))?;
        let tokenizer = Tokenizer::open(&path)?;
        let named = &target.manifest().tokenizer;
        if tokenizer.hash() != named {
            return Err(Error::BadEngine(format!(
                "{}: tokenizer.json has hash {}, the engine was built with {named}: rebuild with spec-build",
                path.display(),
                tokenizer.hash()
            )));
        }
        Ok(Self { path, target, tokenizer })
    }
}

/// The folder that holds the engines: `path` itself, or its highest numbered sub-folder.
fn version_folder(path: &Path) -> Result<PathBuf> {
    if path.join(TARGET_FILE).is_file() {
        return Ok(path.to_path_buf());
    }
    let entries = std::fs::read_dir(path).map_err(|source| Error::io(path, source))?;
    let newest = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u64>().ok())
        .filter(|version| path.join(version.to_string()).join(TARGET_FILE).is_file())
        .max();
    match newest {
        Some(version) => Ok(path.join(version.to_string())),
        None => Err(Error::BadModel(format!(
            "{}: no version folder with {TARGET_FILE}: not written by spec-build",
            path.display()
        ))),
    }
}
