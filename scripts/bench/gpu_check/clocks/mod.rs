//! Clocks of what machine code does not say and `scripts/predict/assume.py` assumes, under the names that it has there.

use crate::compile::{self, Code};
use crate::gpu::{Machine, Watched};
use crate::noise::random_words;
use crate::report::{Report, Verdict};
use crate::timing::rounded;
use serde_json::{Value, json};
use spec_core::testing::cuda::device::{Address, Device, Kernel, Launch, Op};
use std::collections::HashMap;
use std::error::Error;
use std::slice;

/// The kernels, which are part of no engine, and a header of theirs.
const OWN: [(&str, &str); 6] = [
    ("chase.cu", include_str!("chase.cu")),
    ("draw.cu", include_str!("draw.cu")),
    ("count.cu", include_str!("count.cu")),
    ("link.cu", include_str!("link.cu")),
    ("warpgroups.cu", include_str!("warpgroups.cu")),
    ("clocks.cuh", include_str!("clocks.cuh")),
];

/// Threads of a block, rounds of groups and shared memory, as in their sources.
const THREADS: u32 = 256;
const GROUP_ROUNDS: f64 = 64.0;
const SHARED_BYTES: u32 = 64 << 10;

/// Addresses of which each says where the next one is.
struct Ring {
    /// Of what holds it.
    name: &'static str,
    bytes: usize,
    /// Bytes between two of them.
    stride: usize,
    steps: u32,
    /// The last one counts.
    rounds: u32,
}

const RINGS: [Ring; 3] = [
    Ring { name: "l1", bytes: 8 << 10, stride: 128, steps: 64, rounds: 8 },
    Ring { name: "l2", bytes: 16 << 20, stride: 128, steps: 1 << 17, rounds: 2 },
    Ring { name: "memory", bytes: 512 << 20, stride: 8192, steps: 1 << 15, rounds: 1 },
];

/// Activations of 64 rows of 4096.
const DRAWN_BYTES: usize = 512 << 10;
const DRAWN_ROUNDS: u32 = 16;
const COUNTED: u32 = 64;
/// Kernels one behind the other, and words that each block leaves.
const LINKS: usize = 8;
const LINK_WORDS: usize = 5;
/// From the trigger of a kernel to its end: longer than the next one takes to begin.
const LINK_SPIN: u32 = 8000;

/// Measures and reports.
pub(crate) fn run(report: &mut Report, machine: Machine, arch: &str) {
    report.check("clocks", |report| {
        let code = compile(arch)?;
        if machine.is_emulated() {
            return Ok(Verdict::Skipped("the kernels compile; an emulator has no clock".into()));
        }
        let found = Clocks::load(&code, machine.open()?)?.measure(arch)?;
        let text = found.to_string();
        report.put("clocks", found);
        Ok(Verdict::Passed(text))
    });
}

/// Compiles the kernels.
pub(crate) fn compile(arch: &str) -> Result<Code, Box<dyn Error>> {
    compile::own(arch, &OWN)
}

struct Clocks {
    device: Watched,
    kernels: Vec<(&'static str, Kernel)>,
}

impl Clocks {
    fn load(code: &Code, mut device: Watched) -> spec_core::Result<Self> {
        let kernel = |(name, code): &(&'static str, Vec<u8>)| {
            Ok((*name, device.load(name, name, code, SHARED_BYTES)?))
        };
        let kernels = code.iter().map(kernel).collect::<spec_core::Result<_>>()?;
        Ok(Self { device, kernels })
    }

    fn measure(&mut self, arch: &str) -> Result<Value, Box<dyn Error>> {
        let mut found = json!({});
        for ring in &RINGS {
            found[ring.name] = json!(rounded(self.chase(ring)?));
        }
        found["l2_rate"] = json!(rounded(self.draw(false)?));
        found["l2_rate_spread"] = json!(rounded(self.draw(true)?));
        found["count"] = json!(rounded(self.count()?));
        let (launch, release) = self.link()?;
        (found["launch"], found["release"]) = (json!(launch), json!(release));
        if arch == "sm_90a" {
            found["wgmma"] = json!({ "one": self.warpgroups(1)?, "two": self.warpgroups(2)? });
        }
        Ok(found)
    }

    /// What a load takes whose address the one before it has brought.
    fn chase(&mut self, ring: &Ring) -> Result<f64, Box<dyn Error>> {
        let Ring { bytes, stride, steps, rounds, .. } = *ring;
        let num = bytes / stride;
        let mut order: Vec<usize> = (1..num).collect();
        let random = random_words(num);
        (1..order.len()).rev().for_each(|i| order.swap(i, random[i] as usize % (i + 1)));
        let memory = self.device.alloc(bytes)?;
        let mut words = vec![0u8; bytes];
        let mut at = 0;
        for next in order.into_iter().chain([0]) {
            let address = memory + (next * stride) as Address;
            words[at * stride..][..8].copy_from_slice(&address.to_le_bytes());
            at = next;
        }
        self.device.write(memory, &words)?;
        let out = self.device.alloc(16)?;
        self.run(&[self.launch("chase", 1, &[memory, out], &[steps, rounds])])?;
        let found = self.words(out, 2)?;
        if !(memory..memory + bytes as Address).contains(&found[1]) {
            return Err("the chase left its ring".into());
        }
        Ok(found[0] as f64 / f64::from(steps))
    }

