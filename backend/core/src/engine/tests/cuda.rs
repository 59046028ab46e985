//! Engines with code: their sections, which GPU runs them, and what is refused.

use super::*;
use crate::engine::{SectionKind, code_section, needed_variants};

/// An edit that makes a model unfit, and what is said about it.
type Case = (fn(&mut Manifest), &'static str);

/// The message for an edited manifest of an engine with code, whose identity fits the edit.
fn refusal(edit: impl FnOnce(&mut Manifest)) -> String {
    let mut manifest = placed(cuda_manifest());
    edit(&mut manifest);
    manifest.identity = manifest.compute_identity();
    parse_bytes(&format::frame(&serde_json::to_vec(&manifest).unwrap())).unwrap_err()
}

#[test]
fn an_engine_with_code_round_trips() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.engine");
    seal(&path, cuda_manifest(), 0).commit().unwrap();
    let engine = Engine::open(&path).unwrap();
    engine.verify_hashes(|_| ()).unwrap();
    let manifest = engine.manifest();
    for arch in ["sm_90a", "sm_80"] {
        for variant in needed_variants(&manifest.model, &manifest.precision, arch) {
            let name = code_section(arch, &variant);
            let written = manifest.sections.iter().find(|section| section.name == name).unwrap();
            assert_eq!(section(&engine, &name), contents(written, 0));
        }
    }
}

#[test]
fn the_newest_code_that_runs_is_chosen() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("x");
    let mut manifest = cuda_manifest();
    let archs = ["sm_80", "sm_120a", "sm_89"].map(String::from).into();
    manifest.device = Device::Cuda { archs, min_driver: 580 };
    seal(&path, manifest, 0).commit().unwrap();
    let engine = Engine::open(&path).unwrap();
    for (major, minor, arch) in [(8, 6, "sm_80"), (8, 9, "sm_89"), (12, 0, "sm_120a")] {
        assert_eq!(engine.require_cuda(major, minor, 580).unwrap(), arch);
    }
}

#[test]
fn code_must_be_that_of_the_model_and_of_bounded_length() {
    let sections = placed(cuda_manifest()).sections;
    let last = sections.len() - 1;
    let name = &sections[last].name;
    assert!(name.starts_with("code.sm_80."), "{name}");
    assert_eq!(refusal(|m| drop(m.sections.pop())), format!("section `{name}` is missing"));
    for bytes in [0, 1 << 40] {
        assert_eq!(
            refusal(|m| m.sections[last].bytes = bytes),
            format!("section `{name}` takes {bytes} bytes, expected 1 to 67108864")
        );
    }
    assert_eq!(
        refusal(|m| m.sections[last].dtype = Some(Dtype::Fp8)),
        format!("section `{name}` is a Code of fp8 [], expected a Code of bytes []")
    );
    assert_eq!(
        refusal(|m| m.sections[last].kind = SectionKind::Vector),
        format!("section `{name}` is a Vector of bytes [], expected a Code of bytes []")
    );
}

#[test]
fn code_of_other_sources_is_refused() {
    assert_eq!(
        refusal(|m| m.kernels = "0123".into()),
        format!("built with kernels \"0123\", this has {:?}", spec_kernels::HASH)
    );
}

#[test]
fn architectures_must_be_known_and_named_once() {
    let archs = |archs: &[&str]| {
        let archs = archs.iter().map(|arch| arch.to_string()).collect();
        refusal(|m| m.device = Device::Cuda { archs, min_driver: 580 })
    };
    assert_eq!(archs(&[]), "device cuda lists no architecture, expected at least one");
    assert_eq!(archs(&["sm_80", "sm_80"]), "architecture \"sm_80\" is listed twice");
    assert_eq!(
        archs(&["sm_90"]),
        "architecture \"sm_90\" is unknown, expected one of sm_80, sm_89, sm_90a, sm_100a, sm_120a"
    );
}

#[test]
fn a_model_that_the_kernels_do_not_take_is_refused_by_field_value_and_remedy() {
    let cases: [Case; 7] = [
        (
            |m| m.precision.weights = Dtype::Bf16,
            "weights is bf16, CUDA engines take fp8 or fp16: use --dtype fp8 or fp16",
        ),
        (
            |m| m.precision.head = Dtype::Int8,
            "head is int8, CUDA engines take fp8 or fp16: use --head-dtype fp8 or fp16",
        ),
        (
            |m| m.precision.kv = Dtype::Fp32,
            "kv is fp32, CUDA engines take fp8 or fp16: use --kv-dtype fp8 or fp16",
        ),
        (
            |m| m.model.head_dim = 96,
            "head_dim is 96, CUDA engines take 64 or 128: use --device cpu",
        ),
        (
            |m| (m.model.num_heads, m.model.num_kv_heads) = (34, 2),
            "num_heads / num_kv_heads is 17, CUDA engines take at most 16: use --device cpu",
        ),
        (
            |m| m.model.hidden_size = 100,
            "hidden_size is 100, CUDA engines take a multiple of 32: use --device cpu",
        ),
        (
            |m| m.model.intermediate_size = 168,
            "intermediate_size is 168, CUDA engines take a multiple of 32: use --device cpu",
        ),
    ];
    for (edit, message) in cases {
        assert_eq!(refusal(edit), message);
        let mut manifest = cuda_manifest();
        edit(&mut manifest);
        let folder = TempDir::new().unwrap();
        let error = EngineWriter::create(folder.path().join("x"), manifest).unwrap_err();
        assert_eq!(error.to_string(), message, "the writer refuses it too");
    }
}

#[test]
#[should_panic(expected = "there is no code for section `code.sm_90a.embed.WEIGHT=FP16`")]
fn forgotten_code_is_a_mistake_of_the_builder() {
    let folder = TempDir::new().unwrap();
    drop(EngineWriter::create(folder.path().join("x"), cuda_manifest()));
}
