//! The machine as a device of the CUDA executor: what it issues runs here.

use crate::arena::Arena;
use crate::machine::{self, Schedule};
use crate::product;
use spec_core::model::Dtype;
use spec_core::testing::cuda::device::{
    Address, Description, Device, Graph, Held, Kernel, Launch, Mark, Op, ProductShape, Shared,
};
use spec_core::testing::cuda::step::params::{SAMPLE_SLICES, SAMPLE_THREADS};
use spec_core::{Error, Result};
use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Address space of a device; what is not used takes no memory.
const MEMORY_BYTES: usize = 16 << 30;

/// Blocks in flight: no kernel of the executor waits for a block that has not begun.
const MAX_RESIDENT: u32 = 8;

/// Work that was issued.
enum Work {
    Op(Op),
    /// Its source is read when its turn comes, as the copy engine of a GPU does.
    Copy {
        to: Address,
        from: Address,
        bytes: usize,
    },
}

/// A GPU that is emulated. Work waits until somebody looks at memory, so that launches which may overlap do, and no
/// longer work than is looked for is done: who reads what is not there yet finds what was there before.
pub struct Emulator {
    arena: Arena,
    held: Held,
    description: Description,
    schedule: Schedule,
    /// Names of the loaded variants.
    kernels: Vec<String>,
    graphs: Vec<Vec<Op>>,
    queue: VecDeque<Work>,
    /// Work done since the beginning.
    num_done: u64,
    /// Work ahead of each mark.
    marks: Vec<u64>,
    /// Copies from shared memory until one is refused.
    copies_left: Option<usize>,
    /// Shapes of products that are enabled.
    products: HashSet<ProductShape>,
    small_samples: bool,
    /// Launches of kernels whose names begin so are counted.
    counted: Option<(&'static str, Arc<AtomicUsize>)>,
}

/// A kernel as it is shipped, and another that does the same in fewer and smaller blocks: their names, blocks and threads.
const SAMPLE: (&str, u32, u32) = ("sample", SAMPLE_SLICES, SAMPLE_THREADS);
const SMALL_SAMPLE: (&str, u32, u32) = ("sample_small", 2, 64);

impl Emulator {
    /// A GPU of this compute capability with a few multiprocessors.
    pub fn new(capability: (u32, u32), num_sms: u32, schedule: Schedule) -> Self {
        let name = format!("emulated GPU of compute capability {}.{}", capability.0, capability.1);
        Self {
            arena: Arena::new(MEMORY_BYTES),
            held: Held::default(),
            description: Description { name, capability, driver: 580, num_sms },
            schedule,
            kernels: Vec::new(),
            graphs: Vec::new(),
            queue: VecDeque::new(),
            num_done: 0,
            marks: Vec::new(),
            copies_left: None,
            products: HashSet::new(),
            small_samples: false,
            counted: None,
        }
    }

    /// Samples in fewer and smaller blocks than are launched: what they decide depends on that by rounding alone, and most of the
    /// time of a step of a small model goes by their threads.
    pub fn with_small_samples(self) -> Self {
        Self { small_samples: true, ..self }
    }

    /// Counts launches of kernels whose names begin so.
    pub fn counting(self, name: &'static str, count: Arc<AtomicUsize>) -> Self {
        Self { counted: Some((name, count)), ..self }
    }

    /// Refuses one copy from shared memory, the one behind so many others.
    pub fn refusing_a_copy(self, after: usize) -> Self {
        Self { copies_left: Some(after), ..self }
    }

    /// Work issued since the beginning.
    fn num_issued(&self) -> u64 {
        self.num_done + self.queue.len() as u64
    }

    /// Runs what is waiting.
    fn drain(&mut self) -> Result<()> {
        self.drain_to(self.num_issued())
    }

    /// Runs the first `end` pieces of work ever issued.
    fn drain_to(&mut self, end: u64) -> Result<()> {
        let mut launches = Vec::new();
        while self.num_done < end {
            let Some(work) = self.queue.pop_front() else { break };
            self.num_done += 1;
            match work {
                Work::Op(Op::Launch(launch)) => launches.push(launch),
                Work::Op(Op::Product(product)) => {
                    self.run(&std::mem::take(&mut launches))?;
                    product::multiply(&self.arena, &product);
                }
                Work::Op(Op::Copy { to, from, bytes, rows, pitch }) => {
                    self.run(&std::mem::take(&mut launches))?;
                    for row in (0..rows).map(|row| (row * pitch) as Address) {
                        self.copy(from + row, to + row, bytes);
                    }
                }
                Work::Copy { to, from, bytes } => {
                    self.run(&std::mem::take(&mut launches))?;
                    self.copy(from, to, bytes);
                }
            }
        }
        self.run(&launches)
    }

    fn copy(&self, from: Address, to: Address, bytes: usize) {
        let mut copied = vec![0; bytes];
        self.arena.read(from, &mut copied);
        self.arena.write(to, &copied);
    }

    /// A product that nobody has enabled is a mistake of who issues it.
    fn check(&self, op: &Op) {
        if let Op::Product(product) = op {
            product::check(product);
            assert!(self.products.contains(&product.shape), "{:?} was not enabled", product.shape);
        }
    }

