//! What is measured: ceilings first, then models of well-known shapes, kernel by kernel and step by step. Each figure is
//! in the report as soon as it is there, and nothing is begun when the time is up.

use crate::args::Args;
use crate::ceiling::{self, Ceilings};
use crate::kernels;
use crate::prefill;
use crate::random_engine::{LLAMA_1B, LLAMA_8B, LLAMA_70B, Model, RandomEngines, TINY};
use crate::report::{Outcome, Report, Verdict};
use crate::steps;
use spec_core::engine::Limits;
use spec_core::model::Dtype;
use std::time::Instant;

const FP8_1B: Model = Model { shape: &LLAMA_1B, dtype: Dtype::Fp8 };
const FP16_1B: Model = Model { shape: &LLAMA_1B, dtype: Dtype::Fp16 };
const FP8_8B: Model = Model { shape: &LLAMA_8B, dtype: Dtype::Fp8 };
const FP16_8B: Model = Model { shape: &LLAMA_8B, dtype: Dtype::Fp16 };
const FP8_70B: Model = Model { shape: &LLAMA_70B, dtype: Dtype::Fp8 };
const FP8_TINY: Model = Model { shape: &TINY, dtype: Dtype::Fp8 };

/// Targets and their drafters.
const PAIRS: [(Model, Option<Model>); 5] = [
    (FP8_1B, None),
    (FP16_1B, None),
    (FP8_8B, Some(FP8_1B)),
    (FP16_8B, Some(FP16_1B)),
    (FP8_70B, Some(FP8_1B)),
];
/// The same on an emulator.
const FEW_PAIRS: [(Model, Option<Model>); 1] = [(FP8_TINY, Some(FP8_TINY))];

/// As a server would be set up.
const LIMITS: Limits =
    Limits { max_draft_len: 8, max_batch_size: 64, max_seq_len: 8192, max_num_tokens: 8192 };

/// Measures all that is asked for and that there is time for.
pub(crate) fn run(report: &mut Report, args: &Args, gpu: &str, arch: &str, start: Instant) {
    let ceilings = ceiling::run(report, args.machine, arch);
    let deadline = start + args.budget;
    let pairs = if args.machine.is_emulated() { &FEW_PAIRS[..] } else { &PAIRS };
    for (target, draft) in pairs.iter().filter(|(target, _)| args.wants_model(&target.name())) {
        let bench = Bench { args, target, draft: draft.as_ref(), ceilings, gpu, arch, deadline };
        bench.run(report);
    }
}

struct Bench<'a> {
    args: &'a Args,
    target: &'a Model,
    draft: Option<&'a Model>,
    ceilings: Option<Ceilings>,
    gpu: &'a str,
    arch: &'a str,
    deadline: Instant,
}

impl Bench<'_> {
    fn run(&self, report: &mut Report) {
        let name = self.target.name();
        let mut written = None;
        report.check(&format!("{name}: engines with random weights"), |_| {
            if self.is_late() {
                return Ok(Verdict::Skipped("the time is up".into()));
            }
            let draft = self.draft.copied();
            let engines = RandomEngines::write(*self.target, draft, &LIMITS, self.arch)?;
            let bytes: u64 = engines.target.manifest().sections.iter().map(|s| s.bytes).sum();
            written = Some(engines);
            Ok(Verdict::Passed(format!("{} MB", bytes / 1_000_000)))
        });
        let Some(engines) = &written else { return };
        if self.args.wants("kernels") {
            report.check(&format!("{name}: kernels"), |report| self.kernels(engines, report));
        }
        if self.args.wants("prefill") {
            report.check(&format!("{name}: prompts"), |report| self.prefill(engines, report));
        }
        if self.args.wants("steps") {
            report.check(&format!("{name}: steps"), |report| self.steps(engines, report));
        }
    }

    fn is_late(&self) -> bool {
        Instant::now() > self.deadline
    }

    fn kernels(&self, engines: &RandomEngines, report: &mut Report) -> Outcome {
        if self.is_late() {
            return Ok(Verdict::Skipped("the time is up".into()));
        }
        let (engine, ceilings) = (&engines.target, self.ceilings);
        let machine = self.args.machine;
        let count = kernels::Bench { engine, shape: self.target, machine, ceilings }.run(report)?;
        Ok(Verdict::Passed(format!("{count} timed")))
    }

    fn prefill(&self, engines: &RandomEngines, report: &mut Report) -> Outcome {
        if self.is_late() {
            return Ok(Verdict::Skipped("the time is up".into()));
        }
        let count = prefill::run(&engines.target, self.target, self.args.machine, report)?;
        Ok(Verdict::Passed(format!("{count} timed")))
    }

    fn steps(&self, engines: &RandomEngines, report: &mut Report) -> Outcome {
        if self.is_late() {
            return Ok(Verdict::Skipped("the time is up".into()));
        }
        let bench = steps::Bench {
            engines,
            target: self.target,
            draft: self.draft,
            machine: self.args.machine,
            gpu: self.gpu,
            ceilings: self.ceilings,
            deadline: self.deadline,
        };
        let count = bench.run(report)?;
        let late = if self.is_late() { ", then the time was up" } else { "" };
        Ok(Verdict::Passed(format!("{count} timed{late}")))
    }
}
