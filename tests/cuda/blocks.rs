//! Prompts in blocks, which kernels here multiply or a library does: near the CPU executor, and the same however they are
//! computed.

use super::common::models::{self, Recipe};
use super::common::running::{self, Done};
use super::common::small::{NORMED, SMALL, in_parts_of_prompt, tokens};
use super::common::{golden, tiny};
use super::{
    Drafts, FP8_ROWS_TOLERANCE, FP8_TOLERANCE, FP16_TOLERANCE, NUM_SMS, assert_close, both,
    both_on, emulator, load_bounded, on, open, requests, target,
};
use spec_core::model::Dtype;
use spec_core::runtime::DraftPolicy::{Adaptive, Fixed};
use spec_core::runtime::{AdmissionPolicy, Options, Prefill, Request, Runtime};
use spec_core::testing::PageId;
use spec_core::testing::batch::{Forward, Segment};
use spec_emu::{Emulator, Schedule};

/// Both, on Hopper.
const WAYS: [Prefill; 2] = [Prefill::Blocks, Prefill::CublasLt];

#[test]
fn logits_of_blocks_of_prompts_are_those_of_the_cpu_executor() {
    for (sizes, dtype, capability, tolerance, ways) in [
        (&SMALL, Dtype::Fp16, (9, 0), FP16_TOLERANCE, &WAYS[..]),
        (&NORMED, Dtype::Fp16, (9, 0), FP16_TOLERANCE, &WAYS),
        (&SMALL, Dtype::Fp8, (9, 0), FP8_ROWS_TOLERANCE, &WAYS),
        (&NORMED, Dtype::Fp8, (9, 0), FP8_ROWS_TOLERANCE, &WAYS),
        (&SMALL, Dtype::Fp8, (8, 0), FP8_TOLERANCE, &WAYS[1..]),
    ] {
        let archs = "cuda:sm_90a,sm_80";
        let (_dir, cpu, cuda) = both_on(archs, sizes, dtype, Dtype::Fp16);
        let tokens = tokens(330);
        let expected = golden::all_logits(&mut golden::model(&cpu, 21), &tokens);
        for &prefill in ways {
            let device = Emulator::new(capability, NUM_SMS, Schedule::PLAIN);
            let mut model = on(device, &cuda, 21, prefill);
            let found = in_parts_of_prompt(&mut model, &tokens, &[190, 120, 20], 311);
            let name = format!("{dtype} {sizes:?} {capability:?} {prefill:?}");
            assert_close(&found, &expected, tolerance, &name);
        }
    }
}

#[test]
fn bits_of_a_prompts_row_do_not_depend_on_what_is_computed_with_it() {
    for (way, sizes, dtype) in [
        (Prefill::Blocks, &SMALL, Dtype::Fp8),
        (Prefill::Blocks, &NORMED, Dtype::Fp16),
        (Prefill::CublasLt, &SMALL, Dtype::Fp8),
        (Prefill::CublasLt, &NORMED, Dtype::Fp16),
    ] {
        let (_dir, _, cuda) = both(sizes, dtype, Dtype::Fp8);
        let text = tokens(330);
        let run = |prefill, prompt_len, parts: &[usize]| {
            let mut model = on(emulator(Schedule::seeded(1)), &cuda, 21, prefill);
            in_parts_of_prompt(&mut model, &text, parts, prompt_len)
        };
        let whole = run(way, 311, &[310, 20]);
        for parts in [&[330][..], &[1, 309, 20], &[150, 96, 64, 3, 17]] {
            assert_eq!(run(way, 311, parts), whole, "{way:?}, {dtype}: {parts:?}");
        }
        if dtype == Dtype::Fp8 {
            let longer = tokens(790);
            let run = |parts: &[usize]| {
                let mut model = on(emulator(Schedule::seeded(1)), &cuda, 50, way);
                in_parts_of_prompt(&mut model, &longer, parts, 791).split_off(740)
            };
            assert_eq!(run(&[790]), run(&[300, 240, 250]), "{way:?}: two blocks");
        }
        let exact = run(Prefill::Exact, 311, &[330]);
        // The longest that are not in blocks.
        let short = if way == Prefill::Blocks { 128 } else { 256 };
        assert_eq!(run(way, short, &[330]), exact, "a short prompt is computed as ever");
        if way == Prefill::CublasLt || dtype == Dtype::Fp8 {
            assert_ne!(whole[..311], exact[..311]);
        }
    }
}

