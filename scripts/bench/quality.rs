//! Prints how far engines of every number format are from recorded fp32 outputs: see `scripts/bench/quality`.

#[path = "../../tests/common/mod.rs"]
mod common;

use common::data;
use common::golden::{self, COMPARED_TOKENS, Distance, Prompt, agreement};
use common::models::{self, QWEN, Recipe, SMOLLM2};
use spec_build::calibrate::Calibration;
use spec_core::engine::Engine;
use spec_core::model::Dtype;
use spec_core::runtime::{Prefill, pages_for};
use spec_core::testing::PageId;
use spec_core::testing::batch::{Forward as _, Logits, Segment};
use spec_core::testing::cuda::{Gpu, Model, OnHost};
use spec_emu::{Emulator, Schedule};
use std::fmt;
use std::io::{Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;

/// Number formats of an engine.
#[derive(Clone, Copy)]
struct Formats {
    weights: Dtype,
    /// If it is not 16-bit by itself.
    head: Option<Dtype>,
    /// If it is not the default.
    kv: Option<Dtype>,
    /// Whether scales of keys and values are found.
    calibrated: bool,
}

const fn weights(weights: Dtype) -> Formats {
    Formats { weights, head: None, kv: None, calibrated: true }
}

/// Of weights from the widest to the narrowest, then of keys and values alone.
const FORMATS: [Formats; 11] = [
    weights(Dtype::Fp32),
    weights(Dtype::Fp16),
    weights(Dtype::Bf16),
    weights(Dtype::Fp8),
    weights(Dtype::Int8),
    Formats { head: Some(Dtype::Int8), ..weights(Dtype::Int8) },
    weights(Dtype::Int4),
    Formats { head: Some(Dtype::Int4), ..weights(Dtype::Int4) },
    Formats { kv: Some(Dtype::Fp16), ..weights(Dtype::Fp32) },
    Formats { kv: Some(Dtype::Fp8), calibrated: false, ..weights(Dtype::Fp32) },
    Formats { kv: Some(Dtype::Fp8), ..weights(Dtype::Fp32) },
];
/// Tokens of a text.
const MAX_LEN: usize = 256;
/// Of these the first ones are a prompt that a GPU computes in a block.
const IN_BLOCK: usize = 192;
/// Multiprocessors of the emulated GPU.
const NUM_SMS: u32 = 4;

fn main() -> ExitCode {
    let mut names: Vec<String> = std::env::args().skip(1).collect();
    if names.first().is_some_and(|arg| arg == "--blocks") {
        return blocks(&names[1..]);
    }
    let peers = match names.iter().position(|arg| arg == "--peers") {
        Some(at) if at + 1 < names.len() => names.drain(at..at + 2).nth(1).map(PathBuf::from),
        Some(_) => {
            eprintln!("quality: --peers DIR");
            return ExitCode::FAILURE;
        }
        None => None,
    };
    if names.is_empty() {
        names = [SMOLLM2, QWEN].map(String::from).into();
    }
    println!(
        "| model | weights | MiB | KL | KL p99 | argmax | mean | p99 | argmax | greedy tokens |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for name in &names {
        let prompts = golden::prompts(name);
        let Some(checkpoint) = models::hf(name) else {
            return ExitCode::FAILURE;
        };
        let texts = texts(name);
        let mut reference = None;
        for formats in FORMATS {
            let Formats { weights, head, kv, calibrated } = formats;
            let recipe = Recipe {
                head_dtype: head,
                kv_dtype: kv,
                kv_calibration: (!calibrated).then_some(Calibration::None),
                ..Recipe::ngram(checkpoint.clone(), weights)
            };
            let engine = recipe.engine(&format!("{name}-{formats}-ngram").replace(' ', "-"));
            let logits = logits(&engine, &texts);
            let divergence =
                Divergence::of(reference.get_or_insert_with(|| logits.clone()), &logits);
            println!("| {name} | {formats} | {}", row(&engine, &divergence, &prompts));
        }
        let gguf = |peers: &PathBuf| peers.join("gguf").join(format!("{name}-q8_0.gguf"));
        if let (Some(peers), Some(reference)) = (&peers, &reference)
            && gguf(peers).is_file()
        {
            let logits = llama_logits(peers, &gguf(peers), &texts);
            let divergence = Divergence::of(reference, &logits);
            let mib = gguf(peers).metadata().expect("its size").len() >> 20;
            println!("| {name} | llama.cpp Q8_0 | {mib} | {divergence} | | | | |");
        }
    }
    println!();
    println!(
        "KL: Kullback-Leibler divergence of the next token's distribution from that of fp32, mean and 99 of 100 of \
         the positions of six prompts, and the share of them with the same likeliest token. Against recorded outputs: \
         mean, p99: absolute differences of log-probabilities (over the whole vocabulary) of the {COMPARED_TOKENS} \
         likeliest tokens after each of 4 prompts; argmax: positions of the prompts with the same likeliest \
         token; greedy tokens: equal ones before the first difference, of 64 after each prompt."
    );
    ExitCode::SUCCESS
}

/// How far what is behind a prompt in FP8 is from fp32, where a CPU computes the prompt and where a GPU does, in a block.
fn blocks(names: &[String]) -> ExitCode {
    println!("| model | prompts | KL | KL p99 | argmax |");
    println!("|---|---|---|---|---|");
    for name in names {
        let Some(checkpoint) = models::hf(name) else {
            return ExitCode::FAILURE;
        };
        let texts = joined(&texts(name));
        let engine = |dtype| {
            let recipe = Recipe::ngram(checkpoint.clone(), dtype).with_kv(Dtype::Fp16);
            recipe.engine(&format!("{name}-{dtype}-fp16-kv-ngram"))
        };
        let behind =
            |all: Vec<Logits>| -> Vec<Logits> { all.into_iter().map(behind_block).collect() };
        let reference = behind(logits(&engine(Dtype::Fp32), &texts));
        let on_cpu = behind(logits(&engine(Dtype::Fp8), &texts));
        println!(
            "| {name} | as tokens are decoded, on a CPU | {} |",
            Divergence::of(&reference, &on_cpu)
        );
        let recipe = Recipe::ngram(checkpoint, Dtype::Fp8).with_kv(Dtype::Fp16).on("cuda:sm_90a");
        let on_gpu = in_blocks(&recipe.engine(&format!("{name}-fp8-fp16-kv-ngram-cuda")), &texts);
        println!(
            "| {name} | in blocks, on an emulated GPU | {} |",
            Divergence::of(&reference, &on_gpu)
        );
    }
    println!();
    println!(
        "Weights in FP8, keys and values in FP16. KL: Kullback-Leibler divergence of the next token's distribution from that \
         of fp32, mean and 99 of 100 of the {} positions behind the first {IN_BLOCK} of six texts each, which are prompts one behind the other, and the share of \
         them with the same likeliest token.",
        MAX_LEN - IN_BLOCK
    );
    ExitCode::SUCCESS
}

/// Six prompts, or their beginnings.
fn texts(name: &str) -> Vec<Vec<u32>> {
    let prompts = data::six_prompts(name).into_iter();
    prompts.map(|(_, ids)| ids[..ids.len().min(MAX_LEN)].to_vec()).collect()
}

/// As many texts, each with the others behind it: all of them long.
fn joined(texts: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let from = |first: usize| texts.iter().cycle().skip(first).take(texts.len()).flatten();
    (0..texts.len()).map(|first| from(first).copied().take(MAX_LEN).collect()).collect()
}

/// Logits behind the block of a text.
fn behind_block(Logits { vocab_size, mut values }: Logits) -> Logits {
    let values = values.split_off(IN_BLOCK * vocab_size);
    Logits { vocab_size, values }
}

/// The same of an emulated GPU that computes what is before them in a block.
fn in_blocks(engine: &Engine, texts: &[Vec<u32>]) -> Vec<Logits> {
    let pages: Vec<PageId> = (0..pages_for(MAX_LEN) as PageId).collect();
    let gpu = Gpu::new(Box::new(Emulator::new((9, 0), NUM_SMS, Schedule::PLAIN)));
    let model = Model::load_with(engine, pages.len(), Prefill::Blocks, &mut **gpu.lock());
    let mut model = OnHost::new(Arc::new(model.expect("loads")), gpu);
    let mut logits = |text: &Vec<u32>| {
        let segment = |rows: Range<usize>, num_logits| Segment {
            tokens: &text[rows.clone()],
            first_position: rows.start,
            pages: &pages,
            prompt_len: IN_BLOCK + 1,
            num_logits,
            tree: &[],
        };
        let behind = text.len() - IN_BLOCK;
        model.forward(&[segment(0..IN_BLOCK, 0)]).expect("a block");
        model.forward(&[segment(IN_BLOCK..text.len(), behind)]).expect("what is behind it")
    };
    texts.iter().map(&mut logits).collect()
}

impl fmt::Display for Formats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { weights, head, kv, calibrated } = self;
        write!(f, "{weights}")?;
        if let Some(head) = head {
            write!(f, " with {head} head")?;
        }
        match (kv, calibrated) {
            (None, _) => Ok(()),
            (Some(kv), true) => write!(f, " with {kv} kv"),
            (Some(kv), false) => write!(f, " with {kv} kv, scales 1"),
        }
    }
}