    fn as_run<'a>(&'a self, launch: &'a Launch) -> machine::Launch<'a> {
        let mut variant = &self.kernels[launch.kernel.0 as usize][..];
        let (mut grid, mut block) = (launch.grid, launch.block);
        if self.small_samples && variant == SAMPLE.0 {
            variant = SMALL_SAMPLE.0;
            (grid, block) = (grid / SAMPLE.1 * SMALL_SAMPLE.1, SMALL_SAMPLE.2);
        }
        machine::Launch {
            variant,
            grid,
            block,
            shared_bytes: launch.shared_bytes,
            params: &launch.params,
            overlap: launch.overlap,
            max_resident: MAX_RESIDENT,
        }
    }

    fn run(&mut self, launches: &[Launch]) -> Result<()> {
        if launches.is_empty() {
            return Ok(());
        }
        if let Some((name, count)) = &self.counted {
            let variant = |launch: &&Launch| &self.kernels[launch.kernel.0 as usize];
            let counted = launches.iter().filter(|launch| variant(launch).starts_with(name));
            count.fetch_add(counted.count(), Ordering::Relaxed);
        }
        // Another order each time, and the same in every run.
        self.schedule.seed = self.schedule.seed.wrapping_add(1);
        let launches: Vec<_> = launches.iter().map(|launch| self.as_run(launch)).collect();
        machine::run(&launches, &self.schedule).map_err(Error::Device)
    }
}

impl Device for Emulator {
    fn describe(&self) -> &Description {
        &self.description
    }

    fn available_bytes(&self) -> Result<usize> {
        Ok(MEMORY_BYTES - self.held.device - self.held.pinned)
    }

    fn held(&self) -> Held {
        self.held
    }

    fn alloc(&mut self, bytes: usize) -> Result<Address> {
        self.held.device += bytes;
        let address = self.arena.alloc(bytes);
        self.arena.write(address, &vec![0; bytes]);
        Ok(address)
    }

    fn alloc_shared(&mut self, bytes: usize) -> Result<Shared> {
        let bytes = bytes.next_multiple_of(size_of::<u32>());
        let address = self.alloc(bytes)?;
        // All of its memory is the machine's; this is told apart.
        self.held.device -= bytes;
        self.held.pinned += bytes;
        let words = self.arena.words(address, bytes / size_of::<u32>());
        Ok(Shared::new(Arc::new(words), address))
    }

    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<()> {
        self.drain()?;
        self.arena.write(to, bytes);
        Ok(())
    }

    fn write_shared(&mut self, to: Address, shared: &Shared, from: Range<usize>) -> Result<()> {
        assert!(from.end <= shared.num_bytes(), "{from:?} of {} bytes", shared.num_bytes());
        match self.copies_left {
            Some(0) => {
                self.copies_left = None;
                return Err(Error::Device("a copy is refused".into()));
            }
            Some(left) => self.copies_left = Some(left - 1),
            None => (),
        }
        let (from, bytes) = (shared.address() + from.start as Address, from.len());
        self.queue.push_back(Work::Copy { to, from, bytes });
        Ok(())
    }

    fn read(&mut self, from: Address, out: &mut [u8]) -> Result<()> {
        self.drain()?;
        self.arena.read(from, out);
        Ok(())
    }

    /// The code itself is not looked at: the emulator has the kernel of this name already, with the shape of its
    /// matrix as a parameter.
    fn load(&mut self, variant: &str, _: &str, _: &[u8], _: u32) -> Result<Kernel> {
        let name = machine::variant_for(variant, self.description.capability);
        self.kernels.push(name.map_err(Error::Device)?);
        Ok(Kernel(self.kernels.len() as u32 - 1))
    }

    fn issue(&mut self, op: &Op) -> Result<()> {
        self.check(op);
        self.queue.push_back(Work::Op(op.clone()));
        Ok(())
    }

    fn enable_products(&mut self, shapes: &[ProductShape]) -> Result<()> {
        for shape in shapes {
            if shape.format == Dtype::Fp8 && !self.description.multiplies_fp8() {
                let name = &self.description.name;
                return Err(Error::Device(format!("{name} does not multiply fp8")));
            }
            self.products.insert(*shape);
        }
        Ok(())
    }

    fn record(&mut self, ops: &[Op]) -> Result<Graph> {
        ops.iter().for_each(|op| self.check(op));
        self.graphs.push(ops.to_vec());
        Ok(Graph(self.graphs.len() as u32 - 1))
    }

    fn replay(&mut self, graph: Graph) -> Result<()> {
        self.queue.extend(self.graphs[graph.0 as usize].iter().cloned().map(Work::Op));
        Ok(())
    }

    fn new_mark(&mut self) -> Result<Mark> {
        self.marks.push(0);
        Ok(Mark(self.marks.len() as u32 - 1))
    }

    fn put_mark(&mut self, mark: Mark) -> Result<()> {
        self.marks[mark.0 as usize] = self.num_issued();
        Ok(())
    }

    fn wait_for(&mut self, mark: Mark) -> Result<()> {
        self.drain_to(self.marks[mark.0 as usize])
    }

    fn wait(&mut self) -> Result<()> {
        self.drain()
    }
}
