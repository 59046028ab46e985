//! The executor over the CUDA driver's own interface, in processes of their own that find an emulated `libcuda.so`.
//! Texts are those of the emulator as a device, everything is freed, and what goes wrong is said.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod emulated;

use common::running::{self, Done};
use common::tiny;
use emulated::{Emulated, FOLDER, code};
use spec_core::runtime::DraftPolicy::{Adaptive, Fixed};
use spec_core::runtime::{Memory, MemoryType, Options, Prefill, Request, Runtime, SharedWeights};
use spec_core::sampling::SamplingParams;
use spec_core::testing::cuda::Driver;
use spec_core::testing::cuda::device::{Device as _, Launch, Op};
use spec_emu::{Emulator, Schedule};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{env, thread};

/// A tenth of a GPU's memory is more than enough.
fn options(policy: spec_core::runtime::DraftPolicy) -> Options {
    Options { kv_tokens: Some(2048), ..running::options(policy) }
}

fn requests() -> Vec<Request> {
    let seeded = SamplingParams { temperature: 1.1, seed: Some(5), ..SamplingParams::default() };
    let sampling = [
        SamplingParams::default(),
        SamplingParams { top_k: 7, repetition_penalty: 1.3, ..seeded.clone() },
        SamplingParams { min_p: 0.1, logprobs: Some(2), ..seeded },
    ];
    let request = |(idx, sampling): (usize, &SamplingParams)| Request {
        prompt: (0..10 + 9 * idx as u32)
            .map(|i| (i * i + 7 * i + 3) % tiny::VOCAB as u32)
            .collect::<Vec<_>>()
            .into(),
        max_tokens: 10,
        sampling: sampling.clone(),
        ..Request::default()
    };
    sampling.iter().enumerate().map(request).collect()
}

fn texts(done: &[Done]) -> Vec<Vec<u32>> {
    done.iter().map(|done| done.tokens.clone()).collect()
}

fn error<T>(result: spec_core::Result<T>) -> String {
    result.err().expect("is refused").to_string()
}

#[test]
fn texts_are_those_of_the_emulator_and_everything_is_freed() {
    let test = "texts_are_those_of_the_emulator_and_everything_is_freed";
    let Some(emulated) = Emulated::run(test, &[], &[]) else { return };
    let engine = emulated.target("cuda:sm_90a");
    for policy in [Fixed, Adaptive] {
        let open = |_| Ok(Box::new(Emulator::new((9, 0), 3, Schedule::PLAIN)) as _);
        let mut expected = Runtime::load_on(&engine, &options(policy), &open).unwrap();
        let mut found = Runtime::load(&engine, &options(policy)).unwrap();
        let expected = running::run(&mut expected, &requests());
        let found = running::run(&mut found, &requests());
        assert_eq!(texts(&found), texts(&expected), "{policy:?}");
        // What adapts may find that drafts do not pay here.
        let accepts = found.iter().any(|done| done.counters.accepted > 0);
        assert!(accepts || policy == Adaptive, "drafts engage");
    }
}

#[test]
fn instances_on_a_gpu_share_weights_which_are_freed_with_the_last() {
    let test = "instances_on_a_gpu_share_weights_which_are_freed_with_the_last";
    if Emulated::run(test, &[("EMU_DRIVER_DEVICES", "2")], &[]).is_none() {
        return;
    }
    let emulated = Emulated { folder: env::var_os(FOLDER).unwrap().into() };
    let engine = emulated.target("cuda:sm_90a");
    let (options, shared) = (options(Fixed), SharedWeights::default());
    let load = |gpu| {
        let options = Options { gpu, ..options.clone() };
        Runtime::load_sharing(&engine, &options, &shared).unwrap()
    };
    let probe = Driver::open(0).unwrap();
    let left = || probe.available_bytes().unwrap();
    let none_loaded = left();
    let expected =
        texts(&running::run(&mut Runtime::load(&engine, &options).unwrap(), &requests()));
    assert_eq!(left(), none_loaded);

    let mut first = load(0);
    let taken = none_loaded - left();
    let mut second = load(0);
    let weights: usize = first.memory().weights.iter().map(|copy| copy.bytes).sum();
    assert!(weights > 0);
    assert_eq!(none_loaded - left(), 2 * taken - weights);
    let other = load(1);
    let numbers =
        |runtime: &Runtime| runtime.memory().weights.iter().map(|c| c.number).collect::<Vec<_>>();
    assert_eq!(numbers(&first), numbers(&second));
    assert!(numbers(&other).iter().all(|number| !numbers(&first).contains(number)));

    let mut both = Memory::default();
    [&first, &second].into_iter().for_each(|runtime| both.merge(runtime.memory()));
    assert_eq!(both.bytes(|of| of == MemoryType::Gpu(0)), 2 * taken - weights);
    assert_eq!(both.bytes(|of| of == MemoryType::Cpu), 0);
    assert!(both.bytes(|of| of == MemoryType::Pinned) > 0);
    assert_eq!(other.memory().bytes(|of| of == MemoryType::Gpu(1)), taken);

    assert_eq!(texts(&running::run(&mut first, &requests())), expected);
    drop(first);
    assert_eq!(none_loaded - left(), taken, "the second holds the weights");
    assert_eq!(texts(&running::run(&mut second, &requests())), expected);
    drop(second);
    assert_eq!(left(), none_loaded);
}

