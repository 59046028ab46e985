//! The whole checker on an emulated GPU: every part runs, every figure is in the file, and the table shows it.
#![allow(clippy::unwrap_used)]

use crate::args::Args;
use crate::bench::{FEW_PAIRS, LIMITS};
use crate::case::{self, Drafts, FEW, Pair};
use crate::gpu::{Bed, Machine};
use crate::random_engine::RandomEngines;
use crate::report::{Outcome, Report, Verdict};
use crate::supervisor;
use crate::twin::{Findings, Twin};
use serde_json::{Map, Value, json};
use spec_core::engine::Engine;
use spec_core::runtime::Prefill;
use spec_core::testing::cuda::device::Device;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

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
    let file = crate::result_file(folder.path(), &args.date, &description);
    let name = file.file_name().unwrap().to_string_lossy().into_owned();
    assert_eq!(name, "gpu-emulated-gpu-of-compute-capability-9-0-2026-01-02T0304.json");
    let mut report = crate::run(&args, &description, Some(file)).unwrap();
    let (line, is_good) = report.finish();
    let (file, result) = result_in(folder.path());
    assert!(is_good, "{line}: {result:#}");
    for part in ["launches", "logits", "texts", "bench", "sanitizer"] {
        assert_eq!(result["parts"][part], json!("finished"));
    }
    assert_eq!(result["emulated"], json!(true));
    assert_eq!(result["counts"]["failed"], json!(0));
    // Four models by three checks of launches, and three of steps; four models by eight, six of texts, three of the bench.
    assert_eq!(result["counts"]["passed"], json!(12 + 3 + 32 + 6 + 3), "{result:#}");
    let ways: Vec<_> = list(&result, "prefill").iter().map(|entry| &entry["way"]).collect();
    assert_eq!(ways, ["exact", "blocks", "cublaslt"]);
    let kernels = |entry: &&Value| entry["rows"] == json!(33);
    let mut kinds: Vec<_> =
        list(&result, "kernels").iter().filter(kernels).map(|e| &e["kernel"]).collect();
    kinds.sort_by_key(|kind| kind.to_string());
    assert_eq!(kinds, ["down", "embed", "gate_up", "head", "normalise", "out", "qkv"]);
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
        "| tiny FP8 | blocks | 300 |",
        "| tiny FP8 | cublaslt | 300 |",
        "56 passed",
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
        "parts": { "logits": "finished", "bench": "not finished" },
        "running": { "name": "Llama-3.1-8B FP8: steps", "until": 0.0 },
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
        "did not come to its end: it was at Llama-3.1-8B FP8: steps",
        "- **not finished** bench",
        "- **failed** texts: other tokens",
    ] {
        assert!(table.contains(part), "{part} is not in\n{table}");
    }
}

#[test]
fn a_wrong_launch_is_named_with_what_it_wrote() {
    let pair = Pair::build(&FEW[0], "sm_90a");
    let run = |spoiled| {
        let findings = Findings::default();
        let mut twin = Twin::new(Box::new(Machine::Emulator.open().unwrap()), findings.clone());
        twin.spoiled = spoiled;
        let tokens = case::tokens(12);
        crate::logits::on(Box::new(twin), &pair.cuda, Prefill::Exact, &tokens, &[9, 3]).unwrap();
        crate::launches::verdict(&findings)
    };
    let Verdict::Passed(passed) = run(None).unwrap() else { panic!("it runs everywhere") };
    assert!(passed.contains("embed 0e0") && passed.contains("attention 0e0"), "{passed}");
    for (launch, kernel, array) in [
        (0, "embed", "residual"),
        (1, "normalise", "output"),
        (2, "gemm", "output"),
        (3, "attention", "output"),
    ] {
        let error = run(Some(launch)).err().unwrap().to_string();
        assert!(error.starts_with("1 variants in "), "{error}");
        assert!(error.contains(&format!(" launches: {kernel}")), "{error}");
        assert!(error.contains(&format!("launch {launch}: {array}: element ")), "{error}");
    }
}

