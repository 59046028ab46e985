//! Synthetic checkpoints, and the command as a child process.

use serde_json::{Map, Value, json};
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// A tensor to be written as f32.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f32>,
}

/// A checkpoint that can be altered before it is written.
#[derive(Clone)]
pub(crate) struct Checkpoint {
    pub(crate) config: Value,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) tokenizer: Value,
}

/// Tokens of the synthetic tokenizer: the bytes and one end token. The embedding has some rows more.
pub(crate) const NUM_TOKENS: usize = 257;
pub(crate) const VOCAB_SIZE: usize = 264;
pub(crate) const MAX_POSITION: usize = 128;

impl Checkpoint {
    /// Two layers of 32.
    pub(crate) fn tiny(seed: u64) -> Self {
        Self::new(seed, 32, 64, 2)
    }

    /// One layer of 128 with a head of 64, which CUDA kernels take.
    pub(crate) fn for_gpu(seed: u64) -> Self {
        Self::with_heads(seed, 128, 96, 1, 64)
    }

    /// A llama of random weights with heads of 8.
    pub(crate) fn new(seed: u64, hidden: usize, mlp: usize, layers: usize) -> Self {
        Self::with_heads(seed, hidden, mlp, layers, 8)
    }

    fn with_heads(seed: u64, hidden: usize, mlp: usize, layers: usize, head_dim: usize) -> Self {
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE,
            "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
            "num_attention_heads": hidden / head_dim,
            "num_key_value_heads": hidden / 2 / head_dim, "head_dim": head_dim,
            "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": MAX_POSITION,
            "rope_theta": 10000.0, "tie_word_embeddings": true, "bos_token_id": 256,
            "eos_token_id": 256,
        });
        let mut shapes = vec![("model.embed_tokens".to_string(), vec![VOCAB_SIZE, hidden])];
        for layer in 0..layers {
            for (part, shape) in [
                ("input_layernorm", vec![hidden]),
                ("self_attn.q_proj", vec![hidden, hidden]),
                ("self_attn.k_proj", vec![hidden / 2, hidden]),
                ("self_attn.v_proj", vec![hidden / 2, hidden]),
                ("self_attn.o_proj", vec![hidden, hidden]),
                ("post_attention_layernorm", vec![hidden]),
                ("mlp.gate_proj", vec![mlp, hidden]),
                ("mlp.up_proj", vec![mlp, hidden]),
                ("mlp.down_proj", vec![hidden, mlp]),
            ] {
                shapes.push((format!("model.layers.{layer}.{part}"), shape));
            }
        }
        shapes.push(("model.norm".to_string(), vec![hidden]));
        let mut random = Random(seed);
        let tensor = |(name, shape): (String, Vec<usize>)| {
            let values = (0..shape.iter().product()).map(|_| random.value()).collect();
            Tensor { name: format!("{name}.weight"), shape, values }
        };
        Self {
            config,
            tensors: shapes.into_iter().map(tensor).collect(),
            tokenizer: tokenizer("<|end|>"),
        }
    }

    pub(crate) fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).expect("the tensor is there")
    }

    pub(crate) fn write(&self, dir: &Path) {
        fs::create_dir_all(dir).unwrap();
        let mut header = Map::new();
        let mut data = Vec::new();
        for Tensor { name, shape, values } in &self.tensors {
            let start = data.len();
            data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            let offsets = [start, data.len()];
            header.insert(
                name.clone(),
                json!({ "dtype": "F32", "shape": shape, "data_offsets": offsets }),
            );
        }
        let header = Value::Object(header).to_string();
        let length = (header.len() as u64).to_le_bytes();
        let file = [&length[..], header.as_bytes(), &data].concat();
        fs::write(dir.join("model.safetensors"), file).unwrap();
        fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        fs::write(dir.join("tokenizer.json"), self.tokenizer.to_string()).unwrap();
    }
}

/// Weights between -0.125 and 0.125, from a linear congruence.
struct Random(u64);

impl Random {
    fn value(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f32 / (1 << 26) as f32 - 0.125
    }
}

/// A byte-level vocabulary without merges, and one special token.
pub(crate) fn tokenizer(special: &str) -> Value {
    let vocab: Map<String, Value> =
        (0..=255u8).map(|byte| (letter(byte).to_string(), json!(byte))).collect();
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": true });
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{ "id": 256, "content": special, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true }],
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
        "decoder": byte_level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": [] },
    })
}

/// The letter that byte-level vocabularies write for a byte.
fn letter(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(256 + before).unwrap()
}

/// How a run of the command ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// The command, not started.
pub(crate) fn command<S: AsRef<OsStr>>(args: &[S]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_spec-build"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Not the user's own.
    command.env("SPEC_CACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cubin"));
    command
}

/// Runs the command to its end.
pub(crate) fn spec_build<S: AsRef<OsStr>>(args: &[S]) -> Ended {
    let output = command(args).output().expect("the command starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it prints UTF-8");
    let ended = Ended {
        code: output.status.code(),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    };
    assert!(!ended.stderr.contains("panicked"), "{ended:?}");
    ended
}

/// Runs a command that must succeed; what it prints.
pub(crate) fn succeeds<S: AsRef<OsStr>>(args: &[S]) -> String {
    let ended = spec_build(args);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    ended.stdout
}

/// Runs a command that must be refused with status 1, nothing on stdout and one line of error that has
/// all the parts.
pub(crate) fn refused<S: AsRef<OsStr>>(args: &[S], parts: &[&str]) {
    let ended = spec_build(args);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(ended.stdout, "", "{ended:?}");
    let errors = ended.stderr.lines().filter(|line| line.starts_with("spec-build: ")).count();
    let last = ended.stderr.lines().last().unwrap_or_default();
    assert!(errors == 1 && last.starts_with("spec-build: "), "{ended:?}");
    for part in parts {
        assert!(last.contains(part), "`{part}` is not in: {last}");
    }
}

/// Runs a command whose arguments are wrong: status 2.
pub(crate) fn misused<S: AsRef<OsStr>>(args: &[S], parts: &[&str]) {
    let ended = spec_build(args);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    for part in parts {
        assert!(ended.stderr.contains(part), "`{part}` is not in: {}", ended.stderr);
    }
}

/// `spec-build` with these options and paths after them.
pub(crate) fn build_args(target: &Path, output: &Path, options: &[&str]) -> Vec<String> {
    let text = |path: &Path| path.to_str().unwrap().to_string();
    let mut args = vec!["--target".into(), text(target), "--output".into(), text(output)];
    args.push("--quiet".into());
    args.extend(options.iter().map(|option| option.to_string()));
    args
}

/// A folder with a checkpoint and the model built from it, `checkpoint` and `model`.
pub(crate) fn built(checkpoint: &Checkpoint, options: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    checkpoint.write(&dir.path().join("checkpoint"));
    let (from, to) = (dir.path().join("checkpoint"), dir.path().join("model"));
    succeeds(&build_args(&from, &to, options));
    dir
}

/// Names in a folder, sorted.
pub(crate) fn names_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
