//! The assembly text that NVRTC makes of the kernels, inline assembly and all, executed: every launch of the CUDA executor
//! runs from it and on the emulator, and leaves the same bytes everywhere in memory.
//!
//! The text is made with the options of engines. The kernels say themselves where a product and a sum are fused, so that
//! NVRTC fuses no other whose rounding matters. What instructions leave open is done as in the emulator: the order of sums
//! in a product of matrices, the last bits of `ex2.approx`, and that `mul` and `add`, which an assembler may fuse, are not.
#![allow(clippy::unwrap_used)]

mod common;

use common::models::Recipe;
use common::running::{self, Done};
use common::small::{NORMED, SMALL, in_parts, in_parts_of_prompt, tokens};
use common::tiny::{self, HeadKind, Sizes};
use spec_build::cuda::{Cache, Compiler};
use spec_core::engine::Engine;
use spec_core::exec::SearchPath;
use spec_core::model::Dtype;
use spec_core::runtime::DraftPolicy::Fixed;
use spec_core::runtime::{Options, Prefill, Request, Runtime, TARGET_FILE};
use spec_core::testing::cuda::{Gpu, Model, OnHost};
use spec_emu::{Emulator, Schedule};
use spec_emu_ptx::{Device, Kernels};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

/// Multiprocessors: an odd number, so that blocks begin and end inside of columns.
const NUM_SMS: u32 = 3;

/// Compute capabilities: with bulk copies, with copies by threads alone, and with those and without e4m3.
const NEW: (u32, u32) = (9, 0);
const MIDDLE: (u32, u32) = (8, 9);
const OLD: (u32, u32) = (8, 0);

/// The compiler, with a cache beside cargo's files; none where it is not installed.
fn compiler() -> Option<Compiler> {
    let cache = Cache::in_folder(Path::new(env!("CARGO_TARGET_TMPDIR")).join("ptx"));
    match Compiler::open(&SearchPath::of_process(None), Some(cache)) {
        Ok(compiler) => Some(compiler),
        Err(error) => {
            let _ = writeln!(io::stderr(), "skipped: {error:#}");
            None
        }
    }
}

fn kernels(capability: (u32, u32)) -> Option<Arc<Kernels>> {
    Some(Arc::new(Kernels::new(compiler()?, arch(capability))))
}

/// What NVRTC calls it.
fn arch(capability: (u32, u32)) -> &'static str {
    match capability {
        NEW => "compute_90a",
        MIDDLE => "compute_89",
        _ => "compute_80",
    }
}

fn device(capability: (u32, u32), kernels: &Arc<Kernels>, seed: u64) -> Device {
    let emulator = Emulator::new(capability, NUM_SMS, Schedule::PLAIN);
    Device::new(emulator, Arc::clone(kernels), seed)
}

fn on(device: Device, engine: &Engine, prefill: Prefill) -> OnHost {
    let gpu = Gpu::new(Box::new(device));
    let model = Model::load_with(engine, 17, prefill, &mut **gpu.lock()).expect("loads");
    OnHost::new(Arc::new(model), gpu)
}

fn open(dir: &Path, name: &str) -> Engine {
    Engine::open(dir.join(name).join("1").join(TARGET_FILE)).expect("opens")
}

fn built(device: &str, sizes: &Sizes, dtype: Dtype, kv: Dtype) -> (TempDir, Engine) {
    let dir = tempfile::tempdir().expect("a folder");
    tiny::write_sized(&dir.path().join("model"), 2, 3, sizes);
    let recipe = Recipe::plain(dir.path().join("model"), dtype).with_kv(kv);
    recipe.on(device).build(&dir.path().join("built"));
    let engine = open(dir.path(), "built");
    (dir, engine)
}

fn built_for(capability: (u32, u32), sizes: &Sizes, dtype: Dtype, kv: Dtype) -> (TempDir, Engine) {
    let device = arch(capability).replace("compute_", "cuda:sm_");
    built(&device, sizes, dtype, kv)
}

