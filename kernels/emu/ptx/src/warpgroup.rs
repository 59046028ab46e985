//! Products of warpgroups: each warp performs its own share, at some moment from where it is issued to the wait for its group.
//! Registers and shared memory are read then: whoever writes them too early gets other results. What ordinary stores have
//! written may be read behind a fence between the two ways to shared memory alone.

use half::f16;

use crate::cluster::Cluster;
use crate::number::{e4m3_to_half, sum_of_e4m3};
use crate::operation::{Element, LANES, Left, Slot, Source, WarpProduct};
use crate::parse::SHARED_START;
use crate::peers::SharedAddress;

/// Bytes of k of a product.
const DEPTH_BYTES: usize = 32;
/// Rows of a warp.
const ROWS: usize = 16;
/// Warps of a warpgroup.
const WARPS: usize = 4;

/// Rows as the swizzle repeats, and bytes of each.
const ATOM_ROWS: u64 = 8;
const ROW_BYTES: u64 = 128;
/// Bytes that a swizzle moves together.
const CHUNK_BYTES: u64 = 16;

/// What a warp has under way.
#[derive(Default)]
pub(crate) struct Share {
    products: Vec<Issued>,
    open_group: u64,
    num_issued: u64,
    is_fenced: bool,
}

/// A product with the values of its descriptors.
struct Issued {
    /// Of the instruction.
    at: usize,
    a: u64,
    b: u64,
    group: u64,
}

/// Which bytes of shared memory an ordinary store has written, by whom and when, and when each thread has fenced last.
pub(crate) struct Proxies {
    /// Of each 16 bytes of each block; 0 is never.
    written: Vec<Vec<(u64, usize)>>,
    fenced: Vec<u64>,
    clock: u64,
}

impl Proxies {
    pub(crate) fn new(num_blocks: usize, shared_bytes: usize, num_threads: usize) -> Self {
        let chunks = vec![(0, 0); shared_bytes.div_ceil(CHUNK_BYTES as usize)];
        Self { written: vec![chunks; num_blocks], fenced: vec![0; num_threads], clock: 0 }
    }

    /// A thread's stores to shared memory so far may be read by products, and what others have told it of.
    pub(crate) fn fence(&mut self, thread: usize) {
        self.clock += 1;
        self.fenced[thread] = self.clock;
    }

    fn chunks(&mut self, at: SharedAddress, len: usize) -> impl Iterator<Item = &mut (u64, usize)> {
        let first = at.offset.saturating_sub(SHARED_START) / CHUNK_BYTES;
        let count = (len as u64).div_ceil(CHUNK_BYTES);
        self.written[at.rank].iter_mut().skip(first as usize).take(count as usize)
    }

    /// By an ordinary store, or a copy of 16 bytes, that has landed.
    pub(crate) fn store(&mut self, thread: usize, at: SharedAddress, len: usize) {
        self.clock += 1;
        let clock = self.clock;
        self.chunks(at, len).for_each(|chunk| *chunk = (clock, thread));
    }

    /// By a bulk copy, which goes the way that products read.
    pub(crate) fn copied(&mut self, at: SharedAddress, len: usize) {
        self.chunks(at, len).for_each(|chunk| *chunk = (0, 0));
    }

    /// Whether a warp's products may read 16 bytes: the writer has fenced behind its store, or all lanes have.
    fn are_seen(&self, at: SharedAddress, first: usize) -> bool {
        let chunk = at.offset.saturating_sub(SHARED_START) / CHUNK_BYTES;
        let chunk = self.written[at.rank].get(chunk as usize);
        let Some(&(stored, writer)) = chunk else { return true };
        let lanes = &self.fenced[first..first + LANES];
        stored == 0 || self.fenced[writer] > stored || lanes.iter().all(|&fenced| fenced > stored)
    }
}

/// Rows of an operand in shared memory.
struct Operand {
    first: u64,
    atom_stride: u64,
}

