//! Engines for GPUs against the checkpoint they were made from: every row of every matrix is found where the kernels
//! look for it, by a definition of its own.

use super::*;
use crate::checkpoint::testing::{Folder, tiny_config};
use names::{EMBED, FINAL_NORM, HEAD};
use serde_json::json;
use spec_core::engine::code_section;
use spec_core::engine::{
    DrafterKind, Engine, Limits, Manifest, Precision, Role as EngineRole, needed_variants,
};
use spec_core::model::ModelConfig;
use spec_core::model::image::unpack_row;

/// Hidden 64, MLP 96, 3 query heads a key head, vocabulary 70: the last tiles are not full.
fn qwen(head_dim: usize) -> Folder {
    let mut config = tiny_config("qwen2", "Qwen2ForCausalLM");
    for (field, value) in [
        ("vocab_size", 70),
        ("hidden_size", 64),
        ("intermediate_size", 96),
        ("num_attention_heads", 6),
        ("num_key_value_heads", 2),
        ("head_dim", head_dim),
        ("num_hidden_layers", 1),
    ] {
        config[field] = json!(value);
    }
    Folder::new(config)
}

fn manifest(model: &ModelConfig, precision: Precision) -> Manifest {
    Manifest {
        builder: String::new(),
        kernels: spec_kernels::HASH.into(),
        device: Device::Cuda { archs: vec!["sm_90a".into()], min_driver: 580 },
        role: EngineRole::Target,
        identity: String::new(),
        drafter: DrafterKind::None,
        target: None,
        model: model.clone(),
        precision,
        limits: Limits { max_draft_len: 0, max_batch_size: 1, max_seq_len: 16, max_num_tokens: 16 },
        tokenizer: "0".repeat(64),
        end_tokens: Vec::new(),
        bos_token: None,
        kv_scales: None,
        costs: None,
        sections: Vec::new(),
    }
}

/// Compiles a checkpoint; the code of the kernels is their names.
fn engine(checkpoint: &Checkpoint, weights: Dtype, folder: &std::path::Path) -> Engine {
    let precision = Precision { weights, head: Dtype::Fp16, kv: Dtype::Fp16 };
    let manifest = manifest(&checkpoint.config, precision);
    let code: Vec<Code> = needed_variants(&manifest.model, &manifest.precision, "sm_90a")
        .iter()
        .map(|v| Code { section: code_section("sm_90a", v), cubin: v.to_string().into_bytes() })
        .collect();
    let lengths = code.iter().map(|c| (c.section.clone(), c.cubin.len() as u64)).collect();
    let path = folder.join("target.engine");
    let device = manifest.device.clone();
    let writer = EngineWriter::with_code(&path, manifest, &lengths).unwrap();
    compile(checkpoint, &device, &code, &writer, &Progress::hidden()).unwrap();
    writer.seal().unwrap().commit().unwrap();
    let engine = Engine::open(path).unwrap();
    engine.verify_hashes(|_| ()).unwrap();
    for Code { section, cubin } in code {
        assert_eq!(bytes(&engine, &section), cubin);
    }
    engine
}

/// A section as it is read back.
fn bytes(engine: &Engine, section: &str) -> Vec<u8> {
    engine.reader().unwrap().section(section).bytes().unwrap()
}

fn floats(engine: &Engine, section: &str) -> Vec<f32> {
    engine.reader().unwrap().section(section).floats().unwrap()
}

/// Tensor and row whose outputs stand at each row of the fused q, k, v projection.
fn qkv_rows(head_dim: usize) -> Vec<(&'static str, usize)> {
    let mut places = Vec::new();
    for (name, heads, rotated) in [("q", 6, true), ("k", 2, true), ("v", 2, false)] {
        for head in 0..heads {
            let mut rows = vec![usize::MAX; head_dim];
            for element in 0..head_dim {
                let half = head_dim / 2;
                let (pair, second) = (element % half, element / half);
                let place =
                    if rotated { pair / 32 * 64 + second * 32 + pair % 32 } else { element };
                rows[place] = head * head_dim + element;
            }
            places.extend(rows.into_iter().map(|row| (name, row)));
        }
    }
    places
}

/// The same for the gate and up projection.
fn gate_up_rows() -> Vec<(&'static str, usize)> {
    let tile = |first: usize| {
        let rows = move |name| (first..first + 32).map(move |row| (name, row));
        rows("gate").chain(rows("up"))
    };
    [0, 32, 64].into_iter().flat_map(tile).collect()
}