/// Chunks and single rows.
const FEW: [usize; 4] = [37, 1, 5, 7];

/// Passes of so many rows each, each launch compared.
fn passes(
    capability: (u32, u32),
    cases: &[(&Sizes, Dtype, Dtype)],
    seeds: &[u64],
    parts: &[usize],
) {
    for &(sizes, dtype, kv) in cases {
        let Some(kernels) = kernels(capability) else { return };
        let (_dir, engine) = built_for(capability, sizes, dtype, kv);
        for &seed in seeds {
            let device = device(capability, &kernels, seed);
            let counts = device.counts();
            let tokens = tokens(parts.iter().sum());
            in_parts(&mut on(device, &engine, Prefill::Exact), &tokens, parts);
            let counts = counts.lock().unwrap();
            assert!(counts.values().sum::<usize>() >= parts.len() * 11, "{counts:?}");
        }
    }
}

#[test]
fn passes_with_bulk_copies_leave_the_bytes_of_the_emulator() {
    let wide = (&NORMED, Dtype::Fp16, Dtype::Fp8);
    passes(NEW, &[(&SMALL, Dtype::Fp8, Dtype::Fp8), wide], &[0, 1, 2], &FEW);
}

#[test]
fn passes_with_copies_by_threads_leave_the_bytes_of_the_emulator() {
    let small = (&SMALL, Dtype::Fp8, Dtype::Fp8);
    passes(OLD, &[small, (&NORMED, Dtype::Fp16, Dtype::Fp16)], &[0, 1, 2], &FEW);
    passes(MIDDLE, &[small], &[1], &FEW);
}

/// Two blocks share their rows, and of the first pass sums take the registers of other warps.
#[test]
fn passes_of_many_rows_leave_the_bytes_of_the_emulator() {
    let wide = (&NORMED, Dtype::Fp16, Dtype::Fp8);
    passes(NEW, &[(&SMALL, Dtype::Fp8, Dtype::Fp8), wide], &[1], &[200, 70]);
}

#[test]
fn blocks_that_a_library_multiplies_leave_the_bytes_of_the_emulator() {
    for (capability, dtype) in [(NEW, Dtype::Fp8), (OLD, Dtype::Fp16)] {
        let Some(kernels) = kernels(capability) else { return };
        let (_dir, engine) = built_for(capability, &SMALL, dtype, Dtype::Fp16);
        let device = device(capability, &kernels, 1);
        let counts = device.counts();
        let mut model = on(device, &engine, Prefill::CublasLt);
        in_parts_of_prompt(&mut model, &tokens(270), &[170, 95, 5], 265);
        let counts = counts.lock().unwrap();
        let launched: BTreeSet<&str> =
            counts.keys().filter_map(|name| name.split('.').next()).collect();
        let expected = ["finish", "normalise", "unpack", "quantise"];
        let num = if dtype == Dtype::Fp8 { 4 } else { 3 };
        assert!(expected[..num].iter().all(|name| launched.contains(name)), "{launched:?}");
    }
}

#[test]
fn blocks_that_kernels_multiply_leave_the_bytes_of_the_emulator() {
    let Some(kernels) = kernels(NEW) else { return };
    for dtype in [Dtype::Fp8, Dtype::Fp16] {
        let (_dir, engine) = built_for(NEW, &SMALL, dtype, Dtype::Fp16);
        let device = device(NEW, &kernels, 1);
        let counts = device.counts();
        let mut model = on(device, &engine, Prefill::Blocks);
        in_parts_of_prompt(&mut model, &tokens(270), &[170, 95, 5], 265);
        let counts = counts.lock().unwrap();
        let num_products = counts.iter().filter(|(name, _)| name.starts_with("multiply"));
        let num_products: usize = num_products.map(|(_, count)| count).sum();
        let num_layers = engine.manifest().model.num_layers;
        assert_eq!(num_products, 2 * 4 * num_layers, "{counts:?}");
    }
}

