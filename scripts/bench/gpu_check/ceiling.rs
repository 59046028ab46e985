//! What the GPU can do at most, measured by kernels that do nothing else: copying, reading, multiplying, and one
//! kernel more in a graph. Everything else is reported as a share of these.

use crate::compile::{self, Code};
use crate::gpu::{Machine, Watched};
use crate::noise::{random_halves, random_words};
use crate::report::{Report, Verdict};
use crate::timing::{Timing, rounded};
use serde_json::{Value, json};
use spec_core::testing::cuda::device::{Address, Device, Kernel, Launch, Op, bytes_of};
use std::error::Error;

/// The kernels, which are part of no engine.
const OWN: [(&str, &str); 4] = [
    ("copy.cu", include_str!("copy.cu")),
    ("stream.cu", include_str!("stream.cu")),
    ("multiply.cu", include_str!("multiply.cu")),
    ("nothing.cu", include_str!("nothing.cu")),
];

/// Many times the largest cache.
const STREAM_BYTES: usize = 2 << 30;
/// Threads of the blocks that stream, and of those that multiply, as their sources say.
const STREAM_THREADS: u32 = 512;
const MULTIPLY_THREADS: u32 = 256;
/// Blocks of a multiprocessor.
const BLOCKS: u32 = 2;
/// As in `multiply.cu`.
const FRAGMENT_WORDS: usize = 6;
const CHAINS: f64 = 8.0;
/// Multiplications and additions of one instruction: 16 by 8 by 16.
const INSTRUCTION_FLOPS: f64 = 2.0 * 16.0 * 8.0 * 16.0;
/// Products of each chain in a launch.
const PRODUCTS: u32 = 8192;
/// Kernels that do nothing in a graph.
const CHAIN_KERNELS: usize = 200;

/// What was measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ceilings {
    /// Bytes a microsecond that a copy reads and writes.
    pub(crate) copy: f64,
    /// Bytes a microsecond that are read.
    pub(crate) read: f64,
}

/// Measures and reports; none on an emulator, whose times mean nothing, and where it fails.
pub(crate) fn run(report: &mut Report, machine: Machine, arch: &str) -> Option<Ceilings> {
    report.check("ceilings", |report| {
        let kernels = Kernels::compile(arch)?;
        if machine.is_emulated() {
            return Ok(Verdict::Skipped("the kernels compile; an emulator has no speed".into()));
        }
        let mut device = machine.open()?;
        let json = kernels.measure(&mut device)?;
        let summary = summary(&json);
        report.put("ceilings", json);
        Ok(Verdict::Passed(summary))
    });
    let json = report.get("ceilings")?;
    let rate = |name: &str| json[name]["gb_per_s"].as_f64().unwrap_or(0.0) * 1e3;
    Some(Ceilings { copy: rate("copy"), read: rate("read") })
}

/// Compiles its kernels.
pub(crate) fn compile(arch: &str) -> Result<(), Box<dyn Error>> {
    Kernels::compile(arch).map(drop)
}

fn summary(json: &Value) -> String {
    format!(
        "copy {} GB/s, read {} GB/s, mma.sync {} TFLOP/s, a kernel more {} us",
        json["copy"]["gb_per_s"],
        json["read"]["gb_per_s"],
        json["multiply"]["tflops"],
        json["boundary"]["us"]
    )
}

struct Kernels(Code);

impl Kernels {
    fn compile(arch: &str) -> Result<Self, Box<dyn Error>> {
        Ok(Self(compile::own(arch, &OWN)?))
    }

    fn load(&self, name: &str, device: &mut dyn Device) -> spec_core::Result<Kernel> {
        let (_, code) = self.0.iter().find(|(known, _)| *known == name).expect("one of OWN");
        device.load(name, name, code, 0)
    }

    fn measure(&self, device: &mut Watched) -> Result<Value, Box<dyn Error>> {
        let from = device.alloc(STREAM_BYTES)?;
        let block = random_words(1 << 20);
        for offset in (0..STREAM_BYTES).step_by(size_of_val(&block[..])) {
            device.write(from + offset as Address, bytes_of(&block))?;
        }
        let copy = self.copy(from, &block, device)?;
        let read = self.read(from, &block, device)?;
        let gb_per_s =
            |bytes: usize, timing: &Timing| rounded(bytes as f64 / timing.median() / 1e3);
        let read_bytes = STREAM_BYTES - size_of_val(&block[..]);
        let (multiply, flops) = self.multiply(device)?;
        Ok(json!({
            "bytes": STREAM_BYTES,
            "copy": { "gb_per_s": gb_per_s(2 * STREAM_BYTES, &copy), "time": copy.json() },
            "read": { "gb_per_s": gb_per_s(read_bytes, &read), "time": read.json() },
            "multiply": {
                "tflops": rounded(flops / multiply.median() / 1e6), "time": multiply.json(),
            },
            "boundary": self.boundary(device)?.json(),
        }))
    }

