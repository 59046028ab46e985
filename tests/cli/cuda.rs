//! Engines for GPUs, built where there may be none. Tests that compile kernels say so where NVRTC is missing.

use super::support::{
    Checkpoint, build_args, command, misused, names_in, refused, spec_build, succeeds,
};
use spec_build::cuda::Compiler;
use spec_core::engine::{Engine, SectionKind, needed_variants};
use spec_core::exec::SearchPath;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

/// Kernels that an engine carries for some architectures.
fn num_kernels(engine: &Engine, archs: &[&str]) -> usize {
    let manifest = engine.manifest();
    let of_arch = |arch| needed_variants(&manifest.model, &manifest.precision, arch).len();
    archs.iter().copied().map(of_arch).sum()
}

/// Whether kernels can be compiled here.
fn has_nvrtc() -> bool {
    match Compiler::open(&SearchPath::of_process(None), None) {
        Ok(_) => true,
        Err(error) => {
            let _ = writeln!(io::stderr(), "skipped: {error:#}");
            false
        }
    }
}

fn checkpoints(dir: &Path) {
    Checkpoint::for_gpu(1).write(&dir.join("target"));
    Checkpoint::for_gpu(2).write(&dir.join("draft"));
}

/// A pair for two architectures, in the folder `name`.
fn build_pair(dir: &Path, name: &str) {
    let draft = dir.join("draft");
    let options = ["--draft", draft.to_str().unwrap(), "--device", "cuda:sm_90a,sm_80"];
    succeeds(&build_args(&dir.join("target"), &dir.join(name), &options));
}

#[test]
fn a_pair_for_two_architectures_is_built_and_described() {
    if !has_nvrtc() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    checkpoints(dir.path());
    build_pair(dir.path(), "model");
    let model = dir.path().join("model");
    let config = fs::read_to_string(model.join("config.pbtxt")).unwrap();
    assert!(config.contains("{ count: 1 kind: KIND_GPU gpus: [ 0 ] }"), "{config}");
    let text = succeeds(&["inspect".as_ref(), model.as_os_str()]);
    let target = Engine::open(model.join("1/target.engine")).unwrap();
    let kernels = num_kernels(&target, &["sm_90a", "sm_80"]);
    let kernels = format!("{kernels} kernels, for 2 architecture(s)");
    for part in [
        "NVRTC 13.",
        "cuda:sm_90a,sm_80, driver 580 or newer",
        &kernels,
        "weights fp8, embedding and head fp16, kv fp16",
    ] {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
    let line = succeeds(&["verify".as_ref(), model.as_os_str()]);
    assert!(line.contains("no tokens were run: that takes a GPU of sm_90a or sm_80"), "{line}");
    target.open_drafter().unwrap().expect("it has one");
    let code = target.manifest().sections.iter().filter(|s| s.kind == SectionKind::Code);
    let reader = target.reader().unwrap();
    for section in code {
        let cubin = reader.section(&section.name).bytes().unwrap();
        assert!(cubin.starts_with(b"\x7fELF"), "{} is no ELF file", section.name);
    }
}

#[test]
fn the_same_inputs_give_the_same_engines_whatever_is_cached() {
    if !has_nvrtc() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    checkpoints(dir.path());
    let cache = dir.path().join("cache");
    let build = |name: &str| {
        let target = dir.path().join("target");
        // NVRTC's code for newer architectures can depend on where its data happens to lie in memory.
        let options = ["--device", "cuda:sm_90a"];
        let mut command = command(&build_args(&target, &dir.path().join(name), &options));
        let ended = command.env("SPEC_CACHE", &cache).output().unwrap();
        assert!(ended.status.success(), "{ended:?}");
        fs::read(dir.path().join(name).join("1/target.engine")).unwrap()
    };
    let first = build("first");
    let entries = names_in(&cache);
    let engine = Engine::open(dir.path().join("first/1/target.engine")).unwrap();
    assert_eq!(entries.len(), num_kernels(&engine, &["sm_90a"]));
    assert!(build("cached") == first, "what was cached is not what was compiled");
    // Some, of all kernels: each takes a second to compile.
    for name in entries.iter().step_by(4) {
        let entry = cache.join(name);
        let mut bytes = fs::read(&entry).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(entry, bytes).unwrap();
    }
    assert!(build("damaged") == first, "compiling again gives other bytes");
}

#[test]
fn a_missing_compiler_is_named_with_what_to_install() {
    let dir = tempfile::tempdir().unwrap();
    checkpoints(dir.path());
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let options = ["--device", "cuda:sm_90a", "--cuda-lib", empty.to_str().unwrap()];
    let parts = ["empty holds no libnvrtc.so.13", "pip install nvidia-cuda-nvrtc==13.0.88"];
    refused(&build_args(&dir.path().join("target"), &dir.path().join("model"), &options), &parts);
    assert_eq!(names_in(dir.path()), ["draft", "empty", "target"]);
}

#[test]
fn what_the_kernels_do_not_take_is_refused_by_build_and_plan_alike() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("target");
    for (alter, options, parts) in [
        (None, &["--dtype", "bf16"][..], &["weights is bf16", "fp8 or fp16", "--dtype"][..]),
        (None, &["--dtype", "fp32"], &["weights is fp32"]),
        (None, &["--head-dtype", "bf16"], &["head is bf16", "--head-dtype fp8 or fp16"]),
        (None, &["--kv-dtype", "fp32"], &["kv is fp32", "--kv-dtype fp8 or fp16"]),
        (
            Some(("intermediate_size", 100)),
            &[],
            &["intermediate_size is 100", "a multiple of 32", "--device cpu"],
        ),
    ] {
        let mut checkpoint = Checkpoint::for_gpu(1);
        if let Some((field, value)) = alter {
            checkpoint.config[field] = value.into();
            for tensor in &mut checkpoint.tensors {
                for size in tensor.shape.iter_mut().filter(|size| **size == 96) {
                    *size = value;
                }
                tensor.values.resize(tensor.shape.iter().product(), 0.0);
            }
        }
        checkpoint.write(&target);
        let options = [&["--device", "cuda:sm_90a"], options].concat();
        refused(&build_args(&target, &dir.path().join("model"), &options), parts);
        let plan = ["plan", "--target", target.to_str().unwrap()];
        refused(&[&plan[..], &options].concat(), parts);
    }
    assert_eq!(names_in(dir.path()), ["target"]);
}

