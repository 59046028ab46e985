//! What a test sets about the emulated machine, by variables of the environment.
//!
//! - `EMU_DRIVER_CODE`: a file of lines `<BLAKE3 of a cubin> <variant>`: what the emulator runs for a cubin. Read
//!   whenever code is loaded: NVRTC opens the driver, and with it all of this, before there are cubins.
//! - `EMU_DRIVER_CAPABILITY`: such as `9.0`, which is the default.
//! - `EMU_DRIVER_DEVICES`, `EMU_DRIVER_MIB`: GPUs, and the memory of each.
//! - `EMU_DRIVER_FAIL`: `NAME=STATUS@N`: the call number N of a function, or each without `@N`, does nothing and
//!   returns the status. The name `kernel` stands for the kernels that run.

use std::path::PathBuf;
use std::{env, fs};

use crate::fault::Status;

/// Multiprocessors of a GPU: an odd number, so that blocks begin and end inside of columns.
pub(crate) const NUM_SMS: i32 = 3;

/// What there is.
pub(crate) struct Config {
    pub(crate) capability: (u32, u32),
    pub(crate) num_devices: usize,
    /// Of each device.
    pub(crate) memory_bytes: usize,
    /// The file that names the variants of cubins.
    code: Option<PathBuf>,
    pub(crate) failing: Option<Failing>,
}

/// A call that is to fail.
pub(crate) struct Failing {
    name: String,
    status: Status,
    /// Which one; every one if there is none.
    number: Option<u64>,
    seen: u64,
}

impl Config {
    /// What the environment says; the error names the variable.
    pub(crate) fn from_env() -> Result<Self, String> {
        let capability = parsed("EMU_DRIVER_CAPABILITY", (9, 0), |text| {
            let (major, minor) = text.split_once('.')?;
            Some((major.parse().ok()?, minor.parse().ok()?))
        })?;
        Ok(Self {
            capability,
            num_devices: parsed("EMU_DRIVER_DEVICES", 1, |text| text.parse().ok())?,
            memory_bytes: parsed("EMU_DRIVER_MIB", 2048, |text| text.parse::<usize>().ok())? << 20,
            code: env::var_os("EMU_DRIVER_CODE").map(PathBuf::from),
            failing: parsed("EMU_DRIVER_FAIL", None, |text| Failing::parse(text).map(Some))?,
        })
    }

    /// The variant that a cubin was compiled from, by its hash.
    pub(crate) fn variant_of(&self, hash: &str) -> Result<String, String> {
        let unknown = || format!("no kernel is known for {hash}");
        let path = self.code.as_ref().ok_or_else(unknown)?;
        let text =
            fs::read_to_string(path).map_err(|e| format!("EMU_DRIVER_CODE {path:?}: {e}"))?;
        let mut pairs = text.lines().filter_map(|line| line.split_once(' '));
        let found = pairs.find(|(other, _)| *other == hash).ok_or_else(unknown)?;
        Ok(found.1.into())
    }
}

impl Failing {
    fn parse(text: &str) -> Option<Self> {
        let (name, rest) = text.split_once('=')?;
        let (status, number) = match rest.split_once('@') {
            Some((status, number)) => (status, Some(number.parse().ok()?)),
            None => (rest, None),
        };
        Some(Self { name: name.into(), status: status.parse().ok()?, number, seen: 0 })
    }

    /// What this call returns, if it is to fail.
    pub(crate) fn of(&mut self, name: &str) -> Option<Status> {
        if self.name != name {
            return None;
        }
        self.seen += 1;
        self.number.is_none_or(|number| number == self.seen).then_some(self.status)
    }
}

fn parsed<T>(name: &str, default: T, parse: impl Fn(&str) -> Option<T>) -> Result<T, String> {
    match env::var(name) {
        Ok(text) => parse(&text).ok_or_else(|| format!("{name} is {text:?}")),
        Err(_) => Ok(default),
    }
}