#[test]
fn bits_of_a_prompt_do_not_depend_on_the_prompts_beside_it() {
    let (_dir, _, cuda) = both(&SMALL, Dtype::Fp8, Dtype::Fp8);
    let tokens = tokens(310);
    let pages: Vec<PageId> = (0..60).collect();
    let segment = |sequence: usize, len: usize| Segment {
        tokens: &tokens[..len],
        first_position: 0,
        pages: &pages[20 * sequence..][..20],
        prompt_len: len,
        num_logits: 2,
        tree: &[],
    };
    let run = |segments: &[Segment<'_>]| {
        WAYS.map(|way| {
            let mut model = on(emulator(Schedule::seeded(1)), &cuda, 60, way);
            model.forward(segments).expect("a pass").values
        })
    };
    let prompts = [segment(0, 305), segment(1, 7), segment(2, 294)];
    let each = prompts.map(|prompt| run(&[prompt]));
    let alone: [Vec<f32>; 2] =
        [0, 1].map(|way| each.iter().flat_map(|found| found[way].clone()).collect());
    assert_eq!(run(&prompts), alone);
}

/// Numbers of one prompt that are beyond every bound leave nothing behind that others compute with: where rows of blocks lie,
/// products of few rows have zeros behind theirs.
#[test]
fn what_overflows_in_the_blocks_of_a_prompt_stays_with_it() {
    const OVERFLOWS: u32 = tiny::END;
    let dir = tempfile::tempdir().expect("a folder");
    let checkpoint = dir.path().join("model");
    tiny::write_sized(&checkpoint, 2, 1, &SMALL);
    // A place of the hidden states that only this token has, and its MLP overflows with.
    tiny::edit(&checkpoint, |name, row_len, values| {
        let len = values.len();
        if name.contains("embed_tokens") {
            (0..len).step_by(row_len).for_each(|first| values[first] = 0.0);
            values[OVERFLOWS as usize * row_len] = 1.0;
        } else if name.contains("o_proj") || name.contains("down_proj") {
            values[..row_len].fill(0.0);
        } else if name.contains("post_attention_layernorm") {
            values[0] = f32::MAX;
        } else if name.contains("gate_proj") {
            (0..len).step_by(row_len).for_each(|first| values[first] = -8.0);
        }
    });
    Recipe::plain(checkpoint, Dtype::Fp8).on("cuda:sm_90a").build(&dir.path().join("built"));
    let cuda = open(dir.path(), "built");
    let [overflowing, others]: [Vec<PageId>; 2] = [(0..20).collect(), (20..24).collect()];
    let tokens: Vec<u32> = tokens(50).into_iter().filter(|&token| token != OVERFLOWS).collect();
    let pass = |model: &mut dyn Forward, tokens: &[u32], pages: &[PageId]| {
        let (prompt_len, num_logits) = (tokens.len(), tokens.len());
        let segment =
            Segment { tokens, first_position: 0, pages, prompt_len, num_logits, tree: &[] };
        model.forward(&[segment]).expect("a pass").values
    };
    for way in WAYS {
        let load = || on(emulator(Schedule::PLAIN), &cuda, 24, way);
        let alone = pass(&mut load(), &tokens, &others);
        assert!(alone.iter().all(|logit| logit.is_finite()));
        let mut model = load();
        let found = pass(&mut model, &[OVERFLOWS; 300], &overflowing);
        assert!(found.iter().all(|logit| logit.is_nan()), "{way:?}: nothing overflows");
        assert!(pass(&mut model, &tokens, &others) == alone, "{way:?}: others compute with it");
    }
}

/// Requests with prompts that are long enough for blocks. The odd ones begin alike, with two; each has another length.
fn long_requests() -> Vec<Request> {
    let longer = |(idx, request): (usize, Request)| {
        let len = if idx % 2 == 0 { 258 + 20 * idx } else { 660 };
        Request { prompt: [tokens(len), request.prompt.to_vec()].concat().into(), ..request }
    };
    requests().into_iter().enumerate().map(longer).collect()
}