/// Compares a section with rows of tensors, in the order given.
fn check(engine: &Engine, checkpoint: &Checkpoint, section: &str, rows: &[(String, usize)]) {
    let spec = engine.manifest().sections.iter().find(|s| s.name == section).unwrap();
    let (dtype, k) = (spec.dtype.unwrap(), spec.shape[1]);
    assert_eq!(spec.shape[0], rows.len());
    let scales = dtype.has_output_scales().then(|| floats(engine, &format!("{section}.scale")));
    let image = bytes(engine, section);
    for (place, (name, row)) in rows.iter().enumerate() {
        let (mut expected, mut found) = (vec![0.0; k], vec![0.0; k]);
        checkpoint.read_rows(name, *row..row + 1, &mut expected).unwrap();
        let scale = scales.as_ref().map(|scales| scales[place]);
        unpack_row(dtype, &image, k, place, scale, &mut found);
        let largest = expected.iter().fold(0f32, |most, v| most.max(v.abs()));
        for (found, expected) in found.iter().zip(&expected) {
            // e4m3 keeps four significant bits, and steps of 2^-9 below; half precision holds the values exactly.
            let room = match dtype {
                Dtype::Fp8 => expected.abs() / 16.0 + largest / 448.0 / 512.0,
                _ => 0.0,
            };
            assert!(
                (found - expected).abs() <= room,
                "{section} row {place}, {name} {row}: {found} is not {expected}"
            );
        }
    }
    if let Some(scales) = scales {
        assert_eq!(scales.len(), rows.len().next_multiple_of(64));
        assert!(scales[rows.len()..].iter().all(|&scale| scale == 0.0));
    }
}

fn whole(name: &str, rows: usize) -> Vec<(String, usize)> {
    (0..rows).map(|row| (name.to_string(), row)).collect()
}

#[test]
fn every_row_stands_where_the_kernels_look_for_it() {
    for (head_dim, weights) in
        [(64, Dtype::Fp8), (64, Dtype::Fp16), (128, Dtype::Fp8), (128, Dtype::Fp16)]
    {
        let dir = tempfile::tempdir().unwrap();
        qwen(head_dim).write(dir.path());
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let engine = engine(&checkpoint, weights, dir.path());
        let named = |rows: Vec<(&str, usize)>, part: &str| -> Vec<(String, usize)> {
            let full = |name| format!("model.layers.0.{part}.{name}_proj.weight");
            rows.into_iter().map(|(name, row)| (full(name), row)).collect()
        };
        let layer = |part: &str| format!("layers.0.{part}");
        check(&engine, &checkpoint, &layer("qkv"), &named(qkv_rows(head_dim), "self_attn"));
        check(&engine, &checkpoint, &layer("gate_up"), &named(gate_up_rows(), "mlp"));
        let out = whole("model.layers.0.self_attn.o_proj.weight", 64);
        check(&engine, &checkpoint, &layer("out"), &out);
        let down = whole("model.layers.0.mlp.down_proj.weight", 64);
        check(&engine, &checkpoint, &layer("down"), &down);
        check(&engine, &checkpoint, "embed", &whole(EMBED, 70));
        check(&engine, &checkpoint, "head", &whole(HEAD, 70));
    }
}

#[test]
fn biases_follow_their_rows_and_norms_stay_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    qwen(128).write(dir.path());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let engine = engine(&checkpoint, Dtype::Fp8, dir.path());
    let bias = floats(&engine, "layers.0.qkv.bias");
    assert_eq!(bias.len(), 10 * 128);
    for (found, (name, row)) in bias.iter().zip(qkv_rows(128)) {
        let mut expected = [0.0];
        let name = format!("model.layers.0.self_attn.{name}_proj.bias");
        checkpoint.read_rows(&name, row..row + 1, &mut expected).unwrap();
        assert_eq!([*found], expected, "{name} {row}");
    }
    let mut norm = [0.0; 64];
    checkpoint.read_rows(FINAL_NORM, 0..64, &mut norm).unwrap();
    assert_eq!(floats(&engine, "final_norm"), norm);
}

#[test]
fn weights_that_are_fp8_already_are_kept_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    qwen(128).write(dir.path());
    let made_up = format!("random:{}", dir.path().display());
    let checkpoint = Checkpoint::open(std::path::Path::new(&made_up)).unwrap();
    let engine = engine(&checkpoint, Dtype::Fp8, dir.path());
    let scales = floats(&engine, "layers.0.qkv.scale");
    let image = bytes(&engine, "layers.0.qkv");
    for (place, (name, row)) in qkv_rows(128).into_iter().enumerate() {
        let name = format!("model.layers.0.self_attn.{name}_proj.weight");
        let (mut expected, mut found) = ([0.0; 64], [0.0; 64]);
        checkpoint.read_rows(&name, row..row + 1, &mut expected).unwrap();
        unpack_row(Dtype::Fp8, &image, 64, place, Some(scales[place]), &mut found);
        assert_eq!(found, expected, "{name} {row}");
    }
}

#[test]
fn weights_beyond_half_precision_are_refused_with_a_format_that_the_device_has() {
    let dir = tempfile::tempdir().unwrap();
    let mut folder = qwen(64);
    let blob = folder.blob("model.layers.0.mlp.up_proj.weight");
    blob.bytes[..4].copy_from_slice(&70_000f32.to_le_bytes());
    folder.write(dir.path());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let precision = Precision { weights: Dtype::Fp16, head: Dtype::Fp16, kv: Dtype::Fp16 };
    let manifest = manifest(&checkpoint.config, precision);
    let names = needed_variants(&manifest.model, &manifest.precision, "sm_90a");
    let code = names.iter().map(|variant| (code_section("sm_90a", variant), 1)).collect();
    let device = manifest.device.clone();
    let writer = EngineWriter::with_code(dir.path().join("x"), manifest, &code).unwrap();
    let error = compile(&checkpoint, &device, &[], &writer, &Progress::hidden()).unwrap_err();
    let text = format!("{error:#}");
    assert!(text.contains("70000") && text.contains("65504: use fp8"), "{text}");
}