#[test]
fn a_gpu_that_is_not_there_is_named() {
    let test = "a_gpu_that_is_not_there_is_named";
    if Emulated::run(test, &[("EMU_DRIVER_DEVICES", "2")], &[]).is_none() {
        return;
    }
    assert_eq!(error(Driver::open(2)), "device: GPU 2 was asked for, 2 are here");
    let (first, second) = (Driver::open(0).unwrap(), Driver::open(1).unwrap());
    let name = |number| format!("emulated GPU {number} of compute capability 9.0");
    assert_eq!(first.describe().name, name(0));
    assert_eq!(second.describe().name, name(1));
}

#[test]
fn memory_that_is_not_there_is_named_before_and_after_planning() {
    let test = "memory_that_is_not_there_is_named_before_and_after_planning";
    // 512 MiB of a GPU are never planned.
    let Some(emulated) = Emulated::run(test, &[("EMU_DRIVER_MIB", "513")], &[]) else { return };
    let engine = emulated.target("cuda:sm_90a");
    let options = Options { kv_bytes: Some(1 << 30), ..running::options(Fixed) };
    let message = error(Runtime::load(&engine, &options));
    for part in ["into the memory of GPU 0", "KV cache 2 for one", "spec-build --max-batch-size"] {
        assert!(message.contains(part), "{message}");
    }
    let mut gpu = Driver::open(0).unwrap();
    gpu.alloc(500 << 20).unwrap();
    let name = "emulated GPU 0 of compute capability 9.0";
    let expected = format!("{name}: 14 MiB of GPU memory are needed, 13 MiB are left");
    assert_eq!(error(gpu.alloc(14 << 20)), expected);
    gpu.alloc(13 << 20).unwrap();
    assert_eq!(gpu.available_bytes().unwrap(), 0);
}

#[test]
fn code_that_is_for_another_gpu_or_no_code_is_refused_by_name() {
    let test = "code_that_is_for_another_gpu_or_no_code_is_refused_by_name";
    let complaints = ["cuModuleLoadData: no ELF file"];
    let Some(emulated) = Emulated::run(test, &[], &complaints) else { return };
    let engine = emulated.target("cuda:sm_90a,sm_80");
    let mut gpu = Driver::open(0).unwrap();
    let code = |arch| code(&engine, &format!("code.{arch}.accept"));
    gpu.load("accept", "accept", &code("sm_90a"), 0).unwrap();
    let message = error(gpu.load("accept", "accept", &code("sm_80"), 0));
    assert_eq!(message, "device: cuModuleLoadData of accept: CUDA_ERROR_NO_BINARY_FOR_GPU");
    let message = error(gpu.load("accept", "other", &code("sm_90a"), 0));
    assert_eq!(message, "device: cuModuleGetFunction of accept: CUDA_ERROR_NOT_FOUND");
    let message = error(gpu.load("accept", "accept", &[0; 64], 0));
    assert_eq!(message, "device: cuModuleLoadData of accept: CUDA_ERROR_INVALID_IMAGE");
}

