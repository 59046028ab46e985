//! Tests of whole files; what they share.

mod changed;
mod cuda;
mod damage;
mod hostile;
mod pair;
mod round_trip;
mod writing;

use super::{
    Device, DrafterKind, Engine, EngineWriter, Limits, Manifest, Peer, Precision, Role, Sealed,
    Section, expected_sections, format,
};
use crate::model::testing::small_llama;
use crate::model::{Dtype, Family, ModelConfig};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The smallest model, as a target that does not speculate; no sections yet.
pub(super) fn tiny_manifest() -> Manifest {
    Manifest {
        builder: "spec-build 0.1.0".into(),
        kernels: String::new(),
        device: Device::Cpu,
        role: Role::Target,
        identity: String::new(),
        drafter: DrafterKind::None,
        target: None,
        model: ModelConfig {
            family: Family::Llama,
            vocab_size: 8,
            hidden_size: 3,
            intermediate_size: 2,
            num_layers: 1,
            num_heads: 2,
            num_kv_heads: 1,
            head_dim: 2,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.123_456_789_012,
            rope_scaling: None,
            max_position: 64,
            tied_head: true,
            qkv_bias: false,
            out_bias: false,
            mlp_bias: false,
            qk_norm: false,
            mask_token: None,
            draft_vocab: None,
            draft_head: None,
        },
        precision: Precision { weights: Dtype::Bf16, head: Dtype::Fp16, kv: Dtype::Fp16 },
        limits: Limits { max_draft_len: 4, max_batch_size: 2, max_seq_len: 32, max_num_tokens: 16 },
        tokenizer: "7".repeat(64),
        end_tokens: vec![2, 7],
        bos_token: Some(1),
        costs: None,
        kv_scales: None,
        sections: Vec::new(),
    }
}

/// A model that the CUDA kernels take, for two architectures.
pub(super) fn cuda_manifest() -> Manifest {
    let archs = vec!["sm_90a".into(), "sm_80".into()];
    Manifest {
        kernels: spec_kernels::HASH.into(),
        device: Device::Cuda { archs, min_driver: 580 },
        model: small_llama(),
        precision: Precision { weights: Dtype::Fp8, head: Dtype::Fp16, kv: Dtype::Fp16 },
        ..tiny_manifest()
    }
}

/// The same as [`tiny_manifest`] with sections in their places; their hashes are made up.
pub(super) fn placed_manifest() -> Manifest {
    placed(tiny_manifest())
}

fn placed(mut manifest: Manifest) -> Manifest {
    let specs = expected_sections(&manifest.model, &manifest.precision, &manifest.device);
    manifest.sections = specs
        .into_iter()
        .map(|spec| Section {
            bytes: spec.bytes.unwrap_or_else(|| code_bytes(&spec.name)),
            name: spec.name,
            kind: spec.kind,
            dtype: spec.dtype,
            shape: spec.shape,
            offset: 0,
            hash: "1".repeat(64),
        })
        .collect();
    manifest.identity = manifest.compute_identity();
    format::place(&mut manifest).unwrap();
    manifest
}

/// A length for the code of a section.
fn code_bytes(name: &str) -> u64 {
    100 + name.len() as u64
}

/// Bytes of a section that depend on its name and on `salt`.
fn contents(section: &Section, salt: u8) -> Vec<u8> {
    let mut bytes = vec![0; section.bytes as usize];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&[salt]).update(section.name.as_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

fn seal(path: &Path, manifest: Manifest, salt: u8) -> Sealed {
    let specs = expected_sections(&manifest.model, &manifest.precision, &manifest.device);
    let code = specs.iter().filter(|spec| spec.bytes.is_none());
    let code = code.map(|spec| (spec.name.clone(), code_bytes(&spec.name))).collect();
    let writer = EngineWriter::with_code(path, manifest, &code).unwrap();
    for section in writer.sections() {
        let mut out = writer.section(&section.name);
        out.write(&contents(section, salt)).unwrap();
        out.close();
    }
    writer.seal().unwrap()
}

/// A folder with a finished engine in it.
pub(super) fn tiny_engine() -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("target.engine");
    seal(&path, tiny_manifest(), 0).commit().unwrap();
    (folder, path)
}

fn tiny_file() -> Vec<u8> {
    let (_folder, path) = tiny_engine();
    fs::read(path).unwrap()
}

/// The manifest of a file of these bytes.
pub(super) fn parse_bytes(file: &[u8]) -> format::Result<Manifest> {
    format::parse(file.len() as u64, |range| {
        Ok(file[range.start as usize..range.end as usize].to_vec())
    })
}

/// A section as it is read back.
fn section(engine: &Engine, name: &str) -> Vec<u8> {
    let reader = engine.reader().unwrap();
    let bytes = reader.section(name).bytes().unwrap();
    reader.finish().unwrap();
    bytes
}

fn open_error(path: &Path) -> String {
    Engine::open(path).unwrap_err().to_string()
}

fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn peer(file: &str, identity: &str) -> Peer {
    Peer { file: file.into(), identity: identity.into() }
}

/// An edit that makes limits bad, and what is said about it.
type LimitsCase = (fn(&mut Limits), &'static str);
