//! The scales of keys and values that an engine keeps in FP8: those that the checkpoint brings, or those that a few hundred
//! tokens need. An engine for CPUs with a cache in FP32 is made for them, and removed again.

use crate::checkpoint::Checkpoint;
use crate::folder::{EngineMaker, Kernels, file_of};
use crate::prompts;
use anyhow::{Context, Result, bail, ensure};
use spec_core::engine::{Device, DrafterKind, Engine, Manifest, Precision, Role};
use spec_core::exec::kv_peaks;
use spec_core::model::{Dtype, KvScales};
use spec_core::tokenizer::Tokenizer;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// Tokens of a prompt that are looked at.
const MAX_PROMPT: usize = 256;
/// And of all of them.
const MAX_TOKENS: usize = 2048;

/// Where scales come from, if it is said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Calibration {
    /// Prompts of a file.
    Prompts(PathBuf),
    /// Nowhere: all of them are 1.
    None,
}

impl Calibration {
    /// As on the command line.
    pub(crate) fn parse(text: OsString) -> Self {
        match text.to_str() {
            Some("none") => Self::None,
            _ => Self::Prompts(text.into()),
        }
    }
}

/// The scales of an engine that is to have this manifest; none where it needs none. Where nothing is said they are the
/// checkpoint's, or found with the built-in prompts.
pub(crate) fn kv_scales(
    calibration: Option<&Calibration>,
    checkpoint: &Checkpoint,
    manifest: &Manifest,
    tokenizer: &Tokenizer,
    maker: &EngineMaker<'_>,
) -> Result<Option<KvScales>> {
    if manifest.precision.kv != Dtype::Fp8 {
        return Ok(None);
    }
    let prompts = match calibration {
        Some(Calibration::None) => return Ok(None),
        Some(Calibration::Prompts(file)) => prompts::read(&[file], tokenizer, true)?,
        None => match &checkpoint.kv_scales {
            Err(error) => bail!("{error:#}: see --kv-calibration"),
            Ok(Some(layers)) => {
                return Ok(Some(KvScales::of_layers(layers, manifest.model.num_kv_heads)));
            }
            Ok(None) => prompts::built_in(tokenizer),
        },
    };
    ensure!(!prompts.is_empty(), "no built-in prompt is one for this model: see --kv-calibration");
    if !maker.quiet {
        let file = file_of(manifest.role);
        eprintln!("{file}: finding the scales of keys and values with an engine for this CPU");
    }
    let folder = maker.folder.join("calibration");
    fs::create_dir(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let scales = find(checkpoint, manifest, &folder, &cut(prompts, manifest.limits.max_seq_len))
        .context("calibrating keys and values")?;
    fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    Ok(Some(scales))
}

/// Scales for what these texts need.
fn find(
    checkpoint: &Checkpoint,
    manifest: &Manifest,
    folder: &Path,
    texts: &[Vec<u32>],
) -> Result<KvScales> {
    // Keys and values do not depend on which tokens have logits.
    let checkpoint = &checkpoint.with_all_logits();
    let manifest = Manifest {
        device: Device::Cpu,
        model: checkpoint.config.clone(),
        role: Role::Target,
        drafter: DrafterKind::None,
        target: None,
        precision: Precision { kv: Dtype::Fp32, ..manifest.precision.clone() },
        ..manifest.clone()
    };
    let maker =
        EngineMaker { kernels: Kernels::new([&Device::Cpu; 2], None)?, quiet: true, folder };
    maker.seal(checkpoint, manifest)?.commit()?;
    let engine = Engine::open(folder.join(file_of(Role::Target)))?;
    Ok(KvScales::covering(&kv_peaks(&engine, texts)?))
}

/// As many of the texts as are looked at, each as far as it is.
fn cut(texts: Vec<Vec<u32>>, max_seq_len: usize) -> Vec<Vec<u32>> {
    let mut left = MAX_TOKENS;
    let mut cut = Vec::new();
    for mut text in texts {
        text.truncate(MAX_PROMPT.min(max_seq_len).min(left));
        left -= text.len();
        cut.extend(Some(text).filter(|text| !text.is_empty()));
    }
    cut
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_and_many_are_cut() {
        let lens = |texts: Vec<Vec<u32>>, max| -> Vec<usize> {
            cut(texts, max).iter().map(Vec::len).collect()
        };
        assert_eq!(lens(vec![vec![0; 300], vec![0; 7]], 1000), [256, 7]);
        assert_eq!(lens(vec![vec![0; 300], vec![0; 7]], 16), [16, 7]);
        assert_eq!(lens(vec![vec![0; 200]; 12], 1000), [&[200; 10][..], &[48]].concat());
    }
}
