//! Every kernel by itself, beside the emulated GPU: what is wrong first, before anything whole is looked at. A kernel
//! that is wrong is named with what it wrote, one that faults or hangs is the last that was begun.

use crate::case::{self, Drafts, FEW, Pair, tokens};
use crate::common::running;
use crate::gpu::Bed;
use crate::logits;
use crate::prefill;
use crate::report::{Outcome, Report, Verdict};
use crate::twin::{Findings, Twin};
use spec_core::engine::Engine;
use spec_core::runtime::{DraftPolicy, Options, Prefill, Request, Runtime};
use spec_core::testing::cuda::device::Device;
use std::cell::LazyCell;
use std::time::Duration;

/// The emulator takes its time.
pub(crate) const LIMIT: Duration = Duration::from_secs(150);
/// No check begins later, so that there is time for what else there is to see of a GPU.
const SHARE: Duration = Duration::from_secs(180);

/// Rows of the passes: every width of the products, and the tiles of the attention.
const PARTS: [usize; 4] = [33, 9, 1, 2];
/// A chunk in blocks, and one behind it.
const LONG_PARTS: [usize; 2] = [300, 5];
/// Tokens that requests generate.
const MAX_TOKENS: usize = 6;
const DRAFT_LEN: usize = 3;
const KV_TOKENS: usize = 2048;
/// Wrong kernels that are shown.
const SHOWN: usize = 8;

/// Checks passes of all small models, and steps.
pub(crate) fn run(report: &mut Report, bed: Bed) {
    let bed = Bed { small: true, ..bed };
    for case in &FEW {
        let name = case.name();
        let pair = LazyCell::new(|| Pair::build(case, bed.arch));
        check(report, bed, &format!("launches of passes: {name}"), || {
            passes(&pair.cuda, bed, Prefill::Exact, &PARTS)
        });
        for (way, called) in prefill::BLOCKS {
            check(report, bed, &format!("launches of prompts by {called}: {name}"), || {
                match prefill::missing(way, bed.machine) {
                    Some(missing) => Ok(Verdict::Skipped(missing)),
                    None => passes(&pair.cuda, bed, way, &LONG_PARTS),
                }
            });
        }
    }
    for (drafts, name) in
        [(Drafts::LookUp, "look-up"), (Drafts::Model, "model"), (Drafts::Head, "head")]
    {
        let name = format!("launches of steps with drafts by {name}");
        check(report, bed, &name, || steps(drafts, bed));
    }
}

fn check(report: &mut Report, bed: Bed, name: &str, run: impl FnOnce() -> Outcome) {
    let is_late = !bed.machine.is_emulated() && report.elapsed() > SHARE;
    report.check_within(LIMIT, name, |_| match is_late {
        true => Ok(Verdict::Skipped(format!("{} s were over", SHARE.as_secs()))),
        false => run(),
    });
}

/// Runs passes of so many rows of one sequence.
pub(crate) fn passes(engine: &Engine, bed: Bed, prefill: Prefill, parts: &[usize]) -> Outcome {
    let findings = Findings::default();
    let twin = Twin::new(Box::new(bed.machine.open()?), findings.clone());
    let tokens = tokens(parts.iter().sum());
    logits::on(Box::new(twin), engine, prefill, &tokens, parts)?;
    verdict(&findings)
}

fn steps(drafts: Drafts, bed: Bed) -> Outcome {
    let findings = Findings::default();
    let (_folder, engine) = case::speculating(drafts, bed);
    // Steps begin when they are asked for: one that begins ahead does the same.
    let options = Options {
        kv_tokens: Some(KV_TOKENS),
        launch_ahead: false,
        ..running::options(DraftPolicy::Fixed)
    };
    let open = || -> spec_core::Result<Box<dyn Device>> {
        Ok(Box::new(Twin::new(Box::new(bed.machine.open()?), findings.clone())))
    };
    let mut runtime = Runtime::load_on(&engine, &options, &|_| open())?;
    let requests = running::kinds_of_sampling().into_iter().enumerate().map(|(idx, sampling)| {
        let prompt = [tokens(7 + 9 * idx), tokens(4 + idx)].concat().into();
        let draft_len = Some(DRAFT_LEN);
        Request { prompt, max_tokens: MAX_TOKENS, sampling, draft_len, ..Request::default() }
    });
    running::run(&mut runtime, &requests.collect::<Vec<_>>());
    verdict(&findings)
}

/// What is wrong of each variant, or how near all was.
pub(crate) fn verdict(findings: &Findings) -> Outcome {
    let found = findings.found();
    let num = found.num_launches;
    if !found.wrong.is_empty() {
        let mut wrong: Vec<_> = found.wrong.iter().collect();
        wrong.sort_by_key(|(_, (launch, _))| *launch);
        let shown = wrong.iter().take(SHOWN);
        let shown: Vec<String> = shown
            .map(|(variant, (launch, what))| format!("{variant}, launch {launch}: {what}"))
            .collect();
        let text = format!("{} variants in {num} launches: {}", wrong.len(), shown.join(" | "));
        return Err(text.into());
    }
    if num == 0 {
        return Err("nothing was launched".into());
    }
    let shares = found.shares.iter().map(|(kernel, share)| format!("{kernel} {share:.0e}"));
    let shares: Vec<String> = shares.collect();
    Ok(Verdict::Passed(format!("{num} launches, off by at most {}", shares.join(", "))))
}
