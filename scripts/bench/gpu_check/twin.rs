//! A GPU and an emulated one that do the same, one launch at a time: after each, all memory that its kernel was told of is
//! compared. The GPU then goes on with what the emulator has, so that each kernel is judged by itself.

use crate::outputs::{self, Kind, Word, Written};
use spec_core::testing::cuda::device::{
    Address, Description, Device, Graph, Kernel, Launch, Mark, Op, Product, ProductShape, Shared,
    bytes_of,
};
use spec_core::{Error, Result};
use spec_emu::{Emulator, Schedule};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What was found, also after the device went into an executor.
#[derive(Clone, Debug, Default)]
pub(crate) struct Findings(Arc<Mutex<Found>>);

/// Of all launches.
#[derive(Debug, Default)]
pub(crate) struct Found {
    pub(crate) num_launches: usize,
    /// What is wrong first of each variant: number of the launch, and what.
    pub(crate) wrong: BTreeMap<String, (usize, String)>,
    /// How far numbers were apart at most, as shares of the largest thereabouts, by kernel.
    pub(crate) shares: BTreeMap<String, f32>,
}

impl Findings {
    pub(crate) fn found(&self) -> MutexGuard<'_, Found> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory on both.
struct Piece {
    gpu: Address,
    emulated: Address,
    len: usize,
    /// Where the host sees that of the GPU, too.
    shared: Option<Shared>,
}

impl Piece {
    fn offset_of(&self, address: Address) -> Option<usize> {
        let offset = address.checked_sub(self.gpu)? as usize;
        (offset < self.len).then_some(offset)
    }
}

/// An argument of a launch that is an address.
struct Argument {
    /// Where it is in the kernel's struct.
    at: usize,
    piece: usize,
    /// What it points at in there.
    offset: usize,
}

/// Both. Addresses, and memory that the host sees, are the GPU's.
pub(crate) struct Twin {
    gpu: Box<dyn Device>,
    emulator: Emulator,
    description: Description,
    pieces: Vec<Piece>,
    variants: Vec<String>,
    graphs: Vec<Vec<Op>>,
    num_marks: u32,
    findings: Findings,
    /// A launch after which a bit of what it wrote is turned on the GPU.
    #[cfg(test)]
    pub(crate) spoiled: Option<usize>,
}

impl Twin {
    pub(crate) fn new(gpu: Box<dyn Device>, findings: Findings) -> Self {
        let description = gpu.describe().clone();
        let emulator = Emulator::new(description.capability, description.num_sms, Schedule::PLAIN);
        Self {
            gpu,
            emulator,
            description,
            pieces: Vec::new(),
            variants: Vec::new(),
            graphs: Vec::new(),
            num_marks: 0,
            findings,
            #[cfg(test)]
            spoiled: None,
        }
    }

    fn find(&self, address: Address) -> Option<(usize, usize)> {
        let offset = |(idx, piece): (usize, &Piece)| Some((idx, piece.offset_of(address)?));
        self.pieces.iter().enumerate().find_map(offset)
    }

    fn emulated(&self, address: Address) -> Address {
        let (piece, offset) = self.find(address).expect("an address that was allocated");
        self.pieces[piece].emulated + offset as Address
    }

    /// Addresses in a struct: what looks like one is one, as nothing else in there is so large.
    fn arguments(&self, params: &[u8]) -> Vec<Argument> {
        let words = params.as_chunks::<8>().0.iter().enumerate();
        let argument = |(idx, &word): (usize, &[u8; 8])| {
            let (piece, offset) = self.find(Address::from_le_bytes(word))?;
            Some(Argument { at: idx * 8, piece, offset })
        };
        words.filter_map(argument).collect()
    }

    /// The library's sums are compared as a kernel's are.
    fn multiply(&mut self, product: &Product) -> Result<()> {
        let Product { weights, input, output, .. } = *product;
        let arguments = self.arguments(bytes_of(&[weights, input, output]));
        let [weights, input, output] =
            [weights, input, output].map(|address| self.emulated(address));
        let emulated = Product { weights, input, output, ..*product };
        self.emulator.issue(&Op::Product(emulated))?;
        self.gpu.issue(&Op::Product(*product)).and_then(|()| self.gpu.wait())?;
        let sums = Written { name: "sums", at: 16, kind: Kind::Words(&[Word::Float]) };
        let ProductShape { format, m, n, k } = product.shape;
        self.judge(&format!("product.{format}.{m}x{n}x{k}"), &arguments, &[sums])
    }

