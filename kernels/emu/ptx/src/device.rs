//! A device of the CUDA executor on which every launch runs twice: from its assembly text, and on the emulator, whose memory
//! must then be the same to the last bit.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use spec_build::cuda::Compiler;
use spec_core::testing::cuda::device::{
    self, Address, Description, Graph, Launch, Mark, Op, ProductShape, Shared,
};
use spec_core::{Error, Result};
use spec_emu::Emulator;
use spec_kernels::{Variant, kernel_of, path_of};

use crate::cluster;
use crate::compare::difference;
use crate::memory::Memory;
use crate::parse::Kernel;

/// Defines that variants have.
const DEFINES: [&str; 10] = [
    "WEIGHT",
    "ROWS",
    "EPILOGUE",
    "HEAD_DIM",
    "SHAPE_N",
    "SHAPE_K",
    "KV",
    "GROUP",
    "TILE_ROWS",
    "WINDOW",
];

/// Kernels as text, made when they are asked for.
pub struct Kernels {
    compiler: Compiler,
    arch: &'static str,
    parsed: Mutex<BTreeMap<String, Arc<Kernel>>>,
}

impl Kernels {
    /// Those of an architecture, such as `compute_90a`.
    pub fn new(compiler: Compiler, arch: &'static str) -> Self {
        Self { compiler, arch, parsed: Mutex::default() }
    }

    /// The kernel of a variant by its name.
    pub fn get(&self, variant: &str) -> std::result::Result<Arc<Kernel>, String> {
        // Not held while a kernel is made: others make theirs meanwhile.
        let parsed = || self.parsed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = parsed().get(variant) {
            return Ok(Arc::clone(kernel));
        }
        let wanted = named(variant).ok_or_else(|| format!("no variant is called {variant}"))?;
        let text = self.compiler.ptx(self.arch, &wanted);
        let text = text.map_err(|error| format!("{error:#}"))?;
        let kernel = Kernel::parse(&text).map_err(|e| format!("{variant}, {}: {e}", self.arch))?;
        let kernel = Arc::new(kernel);
        parsed().insert(variant.into(), Arc::clone(&kernel));
        Ok(kernel)
    }
}

/// A variant by its name.
fn named(name: &str) -> Option<Variant> {
    let mut parts = name.split('.');
    let kernel = kernel_of(path_of(parts.next()?)?)?;
    let define = |part: &str| {
        let (name, value) = part.split_once('=')?;
        let name = DEFINES.iter().find(|known| **known == name)?;
        Some((*name, value.to_string()))
    };
    Some(Variant { kernel, defines: parts.map(define).collect::<Option<_>>()? })
}

/// The device. A launch after which any byte of memory differs panics.
pub struct Device {
    emulator: Emulator,
    kernels: Arc<Kernels>,
    memory: Memory,
    shared: Vec<Shared>,
    /// Variants and their entries. Their texts are made when they are launched.
    loaded: Vec<(String, String)>,
    graphs: Vec<Vec<Op>>,
    /// Launches by kernel.
    counts: Arc<Mutex<BTreeMap<String, usize>>>,
    seed: u64,
}

impl Device {
    /// Lays out memory as the emulator does; `seed` orders blocks and copies of the texts.
    pub fn new(emulator: Emulator, kernels: Arc<Kernels>, seed: u64) -> Self {
        Self {
            emulator,
            kernels,
            memory: Memory::default(),
            shared: Vec::new(),
            loaded: Vec::new(),
            graphs: Vec::new(),
            counts: Arc::default(),
            seed,
        }
    }

    /// Counts launches by variant, while the device is somebody else's.
    pub fn counts(&self) -> Arc<Mutex<BTreeMap<String, usize>>> {
        Arc::clone(&self.counts)
    }

    /// Takes over what was written from outside.
    fn pull(&mut self, address: Address, len: usize) -> Result<()> {
        let place = self.memory.slice(address, len).map_err(Error::Device)?;
        device::Device::read(&mut self.emulator, address, place)
    }

    fn pull_shared(&mut self) -> Result<()> {
        for at in 0..self.shared.len() {
            let shared = &self.shared[at];
            let (address, bytes) = (shared.address(), shared.num_bytes());
            self.pull(address, bytes)?;
        }
        Ok(())
    }

