//! Real models: the GGUF files that `scripts/fetch-model` leaves in `models/` (or `$SPEC_MODELS`), the
//! same as Hugging Face folders, a cut one, and engines built from them.

use super::cache;
use safetensors::SafeTensors;
use serde_json::{Value, json};
use spec_build::calibrate::Calibration;
use spec_build::cli::{BuildArgs, DraftSource, ModelArgs, SkipArgs};
use spec_build::skip::SkipSource;
use spec_build::{export, folder};
use spec_core::engine::Engine;
use spec_core::model::Dtype;
use spec_core::runtime::TARGET_FILE;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// SmolLM2-135M-Instruct.
pub(crate) const SMOLLM2: &str = "smollm2-135m";
/// Qwen2.5-Coder-0.5B-Instruct.
pub(crate) const QWEN: &str = "qwen2.5-coder-0.5b";

/// The GGUF file of a model, if it was fetched.
pub(crate) fn gguf(model: &str) -> Option<PathBuf> {
    let folder =
        std::env::var_os("SPEC_MODELS").map_or_else(|| cache::root().join("models"), PathBuf::from);
    let file = match model {
        SMOLLM2 => "smollm2-135m-instruct-q4_1.gguf",
        QWEN => "qwen2.5-coder-0.5b.gguf",
        other => panic!("no model is called {other}"),
    };
    let path = folder.join(file);
    if !path.is_file() {
        let _ = writeln!(
            io::stderr(),
            "skipped: there is no {}: run scripts/fetch-model {model}",
            path.display()
        );
        return None;
    }
    Some(path)
}

/// The model as a Hugging Face folder in bf16, exported from its GGUF file.
pub(crate) fn hf(model: &str) -> Option<PathBuf> {
    let gguf = gguf(model)?;
    let make = |dir: &Path| {
        eprintln!("exporting {model}");
        let tokenizer = |source: &_, dir: &Path| folder::write_tokenizer(source, dir).map(drop);
        export::export(&gguf, dir, tokenizer).expect("exports");
    };
    Some(cache::folder(&format!("{model}-hf"), &[&contents(&gguf)], make))
}

/// A hash of a file, taken once in a program.
fn contents(path: &Path) -> String {
    static KNOWN: Mutex<Option<HashMap<PathBuf, String>>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let hash = || {
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(File::open(path).expect("a readable file")).expect("a readable file");
        hasher.finalize().to_string()
    };
    known.get_or_insert_default().entry(path.into()).or_insert_with(hash).clone()
}

/// The first layers of a model, as a Hugging Face folder: a poor drafter for the whole.
pub(crate) fn first_layers(model: &str, num_layers: usize) -> Option<PathBuf> {
    let whole = hf(model)?;
    let label = format!("{model}-{num_layers}-layers-hf");
    let make = |dir: &Path| cut(&whole, num_layers, dir);
    Some(cache::folder(&label, &[&whole.to_string_lossy()], make))
}

fn cut(whole: &Path, num_layers: usize, dir: &Path) {
    fs::create_dir_all(dir).expect("a new folder");
    for entry in fs::read_dir(whole).expect("a folder") {
        let path = entry.expect("a readable folder").path();
        fs::copy(&path, dir.join(path.file_name().expect("a name"))).expect("copies");
    }
    let path = dir.join("config.json");
    let mut config: Value =
        serde_json::from_slice(&fs::read(&path).expect("a config")).expect("JSON");
    config["num_hidden_layers"] = json!(num_layers);
    fs::write(&path, config.to_string()).expect("writes");

    let bytes = fs::read(whole.join("model.safetensors")).expect("the weights");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let layer = |name: &str| name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok();
    let kept = tensors.iter().filter(|(name, _)| layer(name).is_none_or(|n: usize| n < num_layers));
    safetensors::serialize_to_file(kept, None, &dir.join("model.safetensors")).expect("writes");
}

/// What to build.
#[derive(Clone, Debug)]
pub(crate) struct Recipe {
    /// A checkpoint.
    pub(crate) target: PathBuf,
    /// Number format of the target.
    pub(crate) dtype: Dtype,
    /// Where drafts come from.
    pub(crate) draft: DraftSource,
    /// Number format of the drafter.
    pub(crate) draft_dtype: Dtype,
    /// As on the command line.
    pub(crate) device: String,
    /// The same for the drafter, if it is another one.
    pub(crate) draft_device: Option<String>,
    /// Number format of keys and values, if not the default.
    pub(crate) kv_dtype: Option<Dtype>,
    /// How scales of keys and values are found, if not as by default.
    pub(crate) kv_calibration: Option<Calibration>,
    /// Number format of the head, if not the default.
    pub(crate) head_dtype: Option<Dtype>,
    /// The same of the drafter.
    pub(crate) draft_head_dtype: Option<Dtype>,
    /// The tokens that it drafts, as on the command line, if those are not all.
    pub(crate) draft_vocab: Option<String>,
    /// Tokens of a sequence.
    pub(crate) max_seq_len: usize,
    /// Draft tokens in a step.
    pub(crate) max_draft_len: usize,
}