    fn run(&mut self, launch: &Launch) -> Result<()> {
        let variant = self.variants[launch.kernel.0 as usize].clone();
        let arguments = self.arguments(&launch.params);
        let mut params = launch.params.clone();
        for argument in &arguments {
            let address = self.pieces[argument.piece].emulated + argument.offset as Address;
            params[argument.at..argument.at + 8].copy_from_slice(&address.to_le_bytes());
        }
        self.follow_host(&arguments)?;
        let emulated = Launch { params, overlap: false, ..launch.clone() };
        self.emulator.issue(&Op::Launch(emulated))?;
        let num_launches = self.findings.found().num_launches;
        let name = |error: Error| {
            let text = match error {
                Error::Device(text) => text,
                other => other.to_string(),
            };
            let Launch { grid, .. } = launch;
            Error::Device(format!("{text} (launch {num_launches}: {variant}, grid {grid})"))
        };
        self.gpu.issue(&Op::Launch(launch.clone())).and_then(|()| self.gpu.wait()).map_err(name)?;
        let written = outputs::written(&variant, &launch.params);
        #[cfg(test)]
        self.spoil(&arguments, &written)?;
        self.judge(&variant, &arguments, &written)
    }

    /// What the host has written to memory that it shares with the GPU.
    fn follow_host(&mut self, arguments: &[Argument]) -> Result<()> {
        for argument in arguments {
            let piece = &self.pieces[argument.piece];
            let Some(shared) = &piece.shared else { continue };
            let mut bytes = vec![0u8; piece.len];
            shared.copy_to(0, &mut bytes);
            self.emulator.write(piece.emulated, &bytes)?;
        }
        Ok(())
    }

    /// Compares what the launch has been told of, and has the GPU go on with what the emulator holds.
    fn judge(&mut self, variant: &str, arguments: &[Argument], written: &[Written]) -> Result<()> {
        let mut wrong = Vec::new();
        let mut share = 0f32;
        let mut pieces: Vec<usize> = arguments.iter().map(|argument| argument.piece).collect();
        pieces.sort_unstable();
        pieces.dedup();
        for idx in pieces {
            let (found, expected) = self.contents(idx)?;
            if found == expected {
                continue;
            }
            for (array, kind, range) in arrays(idx, found.len(), arguments, written) {
                match outputs::compare(kind, &found[range.clone()], &expected[range]) {
                    Ok(distance) => share = share.max(distance.share),
                    Err(what) => wrong.push(format!("{array}: {what}")),
                }
            }
            self.correct(idx, &found, &expected)?;
        }
        let mut findings = self.findings.found();
        let kernel = variant.split('.').next().unwrap_or(variant);
        let largest = findings.shares.entry(kernel.into()).or_default();
        *largest = largest.max(share);
        if !wrong.is_empty() {
            let first = (findings.num_launches, wrong.join("; "));
            findings.wrong.entry(variant.into()).or_insert(first);
        }
        findings.num_launches += 1;
        Ok(())
    }

    /// Of a piece of memory: the GPU's and the emulator's.
    fn contents(&mut self, idx: usize) -> Result<(Vec<u8>, Vec<u8>)> {
        let &Piece { gpu, emulated, len, ref shared } = &self.pieces[idx];
        let (mut found, mut expected) = (vec![0u8; len], vec![0u8; len]);
        match shared {
            Some(shared) => shared.copy_to(0, &mut found),
            None => self.gpu.read(gpu, &mut found)?,
        }
        self.emulator.read(emulated, &mut expected)?;
        Ok((found, expected))
    }

    fn correct(&mut self, idx: usize, found: &[u8], expected: &[u8]) -> Result<()> {
        let differs = |(a, b)| a != b;
        let first = found.iter().zip(expected).position(differs).unwrap_or(0);
        let last = found.iter().zip(expected).rposition(differs).unwrap_or(0);
        let &Piece { gpu, ref shared, .. } = &self.pieces[idx];
        match shared {
            // In words.
            Some(shared) => {
                let (first, end) = (first / 4 * 4, (last + 1).next_multiple_of(4));
                shared.copy_from(first, &expected[first..end]);
            }
            None => self.gpu.write(gpu + first as Address, &expected[first..=last])?,
        }
        Ok(())
    }