#[test]
fn wrong_logits_are_followed_by_a_search_for_the_launch() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("result.json");
    let kinds = [
        "logits against the CPU executor",
        "bits of a row, any passes",
        "bits of a row, beside others",
        "bits of two runs",
        "logits of a prompt by blocks",
        "bits of a row by blocks, any passes",
        "logits of a prompt by cublaslt",
        "bits of a row by cublaslt, any passes",
    ];
    let names = FEW.iter().flat_map(|case| kinds.map(|kind| format!("{kind}: {}", case.name())));
    let ended = |(idx, name)| json!({ "name": name, "status": if idx == kinds.len() { "failed" } else { "passed" } });
    let checks: Vec<Value> = names.enumerate().map(ended).collect();
    std::fs::write(&file, json!({ "checks": checks }).to_string()).unwrap();
    let mut report = Report::new(Some(file), Map::new());
    let bed = Bed { machine: Machine::Emulator, arch: "sm_90a", small: true };
    crate::logits::run(&mut report, bed);
    assert_eq!(report.finish().0, "32 passed, 1 failed, 0 skipped");
    let (_, result) = result_in(folder.path());
    let name = format!("launches behind those logits: {}", FEW[1].name());
    assert_eq!(list(&result, "checks").last().unwrap()["name"], json!(name));
}

/// Names the file that a process records in which finds the emulated driver.
const RECORD: &str = "GPU_CHECK_RECORD";

#[test]
fn a_run_over_the_driver_goes_on_behind_a_kernel_that_faults() {
    let args = args("--emulate-driver --only launches,texts,kernels,steps").unwrap();
    if let Some(file) = std::env::var_os(RECORD) {
        let description = args.machine.open().unwrap().describe().clone();
        let report = crate::run(&args, &description, Some(file.into())).unwrap();
        std::process::exit(if report.is_stopped() { supervisor::AGAIN.into() } else { 0 });
    }
    let folder = tempfile::tempdir().unwrap();
    let (file, code) = (folder.path().join("results/result.json"), folder.path().join("code"));
    std::fs::create_dir(folder.path().join("results")).unwrap();
    std::fs::write(&code, table_of_code("sm_90a")).unwrap();
    let program = std::env::current_exe().unwrap();
    let driver = program.parent().unwrap().with_file_name("deps/libspec_emu_driver.so");
    // An illegal address in the first process.
    let mut fault = Some("kernel=700@20");
    let process = || {
        let mut command = Command::new(&program);
        let name = "tests::a_run_over_the_driver_goes_on_behind_a_kernel_that_faults";
        command.args([name, "--exact", "--nocapture"]).env(RECORD, &file);
        command.env("SPEC_CUDA_DRIVER", &driver).env("EMU_DRIVER_CODE", &code);
        command.envs(fault.take().map(|fault| ("EMU_DRIVER_FAIL", fault)));
        command
    };
    let mut report = supervisor::run(process, &file, Duration::from_secs(600)).unwrap();
    let (line, _) = report.finish();
    let (_, result) = result_in(file.parent().unwrap());
    assert_eq!(result["counts"]["failed"], json!(1), "{line}: {result:#}");
    assert_eq!(result["parts"]["bench"], json!("finished"));
    let failed = list(&result, "checks").iter().find(|check| check["status"] == "failed");
    let detail = failed.unwrap()["detail"].to_string();
    assert!(detail.contains("cuStreamSynchronize: error 700"), "{detail}");
    assert!(detail.contains("(launch ") && detail.contains(".WEIGHT=FP16."), "{detail}");
    // One of four models and two kinds of steps has failed; the library is not there.
    assert_eq!(result["counts"]["passed"], json!(10 + 2 + 5), "{line}: {result:#}");
}

/// Which kernel each cubin of the run is, for the emulated driver.
fn table_of_code(arch: &'static str) -> String {
    let mut lines = String::new();
    for case in &FEW {
        lines += &lines_of_code(&Pair::build(case, arch).cuda);
    }
    let bed = Bed { machine: Machine::Emulator, arch, small: true };
    for drafts in [Drafts::LookUp, Drafts::Model, Drafts::Head] {
        let (_folder, target) = case::speculating(drafts, bed);
        lines += &lines_of_code(&target);
        lines.extend(target.open_drafter().unwrap().as_ref().map(lines_of_code));
    }
    let [(target, draft)] = FEW_PAIRS;
    let random = RandomEngines::write(target, draft, &LIMITS, arch).unwrap();
    lines.extend(
        [Some(&random.target), random.draft.as_ref()].into_iter().flatten().map(lines_of_code),
    );
    lines
}