#[test]
fn older_gpus_run_their_own_code() {
    let test = "older_gpus_run_their_own_code";
    let Some(emulated) = Emulated::run(test, &[("EMU_DRIVER_CAPABILITY", "8.6")], &[]) else {
        return;
    };
    let engine = emulated.target("cuda:sm_90a,sm_80");
    let open = |_| Ok(Box::new(Emulator::new((8, 6), 3, Schedule::PLAIN)) as _);
    let mut expected = Runtime::load_on(&engine, &options(Fixed), &open).unwrap();
    let mut found = Runtime::load(&engine, &options(Fixed)).unwrap();
    let expected = running::run(&mut expected, &requests());
    assert_eq!(texts(&running::run(&mut found, &requests())), texts(&expected));
}

/// What the steps of a runtime say until it is idle.
fn failures(runtime: &mut Runtime, requests: &[Request]) -> Vec<String> {
    for request in requests {
        runtime.add(request.clone()).unwrap();
    }
    let mut failures = Vec::new();
    while !runtime.is_idle() {
        failures.extend(runtime.step().failure.map(|error| error.to_string()));
    }
    failures
}

#[test]
fn a_kernel_that_fails_is_told_with_what_to_do_and_the_model_can_be_loaded_again() {
    let test = "a_kernel_that_fails_is_told_with_what_to_do_and_the_model_can_be_loaded_again";
    let Some(emulated) = Emulated::run(test, &[("EMU_DRIVER_FAIL", "kernel=719@100")], &[]) else {
        return;
    };
    let engine = emulated.target("cuda:sm_90a");
    let mut runtime = Runtime::load(&engine, &options(Fixed)).unwrap();
    let first = failures(&mut runtime, &requests());
    assert_eq!(first.len(), 1, "{first:?}");
    assert!(first[0].contains("CUDA_ERROR_LAUNCH_FAILED"), "{first:?}");
    assert!(first[0].contains("restart the server"), "{first:?}");
    let later = failures(&mut runtime, &requests()[..1]);
    let expected = "device: the GPU failed before (CUDA_ERROR_LAUNCH_FAILED): restart the server";
    assert_eq!(later, [expected]);
    drop(runtime);
    let mut runtime = Runtime::load(&engine, &options(Fixed)).unwrap();
    assert_eq!(failures(&mut runtime, &requests()), Vec::<String>::new());
}

#[test]
fn models_share_a_gpu_and_one_can_go() {
    let Some(emulated) = Emulated::run("models_share_a_gpu_and_one_can_go", &[], &[]) else {
        return;
    };
    let engine = emulated.target("cuda:sm_90a");
    let load = || Runtime::load(&engine, &options(Fixed)).unwrap();
    let (mut first, mut second) = (load(), load());
    let written = texts(&running::run(&mut first, &requests()));
    assert_eq!(texts(&running::run(&mut second, &requests()[..2])), written[..2]);
    drop(first);
    assert_eq!(texts(&running::run(&mut second, &requests())), written);
}

fn writes_the_same(test: &str, variable: (&str, &str), says: &[&str]) {
    let Some(emulated) = Emulated::run_saying(test, &[variable], &[], says) else { return };
    let engine = emulated.target("cuda:sm_90a");
    let open = |_| Ok(Box::new(Emulator::new((9, 0), 3, Schedule::PLAIN)) as _);
    let mut expected = Runtime::load_on(&engine, &options(Fixed), &open).unwrap();
    let mut found = Runtime::load(&engine, &options(Fixed)).unwrap();
    let expected = running::run(&mut expected, &requests());
    assert_eq!(texts(&running::run(&mut found, &requests())), texts(&expected));
}

#[test]
fn texts_are_the_same_where_no_graph_can_be_captured() {
    let test = "texts_are_the_same_where_no_graph_can_be_captured";
    let says = ["CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operations are issued one by one"];
    writes_the_same(test, ("EMU_DRIVER_FAIL", "cuStreamBeginCapture=900"), &says);
}

#[test]
fn texts_are_the_same_where_no_graph_can_be_instantiated() {
    let test = "texts_are_the_same_where_no_graph_can_be_instantiated";
    let says = "a step's operations are issued one by one";
    writes_the_same(test, ("EMU_DRIVER_FAIL", "cuGraphInstantiateWithFlags=2"), &[says]);
}