    /// Reads and writes; the last block of the copy is compared.
    fn copy(
        &self,
        from: Address,
        block: &[u32],
        device: &mut dyn Device,
    ) -> Result<Timing, Box<dyn Error>> {
        let to = device.alloc(STREAM_BYTES)?;
        let params = [from, to, (STREAM_BYTES / 16) as u64];
        let timing = self.stream("copy", &params, device)?;
        let mut copied = vec![0u8; size_of_val(block)];
        device.read(to + (STREAM_BYTES - copied.len()) as Address, &mut copied)?;
        if copied != bytes_of(block) {
            return Err("the copy differs from what was copied".into());
        }
        Ok(timing)
    }

    /// Reads alone; the words of all threads together are compared.
    fn read(
        &self,
        from: Address,
        block: &[u32],
        device: &mut dyn Device,
    ) -> Result<Timing, Box<dyn Error>> {
        let num_words = (device.describe().num_sms * BLOCKS * STREAM_THREADS) as usize;
        let words = device.alloc(num_words * 4)?;
        // One block less, so that the words do not cancel: there is an even number of blocks.
        let count = STREAM_BYTES - size_of_val(block);
        let timing = self.stream("stream", &[from, words, (count / 16) as u64], device)?;
        let mut found = vec![0u8; num_words * 4];
        device.read(words, &mut found)?;
        let found =
            found.as_chunks::<4>().0.iter().fold(0, |all, &word| all ^ u32::from_le_bytes(word));
        let expected = block.iter().fold(0, |all, word| all ^ word);
        if found != expected {
            return Err(format!("the words read give {found:#x}, expected {expected:#x}").into());
        }
        Ok(timing)
    }

    fn stream(
        &self,
        name: &str,
        params: &[u64; 3],
        device: &mut dyn Device,
    ) -> spec_core::Result<Timing> {
        let launch = Launch {
            kernel: self.load(name, device)?,
            grid: device.describe().num_sms * BLOCKS,
            block: STREAM_THREADS,
            shared_bytes: 0,
            params: params.iter().flat_map(|word| word.to_le_bytes()).collect(),
            overlap: false,
        };
        let graph = device.record(&[Op::Launch(launch)])?;
        Timing::of(graph, false, device)
    }

    /// And the operations of a launch.
    fn multiply(&self, device: &mut dyn Device) -> Result<(Timing, f64), Box<dyn Error>> {
        let grid = device.describe().num_sms * BLOCKS;
        let halves = random_halves(2 * FRAGMENT_WORDS * MULTIPLY_THREADS as usize, 0.1);
        let fragments = device.alloc(halves.len())?;
        device.write(fragments, &halves)?;
        let sums = device.alloc((grid * MULTIPLY_THREADS * 4) as usize)?;
        let mut params: Vec<u8> =
            [fragments, sums].iter().flat_map(|word| word.to_le_bytes()).collect();
        params.extend([PRODUCTS, 0].iter().flat_map(|word| word.to_le_bytes()));
        let launch = Launch {
            kernel: self.load("multiply", device)?,
            grid,
            block: MULTIPLY_THREADS,
            shared_bytes: 0,
            params,
            overlap: false,
        };
        let graph = device.record(&[Op::Launch(launch)])?;
        let timing = Timing::of(graph, false, device)?;
        let mut found = vec![0u8; (grid * MULTIPLY_THREADS * 4) as usize];
        device.read(sums, &mut found)?;
        let mut found = found.as_chunks::<4>().0.iter().map(|&word| f32::from_le_bytes(word));
        if !found.all(|sum| sum.is_finite() && sum != 0.0) {
            return Err("a sum of products is zero or not finite".into());
        }
        let instructions = f64::from(grid * (MULTIPLY_THREADS / 32)) * CHAINS * f64::from(PRODUCTS);
        Ok((timing, instructions * INSTRUCTION_FLOPS))
    }

    /// What one kernel more costs.
    fn boundary(&self, device: &mut dyn Device) -> spec_core::Result<Timing> {
        let launch = Launch {
            kernel: self.load("nothing", device)?,
            grid: device.describe().num_sms,
            block: 32,
            shared_bytes: 0,
            params: 0u64.to_le_bytes().into(),
            overlap: true,
        };
        let graph = device.record(&vec![Op::Launch(launch); CHAIN_KERNELS])?;
        Ok(Timing::of(graph, false, device)?.of_each(CHAIN_KERNELS))
    }
}
