//! The machine that a measurement ran on.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::thread;

/// The machine of this process: it asks, and runs the engines that are in this process too.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// What its processor calls itself; empty where it does not say.
    pub processor: String,
    /// Processors that this process may use.
    pub cpus: usize,
    /// Its memory, in bytes; 0 where it does not say.
    pub memory_bytes: u64,
    /// Of spec-bench, and so of an engine in its process.
    pub version: String,
}

impl Machine {
    /// This one.
    pub fn here() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Self {
            processor: field(&read("/proc/cpuinfo"), "model name").unwrap_or_default().to_string(),
            cpus: thread::available_parallelism().map_or(1, |count| count.get()),
            memory_bytes: field(&read("/proc/meminfo"), "MemTotal").and_then(bytes).unwrap_or(0),
            version: env!("CARGO_PKG_VERSION").to_string(),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { processor, cpus, memory_bytes, version } = self;
        let processor = if processor.is_empty() { "processor unknown" } else { processor };
        write!(f, "{processor}, {cpus} CPUs")?;
        if *memory_bytes > 0 {
            write!(f, ", {:.0} GiB", *memory_bytes as f64 / (1u64 << 30) as f64)?;
        }
        write!(f, ", spec-bench {version}")
    }
}

/// The value of a line `name : value`, the first of that name.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    pairs.map(|(key, value)| (key.trim(), value.trim())).find(|(key, _)| *key == name).map(|p| p.1)
}

/// Bytes of a number of `kB`, as the kernel writes KiB.
fn bytes(value: &str) -> Option<u64> {
    value.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_tells_is_read() {
        let cpuinfo =
            "processor\t: 0\nmodel name\t: A: fast one\n\nprocessor\t: 1\nmodel name\t: B\n";
        assert_eq!(field(cpuinfo, "model name"), Some("A: fast one"));
        assert_eq!(field(cpuinfo, "model"), None);
        assert_eq!(bytes("2048 kB"), Some(2 << 20));
        assert_eq!([bytes("2048"), bytes("x kB"), bytes("99999999999999999999 kB")], [None; 3]);
    }

    #[test]
    fn a_machine_is_told_in_a_line() {
        let machine = Machine {
            processor: "AMD EPYC 9R14".into(),
            cpus: 2,
            memory_bytes: 24 << 30,
            version: "0.1.0".into(),
        };
        assert_eq!(machine.to_string(), "AMD EPYC 9R14, 2 CPUs, 24 GiB, spec-bench 0.1.0");
        let unknown = Machine { processor: String::new(), memory_bytes: 0, ..machine };
        assert_eq!(unknown.to_string(), "processor unknown, 2 CPUs, spec-bench 0.1.0");
        assert!(Machine::here().cpus > 0);
    }
}