    #[cfg(test)]
    fn spoil(&mut self, arguments: &[Argument], written: &[Written]) -> Result<()> {
        if self.spoiled == Some(self.findings.found().num_launches) {
            let first = arguments.iter().find(|argument| argument.at == written[0].at);
            let argument = first.expect("it writes something");
            let address = self.pieces[argument.piece].gpu + argument.offset as Address;
            let mut word = [0; 4];
            self.gpu.read(address, &mut word)?;
            word[3] ^= 0x40;
            self.gpu.write(address, &word)?;
        }
        Ok(())
    }
}

/// What a launch has been told of inside of a piece: each array goes as far as the next one begins. Those that it does
/// not write stay as they are.
fn arrays(
    piece: usize,
    len: usize,
    arguments: &[Argument],
    written: &[Written],
) -> Vec<(String, Kind, Range<usize>)> {
    let unwritten = Kind::Words(&[Word::Count]);
    let mut starts = BTreeMap::from([(0, ("memory ahead of all arguments".into(), unwritten))]);
    let (kept, arrays): (Vec<_>, Vec<_>) = arguments
        .iter()
        .filter(|argument| argument.piece == piece)
        .map(|argument| (argument, written.iter().find(|array| array.at == argument.at)))
        .partition(|(_, array)| array.is_none());
    // An array that is read and written is one that is written.
    for (argument, array) in kept.into_iter().chain(arrays) {
        let (name, kind) = match array {
            Some(array) => (array.name.to_string(), array.kind),
            None => (format!("argument at byte {}, which is only read", argument.at), unwritten),
        };
        starts.insert(argument.offset, (name, kind));
    }
    let ends: Vec<usize> = starts.keys().skip(1).copied().chain([len]).collect();
    let ranges = starts.into_iter().zip(ends);
    ranges.map(|((start, (name, kind)), end)| (name, kind, start..end)).collect()
}

impl Device for Twin {
    fn describe(&self) -> &Description {
        &self.description
    }

    fn available_bytes(&self) -> Result<usize> {
        Ok(self.gpu.available_bytes()?.min(self.emulator.available_bytes()?))
    }

    fn alloc(&mut self, bytes: usize) -> Result<Address> {
        let (gpu, emulated) = (self.gpu.alloc(bytes)?, self.emulator.alloc(bytes)?);
        self.pieces.push(Piece { gpu, emulated, len: bytes, shared: None });
        Ok(gpu)
    }

    fn alloc_shared(&mut self, bytes: usize) -> Result<Shared> {
        let shared = self.gpu.alloc_shared(bytes)?;
        let (gpu, len) = (shared.address(), shared.num_bytes());
        let emulated = self.emulator.alloc(len)?;
        self.pieces.push(Piece { gpu, emulated, len, shared: Some(shared.clone()) });
        Ok(shared)
    }

    fn write(&mut self, to: Address, bytes: &[u8]) -> Result<()> {
        self.emulator.write(self.emulated(to), bytes)?;
        self.gpu.write(to, bytes)
    }

    fn write_shared(&mut self, to: Address, shared: &Shared, from: Range<usize>) -> Result<()> {
        let mut bytes = vec![0u8; from.len()];
        shared.copy_to(from.start, &mut bytes);
        self.emulator.write(self.emulated(to), &bytes)?;
        self.gpu.write_shared(to, shared, from)
    }

    fn read(&mut self, from: Address, out: &mut [u8]) -> Result<()> {
        self.gpu.read(from, out)
    }

    fn load(
        &mut self,
        variant: &str,
        entry: &str,
        code: &[u8],
        shared_bytes: u32,
    ) -> Result<Kernel> {
        self.variants.push(variant.into());
        self.emulator.load(variant, entry, code, shared_bytes)?;
        self.gpu.load(variant, entry, code, shared_bytes)
    }

    fn issue(&mut self, op: &Op) -> Result<()> {
        match op {
            Op::Launch(launch) => self.run(launch),
            Op::Product(product) => self.multiply(product),
            &Op::Copy { from, to, bytes, rows, pitch } => {
                let [from, to] = [from, to].map(|address| self.emulated(address));
                self.emulator.issue(&Op::Copy { from, to, bytes, rows, pitch })?;
                self.gpu.issue(op)
            }
        }
    }

    fn enable_products(&mut self, shapes: &[ProductShape]) -> Result<()> {
        self.emulator.enable_products(shapes)?;
        self.gpu.enable_products(shapes)
    }

    fn record(&mut self, ops: &[Op]) -> Result<Graph> {
        self.graphs.push(ops.to_vec());
        Ok(Graph(self.graphs.len() as u32 - 1))
    }

    /// One by one: what is wrong with a graph is for others to find.
    fn replay(&mut self, graph: Graph) -> Result<()> {
        let ops = self.graphs[graph.0 as usize].clone();
        ops.iter().try_for_each(|op| self.issue(op))
    }

    /// Nothing is ever waited for any more.
    fn new_mark(&mut self) -> Result<Mark> {
        self.num_marks += 1;
        Ok(Mark(self.num_marks - 1))
    }

    fn put_mark(&mut self, _: Mark) -> Result<()> {
        Ok(())
    }

    fn wait_for(&mut self, _: Mark) -> Result<()> {
        self.wait()
    }

    fn wait(&mut self) -> Result<()> {
        self.gpu.wait()
    }
}
