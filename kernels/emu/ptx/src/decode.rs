//! Statements to operations. What is not listed here or in `arithmetic` is refused.

use crate::arithmetic;
use crate::operation::{
    Asynchronous, Element, Left, Operation, Place, Shuffle, Slot, Source, Space, Together,
    WarpProduct,
};
use crate::parse::Names;
use crate::warpgroup;

type Decoded<T> = Result<T, String>;

/// What instructions do that order memory, tell the launch behind, fill a cache or share out registers: here everything happens
/// in order, there is no cache, and registers are not counted.
const ORDERING: [&str; 6] = [
    "fence.mbarrier_init.release.cluster",
    "griddepcontrol.wait",
    "griddepcontrol.launch_dependents",
    "prefetch.global.L2",
    "setmaxnreg.inc.sync.aligned.u32",
    "setmaxnreg.dec.sync.aligned.u32",
];

/// Loads and stores that differ from plain ones by their order alone.
const ORDERED: [(&str, &str); 3] = [
    ("ld.relaxed.gpu.global.", "ld.global."),
    ("st.release.sys.global.", "st.global."),
    ("atom.acq_rel.gpu.global.", "atom.global."),
];

/// How opcodes of bulk copies to shared memory begin.
const BULK: &str = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes";

/// The operation of an opcode with its operands.
pub(crate) fn decode(names: &Names, opcode: &str, operands: &[&str]) -> Decoded<Operation> {
    let reader = Reader { names, operands };
    if ORDERING.contains(&opcode) {
        return Ok(Operation::Nothing);
    }
    if opcode == "ret" {
        return Ok(Operation::Exit);
    }
    if opcode.starts_with("mov.b") && operands.iter().any(|operand| operand.starts_with('{')) {
        return reader.vector_move(opcode);
    }
    if let Some(function) = arithmetic::one(opcode) {
        reader.expect(2)?;
        return Ok(Operation::One(function, reader.slot(0)?, reader.source(1)?));
    }
    if let Some(function) = arithmetic::two(opcode) {
        reader.expect(3)?;
        return Ok(Operation::Two(function, reader.slot(0)?, reader.sources(1)?));
    }
    if let Some(function) = arithmetic::three(opcode) {
        reader.expect(4)?;
        return Ok(Operation::Three(function, reader.slot(0)?, reader.sources(1)?));
    }
    if opcode == "mapa.shared::cluster.u32" {
        reader.expect(3)?;
        let [address, rank] = reader.sources(1)?;
        return Ok(Operation::Map { to: reader.slot(0)?, address, rank });
    }
    if let Some(together) = reader.together(opcode)? {
        return Ok(Operation::Together(together));
    }
    if let Some(asynchronous) = reader.asynchronous(opcode)? {
        return Ok(Operation::Asynchronous(asynchronous));
    }
    reader.memory(opcode)
}

struct Reader<'a> {
    names: &'a Names,
    operands: &'a [&'a str],
}

