//! Tests that run again in a process that finds an emulated `libcuda.so`.

use crate::common::models::Recipe;
use crate::common::tiny::{self, Sizes};
use spec_core::engine::Engine;
use spec_core::model::Dtype;
use spec_core::runtime::TARGET_FILE;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

const SIZES: Sizes =
    Sizes { hidden: 96, head_dim: 64, num_heads: 4, num_kv_heads: 2, ff: 160, qk_norm: false };

/// Set in a process that finds the emulated driver: a folder of its own.
pub(crate) const FOLDER: &str = "EMULATED_DRIVER_FOLDER";
/// Kernels by their cubins, for the emulated driver; the process writes them before it opens a GPU.
const CODE: &str = "EMU_DRIVER_CODE";
/// How the emulated driver's complaints begin.
const COMPLAINT: &str = "emulated libcuda:";

/// A process that finds the emulated driver.
pub(crate) struct Emulated {
    pub(crate) folder: PathBuf,
}

impl Emulated {
    /// In the process of a test: runs that test again in one that finds the emulated driver, with variables for it; it
    /// must succeed, without complaints but those that are expected. In that one: gives what the test works with.
    pub(crate) fn run(test: &str, variables: &[(&str, &str)], complaints: &[&str]) -> Option<Self> {
        Self::run_saying(test, variables, complaints, &[])
    }

    /// The same of a process whose executor says each of these things once.
    pub(crate) fn run_saying(
        test: &str,
        variables: &[(&str, &str)],
        complaints: &[&str],
        says: &[&str],
    ) -> Option<Self> {
        if let Some(folder) = env::var_os(FOLDER) {
            return Some(Self { folder: folder.into() });
        }
        let folder = tempfile::tempdir().unwrap();
        let program = env::current_exe().unwrap();
        let library = program.with_file_name("libspec_emu_driver.so");
        std::os::unix::fs::symlink(library, folder.path().join("libcuda.so.1")).unwrap();
        fs::write(folder.path().join("code"), "").unwrap();
        let output = Command::new(program)
            .args([test, "--exact", "--nocapture"])
            .env(FOLDER, folder.path())
            .env("LD_LIBRARY_PATH", folder.path())
            .env(CODE, folder.path().join("code"))
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}{said}", String::from_utf8_lossy(&output.stdout));
        let found: Vec<&str> = said.lines().filter(|line| line.starts_with(COMPLAINT)).collect();
        assert_eq!(found.len(), complaints.len(), "{said}");
        for (found, part) in found.iter().zip(complaints) {
            assert!(found.contains(part), "{said}");
        }
        for part in says {
            assert_eq!(said.lines().filter(|line| line.contains(part)).count(), 1, "{said}");
        }
        None
    }

    /// A target that is compiled for these architectures and drafts with a model, and its kernels made known.
    pub(crate) fn target(&self, device: &str) -> Engine {
        let path = |name: &str| self.folder.join(name);
        tiny::write_sized(&path("big"), 2, 1, &SIZES);
        tiny::write_sized(&path("small"), 1, 1, &SIZES);
        let recipe = Recipe::model(path("big"), Dtype::Fp8, path("small"), Dtype::Fp16);
        recipe.on(device).build(&path("built"));
        let engine = Engine::open(path("built").join("1").join(TARGET_FILE)).unwrap();
        let draft = engine.open_drafter().unwrap();
        let table: String =
            [Some(&engine), draft.as_ref()].into_iter().flatten().map(table).collect();
        fs::write(env::var_os(CODE).unwrap(), table).unwrap();
        engine
    }
}

/// What the emulated driver runs for each cubin of an engine.
pub(crate) fn table(engine: &Engine) -> String {
    let mut lines = String::new();
    let reader = engine.reader().unwrap();
    for section in &engine.manifest().sections {
        let Some((_, variant)) = section.name.strip_prefix("code.").and_then(|n| n.split_once('.'))
        else {
            continue;
        };
        let hash = blake3::hash(&reader.section(&section.name).bytes().unwrap()).to_hex();
        writeln!(lines, "{hash} {variant}").unwrap();
    }
    lines
}

/// A code section of an engine.
pub(crate) fn code(engine: &Engine, name: &str) -> Vec<u8> {
    engine.reader().unwrap().section(name).bytes().unwrap()
}