/// Greedy and seeded, with what depends on the tokens before.
fn requests() -> Vec<Request> {
    let sampling = running::kinds_of_sampling();
    let request = |(idx, sampling): (usize, &_)| Request {
        prompt: [tokens(3 + 9 * idx), tokens(3)].concat().into(),
        max_tokens: 6,
        draft_len: Some(3),
        sampling: Clone::clone(sampling),
        ..Request::default()
    };
    sampling.iter().enumerate().map(request).collect()
}

/// Runs requests with each launch compared, and counts the launches by kernel.
fn run_compared(
    engine: &Engine,
    kernels: &Arc<Kernels>,
    requests: &[Request],
    draft_branches: usize,
) -> (Vec<Done>, BTreeMap<String, usize>) {
    let counted = device(NEW, kernels, 1);
    let counts = counted.counts();
    let device = std::sync::Mutex::new(Some(counted));
    let open = |_| Ok(Box::new(device.lock().unwrap().take().expect("one")) as _);
    let options = Options { kv_tokens: Some(2048), draft_branches, ..running::options(Fixed) };
    let mut runtime = Runtime::load_on(engine, &options, &open).expect("loads");
    let done = running::run(&mut runtime, requests);
    let counts = counts.lock().unwrap().clone();
    (done, counts)
}