/// The first launch of a graph takes memory, of which none may be left by then.
#[test]
fn texts_are_the_same_where_no_graph_can_be_launched() {
    let test = "texts_are_the_same_where_no_graph_can_be_launched";
    let says = ["cuGraphLaunch: CUDA_ERROR_OUT_OF_MEMORY", "operations are issued one by one"];
    writes_the_same(test, ("EMU_DRIVER_FAIL", "cuGraphLaunch=2"), &says);
}

#[test]
fn texts_are_the_same_where_kernels_of_graphs_do_not_overlap() {
    let test = "texts_are_the_same_where_kernels_of_graphs_do_not_overlap";
    let says = "kernels of a graph begin one after the other";
    writes_the_same(test, ("EMU_DRIVER_FAIL", "cuGraphInstantiateWithFlags=2@1"), &[says]);
}

/// A library that cannot do its work is as good as none.
#[test]
fn without_a_library_long_prompts_are_computed_as_others_are_and_that_is_said() {
    let test = "without_a_library_long_prompts_are_computed_as_others_are_and_that_is_said";
    let says = ["prompts are computed a few rows at a time"];
    // On Hopper kernels multiply blocks of prompts, elsewhere a library does.
    let older = [("EMU_DRIVER_CAPABILITY", "8.0")];
    let Some(emulated) = Emulated::run_saying(test, &older, &[], &says) else { return };
    let engine = emulated.target("cuda:sm_80");
    let named = Options { prefill: Some(Prefill::CublasLt), ..options(Fixed) };
    let refused = error(Runtime::load(&engine, &named));
    assert!(refused.contains("prefill = cublaslt"), "{refused}");
    let open = |_| Ok(Box::new(Emulator::new((8, 0), 3, Schedule::PLAIN)) as _);
    let exact = Options { prefill: Some(Prefill::Exact), ..options(Fixed) };
    let mut expected = Runtime::load_on(&engine, &exact, &open).unwrap();
    let mut found = Runtime::load(&engine, &options(Fixed)).unwrap();
    let tokens = (0..200).map(|i| (i * i + 7 * i + 3) % tiny::VOCAB as u32);
    let prompt = tokens.collect::<Vec<_>>().into();
    let requests = [Request { prompt, max_tokens: 30, ..Request::default() }];
    let expected = running::run(&mut expected, &requests);
    assert_eq!(texts(&running::run(&mut found, &requests)), texts(&expected));
}

#[test]
fn texts_are_the_same_where_kernels_do_not_overlap() {
    let test = "texts_are_the_same_where_kernels_do_not_overlap";
    writes_the_same(test, ("SPEC_CUDA_OVERLAP", "off"), &[]);
}

#[test]
fn a_launch_that_cannot_be_recorded_leaves_the_stream_as_it_was() {
    let test = "a_launch_that_cannot_be_recorded_leaves_the_stream_as_it_was";
    let complaint = "cuLaunchKernelEx: accept has up to";
    // Recorded to overlap, recorded without, and launched.
    let Some(emulated) = Emulated::run(test, &[], &[complaint; 3]) else { return };
    let engine = emulated.target("cuda:sm_90a");
    let mut gpu = Driver::open(0).unwrap();
    let code = code(&engine, "code.sm_90a.accept");
    let kernel = gpu.load("accept", "accept", &code, 0).unwrap();
    let params = vec![0; 1024];
    let launch = Launch { kernel, grid: 1, block: 2048, shared_bytes: 0, params, overlap: true };
    let graph = gpu.record(&[Op::Launch(launch)]).unwrap();
    let message = "device: cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE";
    assert_eq!(error(gpu.replay(graph)), message);
    let address = gpu.alloc(4).unwrap();
    gpu.write(address, &[1, 2, 3, 4]).unwrap();
    let mut found = [0; 4];
    gpu.read(address, &mut found).unwrap();
    assert_eq!(found, [1, 2, 3, 4]);
}

