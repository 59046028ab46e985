//! The machine code of every kernel, for every architecture: it compiles, keeps to its registers, has no stack, adds no
//! floats atomically, is made of the instructions that it was written for, and takes the clocks that were predicted. No GPU is
//! needed; where NVRTC is missing the tests say so.
// All of it is test code, helpers included.
#![allow(clippy::unwrap_used)]

mod budget;
mod clocks;
mod code;
mod exhaustive;
mod kernels;
mod rules;

use clocks::Code;
use code::{Listing, compiler, disassembler, in_parallel};
use spec_build::cuda::{Compiler, Cubin};
use spec_kernels::{ARCHS, Epilogue, Format, SOURCES, Variant, kernel_of};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::OnceLock;

/// A kernel for an architecture.
type Job = (Variant, &'static str);

/// The code of a kernel, or why there is none.
type Outcome = Result<Vec<u8>, String>;

fn complaint((variant, arch): &Job, what: impl std::fmt::Display) -> String {
    format!("{variant} for {arch}: {what}")
}

/// The architecture whose kernels are predicted, and of which every number of rows is compiled.
const WHOLE: &str = "sm_90a";

/// Kernels for an architecture, compiled on all cores.
fn compile(
    compiler: &Compiler,
    variants: impl IntoIterator<Item = Variant>,
    arch: &'static str,
) -> Vec<(Job, Outcome)> {
    let jobs: Vec<Job> = variants.into_iter().map(|variant| (variant, arch)).collect();
    let compile = |(variant, arch): &Job| -> Outcome {
        compiler.compile(arch, variant).map_err(|error| format!("{error:#}"))
    };
    let outcomes = in_parallel(&jobs, compile);
    jobs.into_iter().zip(outcomes).collect()
}

/// What every run of the tests looks at, compiled once: one shape of each kernel and what is predicted, and for other
/// architectures one variant of each kernel.
fn compiled(compiler: &Compiler) -> &'static [(Job, Outcome)] {
    static COMPILED: OnceLock<Vec<(Job, Outcome)>> = OnceLock::new();
    COMPILED.get_or_init(|| {
        let of_arch = |arch| {
            if arch != WHOLE {
                return compile(compiler, kernels::one_of_each(arch), arch);
            }
            let budgets = budget::of_table();
            let all = kernels::variants(arch).into_iter();
            let mut variants = kernels::one_shape_each(arch);
            variants.extend(all.filter(|variant| budgets.contains_key(&variant.to_string())));
            compile(compiler, variants, arch)
        };
        ARCHS.into_iter().flat_map(of_arch).collect()
    })
}

fn assert_none(complaints: Vec<String>) {
    assert!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), complaints.join("\n"));
}

/// Kernels keep to their registers and have no stack.
fn assert_resources(compiled: &[(Job, Outcome)]) {
    let mut most = BTreeMap::new();
    let mut complaints = Vec::new();
    for (job @ (variant, arch), outcome) in compiled {
        let kernel = outcome.as_ref().map_err(String::clone).and_then(|cubin| {
            let kernel = Cubin::parse(cubin).and_then(|cubin| cubin.kernel(variant.kernel));
            kernel.map_err(|error| format!("{error:#}"))
        });
        let checked = kernel.and_then(|kernel| {
            let registers = most.entry((variant.kernel, *arch)).or_insert(0);
            *registers = kernel.registers.max(*registers);
            rules::check_resources(variant, arch, &kernel)
        });
        complaints.extend(checked.err().map(|what| complaint(job, what)));
    }
    for ((kernel, arch), registers) in most {
        println!("{kernel:10} {arch:8} {registers:4} registers at most");
    }
    assert_none(complaints);
}

/// Kernels are made of the instructions that they were written for.
fn assert_instructions<'a>(
    disassembler: &Path,
    compiled: impl IntoIterator<Item = &'a (Job, Outcome)>,
) {
    let check = |(job, outcome): &&(Job, Outcome)| {
        // What looks at resources reports what does not compile.
        let cubin = outcome.as_ref().ok()?;
        let listing = Listing::of(disassembler, cubin);
        let complaints = rules::check_instructions(&job.0, job.1, &listing);
        (!complaints.is_empty()).then(|| complaint(job, complaints.join(", ")))
    };
    let jobs: Vec<_> = compiled.into_iter().collect();
    assert_none(in_parallel(&jobs, check).into_iter().flatten().collect());
}

