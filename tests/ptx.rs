//! The assembly text that NVRTC makes of the kernels, inline assembly and all, executed: every launch of the CUDA executor
//! runs from it and on the emulator, and leaves the same bytes everywhere in memory.
//!
//! For that comparison NVRTC is told not to fuse products and sums (`--fmad=false`), as the emulator's compiler does not;
//! what the instructions leave open the interpreter does as the emulator: the order of sums in a product of matrices, and
//! the last bits of `ex2.approx`. The text that is shipped, with fused sums, runs alone and is compared by its answers.
#![allow(clippy::unwrap_used)]

mod common;

use common::models::Recipe;
use common::running::{self, Done};
use common::tiny::{self, Sizes};
use common::golden;
use spec_build::cuda::Compiler;
use spec_core::adapt::DraftPolicy::Fixed;
use spec_core::batch::{Forward, Logits, Segment};
use spec_core::engine::Engine;
use spec_core::exec::cuda::{Gpu, ManyRows, Model, OnHost, Places};
use spec_core::model::Dtype;
use spec_core::pages::PageId;
use spec_core::runtime::{Options, Request, Runtime, TARGET_FILE};
use spec_emu::{Emulator, Schedule};
use spec_emu_ptx::{Device, Kernels, Runs};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// What the kernels are written for, as small as that goes.
const SMALL: Sizes =
    Sizes { hidden: 96, head_dim: 64, num_heads: 4, num_kv_heads: 2, ff: 160, qk_norm: false };
/// Wider heads, with norms, as in Qwen3; three query heads a key head.
const NORMED: Sizes =
    Sizes { hidden: 128, head_dim: 128, num_heads: 3, num_kv_heads: 1, ff: 96, qk_norm: true };

/// Multiprocessors: an odd number, so that blocks begin and end inside of columns.
const NUM_SMS: u32 = 3;

/// Sums and products apart, as the emulator's.
const APART: [&str; 1] = ["--fmad=false"];

/// The kernels of an architecture; none where there is no NVRTC.
fn kernels(capability: (u32, u32), options: &[&'static str]) -> Option<Arc<Kernels>> {
    let compiler = match Compiler::open(&Places::of_process(None), None) {
        Ok(compiler) => compiler,
        Err(error) => {
            eprintln!("skipped: {error:#}");
            return None;
        }
    };
    let arch = if capability >= (9, 0) { "compute_90a" } else { "compute_80" };
    Some(Arc::new(Kernels::new(compiler, arch, options)))
}

fn device(capability: (u32, u32), kernels: &Arc<Kernels>, runs: Runs, seed: u64) -> Device {
    let emulator = Emulator::new(capability, NUM_SMS, Schedule::PLAIN);
    Device::new(emulator, Arc::clone(kernels), runs, seed)
}

fn open(dir: &Path, name: &str) -> Engine {
    Engine::open(dir.join(name).join("1").join(TARGET_FILE)).expect("opens")
}

fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * i + 7 * i + 3) % (tiny::VOCAB as u32)).collect()
}

fn on(device: Device, engine: &Engine, many_rows: ManyRows) -> OnHost {
    let gpu = Gpu::new(Box::new(device));
    let model = Model::load_with(engine, 16, many_rows, &mut **gpu.lock()).expect("loads");
    OnHost::new(Arc::new(model), gpu)
}

/// Logits of all rows, computed in parts.
fn in_parts(model: &mut dyn Forward, tokens: &[u32], parts: &[usize]) -> Vec<Vec<f32>> {
    let pages: Vec<PageId> = (0..tokens.len().div_ceil(16) as u32).rev().collect();
    let (mut first, mut rows) = (0, Vec::new());
    for len in parts {
        let tokens = &tokens[first..first + len];
        let segment = Segment { tokens, first_position: first, pages: &pages, num_logits: *len };
        let logits: Logits = model.forward(&[segment]).expect("a pass");
        rows.extend((0..*len).map(|row| logits.row(row).to_vec()));
        first += len;
    }
    rows
}

/// One model built for both kinds of device.
fn built(sizes: &Sizes, dtype: Dtype, kv: Dtype) -> (TempDir, Engine) {
    let dir = tempfile::tempdir().expect("a folder");
    tiny::write_sized(&dir.path().join("model"), 2, 3, sizes);
    let recipe = Recipe::plain(dir.path().join("model"), dtype).with_kv(kv);
    recipe.on("cuda:sm_90a,sm_80").build(&dir.path().join("cuda"));
    let engine = open(dir.path(), "cuda");
    (dir, engine)
}

#[test]
fn passes_leave_the_bytes_of_the_emulator() {
    for capability in [(9, 0), (8, 0)] {
        let Some(kernels) = kernels(capability, &APART) else { return };
        for (sizes, dtype, kv) in [
            (&SMALL, Dtype::Fp8, Dtype::Fp8),
            (&NORMED, Dtype::Fp16, Dtype::Fp16),
        ] {
            let (_dir, engine) = built(sizes, dtype, kv);
            for seed in [0, 1] {
                let start = std::time::Instant::now();
                let device = device(capability, &kernels, Runs::Both, seed);
                let counts = device.counts();
                in_parts(&mut on(device, &engine, ManyRows::Exact), &tokens(50), &[37, 1, 5, 7]);
                eprintln!("{capability:?} {dtype} {seed}: {:?} {:?}", start.elapsed(), counts.lock().unwrap());
            }
        }
    }
}
