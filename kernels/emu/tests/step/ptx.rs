//! Random steps from the assembly text that NVRTC makes of the kernels: every launch leaves the bytes that it leaves on the
//! emulator, and every decision is the host's.

use crate::device::Run;
use crate::exact::random_step;
use spec_build::cuda::{Cache, Compiler};
use spec_core::exec::SearchPath;
use spec_core::testing::cuda::step::params::SampleParams;
use spec_emu::{Arena, Launch};
use spec_emu_ptx::{Kernels, compare};
use std::io::{self, Write};
use std::mem::offset_of;
use std::path::Path;

/// Sequences of a step.
const BATCH: usize = 9;

#[test]
fn steps_from_nvrtcs_text_are_those_of_the_host() {
    let cache = Cache::in_folder(Path::new(env!("CARGO_TARGET_TMPDIR")).join("ptx"));
    let compiler = match Compiler::open(&SearchPath::of_process(None), Some(cache)) {
        Ok(compiler) => compiler,
        Err(error) => {
            let _ = writeln!(io::stderr(), "skipped: {error:#}");
            return;
        }
    };
    let kernels = Kernels::new(compiler, "compute_90a");
    let both = |arena: &Arena, launches: &[Launch<'_>]| {
        let compare = |launch| compare(&kernels, arena, launch, 3, workspace(launch));
        launches.iter().try_for_each(compare)
    };
    let run = Run { other: Some(&both), ..Run::WHOLE };
    for (seed, vocabs) in (4_001..).zip([(257, 320), (41, 50), (2300, 2100)]) {
        random_step(seed, &[vocabs], BATCH, run).unwrap();
    }
}

/// Where blocks list what is likely, in the order in which threads come to it.
fn workspace(launch: &Launch<'_>) -> Option<u64> {
    let parts = launch.params.get(offset_of!(SampleParams, parts)..)?.first_chunk()?;
    (launch.variant == "sample").then_some(u64::from_le_bytes(*parts))
}
