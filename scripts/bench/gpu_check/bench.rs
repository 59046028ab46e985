//! What is measured: ceilings first, then models of well-known shapes, kernel by kernel and step by step. Each figure is
//! in the report as soon as it is there, and nothing is begun when the time is up.

use crate::args::Args;
use crate::ceiling::{self, Ceilings};
use crate::kernels;
use crate::prefill;
use crate::random_engine::{LLAMA_1B, LLAMA_8B, LLAMA_70B, Model, RandomEngines, TINY};
use crate::report::{Report, Verdict};
use crate::steps;
use spec_core::engine::Limits;
use spec_core::model::Dtype;
use std::cell::OnceCell;
use std::error::Error;
use std::time::{Duration, Instant};

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
/// What an emulator gets through.
pub(crate) const FEW_PAIRS: [(Model, Option<Model>); 1] = [(FP8_TINY, Some(FP8_TINY))];

/// As a server would be set up.
pub(crate) const LIMITS: Limits =
    Limits { max_draft_len: 8, max_batch_size: 64, max_seq_len: 8192, max_num_tokens: 8192 };

/// Of a kind of figures of one model.
const LIMIT: Duration = Duration::from_secs(150);

/// All models that are measured on a GPU.
pub(crate) fn models() -> impl Iterator<Item = Model> {
    PAIRS.into_iter().map(|(target, _)| target)
}

/// Measures all that is asked for and that there is time for.
pub(crate) fn run(report: &mut Report, args: &Args, gpu: &str, arch: &str) {
    let ceilings = ceiling::run(report, args.machine, arch);
    let deadline = Instant::now() + args.budget.saturating_sub(report.elapsed());
    let pairs = if args.small { &FEW_PAIRS[..] } else { &PAIRS };
    for (target, draft) in pairs.iter().filter(|(target, _)| args.wants_model(&target.name())) {
        let engines = OnceCell::new();
        let bench = Bench { args, target, draft: *draft, ceilings, gpu, arch, deadline, engines };
        bench.run(report);
    }
}

struct Bench<'a> {
    args: &'a Args,
    target: &'a Model,
    draft: Option<Model>,
    ceilings: Option<Ceilings>,
    gpu: &'a str,
    arch: &'a str,
    deadline: Instant,
    /// Written for the first kind of figures that there is time for.
    engines: OnceCell<RandomEngines>,
}

impl Bench<'_> {
    fn run(&self, report: &mut Report) {
        self.check(report, "kernels", "kernels", Self::kernels);
        self.check(report, "prefill", "prompts", Self::prefill);
        self.check(report, "steps", "steps", Self::steps);
    }

    /// `measure` gives how many figures went into the report.
    fn check(
        &self,
        report: &mut Report,
        part: &str,
        what: &str,
        measure: impl FnOnce(&Self, &RandomEngines, &mut Report) -> Result<usize, Box<dyn Error>>,
    ) {
        if !self.args.wants(part) {
            return;
        }
        report.check_within(LIMIT, &format!("{}: {what}", self.target.name()), |report| {
            if self.is_late() {
                return Ok(Verdict::Skipped("the time is up".into()));
            }
            let count = measure(self, self.engines()?, report)?;
            let late = if self.is_late() { ", then the time was up" } else { "" };
            Ok(Verdict::Passed(format!("{count} timed{late}")))
        });
    }

    fn engines(&self) -> Result<&RandomEngines, Box<dyn Error>> {
        if self.engines.get().is_none() {
            let start = Instant::now();
            let written = RandomEngines::write(*self.target, self.draft, &LIMITS, self.arch)?;
            let bytes: u64 = written.target.manifest().sections.iter().map(|s| s.bytes).sum();
            let seconds = start.elapsed().as_secs_f64();
            eprint!("({} MB written in {seconds:.1} s) ", bytes / 1_000_000);
            let _ = self.engines.set(written);
        }
        Ok(self.engines.get().expect("just written"))
    }

    fn is_late(&self) -> bool {
        Instant::now() > self.deadline
    }

    fn kernels(
        &self,
        engines: &RandomEngines,
        report: &mut Report,
    ) -> Result<usize, Box<dyn Error>> {
        let (engine, ceilings) = (&engines.target, self.ceilings);
        let machine = self.args.machine;
        kernels::Bench { engine, shape: self.target, machine, ceilings }.run(report)
    }

    fn prefill(
        &self,
        engines: &RandomEngines,
        report: &mut Report,
    ) -> Result<usize, Box<dyn Error>> {
        prefill::run(&engines.target, self.target, self.args.machine, report)
    }

    fn steps(&self, engines: &RandomEngines, report: &mut Report) -> Result<usize, Box<dyn Error>> {
        let bench = steps::Bench {
            engines,
            target: self.target,
            draft: self.draft.as_ref(),
            machine: self.args.machine,
            gpu: self.gpu,
            ceilings: self.ceilings,
            deadline: self.deadline,
        };
        bench.run(report)
    }
}