/// However its prompt is cut, whatever runs beside it and is cached, and with any speculation, a text is the same.
#[test]
fn texts_are_the_same_however_blocks_of_prompts_are_computed() {
    let (_dir, engine) = target(Drafts::Model);
    let runtime = |options: &Options, seed| {
        let options = Options { kv_tokens: Some(6144), ..options.clone() };
        load_bounded(&engine, options, Schedule::seeded(seed))
    };
    let with_drafts = |draft_len| {
        // Many tokens, so that texts tell of other bits.
        let set = |(idx, mut request): (usize, Request)| {
            // Two of three tell it in all their bits, if by way of the host.
            if idx % 3 > 0 {
                request.sampling.logprobs.get_or_insert(0);
            }
            let draft_len = Some(draft_len);
            Request { draft_len, max_tokens: 60, ignore_eos: true, ..request }
        };
        long_requests().into_iter().enumerate().map(set).collect::<Vec<_>>()
    };
    let told = |done: &[Done]| -> Vec<_> {
        done.iter().map(|done| (done.tokens.clone(), done.logprobs.clone())).collect()
    };
    let run_alone = |options: &Options| {
        let mut runtime = runtime(options, 1);
        let run = |request| told(&running::run(&mut runtime, &[request])).remove(0);
        with_drafts(0).into_iter().map(run).collect::<Vec<_>>()
    };
    let [fixed, adaptive] = [Fixed, Adaptive].map(running::options);
    let alone = Options { kv_reuse: false, prefill: Some(Prefill::Blocks), ..fixed.clone() };
    let plain = run_alone(&alone);
    let exact = Options { prefill: Some(Prefill::Exact), ..fixed.clone() };
    let exact = run_alone(&exact);
    let num_other = exact.iter().zip(&plain).filter(|(exact, plain)| exact != plain).count();
    let num_telling = plain.iter().filter(|(_, told)| told.iter().any(Option::is_some)).count();
    assert!(num_telling >= 4, "{num_telling} tell their bits");
    assert!(num_other >= num_telling, "{num_other} texts would tell of other bits");
    // What is taken where nothing is said, in steps that hold a block and little more, and many.
    for (options, draft_len, rows) in [(&fixed, 3, 520), (&adaptive, models::MAX_DRAFT_LEN, 2048)] {
        let options = Options { max_num_tokens: Some(rows), ..options.clone() };
        let mut runtime = runtime(&options, 2);
        let done = running::run(&mut runtime, &with_drafts(draft_len));
        assert_eq!(told(&done), plain, "{draft_len} drafts, {rows} rows");
        // What they left in the cache is found, some of it in the middle of a block.
        let before = runtime.usage().reused_pages;
        let again = running::run(&mut runtime, &with_drafts(draft_len));
        assert_eq!(told(&again), plain, "again, {draft_len} drafts, {rows} rows");
        assert!(runtime.usage().reused_pages >= before + 3 * 35, "nothing was found");
    }
    let narrow = Options {
        max_num_tokens: Some(200),
        prefill: Some(Prefill::Blocks),
        admission: AdmissionPolicy::MaxUtilization,
        ..fixed
    };
    let options = Options { kv_tokens: Some(1024), ..narrow };
    let mut runtime = load_bounded(&engine, options, Schedule::seeded(3));
    let done = running::run(&mut runtime, &with_drafts(2));
    assert_eq!(told(&done), plain, "in steps that hold no block, preempted");
    assert!(runtime.usage().preemptions > 0, "nothing was preempted");
}

#[test]
fn blocks_of_prompts_are_refused_where_nothing_multiplies_them() {
    let (_dir, cpu, cuda) = both_on("cuda:sm_90a,sm_80", &SMALL, Dtype::Fp16, Dtype::Fp16);
    for (prefill, name) in [(Prefill::CublasLt, "cublaslt"), (Prefill::Blocks, "blocks")] {
        let options = Options { prefill: Some(prefill), ..running::options(Fixed) };
        let error = Runtime::load(&cpu, &options).err().expect("is refused").to_string();
        let expected =
            format!("prefill = {name} on an engine that was built for the cpu is not supported");
        assert_eq!(error, expected);
    }
    let options = Options { prefill: Some(Prefill::Blocks), ..running::options(Fixed) };
    let on_ampere = |_| Ok(Box::new(Emulator::new((8, 0), NUM_SMS, Schedule::PLAIN)) as _);
    let error =
        Runtime::load_on(&cuda, &options, &on_ampere).err().expect("is refused").to_string();
    let expected =
        "prefill = blocks on a GPU of compute capability 8.0, expected 9.0: use auto or cublaslt";
    assert!(error.starts_with(expected), "{error}");
}
