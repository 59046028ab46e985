//! The whole checker on an emulated GPU: every part runs, every figure is in the file, and the table shows it.
#![allow(clippy::unwrap_used)]

use crate::args::Args;
use crate::report::{Report, Verdict};
use serde_json::{Map, Value, json};
use spec_core::exec::cuda::device::Device;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn args(text: &str) -> Result<Args, String> {
    Args::parse(text.split_whitespace().map(String::from))
}

/// The only result in a folder.
fn result_in(folder: &Path) -> (PathBuf, Value) {
    let mut files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let file = files.next().unwrap();
    assert_eq!(files.next(), None, "one file, and no half of one");
    let value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    (file, value)
}

fn list<'a>(result: &'a Value, name: &str) -> &'a [Value] {
    result[name].as_array().map_or(&[], Vec::as_slice)
}

#[test]
fn the_whole_run_passes_on_an_emulated_gpu_and_its_tables_show_it() {
    let folder = tempfile::tempdir().unwrap();
    let options =
        format!("--emulate --date 2026-01-02T03:04:05+00:00 --results {}", folder.path().display());
    let args = args(&options).unwrap();
    let description = args.machine.open().unwrap().describe().clone();
    let is_good = crate::run(&args, &description).unwrap();
    let (file, result) = result_in(folder.path());
    assert!(is_good, "{result:#}");
    let name = file.file_name().unwrap().to_string_lossy().into_owned();
    assert_eq!(name, "gpu-emulated-gpu-of-compute-capability-9-0-2026-01-02T0304.json");
    assert_eq!(result["emulated"], json!(true));
    assert_eq!(result["counts"]["failed"], json!(0));
    // Four models by five checks, three of texts, and the engines, kernels, prompts and steps of the bench.
    assert_eq!(result["counts"]["passed"], json!(20 + 3 + 4), "{result:#}");
    let ways: Vec<_> = list(&result, "prefill").iter().map(|entry| &entry["way"]).collect();
    assert_eq!(ways, ["exact", "cublaslt"]);
    let kernels = |entry: &&Value| entry["rows"] == json!(33);
    let mut kinds: Vec<_> =
        list(&result, "kernels").iter().filter(kernels).map(|e| &e["kernel"]).collect();
    kinds.sort_by_key(|kind| kind.to_string());
    assert_eq!(kinds, ["down", "embed", "gate_up", "head", "out", "qkv"]);
    let steps = list(&result, "steps");
    assert_eq!(steps.len(), 2);
    let parts = steps[1]["parts_us"].as_object().unwrap();
    for part in ["drafter sample", "drafter qkv", "target attention", "target accept"] {
        assert!(parts.contains_key(part), "{part}: {parts:?}");
    }
    let table = table(&file);
    for part in [
        "| tiny FP8 gate_up |",
        "| tiny FP8, 2 of 4 layers | tiny FP8 |",
        "target sample",
        "| tiny FP8 | cublaslt | 200 |",
        "27 passed",
    ] {
        assert!(table.contains(part), "{part} is not in\n{table}");
    }
}

fn table(file: &Path) -> String {
    let output = Command::new(root().join("scripts/bench/gpu-table")).arg(file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A result as a GPU would give it.
fn measured() -> Value {
    let time = |us: f64| json!({ "us": us, "low_us": us * 0.98, "high_us": us * 1.05, "samples": 21, "replays": 9 });
    let kernel = |rows: usize, us: f64, met: bool| {
        json!({
            "model": "Llama-3.1-8B FP8", "kernel": "gate_up", "rows": rows, "time": time(us), "n": 28672, "k": 4096,
            "to_one_row": us / 45.0, "mb": 117.4, "gb_per_s": 2600.0, "share_of_copy": 0.87, "share_of_read": 0.84,
            "goal": { "what": "share of the copy", "goal": 0.88, "met": met }, "rows_goal": null,
        })
    };
    json!({
        "date": "2026-01-02T03:04:05+00:00", "commit": "abc", "gpu": "NVIDIA H100 80GB HBM3", "arch": "sm_90a",
        "num_sms": 132, "driver": 580, "emulated": false,
        "ceilings": {
            "copy": { "gb_per_s": 3000.0 }, "read": { "gb_per_s": 3100.0 }, "multiply": { "tflops": 620.0 },
            "boundary": { "us": 0.9 },
        },
        "kernels": [kernel(1, 45.0, false), kernel(8, 45.5, false)],
        "steps": [],
        "peer": [
            { "list": "about", "torch": "2.11.0", "cuda": "13.0", "gpu": "NVIDIA H100 80GB HBM3" },
            { "list": "matmul", "model": "Llama-3.1-8B FP8", "kernel": "gate_up", "rows": 1, "time": time(90.0) },
        ],
        "checks": [{ "name": "texts", "status": "failed", "detail": "other tokens", "seconds": 1.0 }],
    })
}

#[test]
fn the_table_tells_goals_peers_and_failures() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("result.json");
    std::fs::write(&file, measured().to_string()).unwrap();
    let table = table(&file);
    for part in [
        "copy 3000 GB/s",
        "| Llama-3.1-8B FP8 gate_up | 117.4 | 45.0 (±5%) | 45.5 (±5%) | 2600 | 87% | 84% | 88% **missed** |",
        " 2.00 x |",
        "did not come to its end",
        "- **failed** texts: other tokens",
    ] {
        assert!(table.contains(part), "{part} is not in\n{table}");
    }
}

#[test]
fn a_failure_or_a_panic_fails_the_run_and_not_the_checks_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut report = Report::new(Some(folder.path().join("result.json")), Map::new());
    report.check("wrong", |_| Err("off by 3".into()));
    report.check("broken", |_| panic!("index 7"));
    report.check("elsewhere", |_| Ok(Verdict::Skipped("no GPU".into())));
    report.check("right", |_| Ok(Verdict::Passed("all".into())));
    assert_eq!(report.finish(), ("1 passed, 2 failed, 1 skipped".into(), false));
    let (_, result) = result_in(folder.path());
    let details: Vec<_> = list(&result, "checks").iter().map(|check| &check["detail"]).collect();
    assert_eq!(details, ["off by 3", "index 7", "no GPU", "all"]);
}

#[test]
fn unknown_parts_and_options_are_refused() {
    for (text, part) in [
        ("--only logit", "expected one of logits, texts"),
        ("--fast", "unknown argument --fast"),
        ("--gpu", "--gpu needs a value"),
    ] {
        let error = args(text).err().unwrap();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn the_scripts_are_whole() {
    let check = |program: &str, option: &str, script: &str| {
        let output = Command::new(program).arg(option).arg(root().join(script)).output().unwrap();
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
    };
    for script in ["scripts/gpu-check", "scripts/gpu-bundle"] {
        check("bash", "-n", script);
    }
    let compile = "import ast, sys; ast.parse(open(sys.argv[1]).read())";
    for script in ["gpu_peer.py", "gpu-server", "gpu-table"] {
        let path = root().join("scripts/bench").join(script);
        let status = Command::new("python3").args(["-c", compile]).arg(path).status().unwrap();
        assert!(status.success(), "{script}");
    }
}
