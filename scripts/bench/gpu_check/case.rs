//! Tiny random models for the checks: written as checkpoints and built by spec-build, for the CPU and for the GPU.

use crate::common::models::Recipe;
use crate::common::tiny::{self, HeadKind, Sizes};
use crate::gpu::Bed;
use spec_core::engine::Engine;
use spec_core::model::Dtype;
use spec_core::runtime::TARGET_FILE;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

/// As small as the kernels take.
const SMALL: Sizes =
    Sizes { hidden: 96, head_dim: 64, num_heads: 4, num_kv_heads: 2, ff: 160, qk_norm: false };
/// Wider heads, with norms, as in Qwen3; three query heads a key head.
const SMALL_NORMED: Sizes =
    Sizes { hidden: 128, head_dim: 128, num_heads: 3, num_kv_heads: 1, ff: 96, qk_norm: true };
/// Wide heads alone.
const SMALL_WIDE: Sizes =
    Sizes { hidden: 128, head_dim: 128, num_heads: 2, num_kv_heads: 1, ff: 160, qk_norm: false };
/// Enough columns for every multiprocessor of a large GPU, and more inputs than are staged at once.
const LARGE: Sizes =
    Sizes { hidden: 2048, head_dim: 64, num_heads: 32, num_kv_heads: 8, ff: 5632, qk_norm: false };
/// The same with wide heads, in groups of 8.
const LARGE_WIDE: Sizes =
    Sizes { hidden: 2048, head_dim: 128, num_heads: 16, num_kv_heads: 2, ff: 4096, qk_norm: false };
/// The same with norms.
const LARGE_NORMED: Sizes =
    Sizes { hidden: 1024, head_dim: 128, num_heads: 16, num_kv_heads: 8, ff: 3072, qk_norm: true };

/// What a model is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) sizes: &'static Sizes,
    pub(crate) dtype: Dtype,
    pub(crate) kv: Dtype,
}

impl Case {
    const fn new(sizes: &'static Sizes, dtype: Dtype, kv: Dtype) -> Self {
        Self { sizes, dtype, kv }
    }

    /// In few words.
    pub(crate) fn name(&self) -> String {
        let Self { sizes, dtype, kv } = self;
        let norms = if sizes.qk_norm { ", head norms" } else { "" };
        let Sizes { hidden, head_dim, num_heads, num_kv_heads, .. } = sizes;
        let heads = format!("{num_heads}/{num_kv_heads} heads of {head_dim}");
        format!("{dtype}, KV {kv}, width {hidden}, {heads}{norms}")
    }
}

/// Those that an emulator or a sanitizer gets through.
pub(crate) const FEW: [Case; 4] = [
    Case::new(&SMALL, Dtype::Fp16, Dtype::Fp16),
    Case::new(&SMALL, Dtype::Fp8, Dtype::Fp8),
    Case::new(&SMALL_WIDE, Dtype::Fp8, Dtype::Fp16),
    Case::new(&SMALL_NORMED, Dtype::Fp16, Dtype::Fp16),
];

/// Those that a GPU gets besides.
const MORE: [Case; 7] = [
    Case::new(&SMALL_NORMED, Dtype::Fp8, Dtype::Fp8),
    Case::new(&LARGE, Dtype::Fp16, Dtype::Fp16),
    Case::new(&LARGE, Dtype::Fp8, Dtype::Fp16),
    Case::new(&LARGE, Dtype::Fp8, Dtype::Fp8),
    Case::new(&LARGE_WIDE, Dtype::Fp16, Dtype::Fp8),
    Case::new(&LARGE_WIDE, Dtype::Fp8, Dtype::Fp16),
    Case::new(&LARGE_NORMED, Dtype::Fp8, Dtype::Fp16),
];

/// The cases of a run.
pub(crate) fn all(small: bool) -> Vec<Case> {
    if small { FEW.to_vec() } else { FEW.into_iter().chain(MORE).collect() }
}

/// Engines of one random model for the CPU and for an architecture, which live as long as the folder.
pub(crate) struct Pair {
    pub(crate) cpu: Engine,
    pub(crate) cuda: Engine,
    _folder: TempDir,
}

impl Pair {
    /// Writes and builds both.
    pub(crate) fn build(case: &Case, arch: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        tiny::write_sized(&path("model"), 2, 3, case.sizes);
        let recipe = Recipe::plain(path("model"), case.dtype).with_kv(case.kv);
        recipe.build(&path("cpu"));
        recipe.on(&format!("cuda:{arch}")).build(&path("cuda"));
        let (cpu, cuda) = (open(folder.path(), "cpu"), open(folder.path(), "cuda"));
        Self { cpu, cuda, _folder: folder }
    }
}

/// Where a target's drafts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drafts {
    LookUp,
    Model,
    /// An EAGLE-3 head that drafts some of the tokens.
    Head,
    /// The target without one of its attentions and one of its MLPs.
    Skip,
}

/// A target that drafts, which lives as long as the folder.
pub(crate) fn speculating(drafts: Drafts, bed: Bed) -> (TempDir, Engine) {
    let sizes = if bed.small { &SMALL } else { &LARGE };
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    tiny::write_sized(&path("big"), 2, 1, sizes);
    tiny::write_sized(&path("small"), 1, 1, sizes);
    let recipe = match drafts {
        Drafts::LookUp => Recipe::ngram(path("big"), Dtype::Fp8),
        Drafts::Model => Recipe::model(path("big"), Dtype::Fp8, path("small"), Dtype::Fp16),
        Drafts::Skip => {
            let file = path("skip_layers.json");
            fs::write(&file, r#"{"attention": [0], "mlp": [1]}"#).expect("writes");
            Recipe::skipping(path("big"), Dtype::Fp8, file)
        }
        Drafts::Head => {
            let (draft_vocab, window) = (Some(tiny::VOCAB / 2), Some(9));
            let kind = HeadKind { draft_vocab, window, norm_output: true, ..HeadKind::default() };
            tiny::write_head_of(&path("head"), 2, 1, sizes, &kind);
            Recipe::model(path("big"), Dtype::Fp8, path("head"), Dtype::Fp16)
        }
    };
    recipe.on(&format!("cuda:{}", bed.arch)).build(&path("pair"));
    let engine = open(folder.path(), "pair");
    (folder, engine)
}

fn open(folder: &Path, name: &str) -> Engine {
    Engine::open(folder.join(name).join("1").join(TARGET_FILE)).expect("opens")
}

/// Tokens that a tiny model knows.
pub(crate) fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * i + 7 * i + 3) % (tiny::VOCAB as u32)).collect()
}
