//! Test support: writes tiny safetensors and GGUF files, and whole tiny checkpoints.

use super::bounded::Object;
use super::names::{self, Expected};
use super::{family, hf_config};
use serde_json::{Value, json};
use spec_core::model::ModelConfig;
use std::fs;
use std::path::Path;

/// A tensor to be written.
#[derive(Clone, Debug)]
pub(crate) struct Blob {
    pub(crate) name: String,
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Blob {
    pub(crate) fn new(name: &str, dtype: &'static str, shape: &[usize], bytes: Vec<u8>) -> Self {
        Self { name: name.into(), dtype, shape: shape.into(), bytes }
    }

    pub(crate) fn f32(name: &str, shape: &[usize], values: &[f32]) -> Self {
        Self::new(name, "F32", shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }
}

/// Bytes of a safetensors file.
pub(crate) fn safetensors(blobs: &[Blob]) -> Vec<u8> {
    let mut header = json!({ "__metadata__": { "format": "pt" } });
    let mut data = Vec::new();
    for blob in blobs {
        let start = data.len();
        data.extend_from_slice(&blob.bytes);
        let offsets = [start, data.len()];
        header[&blob.name] =
            json!({ "dtype": blob.dtype, "shape": blob.shape, "data_offsets": offsets });
    }
    raw_safetensors(&header.to_string(), &data)
}

/// Bytes of a safetensors file with any header.
pub(crate) fn raw_safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// `config.json` of a tiny model: hidden 32, 2 layers, 4 heads over 2, head size 8.
pub(crate) fn tiny_config(model_type: &str, class: &str) -> Value {
    json!({
        "architectures": [class], "model_type": model_type, "vocab_size": 48, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": false,
        "bos_token_id": 1, "eos_token_id": 2
    })
}

/// The model that a `config.json` describes.
pub(crate) fn model(config: &Value) -> ModelConfig {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    fs::write(&path, config.to_string()).unwrap();
    hf_config::model_config(&Object::open(&path).unwrap(), |_| true).unwrap()
}

/// The value of element `idx` of a tensor in tiny checkpoints.
pub(crate) fn value(name: &str, idx: usize) -> f32 {
    let seed: usize = name.bytes().map(usize::from).sum();
    ((seed * 31 + idx * 7) % 257) as f32 / 64.0 - 2.0
}

/// Every tensor of a model, in f32.
pub(crate) fn tiny_blobs(model: &ModelConfig) -> Vec<Blob> {
    let blob = |Expected { name, shape, .. }: Expected| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|idx| value(&name, idx)).collect();
        Blob::f32(&name, &shape, &values)
    };
    names::expected(model, family::row(model.family).fused).into_iter().map(blob).collect()
}

/// A tiny checkpoint that can be altered before it is written.
#[derive(Clone, Debug)]
pub(crate) struct Folder {
    pub(crate) config: Value,
    pub(crate) blobs: Vec<Blob>,
}

impl Folder {
    pub(crate) fn new(config: Value) -> Self {
        Self { blobs: tiny_blobs(&model(&config)), config }
    }

    pub(crate) fn llama() -> Self {
        Self::new(tiny_config("llama", "LlamaForCausalLM"))
    }

    pub(crate) fn blob(&mut self, name: &str) -> &mut Blob {
        self.blobs.iter_mut().find(|blob| blob.name == name).unwrap()
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.blobs.retain(|blob| blob.name != name);
    }

    pub(crate) fn write(&self, folder: &Path) {
        fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        fs::write(folder.join("model.safetensors"), safetensors(&self.blobs)).unwrap();
    }
}

/// Builds a GGUF file.
#[derive(Clone, Debug)]
pub(crate) struct GgufFile {
    pub(crate) version: u32,
    /// Key, value type, encoded value.
    pub(crate) values: Vec<(String, u32, Vec<u8>)>,
    /// Name, sizes innermost first, type number, bytes.
    pub(crate) tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

impl GgufFile {
    /// The tiny model of an architecture, in f32, as llama.cpp's converter would write it.
    pub(crate) fn tiny(arch: &str) -> Self {
        let mut file = Self { version: 3, values: Vec::new(), tensors: Vec::new() };
        file.text("general.architecture", arch);
        for (key, value) in [
            ("block_count", 2),
            ("embedding_length", 32),
            ("feed_forward_length", 64),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 2),
            ("attention.key_length", 8),
            ("attention.value_length", 8),
            ("context_length", 256),
        ] {
            file.u32(&format!("{arch}.{key}"), value);
        }
        file.f32(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5);
        file.f32(&format!("{arch}.rope.freq_base"), 10_000.0);
        file.text("tokenizer.ggml.model", "gpt2");
        file.text("tokenizer.ggml.pre", "smollm");
        let tokens: Vec<String> = (0..40).map(|id| format!("t{id}")).collect();
        let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
        file.texts("tokenizer.ggml.tokens", &tokens);
        let types = [1i32; 40].iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<_>>();
        file.list("tokenizer.ggml.token_type", 5, 40, &types);
        file.texts("tokenizer.ggml.merges", &["t 1", "t 2"]);
        file.u32("tokenizer.ggml.bos_token_id", 1);
        file.u32("tokenizer.ggml.eos_token_id", 2);
        file.value("tokenizer.ggml.add_bos_token", 7, vec![0]);

