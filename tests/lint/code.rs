//! Compiled kernels and their instructions.

use spec_build::cuda::{Cache, Compiler};
use spec_core::exec::SearchPath;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

/// The compiler, with a cache of its own beside cargo's files; none where it is not installed.
pub(crate) fn compiler() -> Option<Compiler> {
    let cache = Cache::in_folder(Path::new(env!("CARGO_TARGET_TMPDIR")).join("cubin"));
    match Compiler::open(&SearchPath::of_process(None), Some(cache)) {
        Ok(compiler) => Some(compiler),
        Err(error) => {
            let _ = writeln!(io::stderr(), "skipped: {error:#}");
            None
        }
    }
}

pub(crate) fn disassembler(compiler: &Compiler) -> Option<PathBuf> {
    let tool = compiler.tool("nvdisasm");
    if tool.is_none() {
        let _ = writeln!(
            io::stderr(),
            "skipped: there is no nvdisasm beside NVRTC: run scripts/setup-cuda"
        );
    }
    tool
}

/// What is printed of a kernel: its code, without an analysis of where its jumps through registers go.
pub(crate) const PRINTED: [&str; 2] = ["-c", "-ndf"];

/// Does the jobs on all cores; outcomes in the order of the jobs.
pub(crate) fn in_parallel<J: Sync, T: Send>(jobs: &[J], run: impl Fn(&J) -> T + Sync) -> Vec<T> {
    let next = Mutex::new(jobs.iter().enumerate());
    let done = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let job = next.lock().unwrap().next();
                    let Some((idx, job)) = job else { break };
                    let outcome = run(job);
                    done.lock().unwrap().insert(idx, outcome);
                }
            });
        }
    });
    done.into_inner().unwrap().into_values().collect()
}

/// The instructions of a kernel, such as `HMMA.16816.F32`, and how often each occurs.
#[derive(Debug)]
pub(crate) struct Listing(BTreeMap<String, usize>);

impl Listing {
    pub(crate) fn of(disassembler: &Path, cubin: &[u8]) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), cubin).unwrap();
        let output = Command::new(disassembler).args(PRINTED).arg(file.path()).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self::parse(&String::from_utf8(output.stdout).unwrap())
    }

    /// An instruction's line is `/*0a10*/ @!P0 HMMA.16816.F32 R4, ... ;`.
    fn parse(text: &str) -> Self {
        let mut counts = BTreeMap::new();
        for line in text.lines() {
            let Some(rest) = line.trim_start().strip_prefix("/*") else { continue };
            let Some((address, rest)) = rest.split_once("*/") else { continue };
            if !address.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                continue;
            }
            let mut words = rest.split_whitespace().skip_while(|word| word.starts_with('@'));
            if let Some(name) = words.next() {
                *counts.entry(name.trim_end_matches(';').to_string()).or_insert(0) += 1;
            }
        }
        assert!(!counts.is_empty(), "there are no instructions in:\n{text}");
        Self(counts)
    }

    /// The instructions.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// How many there are of an operation, such as `HMMA`, or of a kind of one, such as `MEMBAR.ALL.GPU`.
    pub(crate) fn count(&self, operation: &str) -> usize {
        let of = |name: &str| {
            let rest = name.strip_prefix(operation);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.0.iter().filter(|(name, _)| of(name)).map(|(_, count)| count).sum()
    }
}

#[test]
fn instructions_are_counted_by_operation() {
    let listing = Listing::parse(
        ".text.gemm:\n        /*0000*/                   LDC R1, c[0x0][0x28] ;\n\
         .L_x_1:\n        /*0010*/              @!P0 HMMA.16816.F32 R4, R8, R2, R4 ;\n\
         \x20       /*0020*/                   HMMA.16816.F32 R4, R8, R2, R4 ;\n\
         \x20       /*0030*/                   EXIT ;\n",
    );
    assert_eq!((listing.count("HMMA"), listing.count("EXIT"), listing.count("H")), (2, 1, 0));
    assert_eq!((listing.count("HMMA.16816"), listing.count("HMMA.168")), (2, 0));
    assert!(listing.names().eq(["EXIT", "HMMA.16816.F32", "LDC"]));
}
