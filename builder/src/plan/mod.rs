//! `spec-build plan`: what a build would give, from the headers of the checkpoints and what is known of the device: a
//! CPU is measured, GPUs are in a table.

mod cpu;
mod gpu;
mod memory;

use crate::checkpoint::Checkpoint;
use crate::cli::{DraftSource, PlanArgs};
use crate::folder::Plan;
use crate::roofline::{Passes, Share, Step};
use crate::sizes::{self, Capacity, Sizes};
use crate::skip;
use crate::table::{self, Table};
use anyhow::{Result, ensure};
use memory::Fit;
use spec_core::engine::{Device, DrafterKind, Limits, Precision, Role, pass_share};
use spec_core::model::ModelConfig;
use spec_core::runtime::Footprint;
use std::fmt::Write as _;

/// Longest draft of which every length is shown; beyond it, those that double.
const MAX_DENSE_LEN: usize = 8;
/// Acceptances that speeds are shown for.
const ACCEPTANCES: [f64; 3] = [0.6, 0.8, 0.9];
/// Context that its cost is shown for.
const CONTEXT_TOKENS: u64 = 1000;

/// What passes run on.
trait Machine {
    /// Bytes that it reads in a second.
    fn bandwidth(&self) -> f64;

    /// What it is, for a line of the report.
    fn describe(&self) -> String;

    /// Its memory, where that is known.
    fn memory(&self) -> Option<MachineMemory>;

    /// What passes of a model take, of at most `rows` rows.
    fn passes(&self, model: &Model<'_>, rows: usize) -> Result<Box<dyn Passes>>;
}

/// The memory that weights and caches go into.
struct MachineMemory {
    bytes: u64,
    /// Streaming multiprocessors, if it is a GPU's.
    num_sms: u32,
}

/// What a prediction knows of a model.
struct Model<'a> {
    sizes: Sizes,
    precision: &'a Precision,
    config: &'a ModelConfig,
    limits: &'a Limits,
}

impl<'a> Model<'a> {
    fn new(
        checkpoint: &'a Checkpoint,
        precision: &'a Precision,
        limits: &'a Limits,
        device: &Device,
    ) -> Self {
        let config = &checkpoint.config;
        Self { sizes: Sizes::new(config, precision, device), precision, config, limits }
    }
}

/// Runs the command.
pub fn plan(args: &PlanArgs) -> Result<()> {
    if let Some(bandwidth) = args.bandwidth {
        ensure!(
            bandwidth > 0.0 && bandwidth.is_finite(),
            "--bandwidth {bandwidth}: expected more than 0 GB/s"
        );
    }
    let mut plan = Plan::new(&args.model)?;
    if let DraftSource::Skip(source) = &args.model.draft {
        let layers = skip::of_file(source, &args.model.skip, &plan.target.config)?;
        plan.drafter = DrafterKind::Skip { layers, costs: None };
    }
    let bandwidth = args.bandwidth.map(|gigabytes| gigabytes * 1e9);
    let machines: Vec<Box<dyn Machine>> = match plan.device {
        Device::Cpu => vec![Box::new(cpu::Cpu::new(bandwidth, args.isa)?)],
        Device::Cuda { .. } => gpu::Gpu::of_table(bandwidth)?,
    };
    print!("{}", report(&plan, args, &machines)?);
    Ok(())
}

fn report(plan: &Plan, args: &PlanArgs, machines: &[Box<dyn Machine>]) -> Result<String> {
    let target = Model::new(&plan.target, &plan.precision, &plan.limits, &plan.device);
    let draft = plan.draft.as_ref();
    let draft = draft
        .map(|draft| Model::new(draft, &plan.draft_precision, &plan.limits, &plan.draft_device));
    let mut engines = vec![("target", &target.sizes)];
    engines.extend(draft.iter().map(|draft| ("draft", &draft.sizes)));
    let mut text = sizes::table(&engines).to_string();

    let max_seq_len = plan.limits.max_seq_len;
    text.push('\n');
    if let Some(mib) = args.kv_memory {
        let kv_bytes: u64 = engines.iter().map(|(_, sizes)| sizes.kv_token_bytes).sum();
        let capacity = Capacity::new((mib as u64) << 20, kv_bytes, max_seq_len);
        writeln!(
            text,
            "{mib} MiB of keys and values hold {} tokens: {} sequences of max_seq_len {max_seq_len}",
            table::count(capacity.tokens),
            capacity.sequences,
        )?;
    }
    for machine in machines {
        let context_bytes = CONTEXT_TOKENS * target.sizes.kv_token_bytes;
        writeln!(
            text,
            "{}; {CONTEXT_TOKENS} tokens of context add {:.3} ms to a step",
            machine.describe(),
            1e3 * context_bytes as f64 / machine.bandwidth(),
        )?;
        if let Some(memory) = machine.memory() {
            writeln!(text, "{}", fit(plan, &engines, &memory)?)?;
        }
        if draft.is_some() && plan.device != plan.draft_device {
            writeln!(
                text,
                "the drafter is on another device: what its passes take is not predicted, so steps are not"
            )?;
            continue;
        }
        text.push('\n');
        let rows = plan.limits.max_draft_len + 1;
        let target = machine.passes(&target, rows)?;
        let at_once = draft.as_ref().is_some_and(|draft| draft.config.drafts_at_once());
        let draft_rows = if at_once { rows - 1 } else { 1 };
        let draft = draft.as_ref().map(|draft| machine.passes(draft, draft_rows)).transpose()?;
        let part = match &plan.drafter {
            DrafterKind::Skip { layers, .. } => Some(Share {
                whole: &*target,
                share: pass_share(layers, &plan.target.config, &plan.precision, &plan.device),
            }),
            _ => None,
        };
        let part = part.as_ref().map(|part| part as &dyn Passes);
        let steps: Vec<Step> = draft_lens(plan.limits.max_draft_len)
            .map(|draft_len| Step::new(draft_len, &*target, draft.as_deref().or(part), at_once))
            .collect();
        writeln!(text, "{}", step_table(&steps))?;
    }
    text.truncate(text.trim_end().len() + 1);
    if matches!(plan.drafter, DrafterKind::Ngram { .. } | DrafterKind::Suffix { .. }) {
        writeln!(
            text,
            "look-ups are taken to cost nothing; a step without a match is a plain one"
        )?;
    }
    Ok(text)
}

