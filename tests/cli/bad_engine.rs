//! Engines and folders that are damaged, foreign or do not belong together: one line that says what is
//! wrong, both values, and what to do.

use super::support::{Checkpoint, build_args, built, refused, spec_build, succeeds, tokenizer};
use spec_core::engine::{Device, Engine, EngineWriter, code_section, needed_variants};
use std::fs;
use std::path::{Path, PathBuf};

const REBUILD: &str = "rebuild with spec-build";

fn tiny() -> (tempfile::TempDir, PathBuf) {
    let dir = built(&Checkpoint::tiny(1), &["--draft", "ngram"]);
    let engine = dir.path().join("model/1/target.engine");
    (dir, engine)
}

/// The same complaint from every command that opens engines.
fn refused_everywhere(path: &Path, parts: &[&str]) {
    let path = path.to_str().unwrap();
    refused(&["inspect", path], parts);
    refused(&["verify", path], parts);
}

fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_truncated_engine_names_both_lengths() {
    let (dir, engine) = tiny();
    let whole = fs::metadata(&engine).unwrap().len();
    edit(&engine, |bytes| bytes.truncate(whole as usize - 100));
    let parts = ["target.engine", &(whole - 100).to_string(), &whole.to_string(), REBUILD]
        .map(String::from);
    let parts = parts.each_ref().map(String::as_str);
    refused_everywhere(&engine, &parts);
    let model = dir.path().join("model");
    refused(&["try", model.to_str().unwrap(), "--prompt", "x"], &parts);
    edit(&engine, Vec::clear);
    refused_everywhere(&engine, &["not an engine file"]);
}

#[test]
fn an_altered_section_is_named_with_both_hashes() {
    let (_dir, engine) = tiny();
    let expected = Engine::open(&engine).unwrap();
    let section = expected.manifest().sections.iter().find(|s| s.name == "layers.1.down").unwrap();
    edit(&engine, |bytes| bytes[section.offset as usize + 5] ^= 1);
    let path = engine.to_str().unwrap();
    assert_eq!(spec_build(&["inspect", path]).code, Some(0), "inspect reads no sections");
    refused(&["verify", path], &["section `layers.1.down` has hash", &section.hash, REBUILD]);
}

#[test]
fn an_altered_manifest_is_told_by_its_hash() {
    let (_dir, engine) = tiny();
    edit(&engine, |bytes| {
        let at = bytes.windows(9).position(|window| window == b"bos_token").unwrap();
        bytes[at] = b'x';
    });
    refused_everywhere(&engine, &["manifest has hash", "the header says", REBUILD]);
}

#[test]
fn foreign_files_and_other_versions_are_told_apart() {
    let (dir, engine) = tiny();
    edit(&engine, |bytes| bytes[8] = 7);
    refused_everywhere(&engine, &["built by format 7, this reads 1", REBUILD]);
    edit(&engine, |bytes| bytes[..4].copy_from_slice(b"GGUF"));
    refused_everywhere(&engine, &["not an engine file: starts with \"GGUFENG\\n\", expected"]);
    refused_everywhere(&dir.path().join("nothing"), &["nothing", "No such file"]);
    refused_everywhere(dir.path(), &["no version folder with target.engine"]);
}

#[test]
fn an_engine_for_a_gpu_is_described_but_does_not_run_on_the_cpu() {
    let dir = built(&Checkpoint::for_gpu(1), &["--dtype", "fp16"]);
    let engine = dir.path().join("model/1/target.engine");
    let mut manifest = Engine::open(&engine).unwrap().manifest().clone();
    manifest.device = Device::Cuda { archs: vec!["sm_90a".into()], min_driver: 580 };
    let names = needed_variants(&manifest.model, &manifest.precision, "sm_90a");
    let code = names.iter().map(|variant| (code_section("sm_90a", variant), 100)).collect();
    let writer = EngineWriter::with_code(&engine, manifest, &code).unwrap();
    for section in writer.sections() {
        let mut out = writer.section(&section.name);
        out.write(&vec![0; section.bytes as usize]).unwrap();
        out.close();
    }
    writer.seal().unwrap().commit().unwrap();
    let model = dir.path().join("model");
    let model = model.to_str().unwrap();
    let text = succeeds(&["inspect", model]);
    assert!(text.contains("cuda:sm_90a, driver 580 or newer"), "{text}");
    assert!(text.contains(&format!("{} kernels, for 1 architecture(s)", names.len())), "{text}");
    let line = succeeds(&["verify", model]);
    assert!(line.contains("no tokens were run: that takes a GPU of sm_90a"), "{line}");
    // Where there is a driver, it is what refuses code that is no code.
    if !spec_core::testing::cuda::is_present() {
        let parts = ["built for cuda:sm_90a", "libcuda.so.1", "spec-build --device cpu"];
        refused(&["try", model, "--prompt", "x"], &parts);
    }
}

#[test]
fn a_folder_with_another_tokenizer_names_both_hashes() {
    let (dir, engine) = tiny();
    let named = Engine::open(&engine).unwrap().manifest().tokenizer.clone();
    let other = tokenizer("<|other|>").to_string();
    fs::write(dir.path().join("model/1/tokenizer.json"), &other).unwrap();
    let found = blake3::hash(other.as_bytes()).to_hex();
    refused_everywhere(&dir.path().join("model"), &["tokenizer.json", &found, &named, REBUILD]);
}

/// Builds target `1` with the draft of the seed.
fn pair(dir: &Path, name: &str, draft_seed: u64) -> PathBuf {
    let (target, draft) = (dir.join("target"), dir.join(format!("draft{draft_seed}")));
    Checkpoint::tiny(1).write(&target);
    Checkpoint::tiny(draft_seed).write(&draft);
    let model = dir.join(name);
    succeeds(&build_args(&target, &model, &["--draft", draft.to_str().unwrap()]));
    model
}

#[test]
fn a_draft_of_another_build_or_none_at_all_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (pair(dir.path(), "a", 2), pair(dir.path(), "b", 3));
    let draft = a.join("1/draft.engine");
    let identity = |path: &Path| Engine::open(path).unwrap().manifest().identity.clone();
    let (named, found) = (identity(&draft), identity(&b.join("1/draft.engine")));
    fs::copy(b.join("1/draft.engine"), &draft).unwrap();
    refused_everywhere(
        &a,
        &["the target names draft \"draft.engine\"", &named, &found, "rebuild both"],
    );
    fs::remove_file(&draft).unwrap();
    refused_everywhere(&a, &["draft.engine", "No such file"]);
}
