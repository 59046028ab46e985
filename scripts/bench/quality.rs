//! Prints how far engines of every number format are from recorded fp32 outputs: see `scripts/bench/quality`.

#[path = "../../tests/common/mod.rs"]
mod common;

use common::golden::{self, COMPARED_TOKENS, Distance, Prompt, agreement};
use common::models::{self, QWEN, Recipe, SMOLLM2};
use spec_core::engine::Engine;
use spec_core::model::Dtype;
use std::process::ExitCode;

/// From the widest to the narrowest.
const DTYPES: [Dtype; 5] = [Dtype::Fp32, Dtype::Fp16, Dtype::Bf16, Dtype::Fp8, Dtype::Int8];

fn main() -> ExitCode {
    let mut names: Vec<String> = std::env::args().skip(1).collect();
    if names.is_empty() {
        names = [SMOLLM2, QWEN].map(String::from).into();
    }
    println!("| model | weights | MiB | mean | p99 | argmax | greedy tokens |");
    println!("|---|---|---|---|---|---|---|");
    for name in &names {
        let prompts = golden::prompts(name);
        let Some(checkpoint) = models::hf(name) else {
            return ExitCode::FAILURE;
        };
        for dtype in DTYPES {
            let recipe = Recipe::ngram(checkpoint.clone(), dtype);
            let engine = recipe.engine(&format!("{name}-{dtype}-ngram"));
            println!("| {name} | {dtype} | {}", row(&engine, &prompts));
        }
    }
    println!();
    println!(
        "mean, p99: absolute differences of log-probabilities (over the whole vocabulary) of the {COMPARED_TOKENS} \
         likeliest tokens after each of 4 prompts; argmax: positions of the prompts with the same likeliest \
         token; greedy tokens: equal ones before the first difference, of 64 after each prompt."
    );
    ExitCode::SUCCESS
}

fn row(engine: &Engine, prompts: &[Prompt]) -> String {
    let distance = Distance::of(engine, prompts);
    let bytes: u64 = engine.manifest().sections.iter().map(|section| section.bytes).sum();
    let greedy = golden::greedy(engine, prompts);
    let same: Vec<String> = greedy
        .iter()
        .zip(prompts)
        .map(|(ours, prompt)| agreement(ours, &prompt.greedy).to_string())
        .collect();
    format!(
        "{} | {:.2e} | {:.2e} | {}/{} | {} |",
        bytes >> 20,
        distance.mean(),
        distance.p99(),
        distance.same_argmax,
        distance.positions,
        same.join(" ")
    )
}