fn lines_of_code(engine: &Engine) -> String {
    let reader = engine.reader().unwrap();
    let mut lines = String::new();
    for section in &engine.manifest().sections {
        let code = section.name.strip_prefix("code.").and_then(|name| name.split_once('.'));
        let Some((_, variant)) = code else { continue };
        let hash = blake3::hash(&reader.section(&section.name).bytes().unwrap()).to_hex();
        lines += &format!("{hash} {variant}\n");
    }
    lines
}

#[test]
fn a_process_that_fails_crashes_or_hangs_is_followed_by_one_that_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("result.json");
    // Each line is what a process leaves in the file, and then does.
    let running = |name: &str, until: f64| json!({ "running": { "name": name, "until": until } });
    let far = 1e12;
    let steps = [
        (json!({}), "exit 75"),
        (running("crash", far), "kill -SEGV $$"),
        (running("hang", 1.0), "sleep 60"),
        (json!({}), "exit 0"),
    ];
    let mut steps = steps.into_iter();
    let process = || {
        let (left, act) = steps.next().unwrap();
        let mut report = Report::new(Some(file.clone()), Map::new());
        if act == "exit 75" {
            report.check("wrong", |_| Err("off by 3".into()));
        }
        left.as_object().unwrap().iter().for_each(|(key, value)| report.put(key, value.clone()));
        let mut command = Command::new("bash");
        command.args(["-c", act]);
        command
    };
    let start = Instant::now();
    let mut report = supervisor::run(process, &file, Duration::from_secs(50)).unwrap();
    assert!(start.elapsed() < Duration::from_secs(40));
    assert_eq!(report.finish(), ("0 passed, 3 failed, 0 skipped".into(), false));
    let (_, result) = result_in(folder.path());
    let names: Vec<_> = list(&result, "checks").iter().map(|check| &check["name"]).collect();
    assert_eq!(names, ["wrong", "crash", "hang"]);
    assert!(result["checks"][1]["detail"].to_string().contains("signal"), "{result:#}");
}

#[test]
fn a_run_ends_when_its_time_is_up_and_says_what_it_has_not_reached() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("result.json");
    let process = || {
        let mut report = Report::new(Some(file.clone()), Map::new());
        report.set_part("logits", "not finished");
        report.set_part("texts", "not begun");
        report.put("running", json!({ "name": "slow", "until": 1e12 }));
        let mut command = Command::new("sleep");
        command.arg("60");
        command
    };
    let mut report = supervisor::run(process, &file, Duration::from_millis(300)).unwrap();
    let line = "0 passed, 1 failed, 0 skipped; logits not finished, texts not begun";
    assert_eq!(report.finish(), (line.into(), false));
    // One that cannot even begin is tried once.
    let mut count = 0;
    let process = || {
        count += 1;
        Command::new("false")
    };
    let other = folder.path().join("other.json");
    supervisor::run(process, &other, Duration::from_secs(50)).unwrap();
    assert_eq!(count, 1);
}

#[test]
fn a_run_goes_on_behind_the_checks_that_have_ended() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("result.json");
    let run = |first: Outcome| {
        let mut report = Report::new(Some(file.clone()), Map::new()).stopping_at_failure();
        report.part("both", |report| {
            report.check("first", |_| first);
            report.check("second", |_| Ok(Verdict::Passed("all".into())));
        });
        report
    };
    let mut report = run(Err("off by 3".into()));
    assert!(report.is_stopped());
    assert_eq!(report.finish().0, "0 passed, 1 failed, 0 skipped; both not finished");
    let mut report = run(Ok(Verdict::Passed("not again".into())));
    assert!(!report.is_stopped());
    assert_eq!(report.finish(), ("1 passed, 1 failed, 0 skipped".into(), false));
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
        ("--only logit", "expected one of launches, logits"),
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