/// Longest context of the engines built here: the smallest KV cache that is allowed holds one of it.
pub(crate) const MAX_SEQ_LEN: usize = 1024;
/// Most sequences in a step.
pub(crate) const MAX_BATCH_SIZE: usize = 32;
/// Most draft tokens in a step.
pub(crate) const MAX_DRAFT_LEN: usize = 8;

impl Recipe {
    fn new(target: PathBuf, dtype: Dtype, draft: DraftSource, draft_dtype: Dtype) -> Self {
        let (device, kv_dtype, head_dtype) = ("cpu".into(), None, None);
        let draft_device = None;
        let max_seq_len = MAX_SEQ_LEN;
        Self {
            target,
            dtype,
            draft,
            draft_dtype,
            device,
            draft_device,
            kv_dtype,
            kv_calibration: None,
            head_dtype,
            draft_head_dtype: None,
            draft_vocab: None,
            max_seq_len,
            max_draft_len: MAX_DRAFT_LEN,
        }
    }

    /// The same for another device, such as `cuda:sm_90a`.
    pub(crate) fn on(self, device: &str) -> Self {
        Self { device: device.into(), ..self }
    }

    /// The same for texts of up to so many tokens.
    pub(crate) fn up_to(self, max_seq_len: usize) -> Self {
        Self { max_seq_len, ..self }
    }

    /// The same with so many draft tokens in a step.
    pub(crate) fn drafting(self, max_draft_len: usize) -> Self {
        Self { max_draft_len, ..self }
    }

    /// The same with a drafter for another device.
    pub(crate) fn draft_on(self, device: &str) -> Self {
        Self { draft_device: Some(device.into()), ..self }
    }

    /// The same with another format of the drafter's embedding and head.
    pub(crate) fn with_draft_head(self, dtype: Dtype) -> Self {
        Self { draft_head_dtype: Some(dtype), ..self }
    }

    /// The same with a drafter of some tokens.
    pub(crate) fn with_draft_vocab(self, vocab: &str) -> Self {
        Self { draft_vocab: Some(vocab.into()), ..self }
    }

    /// The same with another format of keys and values.
    pub(crate) fn with_kv(self, kv_dtype: Dtype) -> Self {
        Self { kv_dtype: Some(kv_dtype), ..self }
    }

    /// A target that does not draft.
    pub(crate) fn plain(target: PathBuf, dtype: Dtype) -> Self {
        Self::new(target, dtype, DraftSource::None, dtype)
    }

    /// A target that drafts by look-up.
    pub(crate) fn ngram(target: PathBuf, dtype: Dtype) -> Self {
        Self::new(target, dtype, DraftSource::NGRAM, dtype)
    }

    /// A target that drafts without the layers that a file names.
    pub(crate) fn skipping(target: PathBuf, dtype: Dtype, file: PathBuf) -> Self {
        Self::new(target, dtype, DraftSource::Skip(SkipSource::File(file)), dtype)
    }

    /// A target with a second model as the drafter.
    pub(crate) fn model(target: PathBuf, dtype: Dtype, draft: PathBuf, draft_dtype: Dtype) -> Self {
        Self::new(target, dtype, DraftSource::Model(draft), draft_dtype)
    }

    /// Writes the model folder.
    pub(crate) fn build(&self, output: &Path) {
        let model = ModelArgs {
            target: self.target.clone(),
            draft: self.draft.clone(),
            max_draft_len: (self.draft != DraftSource::None).then_some(self.max_draft_len),
            dtype: self.dtype,
            draft_dtype: matches!(self.draft, DraftSource::Model(_)).then_some(self.draft_dtype),
            head_dtype: self.head_dtype,
            draft_head_dtype: self.draft_head_dtype,
            draft_vocab: self
                .draft_vocab
                .as_deref()
                .map(|vocab| vocab.parse().expect("a vocabulary")),
            kv_dtype: self.kv_dtype,
            kv_calibration: self.kv_calibration.clone(),
            device: self.device.clone(),
            draft_device: self.draft_device.clone(),
            skip: SkipArgs::default(),
            cuda_lib: None,
            max_batch_size: MAX_BATCH_SIZE,
            max_seq_len: Some(self.max_seq_len),
            max_num_tokens: 2048,
        };
        let args = BuildArgs { model, output: output.into(), quiet: true };
        folder::build(&args).expect("builds");
    }

    /// Builds the engines unless they are there, and opens the target.
    pub(crate) fn engine(&self, label: &str) -> Engine {
        let make = |dir: &Path| {
            eprintln!("building {label}");
            self.build(dir);
        };
        // The names of exported checkpoints hold their hashes; engines for GPUs carry kernels of their own time.
        let kernels = if self.device == "cpu" { "" } else { spec_kernels::HASH };
        let folder = cache::folder(label, &[&format!("{self:?}"), kernels], make);
        Engine::open(folder.join("1").join(TARGET_FILE)).expect("opens")
    }
}