/// Logits at every position of every text.
fn logits(engine: &Engine, texts: &[Vec<u32>]) -> Vec<Logits> {
    let mut model = golden::model(engine, pages_for(MAX_LEN));
    texts.iter().map(|text| golden::all_logits(&mut model, text)).collect()
}

/// The same of llama.cpp.
fn llama_logits(peers: &Path, gguf: &Path, texts: &[Vec<u32>]) -> Vec<Logits> {
    let num_cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut child = Command::new(peers.join("llama/build/bin/llama_logits"))
        .arg(gguf)
        .arg(num_cores.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("scripts/bench/install-peers has built llama_logits");
    let counted = texts.iter().flat_map(|text| [&[text.len() as u32][..], text].concat());
    let input: Vec<u8> = counted.flat_map(u32::to_le_bytes).collect();
    // What is not read yet is less than a pipe holds.
    child.stdin.take().expect("a pipe").write_all(&input).expect("it reads all texts");
    let mut output = Vec::new();
    child.stdout.take().expect("a pipe").read_to_end(&mut output).expect("its output");
    assert!(child.wait().expect("its end").success(), "llama_logits has failed");
    let values: Vec<f32> =
        output.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    let vocab_size = values.len() / texts.iter().map(Vec::len).sum::<usize>();
    let mut rest = &values[..];
    let mut take = |text: &Vec<u32>| {
        let (values, behind) = rest.split_at(text.len() * vocab_size);
        rest = behind;
        Logits { vocab_size, values: values.to_vec() }
    };
    texts.iter().map(&mut take).collect()
}

/// Of distributions from those of a reference.
struct Divergence {
    /// A position each, in nats, ascending.
    nats: Vec<f64>,
    same_argmax: usize,
}

impl Divergence {
    fn of(reference: &[Logits], logits: &[Logits]) -> Self {
        let mut divergence = Self { nats: Vec::new(), same_argmax: 0 };
        for (reference, logits) in reference.iter().zip(logits) {
            assert_eq!(reference.vocab_size, logits.vocab_size, "the same vocabulary");
            for row in 0..reference.values.len() / reference.vocab_size {
                divergence.add(reference.row(row), logits.row(row));
            }
        }
        divergence.nats.sort_by(f64::total_cmp);
        divergence
    }

    fn add(&mut self, reference: &[f32], logits: &[f32]) {
        let (p_sum, q_sum) = (golden::logsumexp(reference), golden::logsumexp(logits));
        let terms = reference.iter().zip(logits).map(|(&p, &q)| {
            let (p, q) = (f64::from(p) - p_sum, f64::from(q) - q_sum);
            p.exp() * (p - q)
        });
        self.nats.push(terms.sum());
        let argmax = |row: &[f32]| golden::likeliest(row, 1)[0];
        self.same_argmax += usize::from(argmax(reference) == argmax(logits));
    }
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { nats, same_argmax } = self;
        let (mean, p99) =
            (nats.iter().sum::<f64>() / nats.len() as f64, nats[nats.len() * 99 / 100]);
        let same = 100.0 * *same_argmax as f64 / nats.len() as f64;
        write!(f, "{mean:.5} | {p99:.4} | {same:.2} %")
    }
}

fn row(engine: &Engine, divergence: &Divergence, prompts: &[Prompt]) -> String {
    let distance = Distance::of(engine, prompts);
    let bytes: u64 = engine.manifest().sections.iter().map(|section| section.bytes).sum();
    let greedy = golden::greedy(engine, prompts);
    let same: Vec<String> = greedy
        .iter()
        .zip(prompts)
        .map(|(ours, prompt)| agreement(ours, &prompt.greedy).to_string())
        .collect();
    format!(
        "{} | {divergence} | {:.2e} | {:.2e} | {}/{} | {} |",
        bytes >> 20,
        distance.mean(),
        distance.p99(),
        distance.same_argmax,
        distance.positions,
        same.join(" ")
    )
}