impl Operand {
    fn of(descriptor: u64) -> Result<Self, String> {
        let field = |shift: u32| (descriptor >> shift & 0x3fff) * CHUNK_BYTES;
        // Rows of 128 bytes, swizzled.
        if descriptor >> 62 != 1 {
            return Err(format!("the descriptor {descriptor:#x} does not say rows of 128 bytes"));
        }
        Ok(Self { first: field(0), atom_stride: field(32) })
    }

    /// Where a chunk of a row stands.
    fn chunk(&self, row: u64, chunk: u64) -> u64 {
        let atom = self.first + row / ATOM_ROWS * self.atom_stride;
        let at = atom + row % ATOM_ROWS * ROW_BYTES + chunk * CHUNK_BYTES;
        at ^ (at >> 7 & 7) << 4
    }
}

/// The elements of each row: 16 halves or 32 of e4m3.
type Rows = Vec<Vec<f32>>;

impl Cluster<'_> {
    pub(crate) fn fence_warpgroup(&mut self, first: usize) {
        self.shares[first / LANES].is_fenced = true;
    }

    /// Closes a warp's group.
    pub(crate) fn commit_products(&mut self, first: usize) -> Result<(), String> {
        let share = &mut self.shares[first / LANES];
        share.open_group += 1;
        share.is_fenced = false;
        self.perform_some(first)
    }

    /// Performs all but the newest closed groups.
    pub(crate) fn await_products(&mut self, first: usize, pending: u64) -> Result<(), String> {
        let share = &self.shares[first / LANES];
        let end = share.open_group.saturating_sub(pending);
        let due = share.products.iter().take_while(|product| product.group < end).count();
        (0..due).try_for_each(|_| self.perform_oldest(first))
    }

    pub(crate) fn issue_product(
        &mut self,
        first: usize,
        product: &WarpProduct,
    ) -> Result<(), String> {
        let at = self.threads[first].next;
        let uniform = |cluster: &Self, source: Source| {
            let value = cluster.get(first, source);
            let is_alike = (first..first + LANES).all(|lane| cluster.get(lane, source) == value);
            if is_alike { Ok(value) } else { Err("lanes have different descriptors".to_string()) }
        };
        let a = match product.a {
            Left::Fragments(_) => 0,
            Left::Descriptor(source) => uniform(self, source)?,
        };
        let b = uniform(self, product.b)?;
        if (first..first + LANES).any(|lane| self.get(lane, product.adds) == 0) {
            return Err("sums that are not added to".into());
        }
        let share = &mut self.shares[first / LANES];
        if !share.is_fenced {
            return Err("no wgmma.fence since the last commit".into());
        }
        share.num_issued += 1;
        share.products.push(Issued { at, a, b, group: share.open_group });
        self.perform_some(first)
    }

    /// A product may be done at any time.
    fn perform_some(&mut self, first: usize) -> Result<(), String> {
        while !self.shares[first / LANES].products.is_empty() && self.dice.is_bold() {
            self.perform_oldest(first)?;
        }
        Ok(())
    }

    fn perform_oldest(&mut self, first: usize) -> Result<(), String> {
        let Issued { at, a, b, .. } = self.shares[first / LANES].products.remove(0);
        let kernel = self.kernel;
        let product = kernel.code[at].product().ok_or("no product where one was issued")?;
        let left = match &product.a {
            Left::Fragments(sources) => self.fragments(first, sources),
            Left::Descriptor(_) => {
                let own = self.warp_in_block(first / LANES) % WARPS * ROWS;
                self.rows(first, &Operand::of(a)?, own..own + ROWS, product.element)?
            }
        };
        let columns = 0..product.sums.len() * 2;
        let right = self.rows(first, &Operand::of(b)?, columns, product.element)?;
        for lane in 0..LANES {
            for (at, &slot) in product.sums.iter().enumerate() {
                let row = lane / 4 + at % 4 / 2 * 8;
                let column = at / 4 * 8 + lane % 4 * 2 + at % 2;
                let before = f32::from_bits(self.get(first + lane, Source::Slot(slot)) as u32);
                let products = left[row].iter().zip(&right[column]).map(|(a, b)| a * b);
                let sum = match product.element {
                    // In which order the instruction leaves open: by ascending k, each rounded, as in the emulator.
                    Element::Half => products.fold(before, |sum, product| sum + product),
                    Element::E4m3 => sum_of_e4m3(before, products),
                };
                self.set(first + lane, slot, sum.to_bits().into());
            }
        }
        Ok(())
    }

    /// A warp's rows out of its lanes' registers.
    fn fragments(&self, first: usize, sources: &[Source; 4]) -> Rows {
        let mut rows = vec![vec![0.0; DEPTH_BYTES / 2]; ROWS];
        for lane in 0..LANES {
            for (register, &source) in sources.iter().enumerate() {
                let word = self.get(first + lane, source);
                for part in 0..2 {
                    let (row, column) = (lane / 4 + register % 2 * 8, lane % 4 * 2 + part);
                    rows[row][column + register / 2 * 8] = from_half((word >> (16 * part)) as u16);
                }
            }
        }
        rows
    }

    /// Rows of shared memory.
    fn rows(
        &mut self,
        first: usize,
        operand: &Operand,
        rows: std::ops::Range<usize>,
        element: Element,
    ) -> Result<Rows, String> {
        let mut found = Vec::with_capacity(rows.len());
        for row in rows {
            let mut elements = Vec::with_capacity(DEPTH_BYTES);
            for chunk in 0..DEPTH_BYTES as u64 / CHUNK_BYTES {
                let at = self.in_block(first, operand.chunk(row as u64, chunk))?;
                if !self.proxies.are_seen(at, first) {
                    return Err(format!(
                        "a product reads {at}, where a store has no fence.proxy.async behind it"
                    ));
                }
                let bytes = self.shared_bytes(at, CHUNK_BYTES as usize)?;
                match element {
                    Element::Half => {
                        elements.extend(
                            bytes
                                .as_chunks()
                                .0
                                .iter()
                                .map(|&two| from_half(u16::from_le_bytes(two))),
                        );
                    }
                    Element::E4m3 => {
                        elements.extend(bytes.iter().map(|&byte| from_half(e4m3_to_half(byte))));
                    }
                }
            }
            found.push(elements);
        }
        Ok(found)
    }

    /// What the blocks must not leave behind.
    pub(crate) fn check_products(&self) -> Result<(), String> {
        for (warp, share) in self.shares.iter().enumerate() {
            if !share.products.is_empty() {
                let left = share.products.len();
                return Err(format!("warp {warp} ends before {left} of its products"));
            }
            let leader = warp - self.warp_in_block(warp) % WARPS;
            let (own, leader) = (share.num_issued, self.shares[leader].num_issued);
            if own != leader {
                return Err(format!(
                    "warp {warp} has issued {own} products, the first of its warpgroup {leader}"
                ));
            }
        }
        Ok(())
    }
}

fn from_half(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// What the opcode of a product says.
pub(crate) struct Form {
    pub(crate) element: Element,
    num_sums: usize,
}

impl Form {
    /// None of another opcode.
    pub(crate) fn of(opcode: &str) -> Option<Self> {
        let shape = opcode.strip_prefix("wgmma.mma_async.sync.aligned.m64n")?;
        let (columns, element) = match shape.split_once('k')? {
            (columns, "16.f32.f16.f16") => (columns, Element::Half),
            (columns, "32.f32.e4m3.e4m3") => (columns, Element::E4m3),
            _ => return None,
        };
        let columns: usize = columns.parse().ok()?;
        let is_known = columns.is_multiple_of(8) && (8..=256).contains(&columns);
        is_known.then_some(Self { element, num_sums: columns / 2 })
    }

    /// Registers that get sums.
    pub(crate) fn check_sums(&self, sums: &[Slot]) -> Result<(), String> {
        let (found, expected) = (sums.len(), self.num_sums);
        if found == expected { Ok(()) } else { Err(format!("{found} sums, expected {expected}")) }
    }
}