        file.tensor("token_embd.weight", &[48, 32]);
        for layer in 0..2 {
            let name = |part: &str| format!("blk.{layer}.{part}");
            // Phi keeps what belongs together in one tensor.
            let projections: &[(&str, &[usize])] = match arch {
                "phi3" => &[("attn_qkv.weight", &[64, 32]), ("ffn_up.weight", &[128, 32])],
                _ => &[
                    ("attn_q.weight", &[32, 32]),
                    ("attn_k.weight", &[16, 32]),
                    ("attn_v.weight", &[16, 32]),
                    ("ffn_gate.weight", &[64, 32]),
                    ("ffn_up.weight", &[64, 32]),
                ],
            };
            let common: [(&str, &[usize]); 4] = [
                ("attn_norm.weight", &[32]),
                ("attn_output.weight", &[32, 32]),
                ("ffn_norm.weight", &[32]),
                ("ffn_down.weight", &[32, 64]),
            ];
            for (part, shape) in common.iter().chain(projections) {
                file.tensor(&name(part), shape);
            }
            if arch == "qwen2" {
                for (part, rows) in [("attn_q", 32), ("attn_k", 16), ("attn_v", 16)] {
                    file.tensor(&name(&format!("{part}.bias")), &[rows]);
                }
            }
            if arch == "qwen3" {
                file.tensor(&name("attn_q_norm.weight"), &[8]);
                file.tensor(&name("attn_k_norm.weight"), &[8]);
            }
        }
        file.tensor("output_norm.weight", &[32]);
        file
    }

    /// Adds an f32 tensor of the usual values; sizes outermost first.
    pub(crate) fn tensor(&mut self, name: &str, shape: &[usize]) {
        let len = shape.iter().product();
        let bytes = (0..len).flat_map(|idx| value(name, idx).to_le_bytes()).collect();
        let sizes = shape.iter().rev().map(|size| *size as u64).collect();
        self.tensors.push((name.into(), sizes, 0, bytes));
    }

    pub(crate) fn tensor_mut(&mut self, name: &str) -> &mut (String, Vec<u64>, u32, Vec<u8>) {
        self.tensors.iter_mut().find(|tensor| tensor.0 == name).unwrap()
    }

    /// Sets a value, in place of an earlier one of the same key.
    pub(crate) fn value(&mut self, key: &str, kind: u32, bytes: Vec<u8>) {
        self.values.retain(|(other, _, _)| other != key);
        self.values.push((key.into(), kind, bytes));
    }

    pub(crate) fn u32(&mut self, key: &str, value: u32) {
        self.value(key, 4, value.to_le_bytes().into());
    }

    pub(crate) fn f32(&mut self, key: &str, value: f32) {
        self.value(key, 6, value.to_le_bytes().into());
    }

    pub(crate) fn text(&mut self, key: &str, value: &str) {
        self.value(key, 8, string(value));
    }

    pub(crate) fn texts(&mut self, key: &str, values: &[&str]) {
        let bytes: Vec<u8> = values.iter().flat_map(|value| string(value)).collect();
        self.list(key, 8, values.len() as u64, &bytes);
    }

    pub(crate) fn list(&mut self, key: &str, kind: u32, len: u64, elements: &[u8]) {
        let bytes = [&kind.to_le_bytes()[..], &len.to_le_bytes(), elements].concat();
        self.value(key, 9, bytes);
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.values.len() as u64).to_le_bytes());
        for (key, kind, bytes) in &self.values {
            out.extend(string(key));
            out.extend(kind.to_le_bytes());
            out.extend(bytes);
        }
        let mut data = Vec::new();
        for (name, sizes, kind, bytes) in &self.tensors {
            out.extend(string(name));
            out.extend((sizes.len() as u32).to_le_bytes());
            sizes.iter().for_each(|size| out.extend(size.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        [out, data].concat()
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}