#[test]
fn launches_keep_to_the_shared_memory_that_was_asked_for() {
    let test = "launches_keep_to_the_shared_memory_that_was_asked_for";
    let complaint = "cuLaunchKernelEx: sample has up to 50000 bytes of shared memory, not 50001";
    let Some(emulated) = Emulated::run(test, &[], &[complaint]) else { return };
    let engine = emulated.target("cuda:sm_90a");
    let mut gpu = Driver::open(0).unwrap();
    let code = code(&engine, "code.sm_90a.sample");
    let kernel = gpu.load("sample", "sample", &code, 50_000).unwrap();
    let params = vec![0; 1024];
    let launch = Launch { kernel, grid: 1, block: 1, shared_bytes: 50_001, params, overlap: true };
    assert_eq!(
        error(gpu.issue(&Op::Launch(launch))),
        "device: cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE"
    );
}

#[test]
fn a_device_that_is_never_dropped_is_noticed() {
    let test = "a_device_that_is_never_dropped_is_noticed";
    let complaint = "the context of device 0 is held 1 times at the end";
    if Emulated::run(test, &[], &[complaint]).is_some() {
        std::mem::forget(Driver::open(0).unwrap());
    }
}

#[test]
fn a_status_without_a_name_is_told_as_its_number() {
    let test = "a_status_without_a_name_is_told_as_its_number";
    if Emulated::run(test, &[("EMU_DRIVER_FAIL", "cuMemAlloc=4321@2")], &[]).is_none() {
        return;
    }
    let mut gpu = Driver::open(0).unwrap();
    gpu.alloc(1).unwrap();
    assert_eq!(error(gpu.alloc(1)), "device: cuMemAlloc: error 4321");
    gpu.alloc(1).unwrap();
}

#[test]
fn staging_memory_stays_the_drivers_where_what_is_copied_panics() {
    let test = "staging_memory_stays_the_drivers_where_what_is_copied_panics";
    if Emulated::run(test, &[], &[]).is_none() {
        return;
    }
    const BYTES: usize = 20 << 20;
    let mut gpu = Driver::open(0).unwrap();
    let address = gpu.alloc(BYTES).unwrap();
    gpu.write(address, &[7; 4]).unwrap();
    let held = gpu.held().pinned;
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        gpu.write_with(address, BYTES, &mut |offset, piece| {
            assert!(offset == 0, "the second piece");
            piece.fill(9);
            Ok(())
        })
    }));
    assert!(panicked.is_err());
    gpu.write(address, &[8; 4]).unwrap();
    assert_eq!(gpu.held().pinned, held, "no other staging memory was taken");
    let mut found = [0; 8];
    gpu.read(address, &mut found).unwrap();
    assert_eq!(found, [8, 8, 8, 8, 9, 9, 9, 9]);
}

#[test]
fn shared_memory_outlives_its_device_and_goes_on_any_thread() {
    let test = "shared_memory_outlives_its_device_and_goes_on_any_thread";
    if Emulated::run(test, &[], &[]).is_none() {
        return;
    }
    let mut gpu = Driver::open(0).unwrap();
    let shared = gpu.alloc_shared(256).unwrap();
    shared.copy_from(0, &[5u32]);
    let address = gpu.alloc(4).unwrap();
    gpu.write_shared(address, &shared, 0..4).unwrap();
    let mut other = Driver::open(0).unwrap();
    let refused = catch_unwind(AssertUnwindSafe(|| other.write_shared(address, &shared, 0..4)));
    let message = *refused.unwrap_err().downcast::<&str>().unwrap();
    assert_eq!(message, "memory of another device");
    drop((gpu, other));
    let last = thread::spawn(move || {
        let mut found = [0u32];
        shared.copy_to(0, &mut found);
        found[0]
    });
    assert_eq!(last.join().unwrap(), 5);
}

#[test]
fn a_gpu_that_fails_while_memory_is_taken_takes_no_more_work() {
    let test = "a_gpu_that_fails_while_memory_is_taken_takes_no_more_work";
    // Here the context is as good as before: what is not freed any more is noticed.
    let complaints = ["never freed: 1 stream"];
    if Emulated::run(test, &[("EMU_DRIVER_FAIL", "cuMemHostAlloc=700")], &complaints).is_none() {
        return;
    }
    let mut gpu = Driver::open(0).unwrap();
    let message = error(gpu.alloc_shared(256));
    assert!(message.contains("error 700"), "{message}");
    assert!(message.contains("restart the server"), "{message}");
    let message = error(gpu.alloc(4));
    assert!(message.contains("the GPU failed before"), "{message}");
}
