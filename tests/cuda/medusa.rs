//! Medusa heads on a GPU: against the CPU executor's, which are held to the reference's (`tests/heads`), and with themselves.

use crate::common::models::Recipe;
use crate::common::running;
use crate::common::small::{NORMED, SMALL, tokens};
use crate::common::tiny::{self, Sizes};
use crate::heads::{
    assert_close, assert_drafts_are_those_of_the_host, assert_texts_are_those_of_plain_decoding,
};
use crate::{FP8_TOLERANCE, FP16_TOLERANCE, NUM_SMS, emulator, open, requests_of_three_tokens};
use spec_core::engine::Engine;
use spec_core::exec::Pool;
use spec_core::model::Dtype;
use spec_core::runtime::DraftPolicy::Fixed;
use spec_core::runtime::{Isa, Options, Request, Runtime};
use spec_core::testing::cpu::{self, Resources, Weights};
use spec_core::testing::cuda::{Gpu, Medusa, MedusaOnHost, Model};
use spec_core::testing::draft::Heads;
use spec_emu::{Emulator, Schedule};
use std::sync::Arc;
use tempfile::TempDir;

const NUM_LAYERS: usize = 2;
const NUM_HEADS: usize = 4;
const NUM_PAGES: usize = 8;

/// A target with heads, built for one device.
struct Pair {
    target: Engine,
    heads: Engine,
    _dir: TempDir,
}

impl Pair {
    fn new(device: &str, sizes: &Sizes, dtype: Dtype) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        tiny::write_sized(&path("model"), NUM_LAYERS, 3, sizes);
        tiny::write_medusa(&path("heads"), NUM_HEADS, 5, sizes);
        let recipe = Recipe::model(path("model"), dtype, path("heads"), dtype);
        recipe.drafting(NUM_HEADS).on(device).build(&path("built"));
        let target = open(dir.path(), "built");
        let heads = target.open_drafter().unwrap().unwrap();
        Self { target, heads, _dir: dir }
    }

    fn on_cpu(&self) -> cpu::Medusa {
        let pool = Arc::new(Pool::new(1));
        let weights = |engine| Arc::new(Weights::load(engine, &pool).unwrap());
        let (own, target) = (weights(&self.heads), weights(&self.target));
        let resources = Resources { num_pages: NUM_PAGES, rows: 64, isa: Isa::detect(), pool };
        cpu::Medusa::new(&self.heads, own, Some(target), resources).unwrap()
    }

    fn on(&self, device: Emulator) -> MedusaOnHost {
        let gpu = Gpu::new(Box::new(device));
        let target = Arc::new(Model::load(&self.target, NUM_PAGES, &mut **gpu.lock()).unwrap());
        let heads = Medusa::load(&self.heads, target, &mut **gpu.lock()).unwrap();
        MedusaOnHost::new(Arc::new(heads), gpu)
    }
}

/// Hidden states of so many rows, of sizes as they have.
fn taps(rows: usize, sizes: &Sizes) -> Vec<f32> {
    let value = |i: usize| ((i * 7919 % 1013) as f32 / 506.0 - 1.0) * (1.0 + (i % 3) as f32);
    (0..rows * sizes.hidden).map(value).collect()
}

#[test]
fn logits_are_those_of_the_cpu_executor() {
    for (device, capability, sizes, dtype, tolerance) in [
        ("cuda:sm_90a", (9, 0), &SMALL, Dtype::Fp16, FP16_TOLERANCE),
        ("cuda:sm_90a", (9, 0), &NORMED, Dtype::Fp8, FP8_TOLERANCE),
        ("cuda:sm_80", (8, 0), &SMALL, Dtype::Fp16, FP16_TOLERANCE),
    ] {
        let what = format!("{device} {dtype}");
        let mut on_cpu = Pair::new("cpu", sizes, dtype).on_cpu();
        let pair = Pair::new(device, sizes, dtype);
        let mut on_gpu = pair.on(Emulator::new(capability, NUM_SMS, Schedule::PLAIN));
        assert_eq!(on_gpu.taps(), on_cpu.taps());
        assert_eq!(on_gpu.num_heads(), NUM_HEADS);
        // More than a pass takes.
        let taps = taps(70, sizes);
        let expected_states = on_cpu.states(&taps).unwrap();
        let states = on_gpu.states(&taps).unwrap();
        assert_close(&states, &expected_states, tolerance, &format!("{what}: states"));
        for head in 0..NUM_HEADS {
            let expected = on_cpu.logits(head, &expected_states).unwrap();
            let found = on_gpu.logits(head, &expected_states).unwrap();
            let what = format!("{what}: head {head}");
            assert_close(&found.values, &expected.values, tolerance, &what);
            // Alone a row has the same bits.
            let row = 37 * sizes.hidden;
            let alone = on_gpu.logits(head, &expected_states[row..row + sizes.hidden]).unwrap();
            assert_eq!(alone.row(0), found.row(37), "{what}");
        }
    }
}

/// Long enough that what is drafted is right now and then.
fn requests() -> Vec<Request> {
    let mut requests = requests_of_three_tokens();
    for (idx, request) in requests.iter_mut().enumerate() {
        request.prompt = [request.prompt.to_vec(), tokens(7 * idx)].concat().into();
        (request.max_tokens, request.draft_len) = (20, Some(1 + idx % NUM_HEADS));
    }
    requests
}

/// Steps whose logits somebody wants to see are decided about on the host, with a drafter of its own.
#[test]
fn drafts_of_the_graph_are_those_of_the_host() {
    for dtype in [Dtype::Fp16, Dtype::Fp8] {
        let pair = Pair::new("cuda:sm_90a", &SMALL, dtype);
        assert_drafts_are_those_of_the_host(&pair.target, &requests(), &dtype.to_string());
    }
}

#[test]
fn texts_do_not_depend_on_when_heads_are_asked() {
    let pair = Pair::new("cuda:sm_90a", &SMALL, Dtype::Fp16);
    // More than there are sequences in a step.
    let alone = Options { max_batch_size: Some(1), draft_branches: 4, ..running::options(Fixed) };
    assert_texts_are_those_of_plain_decoding(&pair.target, requests(), &[alone]);
}

#[test]
fn heads_on_another_gpu_than_their_target_are_refused() {
    let pair = Pair::new("cuda:sm_90a", &SMALL, Dtype::Fp16);
    let options = Options { draft_gpu: Some(1), kv_tokens: Some(1024), ..running::options(Fixed) };
    let open = |_| Ok(Box::new(emulator(Schedule::PLAIN)) as _);
    let refused = Runtime::load_on(&pair.target, &options, &open);
    let message = refused.err().expect("it is refused").to_string();
    assert!(message.contains("run on the GPU of their target (`draft_gpu`)"), "{message}");
}

#[test]
fn heads_of_another_width_than_their_targets_are_refused() {
    let [small, normed] =
        [&SMALL, &NORMED].map(|sizes| Pair::new("cuda:sm_90a", sizes, Dtype::Fp16));
    let gpu = Gpu::new(Box::new(emulator(Schedule::PLAIN)));
    let target = Arc::new(Model::load(&small.target, NUM_PAGES, &mut **gpu.lock()).unwrap());
    let error = Medusa::load(&normed.heads, target, &mut **gpu.lock()).err().expect("is refused");
    let expected = format!(
        "width and tokens of its heads are ({}, {}), of the target ({}, {})",
        NORMED.hidden,
        tiny::VOCAB,
        SMALL.hidden,
        tiny::VOCAB
    );
    assert!(error.to_string().ends_with(&expected), "{error}");
}