#[test]
fn steps_with_drafts_leave_the_bytes_of_the_emulator() {
    let Some(kernels) = kernels(NEW) else { return };
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    tiny::write_sized(&path("big"), 2, 1, &SMALL);
    tiny::write_sized(&path("small"), 1, 1, &SMALL);
    let recipe = Recipe::model(path("big"), Dtype::Fp8, path("small"), Dtype::Fp16);
    let recipe = recipe.on("cuda:sm_90a");
    recipe.build(&path("all"));
    // Half of the tokens are drafted.
    let recipe = recipe.with_draft_vocab("32");
    recipe.build(&path("some"));
    // And all drafts come from one pass.
    tiny::mask_with(&path("small"), 5);
    recipe.build(&path("at-once"));
    // Or without a model, by a part of the target.
    std::fs::write(path("layers.json"), r#"{"attention": [0], "mlp": [1]}"#).expect("writes");
    let recipe = Recipe::skipping(path("big"), Dtype::Fp8, path("layers.json"));
    recipe.on("cuda:sm_90a").build(&path("part"));
    let few = || requests()[..3].to_vec();
    for (built, requests, branches) in [
        ("all", requests(), 1),
        ("all", few(), 2),
        ("some", few(), 1),
        ("at-once", few(), 1),
        ("part", few(), 1),
    ] {
        let engine = open(dir.path(), built);
        let (done, counts) = run_compared(&engine, &kernels, &requests, branches);
        let what = format!("{built}, {branches} branches");
        assert!(done.iter().any(|done| done.counters.accepted > 0), "{what}: {done:?}");
        for name in ["rows", "sample", "accept"] {
            assert!(counts.contains_key(name), "{what}: {counts:?}");
        }
        let has_map = ["some", "at-once"].contains(&built);
        assert_eq!(counts.contains_key("spread"), has_map, "{what}: {counts:?}");
    }
}

#[test]
fn heads_leave_the_bytes_of_the_emulator() {
    let Some(kernels) = kernels(NEW) else { return };
    let own =
        HeadKind { own_embed: true, norm_before_fc: true, norm_spread: 0.3, ..HeadKind::default() };
    let windowed = HeadKind {
        more_layers: 1,
        draft_vocab: Some(30),
        window: Some(9),
        norm_output: true,
        ..own
    };
    let of_masks = HeadKind { mask_token: Some(9), ..windowed };
    let first = HeadKind { is_eagle1: true, norm_spread: 0.3, ..HeadKind::default() };
    for (sizes, kind, dtype) in [
        (&SMALL, own, Dtype::Fp8),
        (&SMALL, first, Dtype::Fp16),
        (&NORMED, windowed, Dtype::Fp16),
        (&NORMED, of_masks, Dtype::Fp16),
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        let path = |name: &str| dir.path().join(name);
        tiny::write_sized(&path("model"), 2, 1, sizes);
        tiny::write_head_of(&path("head"), 2, 1, sizes, &kind);
        let recipe = Recipe::model(path("model"), dtype, path("head"), dtype);
        recipe.on("cuda:sm_90a").build(&path("built"));
        let engine = open(dir.path(), "built");
        let (done, counts) = run_compared(&engine, &kernels, &requests()[..3], 1);
        assert!(done.iter().all(|done| done.counters.drafted > 0), "{done:?}");
        let has = |part: &str| counts.keys().any(|name| name.contains(part));
        // In the graph of a step, which the host has no part in.
        let launched = ["join", "WINDOW", "sample", "accept"].iter().all(|part| has(part));
        assert!(launched && has("spread") == kind.draft_vocab.is_some(), "{counts:?}");
    }
}

#[test]
fn medusa_heads_leave_the_bytes_of_the_emulator() {
    let Some(kernels) = kernels(NEW) else { return };
    let dir = tempfile::tempdir().expect("a folder");
    let path = |name: &str| dir.path().join(name);
    tiny::write_sized(&path("model"), 2, 1, &SMALL);
    tiny::write_medusa(&path("heads"), 3, 1, &SMALL);
    let recipe = Recipe::model(path("model"), Dtype::Fp16, path("heads"), Dtype::Fp8);
    recipe.drafting(3).on("cuda:sm_90a").build(&path("built"));
    let engine = open(dir.path(), "built");
    let (done, counts) = run_compared(&engine, &kernels, &requests()[..3], 1);
    assert!(done.iter().all(|done| done.counters.drafted > 0), "{done:?}");
    let has = |part: &str| counts.keys().any(|name| name.contains(part));
    assert!(["join", "sample", "accept"].iter().all(|part| has(part)), "{counts:?}");
}

/// A change to a source, and what it is noticed by.
struct Mutant {
    capability: (u32, u32),
    file: &'static str,
    text: &'static str,
    replacement: &'static str,
    notice: &'static str,
}

const PRIMS: &str = "common/prims.cuh";
const WARPGROUP: &str = "common/warpgroup.cuh";

const MUTANTS: [Mutant; 17] = [
    Mutant {
        capability: NEW,
        file: PRIMS,
        text: r#""f"(0.0f), "f"(value)"#,
        replacement: r#""f"(value), "f"(0.0f)"#,
        notice: "EPILOGUE=QKV.HEAD_DIM=64",
    },
    Mutant {
        capability: NEW,
        file: PRIMS,
        text: r#""=r"(r[0]), "=r"(r[1]), "=r"(r[2])"#,
        replacement: r#""=r"(r[0]), "=r"(r[2]), "=r"(r[1])"#,
        notice: "words, from",
    },
    Mutant {
        capability: NEW,
        file: PRIMS,
        text: r#""r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)"#,
        replacement: r#""r"(a[0]), "r"(a[2]), "r"(a[1]), "r"(a[3]), "r"(b0), "r"(b1)"#,
        notice: "words, from",
    },
    Mutant {
        capability: NEW,
        file: PRIMS,
        text: r#""r"(b0), "r"(b1)"#,
        replacement: r#""r"(b1), "r"(b0)"#,
        notice: "words, from",
    },
    Mutant {
        capability: OLD,
        file: PRIMS,
        text: "cp.async.mbarrier.arrive.noinc.shared.b64",
        replacement: "cp.async.mbarrier.arrive.shared.b64",
        notice: "all wait",
    },
    Mutant {
        capability: OLD,
        file: PRIMS,
        text: r#"::"n"(PENDING)"#,
        replacement: r#"::"n"(PENDING + 1)"#,
        notice: "words, from",
    },
    Mutant {
        capability: NEW,
        file: PRIMS,
        text: "mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;",
        replacement: "mbarrier.arrive.expect_tx.shared.b64 state, [%0], 16;",
        notice: "gemm",
    },
    Mutant {
        capability: NEW,
        file: PRIMS,
        text: "} while (!complete);",
        replacement: "} while (false);",
        notice: "gemm",
    },
    Mutant {
        capability: NEW,
        file: PRIMS,
        text: "cp.async.cg.shared.global [%0], [%1], 16;",
        replacement: "cp.async.cg.shared.global [%0], [%1], 16, 8;",
        notice: "words, from",
    },
    Mutant {
        capability: NEW,
        file: PRIMS,
        text: "bar.sync %0, %1;",
        replacement: "bar.sync %1, %0;",
        notice: "barrier",
    },
    Mutant {
        capability: NEW,
        file: WARPGROUP,
        text: "uint64_t(atom_stride >> 4) << 32",
        replacement: "uint64_t(atom_stride >> 4) << 33",
        notice: "gemm",
    },
    Mutant {
        capability: NEW,
        file: WARPGROUP,
        text: "1ull << 62",
        replacement: "2ull << 62",
        notice: "does not say rows of 128 bytes",
    },
    Mutant {
        capability: NEW,
        file: WARPGROUP,
        text: "wgmma.commit_group.sync.aligned;",
        replacement: "",
        notice: "of its products",
    },
    Mutant {
        capability: NEW,
        file: WARPGROUP,
        text: "wgmma.wait_group.sync.aligned %0;",
        replacement: "wgmma.wait_group.sync.aligned 1;",
        notice: "of its products",
    },
    Mutant {
        capability: NEW,
        file: WARPGROUP,
        text: "wgmma.fence.sync.aligned;",
        replacement: "",
        notice: "no wgmma.fence since the last commit",
    },
    Mutant {
        capability: NEW,
        file: "wgmma/stream.cuh",
        text: "    fence_async_proxy();\n",
        replacement: "",
        notice: "no fence.proxy.async behind it",
    },
    Mutant {
        capability: NEW,
        file: WARPGROUP,
        text: "\" {\" A0 \", \" A1 \", \" A2",
        replacement: "\" {\" A0 \", \" A2 \", \" A1",
        notice: "words, from",
    },
];

/// The sources with a change that can be made in one place.
fn mutated(file: &str, text: &str, replacement: &str) -> Vec<(&'static str, &'static str)> {
    let change = |(name, source): (&'static str, &'static str)| {
        if name != file {
            return (name, source);
        }
        assert!(source.contains(text), "{text}");
        (name, &*source.replacen(text, replacement, 1).leak())
    };
    spec_kernels::SOURCES.iter().copied().map(change).collect()
}

/// What a change of the kernels, or of what executes their assembly, alone can break: `scripts/check-kernels` runs it.
mod exhaustive {
    use super::{
        MUTANTS, Mutant, SMALL, arch, built_for, compiler, device, in_parts, mutated, on, tokens,
    };
    use spec_core::model::Dtype;
    use spec_core::runtime::Prefill;
    use spec_emu_ptx::Kernels;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    #[test]
    fn what_is_wrong_in_the_assembly_is_noticed() {
        for mutant in &MUTANTS {
            let Some(compiler) = compiler() else { return };
            let Mutant { capability, file, text, replacement, notice } = *mutant;
            let (_dir, engine) = built_for(capability, &SMALL, Dtype::Fp8, Dtype::Fp8);
            let compiler = compiler.with_sources(mutated(file, text, replacement));
            let kernels = Arc::new(Kernels::new(compiler, arch(capability)));
            let run = || {
                let device = device(capability, &kernels, 1);
                in_parts(&mut on(device, &engine, Prefill::Exact), &tokens(50), &[37, 1, 5, 7])
            };
            let panic = catch_unwind(AssertUnwindSafe(run)).expect_err(replacement);
            let message = panic.downcast_ref::<String>().expect("a message");
            eprintln!("{replacement}\n    {message}");
            assert!(message.contains(notice), "{replacement}: {message}");
        }
    }
}