#[test]
fn made_up_models_are_built_planned_and_run() {
    let dir = tempfile::tempdir().unwrap();
    Checkpoint::for_gpu(1).write(dir.path());
    let config = dir.path().join("config.json");
    let target = format!("random:{}", config.display());
    let draft = format!("random:{}@1", config.display());
    let build = |name: &str, options: &[&str]| {
        let output = dir.path().join(name);
        let options = [&["--draft", &draft, "--max-draft-len", "2"], options].concat();
        succeeds(&build_args(Path::new(&target), &output, &options));
        output
    };
    let (one, two) = (build("one", &[]), build("two", &[]));
    for file in ["target.engine", "draft.engine", "tokenizer.json"] {
        let bytes = |model: &Path| fs::read(model.join("1").join(file)).unwrap();
        assert!(bytes(&one) == bytes(&two), "{file} differs from build to build");
    }
    let line = succeeds(&["verify".as_ref(), one.as_os_str()]);
    assert!(line.contains("8 greedy tokens are the same with draft length 0 and 2"), "{line}");
    if has_nvrtc() {
        build("gpu", &["--device", "cuda:sm_90a"]);
    }
    let args = ["plan", "--target", "random:llama-3.1-70b", "--device", "cuda:sm_90a"];
    let text = succeeds(&args);
    // 80 layers, 8 key heads of 128, keys and values of 2 bytes.
    assert!(text.contains("320.00 KiB"), "{text}");
    let fit = |text: &str, name: &str| -> String {
        let mut lines = text.lines().skip_while(|line| !line.starts_with(name));
        lines.nth(1).unwrap_or_default().into()
    };
    // 8 bits a weight fit, with some GiB for keys and values; 16 do not.
    let line = fit(&text, "H100");
    assert!(line.starts_with("of 79.00 GiB weights take 67.69 GiB"), "{line}");
    assert!(line.contains("are left") && line.contains("sequences of max_seq_len 8192"), "{line}");
    let line = fit(&succeeds(&[&args[..], &["--dtype", "fp16"]].concat()), "H100");
    assert!(line.contains("GiB are missing for one sequence of max_seq_len 8192"), "{line}");
    refused(&["plan", "--target", "random:nothing"], &["`nothing` is neither one of llama-3.2-1b"]);
}

#[test]
fn plan_predicts_the_gpus_of_its_table_or_a_given_one() {
    let dir = tempfile::tempdir().unwrap();
    checkpoints(dir.path());
    let path = dir.path().join("target");
    let path = path.to_str().unwrap();
    let args = ["plan", "--target", path, "--draft", path, "--device", "cuda:sm_90a"];
    let text = succeeds(&args);
    for part in [
        "H100 at 3050 GB/s, predicted from machine code, not measured",
        "H200 at 4300 GB/s",
        "break-even",
    ] {
        assert!(text.contains(part), "`{part}` is not in:\n{text}");
    }
    // One layer, one key head of 64, keys and values of 2 bytes.
    assert!(text.contains("256 B"), "{text}");
    let text = succeeds(&[&args[..], &["--bandwidth", "1000"]].concat());
    assert!(text.contains("a GPU at 1000 GB/s") && !text.contains("H100"), "{text}");
    misused(&["plan", "--device", "cuda:sm_90a"], &["--target"]);
    assert_eq!(spec_build(&[&args[..], &["--bandwidth", "0"]].concat()).code, Some(1));
}