    /// Bytes a clock that a multiprocessor gets of what the L2 cache holds, when all ask for the same.
    fn draw(&mut self, is_spread: bool) -> Result<f64, Box<dyn Error>> {
        let grid = self.device.describe().num_sms;
        let from = self.device.alloc(DRAWN_BYTES)?;
        let out = self.device.alloc(grid as usize * 8)?;
        let words = [DRAWN_BYTES as u32, DRAWN_ROUNDS, u32::from(is_spread), 0];
        let launch = self.launch("draw", grid, &[from, out], &words);
        self.run(slice::from_ref(&launch))?;
        self.run(&[launch])?;
        let clocks = middle(self.words(out, grid as usize)?);
        Ok(DRAWN_BYTES as f64 * f64::from(DRAWN_ROUNDS) / clocks)
    }

    fn count(&mut self) -> Result<f64, Box<dyn Error>> {
        let grid = self.device.describe().num_sms;
        let sums = self.device.alloc((grid * THREADS * 16) as usize)?;
        let counters = self.device.alloc(grid as usize * 128)?;
        self.device.write(counters, &vec![0; grid as usize * 128])?;
        let out = self.device.alloc(grid as usize * 8)?;
        self.run(&[self.launch("count", grid, &[sums, counters, out], &[COUNTED, 0])])?;
        Ok(middle(self.words(out, grid as usize)?) / f64::from(COUNTED))
    }

    /// From a kernel's trigger to the first instruction of the next one's blocks, and from a kernel's end to where the
    /// next one goes on: on each multiprocessor by its own clock.
    fn link(&mut self) -> Result<(f64, f64), Box<dyn Error>> {
        let grid = self.device.describe().num_sms;
        let num_words = grid as usize * LINK_WORDS;
        let arrivals = self.device.alloc(LINKS * 4)?;
        self.device.write(arrivals, &[0; LINKS * 4])?;
        let out = self.device.alloc(LINKS * num_words * 8)?;
        let launches: Vec<Launch> = (0..LINKS)
            .map(|idx| {
                let out = out + (idx * num_words * 8) as Address;
                let arrivals = arrivals + (idx * 4) as Address;
                self.launch("link", grid, &[out, arrivals], &[LINK_SPIN, 0])
            })
            .collect();
        self.run(&launches)?;
        self.run(&launches)?;
        let words = self.words(out, LINKS * num_words)?;
        let kernels: Vec<HashMap<u64, [u64; 4]>> = words
            .chunks_exact(num_words)
            .map(|kernel| {
                let block = |block: &[u64; LINK_WORDS]| {
                    let [at, first, awaited, triggered, end] = *block;
                    (at, [first, awaited, triggered, end])
                };
                kernel.as_chunks().0.iter().map(block).collect()
            })
            .collect();
        let (mut launch, mut release) = (Vec::new(), Vec::new());
        for pair in kernels.windows(2) {
            for (at, &[first, awaited, ..]) in &pair[1] {
                let Some(&[_, _, triggered, end]) = pair[0].get(at) else { continue };
                launch.push(first.saturating_sub(triggered));
                release.push(awaited.saturating_sub(end));
            }
        }
        Ok((middle(launch), middle(release)))
    }

    /// Clocks of a product, and of a group beside its products, for each number of columns.
    fn warpgroups(&mut self, num_warpgroups: u32) -> Result<Value, Box<dyn Error>> {
        let grid = self.device.describe().num_sms;
        let out = self.device.alloc(16 * 8)?;
        let sums = self.device.alloc((grid * THREADS * 4) as usize)?;
        let launch = self.launch("warpgroups", grid, &[out, sums], &[num_warpgroups, 0]);
        self.run(slice::from_ref(&launch))?;
        self.run(&[launch])?;
        let words = self.words(out, 16)?;
        let mut found = json!({});
        for (columns, words) in [8, 16, 32, 64].into_iter().zip(words.as_chunks::<4>().0) {
            let took = words.map(|clocks| clocks as f64 / GROUP_ROUNDS);
            for (kind, four, sixteen) in
                [("registers", took[0], took[2]), ("memory", took[1], took[3])]
            {
                let product = (sixteen - four) / 12.0;
                found[format!("{columns} columns, {kind}")] = json!({
                    "product": rounded(product), "beside": rounded(four - 4.0 * product),
                });
            }
        }
        Ok(found)
    }

    fn launch(&self, name: &str, grid: u32, pointers: &[u64], words: &[u32]) -> Launch {
        let (_, kernel) = self.kernels.iter().find(|(known, _)| *known == name).expect("loaded");
        let params = pointers.iter().flat_map(|word| word.to_le_bytes());
        let params = params.chain(words.iter().flat_map(|word| word.to_le_bytes())).collect();
        let block = if name == "chase" { 32 } else { THREADS };
        Launch { kernel: *kernel, grid, block, shared_bytes: SHARED_BYTES, params, overlap: true }
    }

    fn run(&mut self, launches: &[Launch]) -> spec_core::Result<()> {
        let ops: Vec<Op> = launches.iter().cloned().map(Op::Launch).collect();
        let graph = self.device.record(&ops)?;
        self.device.replay(graph)?;
        self.device.wait()
    }

    fn words(&mut self, from: Address, count: usize) -> spec_core::Result<Vec<u64>> {
        let mut bytes = vec![0u8; count * 8];
        self.device.read(from, &mut bytes)?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|&word| u64::from_le_bytes(word)).collect())
    }
}

fn middle(mut clocks: Vec<u64>) -> f64 {
    clocks.sort_unstable();
    clocks.get(clocks.len() / 2).map_or(f64::NAN, |&clocks| clocks as f64)
}