impl Reader<'_> {
    fn expect(&self, len: usize) -> Decoded<()> {
        if self.operands.len() == len {
            return Ok(());
        }
        Err(format!("{} operands, expected {len}", self.operands.len()))
    }

    fn operand(&self, at: usize) -> Decoded<&str> {
        self.operands.get(at).copied().ok_or_else(|| format!("there is no operand {at}"))
    }

    fn slot(&self, at: usize) -> Decoded<Slot> {
        self.names.slot(self.operand(at)?)
    }

    fn source(&self, at: usize) -> Decoded<Source> {
        self.source_of(self.operand(at)?)
    }

    fn source_of(&self, text: &str) -> Decoded<Source> {
        if let Some(address) = self.names.variable(text) {
            return Ok(Source::Value(address));
        }
        if let Some(value) = constant(text) {
            return Ok(Source::Value(value));
        }
        self.names.slot(text).map(Source::Slot)
    }

    fn sources<const N: usize>(&self, first: usize) -> Decoded<[Source; N]> {
        let mut sources = [Source::Value(0); N];
        for (at, source) in sources.iter_mut().enumerate() {
            *source = self.source(first + at)?;
        }
        Ok(sources)
    }

    /// Registers in braces, or one alone.
    fn slots(&self, at: usize) -> Decoded<Vec<Slot>> {
        parts(self.operand(at)?).map(|name| self.names.slot(name)).collect()
    }

    fn values(&self, at: usize) -> Decoded<Vec<Source>> {
        parts(self.operand(at)?).map(|text| self.source_of(text)).collect()
    }

    fn slots_of<const N: usize>(&self, at: usize) -> Decoded<[Slot; N]> {
        self.slots(at)?.try_into().map_err(|_| format!("operand {at} is not {N} registers"))
    }

    fn values_of<const N: usize>(&self, at: usize) -> Decoded<[Source; N]> {
        self.values(at)?.try_into().map_err(|_| format!("operand {at} is not {N} registers"))
    }

    /// `[base]`, `[base+offset]` or `[base+-offset]`.
    fn place(&self, at: usize) -> Decoded<Place> {
        let text = self.operand(at)?;
        let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        let inner = inner.ok_or_else(|| format!("{text} is no place"))?;
        let (base, offset) = match inner.split_once('+') {
            Some((base, offset)) => {
                (base, constant(offset).ok_or_else(|| format!("{offset} is no offset"))?)
            }
            None => (inner, 0),
        };
        Ok(Place { base: self.source_of(base)?, offset })
    }

    /// Between a register and several of half or a quarter of its bits.
    fn vector_move(&self, opcode: &str) -> Decoded<Operation> {
        self.expect(2)?;
        let whole: u32 = opcode["mov.b".len()..].parse().map_err(|e| format!("{opcode}: {e}"))?;
        if self.operand(0)?.starts_with('{') {
            let to = self.slots(0)?;
            let bits = whole / to.len() as u32;
            return Ok(Operation::Split { to, from: self.source(1)?, bits });
        }
        let parts = self.values(1)?;
        let bits = whole / parts.len() as u32;
        Ok(Operation::Join { to: self.slot(0)?, parts, bits })
    }

    fn together(&self, opcode: &str) -> Decoded<Option<Together>> {
        let mode = match opcode {
            "shfl.sync.up.b32" => Some(Shuffle::Up),
            "shfl.sync.bfly.b32" => Some(Shuffle::Butterfly),
            "shfl.sync.idx.b32" => Some(Shuffle::Index),
            _ => None,
        };
        if let Some(mode) = mode {
            return self.shuffle(mode).map(Some);
        }
        Ok(Some(match opcode {
            "vote.sync.ballot.b32" => Together::Ballot {
                to: self.slot(0)?,
                predicate: self.source(1)?,
                mask: self.source(2)?,
            },
            "wgmma.fence.sync.aligned" => Together::WarpgroupFence,
            "wgmma.commit_group.sync.aligned" => Together::WarpgroupCommit,
            "wgmma.wait_group.sync.aligned" => Together::WarpgroupWait(self.constant(0)?),
            opcode if let Some(form) = warpgroup::Form::of(opcode) => self.product(&form)?,
            "bar.warp.sync" => Together::Sync { mask: self.source(0)? },
            "barrier.cluster.arrive.aligned"
            | "barrier.cluster.arrive.relaxed.aligned"
            | "barrier.cluster.arrive.release.aligned" => Together::ClusterArrive,
            "barrier.cluster.wait.aligned" | "barrier.cluster.wait.acquire.aligned" => {
                Together::ClusterWait
            }
            "bar.sync" => Together::Barrier {
                id: self.source(0)?,
                count: (self.operands.len() > 1).then(|| self.source(1)).transpose()?,
            },
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" => Together::Multiply {
                to: self.slots_of(0)?,
                a: self.values_of(1)?,
                b: self.values_of(2)?,
                c: self.values_of(3)?,
            },
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16" => {
                Together::Matrices { to: self.slots_of(0)?, from: self.place(1)? }
            }
            _ => return Ok(None),
        }))
    }

    /// Sums, the left operand, a descriptor, whether sums are added to; then factors, which are 1, and of halves that
    /// nothing is transposed.
    fn product(&self, form: &warpgroup::Form) -> Decoded<Together> {
        let (sums, element) = (self.slots(0)?, form.element);
        form.check_sums(&sums)?;
        let (a, rest): (_, &[&str]) = match (self.operand(1)?.starts_with('{'), element) {
            (true, Element::Half) => (Left::Fragments(self.values_of(1)?), &["1", "1", "0"]),
            (true, Element::E4m3) => return Err("fragments of e4m3 are not known".into()),
            (false, Element::Half) => (Left::Descriptor(self.source(1)?), &["1", "1", "0", "0"]),
            (false, Element::E4m3) => (Left::Descriptor(self.source(1)?), &["1", "1"]),
        };
        if self.operands.get(4..) != Some(rest) {
            return Err(format!("{:?} at the end, expected {rest:?}", self.operands.get(4..)));
        }
        let (b, adds) = (self.source(2)?, self.source(3)?);
        Ok(Together::Product(WarpProduct { element, sums, a, b, adds }))
    }

    fn constant(&self, at: usize) -> Decoded<u64> {
        match self.source(at)? {
            Source::Value(value) => Ok(value),
            Source::Slot(_) => Err("the count of groups is a constant".into()),
        }
    }

    fn shuffle(&self, mode: Shuffle) -> Decoded<Together> {
        self.expect(5)?;
        let (to, is_in_range) = match self.operand(0)?.split_once('|') {
            Some((to, predicate)) => (to, Some(self.names.slot(predicate)?)),
            None => (self.operand(0)?, None),
        };
        let [value, lane, clamp, mask] = self.sources(1)?;
        let to = self.names.slot(to)?;
        Ok(Together::Shuffle { mode, to, is_in_range, value, lane, clamp, mask })
    }

    fn asynchronous(&self, opcode: &str) -> Decoded<Option<Asynchronous>> {
        if let Some(form) = opcode.strip_prefix(BULK) {
            return self.bulk(form);
        }
        Ok(Some(match opcode {
            "mbarrier.init.shared.b64" => {
                Asynchronous::Init { at: self.place(0)?, count: self.source(1)? }
            }
            "mbarrier.arrive.shared.b64" => {
                self.expect(2)?;
                let bytes = Source::Value(0);
                Asynchronous::Arrive { at: self.place(1)?, state: self.slot(0)?, bytes }
            }
            "mbarrier.arrive.expect_tx.shared.b64" => {
                let bytes = self.source(2)?;
                Asynchronous::Arrive { at: self.place(1)?, state: self.slot(0)?, bytes }
            }
            "mbarrier.arrive.shared::cluster.b64"
            | "mbarrier.arrive.release.cluster.shared::cluster.b64"
                if self.operand(0)? == "_" =>
            {
                self.expect(2)?;
                Asynchronous::ArriveAtPeer(self.place(1)?)
            }
            "mbarrier.try_wait.parity.shared.b64"
            | "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64"
            | "mbarrier.test_wait.parity.shared.b64" => {
                let (to, at) = (self.slot(0)?, self.place(1)?);
                Asynchronous::Test { to, at, parity: self.source(2)? }
            }
            "createpolicy.fractional.L2::evict_first.b64" if self.operand(1)? == "1.0" => {
                Asynchronous::Policy(self.slot(0)?)
            }
            "cp.async.cg.shared.global" if self.operand(2)? == "16" => Asynchronous::Copy {
                to: self.place(0)?,
                from: self.place(1)?,
                bytes: self.operands.get(3).map_or(Ok(Source::Value(16)), |_| self.source(3))?,
            },
            "cp.async.commit_group" => Asynchronous::Commit,
            "cp.async.wait_group" => Asynchronous::Wait(self.constant(0)?),
            "fence.proxy.async.shared::cta" => Asynchronous::Fence,
            "cp.async.mbarrier.arrive.noinc.shared.b64" => {
                Asynchronous::ArriveBehind { at: self.place(0)?, is_counted: true }
            }
            "cp.async.mbarrier.arrive.shared.b64" => {
                Asynchronous::ArriveBehind { at: self.place(0)?, is_counted: false }
            }
            _ => return Ok(None),
        }))
    }

    /// Where to, where from, how much, and the barrier; then a mask of blocks and a policy, where the form has them.
    fn bulk(&self, form: &str) -> Decoded<Option<Asynchronous>> {
        let (has_mask, has_policy) = match form {
            "" => (false, false),
            ".L2::cache_hint" => (false, true),
            ".multicast::cluster" => (true, false),
            ".multicast::cluster.L2::cache_hint" => (true, true),
            _ => return Ok(None),
        };
        let policy = 4 + usize::from(has_mask);
        self.expect(policy + usize::from(has_policy))?;
        Ok(Some(Asynchronous::Bulk {
            to: self.place(0)?,
            from: self.place(1)?,
            bytes: self.source(2)?,
            at: self.place(3)?,
            mask: has_mask.then(|| self.source(4)).transpose()?,
            policy: has_policy.then(|| self.source(policy)).transpose()?,
        }))
    }

    fn memory(&self, opcode: &str) -> Decoded<Operation> {
        let unsupported = || format!("{opcode} is not supported");
        let ordered = ORDERED
            .iter()
            .find_map(|(prefix, plain)| Some(format!("{plain}{}", opcode.strip_prefix(prefix)?)));
        let plain = ordered.as_deref().unwrap_or(opcode);
        if let Some(bits) = plain.strip_prefix("bfi.b") {
            let from = self.sources(1)?;
            let bits = bits.parse().map_err(|_| unsupported())?;
            return Ok(Operation::Insert { to: self.slot(0)?, from, bits });
        }
        // The same address, as a generic one.
        if plain == "cvta.shared.u64" {
            let window = |address| address | crate::memory::SHARED_WINDOW;
            return Ok(Operation::One(window, self.slot(0)?, self.source(1)?));
        }
        let (kind, rest) = plain.split_once('.').ok_or_else(unsupported)?;
        let (space, rest) = match rest.split_once('.') {
            Some(("global", rest)) => (Space::Global, rest),
            Some(("shared", rest)) => (Space::Shared, rest),
            Some(("param", rest)) => (Space::Param, rest),
            _ => (Space::Generic, rest),
        };
        if kind == "atom" {
            let update = arithmetic::update(rest).ok_or_else(unsupported)?;
            let (old, at, value) = (self.slot(0)?, self.place(1)?, self.source(2)?);
            return Ok(Operation::Update { space, update, old, at, value });
        }
        let (len, kind_of_element) = match rest.split_once('.') {
            Some(("v2", element)) => (2, element),
            Some(("v4", element)) => (4, element),
            Some(_) => return Err(unsupported()),
            None => (1, rest),
        };
        let bytes = match kind_of_element {
            "u8" | "b8" => 1,
            "u16" | "b16" => 2,
            "u32" | "b32" | "f32" => 4,
            "u64" | "b64" | "f64" => 8,
            _ => return Err(unsupported()),
        };
        self.expect(2)?;
        let operation = match kind {
            "ld" => Operation::Load { space, bytes, to: self.slots(0)?, from: self.place(1)? },
            "st" => Operation::Store { space, bytes, to: self.place(0)?, values: self.values(1)? },
            _ => return Err(unsupported()),
        };
        let num = match &operation {
            Operation::Load { to, .. } => to.len(),
            Operation::Store { values, .. } => values.len(),
            _ => 0,
        };
        if num == len { Ok(operation) } else { Err(format!("{num} elements, expected {len}")) }
    }
}

/// What stands in braces, or all of it.
fn parts(text: &str) -> impl Iterator<Item = &str> {
    text.trim_matches(['{', '}']).split(',').map(str::trim)
}

/// An integer, or the bits of a float.
fn constant(text: &str) -> Option<u64> {
    let hex = |digits| u64::from_str_radix(digits, 16).ok();
    if let Some(digits) = text.strip_prefix("0f").or_else(|| text.strip_prefix("0d")) {
        return hex(digits);
    }
    if let Some(digits) = text.strip_prefix("0x") {
        return hex(digits);
    }
    match text.strip_prefix('-') {
        Some(digits) => digits.parse::<u64>().ok().map(u64::wrapping_neg),
        None => text.parse().ok(),
    }
}
