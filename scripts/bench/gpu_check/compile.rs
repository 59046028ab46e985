//! Builds everything that a run needs but a GPU, so that its kernels are in the cache: minutes of the compiler that a
//! machine with a GPU need not spend.

use crate::bench;
use crate::case::{self, Drafts, Pair};
use crate::ceiling;
use crate::clocks;
use crate::gpu::{Bed, Machine};
use spec_build::cuda::{Cache, Compiler};
use spec_core::exec::SearchPath;
use spec_kernels::{SOURCES, Variant};
use std::error::Error;
use std::time::Instant;

/// For one architecture; says how long each part has taken.
pub(crate) fn run(arch: &'static str) -> Result<(), Box<dyn Error>> {
    let compiler = Compiler::open(&SearchPath::of_process(None), Cache::of_user())?;
    timed("ceilings", || ceiling::compile(arch))?;
    timed("clocks", || clocks::compile(arch))?;
    for model in bench::models() {
        timed(&model.name(), || {
            let (config, precision) = (model.config(), model.precision());
            compiler.compile_model(&[arch.into()], &config, &precision)
        })?;
    }
    for case in case::all(false) {
        timed(&case.name(), || Ok::<_, Box<dyn Error>>(Pair::build(&case, arch)))?;
    }
    for small in [true, false] {
        let bed = Bed { machine: Machine::Emulator, arch, small };
        for drafts in [Drafts::Model, Drafts::Head] {
            timed("drafts", || Ok::<_, Box<dyn Error>>(case::speculating(drafts, bed)))?;
        }
    }
    Ok(())
}

/// Compiled code, by name of the kernel.
pub(crate) type Code = Vec<(&'static str, Vec<u8>)>;

/// Compiles kernels that are part of no engine: each `.cu` of some sources, over the headers of the engines' kernels.
pub(crate) fn own(
    arch: &str,
    sources: &[(&'static str, &'static str)],
) -> Result<Code, Box<dyn Error>> {
    let headers = SOURCES.iter().filter(|(name, _)| name.ends_with(".cuh"));
    let compiler = Compiler::open(&SearchPath::of_process(None), Cache::of_user())?
        .with_sources(sources.iter().chain(headers).copied().collect());
    let names = sources.iter().filter_map(|(file, _)| file.strip_suffix(".cu"));
    names.map(|name| Ok((name, compiler.compile(arch, &Variant::plain(name))?))).collect()
}

fn timed<T, E>(what: &str, run: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let start = Instant::now();
    let made = run()?;
    eprintln!("{what}: {:.1} s", start.elapsed().as_secs_f64());
    Ok(made)
}