    fn run(&mut self, launch: &Launch) -> Result<()> {
        self.pull_shared()?;
        let (name, entry) = self.loaded[launch.kernel.0 as usize].clone();
        let kernel = self.kernels.get(&name).map_err(Error::Device)?;
        assert_eq!(kernel.name, entry, "the entry of {name}");
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(name.clone()).or_default() += 1;
        drop(counts);
        let Launch { grid, block, shared_bytes, ref params, .. } = *launch;
        let own = cluster::Launch { grid, block, shared_bytes, params, seed: self.seed };
        if self.seed != 0 {
            self.seed += 1;
        }
        cluster::run(&kernel, &own, &mut self.memory).unwrap_or_else(|e| panic!("{name}: {e}"));
        device::Device::issue(&mut self.emulator, &Op::Launch(launch.clone()))?;
        self.compare(&name, launch)
    }

    fn compare(&mut self, name: &str, launch: &Launch) -> Result<()> {
        for (start, bytes) in self.memory.contents() {
            let mut expected = vec![0; bytes.len()];
            device::Device::read(&mut self.emulator, start, &mut expected)?;
            if let Some(difference) = difference(bytes, &expected) {
                panic!("{name}, {} blocks, memory at {start:#x}: {difference}", launch.grid);
            }
        }
        Ok(())
    }
}

impl device::Device for Device {
    fn describe(&self) -> &Description {
        self.emulator.describe()
    }

    fn available_bytes(&self) -> Result<usize> {
        self.emulator.available_bytes()
    }

    fn alloc(&mut self, bytes: usize) -> Result<Address> {
        let address = self.emulator.alloc(bytes)?;
        self.memory.put(address, vec![0; bytes]);
        Ok(address)
    }

    fn alloc_shared(&mut self, bytes: usize) -> Result<Shared> {
        let shared = self.emulator.alloc_shared(bytes)?;
        self.memory.put(shared.address(), vec![0; shared.num_bytes()]);
        self.shared.push(shared.clone());
        Ok(shared)
    }

    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<()> {
        self.emulator.write(to, bytes)?;
        self.pull(to, bytes.len())
    }

    fn write_shared(&mut self, to: Address, shared: &Shared, from: Range<usize>) -> Result<()> {
        let len = from.len();
        self.emulator.write_shared(to, shared, from)?;
        self.pull(to, len)
    }

    fn read(&mut self, from: Address, out: &mut [u8]) -> Result<()> {
        self.emulator.read(from, out)
    }

    fn load(
        &mut self,
        variant: &str,
        entry: &str,
        code: &[u8],
        bytes: u32,
    ) -> Result<device::Kernel> {
        self.loaded.push((variant.into(), entry.into()));
        self.emulator.load(variant, entry, code, bytes)
    }

    fn issue(&mut self, op: &Op) -> Result<()> {
        match op {
            Op::Launch(launch) => self.run(launch),
            Op::Product(product) => {
                self.emulator.issue(op)?;
                let ProductShape { m, n, .. } = product.shape;
                self.pull(product.output, m * n * size_of::<f32>())
            }
            &Op::Copy { to, bytes, rows, pitch, .. } => {
                self.emulator.issue(op)?;
                (0..rows).try_for_each(|row| self.pull(to + (row * pitch) as Address, bytes))
            }
        }
    }

    fn enable_products(&mut self, shapes: &[ProductShape]) -> Result<()> {
        self.emulator.enable_products(shapes)
    }

    fn record(&mut self, ops: &[Op]) -> Result<Graph> {
        self.graphs.push(ops.to_vec());
        Ok(Graph(self.graphs.len() as u32 - 1))
    }

    fn replay(&mut self, graph: Graph) -> Result<()> {
        let ops = self.graphs[graph.0 as usize].clone();
        ops.iter().try_for_each(|op| self.issue(op))
    }

    fn new_mark(&mut self) -> Result<Mark> {
        self.emulator.new_mark()
    }

    fn put_mark(&mut self, mark: Mark) -> Result<()> {
        self.emulator.put_mark(mark)
    }

    fn wait_for(&mut self, mark: Mark) -> Result<()> {
        self.emulator.wait_for(mark)
    }

    fn wait(&mut self) -> Result<()> {
        self.emulator.wait()
    }
}