#[test]
fn kernels_keep_to_their_registers_and_have_no_stack() {
    let Some(compiler) = compiler() else { return };
    assert_resources(compiled(&compiler));
}

#[test]
fn kernels_are_made_of_the_instructions_that_they_were_written_for() {
    let Some(compiler) = compiler() else { return };
    let Some(disassembler) = disassembler(&compiler) else { return };
    // Those of one shape are those of any.
    let representative = kernels::one_shape_each(WHOLE);
    let is_checked = |(variant, arch): &Job| *arch != WHOLE || representative.contains(variant);
    let jobs = compiled(&compiler).iter().filter(|(job, _)| is_checked(job));
    assert_instructions(&disassembler, jobs);
}

/// What they are predicted to be is what they stay, until somebody writes down that they have become faster.
#[test]
fn kernels_keep_to_the_clocks_that_they_are_predicted_to_take() {
    let Some(compiler) = compiler() else { return };
    let Some(disassembler) = disassembler(&compiler) else { return };
    let budgets = budget::of_table();
    let is_whole = |arch: &str| arch == WHOLE;
    let jobs: Vec<_> = compiled(&compiler)
        .iter()
        .filter(|((variant, arch), _)| is_whole(arch) && budgets.contains_key(&variant.to_string()))
        .collect();
    assert_eq!(jobs.len(), budgets.len(), "the table has kernels that are not checked");
    let check = |(job, outcome): &&(Job, Outcome)| {
        let code = Code::of(&disassembler, outcome.as_ref().ok()?);
        let complaints =
            budget::check(&budgets[&job.0.to_string()], &budget::figures(&job.0, &code));
        (!complaints.is_empty()).then(|| complaint(job, complaints.join(", ")))
    };
    assert_none(in_parallel(&jobs, check).into_iter().flatten().collect());
}

/// Twice what happens once: the budgets are tight enough to see it.
#[test]
fn a_product_that_does_more_than_before_is_told() {
    let Some(compiler) = compiler() else { return };
    let Some(disassembler) = disassembler(&compiler) else { return };
    const MULTIPLY: &str = "wgmma_f16<PRODUCT_ROWS>(sums.of[i], weights_of(weights, step), from);";
    let variant = Variant::gemm(Format::Fp8, 8, Epilogue::SwiGlu).with_shape(28_672, 4096);
    let budget = &budget::of_table()[&variant.to_string()];
    let complaints = |compiler: &Compiler| {
        let code = Code::of(&disassembler, &compiler.compile(WHOLE, &variant).unwrap());
        budget::check(budget, &budget::figures(&variant, &code)).join(", ")
    };
    assert_eq!(complaints(&compiler), "");
    let mutate = |&(name, text): &(&'static str, &'static str)| {
        let is_mutant = name == "wgmma/tile.cuh";
        assert!(!is_mutant || text.contains(MULTIPLY), "{name} has no `{MULTIPLY}`");
        (name, if is_mutant { text.replace(MULTIPLY, &MULTIPLY.repeat(2)).leak() } else { text })
    };
    let compiler = self::compiler().unwrap();
    let told = complaints(&compiler.with_sources(SOURCES.iter().map(mutate).collect()));
    assert!(told.contains("unit_instructions") && told.contains("unit_clocks"), "{told:?}");
}

/// A kernel that nobody lists would go unchecked.
#[test]
fn every_source_is_checked() {
    let sources = SOURCES.iter().filter_map(|(path, _)| kernel_of(path));
    let sources: BTreeSet<&str> = sources.collect();
    let checked: BTreeSet<&str> = kernels::variants(WHOLE).iter().map(|v| v.kernel).collect();
    assert_eq!(sources, checked);
    for kernel in checked {
        assert!(rules::registers(kernel).is_some(), "kernel {kernel} has no budget");
    }
}