/// How the engines that run where the target does fit there.
fn fit(plan: &Plan, engines: &[(&str, &Sizes)], memory: &MachineMemory) -> Result<Fit> {
    let here = if plan.device == plan.draft_device { engines } else { &engines[..1] };
    let manifest = |checkpoint, role| plan.manifest(checkpoint, role, None);
    let target = manifest(&plan.target, Role::Target)?;
    let draft = plan.draft.as_ref().filter(|_| here.len() > 1);
    let draft = draft.map(|draft| manifest(draft, Role::Draft)).transpose()?;
    Ok(Fit {
        bytes: memory.bytes,
        weight_bytes: here.iter().map(|(_, sizes)| sizes.total()).sum(),
        footprint: Footprint::of(&target, draft.as_ref(), memory.num_sms),
        kv_token_bytes: here.iter().map(|(_, sizes)| sizes.kv_token_bytes).sum(),
        max_seq_len: plan.limits.max_seq_len,
    })
}

/// 0 to 8, then 16, 32 .. and the longest.
fn draft_lens(longest: usize) -> impl Iterator<Item = usize> {
    (0..=longest)
        .filter(move |&len| len <= MAX_DENSE_LEN || len.is_power_of_two() || len == longest)
}

fn step_table(steps: &[Step]) -> Table {
    let heading = ["draft length", "verify ms", "draft ms", "step ms", "break-even acceptance"];
    let rates = ACCEPTANCES.map(|acceptance| format!("tokens/s at {acceptance}"));
    let mut table = Table::new(heading.map(String::from).into_iter().chain(rates));
    let plain_ms = steps.first().map_or(f64::NAN, Step::ms);
    for step in steps {
        let break_even = match (step.draft_len, step.break_even(plain_ms)) {
            (0, _) => "-".into(),
            (_, Some(acceptance)) => format!("{acceptance:.2}"),
            (_, None) => "never".into(),
        };
        let mut cells = vec![step.draft_len.to_string()];
        cells.extend([step.verify_ms, step.draft_ms, step.ms()].map(|ms| format!("{ms:.2}")));
        cells.push(break_even);
        cells.extend(ACCEPTANCES.map(|acceptance| format!("{:.1}", step.rate(acceptance))));
        table.row(cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_drafts_are_shown_where_they_double() {
        assert_eq!(draft_lens(3).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(draft_lens(40).skip(8).collect::<Vec<_>>(), [8, 16, 32, 40]);
    }

    #[test]
    fn the_table_shows_hand_computed_steps() {
        let steps = [
            Step { draft_len: 0, verify_ms: 10.0, draft_ms: 0.0 },
            Step { draft_len: 1, verify_ms: 10.0, draft_ms: 2.0 },
            Step { draft_len: 2, verify_ms: 31.0, draft_ms: 4.0 },
        ];
        let text = step_table(&steps).to_string();
        let rows: Vec<Vec<&str>> =
            text.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["0", "10.00", "0.00", "10.00", "-", "100.0", "100.0", "100.0"]);
        // 1.6, 1.8 and 1.9 tokens in 12 ms.
        assert_eq!(rows[1], ["1", "10.00", "2.00", "12.00", "0.20", "133.3", "150.0", "158.3"]);
        // 1.96, 2.44 and 2.71 tokens in 35 ms; three plain steps take 30.
        assert_eq!(rows[2], ["2", "31.00", "4.00", "35.00", "never", "56.0", "69.7", "77.4"]);
    }
}
