//! How long pieces of machine code take, from what the assembler says to the hardware in each instruction's control bits: the
//! rules of `scripts/predict/sass.py` and `warp.py` once more, in the middle of what those assume. Both have to find the same.

use super::code::PRINTED;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::Path;
use std::process::Command;

/// Warps that multiply on a quarter of a multiprocessor, of one block.
const WARPS: usize = 2;
const ROUNDS: usize = 40;

/// What only who acquires a unit does.
const ACQUIRE: &str = "FENCE.VIEW";

/// The second word of an instruction ends with its control bits.
const CONTROL_SHIFT: u32 = 41;
const NUM_SCOREBOARDS: usize = 6;

/// Clocks until the result of an operation is there, by what its name begins with: the first that fits.
const LATENCIES: [(&str, u64); 20] = [
    ("LDGSTS", 20),
    ("LDG.", 450),
    ("ATOM", 1300),
    ("RED", 1300),
    ("S2R", 28),
    ("S2UR", 28),
    ("SYNCS", 26),
    ("LDSM", 33),
    ("LDS", 29),
    ("MUFU", 22),
    ("SHFL", 25),
    ("LDC", 30),
    ("STS", 12),
    ("STG", 12),
    ("I2F", 18),
    ("F2I", 18),
    ("R2UR", 12),
    ("HMMA", 24),
    ("BAR", 24),
    ("F2F", 20),
];
const OTHER_LATENCY: u64 = 20;
const READ_LATENCY: u64 = 12;

/// Of a product of a warpgroup: multiply-adds a clock of a quarter, clocks at least, and those until sums can be read.
const QUARTER_MACS: u64 = 512;
const LEAST_PRODUCT: u64 = 12;
const PRODUCT_LATENCY: u64 = 54;

/// Clocks that an operation keeps a pipe busy.
const PIPES: [(&[&str], Pipe, u64); 6] = [
    (&["HMMA"], Pipe::Tensor, 6),
    (
        &[
            "F2FP", "SHF", "LOP3", "ISETP", "SEL", "PRMT", "VIADD", "VIMNMX", "LEA", "IADD3",
            "FMNMX", "FSETP", "PLOP3",
        ],
        Pipe::Alu,
        2,
    ),
    (&["LDSM", "LDS.128", "STS.128"], Pipe::Shared, 16),
    (&["LDS.64", "STS.64"], Pipe::Shared, 8),
    (&["LDS", "STS"], Pipe::Shared, 4),
    (&["MUFU", "SHFL", "I2F", "F2I"], Pipe::Special, 8),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pipe {
    Tensor,
    Alu,
    /// Of shared memory, which all quarters have together.
    Shared,
    Special,
}

/// One instruction of a warp.
#[derive(Clone, Debug)]
struct Instruction {
    op: String,
    /// Clocks before the next one.
    stall: u64,
    /// Scoreboard that is set until the result is written, and until the operands are read; 7 is none.
    writes: usize,
    reads: usize,
    /// Bits of those that are awaited.
    waits: u64,
    /// Where it branches to.
    label: Option<String>,
    /// Whether the one behind it may follow.
    falls_through: bool,
}

/// The instructions of a kernel.
pub(crate) struct Code {
    instructions: Vec<Instruction>,
    labels: HashMap<String, usize>,
}

impl Code {
    pub(crate) fn of(disassembler: &Path, cubin: &[u8]) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), cubin).unwrap();
        let output = Command::new(disassembler).args(PRINTED).arg("-hex").arg(file.path()).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self::parse(&String::from_utf8(output.stdout).unwrap())
    }

    /// An instruction takes two lines: `/*0000*/ TEXT ; /* 0xFIRST */`, then `/* 0xSECOND */`.
    fn parse(listing: &str) -> Self {
        let mut code = Self { instructions: Vec::new(), labels: HashMap::new() };
        let mut text = None;
        for line in listing.lines().map(str::trim) {
            if let Some(label) = line.strip_suffix(':').filter(|line| line.starts_with(".L_x_")) {
                code.labels.insert(label.into(), code.instructions.len());
            } else if let Some(word) = line.strip_prefix("/* 0x") {
                let Some(text) = text.take() else { continue };
                let word = word.trim_end_matches(" */");
                let control = u64::from_str_radix(word, 16).unwrap() >> CONTROL_SHIFT;
                code.instructions.push(Instruction::of(text, control));
            } else if let Some((address, rest)) =
                line.strip_prefix("/*").and_then(|rest| rest.split_once("*/"))
                && address.bytes().all(|byte| byte.is_ascii_hexdigit())
                && let Some((first, _)) = rest.split_once("/* 0x")
            {
                text = Some(first.trim().trim_end_matches([';', ' ']));
            }
        }
        assert!(!code.instructions.is_empty(), "there are no instructions in:\n{listing}");
        code
    }

    /// The shortest loop that has all of these operations.
    fn body(&self, ops: &[&str]) -> Option<(usize, &[Instruction])> {
        let target = |(last, one): (usize, &Instruction)| {
            let first = *self.labels.get(one.label.as_ref()?)?;
            (first <= last).then(|| (first, &self.instructions[first..=last]))
        };
        let loops = self.instructions.iter().enumerate().filter_map(target);
        let fitting =
            loops.filter(|(_, body)| ops.iter().all(|op| body.iter().any(|one| one.is(op))));
        fitting.min_by_key(|(_, body)| body.len())
    }

    /// Where a branch goes.
    fn target(&self, at: usize) -> Option<usize> {
        self.labels.get(self.instructions[at].label.as_ref()?).copied()
    }

    /// The shortest way around a loop that has an operation - others are for what happens now and then - and all that the
    /// loop has of another one.
    fn round(&self, op: &str, all: &str) -> Option<Vec<Instruction>> {
        let loops = (0..self.instructions.len()).filter_map(|last| {
            let first = self.target(last)?;
            (first <= last).then(|| self.way(first, last, op, all))?
        });
        loops.min_by_key(Vec::len)
    }

    /// The shortest way from one instruction to another, between the two, that has an operation, and all of another one.
    fn way(&self, first: usize, last: usize, op: &str, all: &str) -> Option<Vec<Instruction>> {
        let num_all = self.instructions[first..=last].iter().filter(|one| one.is(all)).count();
        let seen = |at: usize, (has_op, had): (bool, usize)| {
            let one = &self.instructions[at];
            (has_op || one.is(op), num_all.min(had + usize::from(one.is(all))))
        };
        let end = (last, (true, num_all));
        let start = (first, seen(first, (false, 0)));
        let mut before = HashMap::from([(start, None)]);
        let mut rest = VecDeque::from([start]);
        while let Some(state @ (at, had)) = rest.pop_front() {
            if state == end {
                break;
            }
            let next = self.instructions[at].falls_through.then_some(at + 1);
            for next in next.into_iter().chain(self.target(at)) {
                if !(first..=last).contains(&next) {
                    continue;
                }
                let after = (next, seen(next, had));
                if let Entry::Vacant(place) = before.entry(after) {
                    place.insert(Some(state));
                    rest.push_back(after);
                }
            }
        }
        before.get(&end)?;
        let mut way = Vec::new();
        let mut state = Some(end);
        while let Some(found) = state {
            way.push(self.instructions[found.0].clone());
            state = before[&found];
        }
        way.reverse();
        Some(way)
    }

    /// What the budget of a product is about.
    pub(crate) fn product(&self) -> BTreeMap<&'static str, u64> {
        let Some(body) = self.round("HGMMA", ACQUIRE) else { return BTreeMap::new() };
        // Of one unit or two, which begin alike, and it acquires as many.
        let units = body.iter().filter(|one| one.is("WARPGROUP.ARRIVE")).count().max(1) as u64;
        let (instructions, clocks) = (body.len() as u64 / units, of_a_round(&body) / units);
        BTreeMap::from([("unit_instructions", instructions), ("unit_clocks", clocks)])
    }

    /// What that of the attention is about.
    pub(crate) fn attention(&self) -> BTreeMap<&'static str, u64> {
        let body = self.body(&["HMMA", "LDGSTS"]).or_else(|| self.body(&["HMMA"]));
        body.map(|(_, body)| ("page_instructions", body.len() as u64)).into_iter().collect()
    }
}

impl Instruction {
    fn of(text: &str, control: u64) -> Self {
        let op = text.split_whitespace().find(|word| !word.starts_with('@'));
        let op = op.unwrap_or_default().to_string();
        let label = text.split(['(', ')']).find(|part| part.starts_with(".L_x_"));
        let label = label.filter(|_| op.starts_with("BRA")).map(String::from);
        let ends = ["BRA", "EXIT", "RET"].iter().any(|end| op.starts_with(end));
        // By a predicate before it or among its operands; or torn warps alone are sent elsewhere.
        let mut operands = text.split_whitespace().skip(1);
        let is_predicate = |word: &str| {
            let word = word.trim_start_matches('!').trim_start_matches('U');
            word.strip_prefix('P')
                .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        };
        let is_conditional =
            text.starts_with('@') || op == "BRA.DIV" || operands.next().is_some_and(is_predicate);
        Self {
            op,
            stall: (control & 15).max(1),
            writes: (control >> 5 & 7) as usize,
            reads: (control >> 8 & 7) as usize,
            waits: control >> 11 & 63,
            label,
            falls_through: !ends || is_conditional,
        }
    }

    fn is(&self, op: &str) -> bool {
        self.op.starts_with(op)
    }

    /// Clocks that a product of a warpgroup keeps the tensor core of a quarter.
    fn product_clocks(&self) -> Option<u64> {
        let mut sizes = self.op.strip_prefix("HGMMA.")?.split('.').next()?.split('x').skip(1);
        let mut size = || sizes.next()?.parse::<u64>().ok();
        let (columns, depth) = (size()?, size()?);
        Some(LEAST_PRODUCT.max(16 * columns * depth / QUARTER_MACS))
    }

    fn latency(&self) -> u64 {
        let found = LATENCIES.iter().find(|(op, _)| self.is(op));
        found.map_or(OTHER_LATENCY, |(_, clocks)| *clocks)
    }

    /// The pipe it takes, for how long.
    fn pipe(&self) -> Option<(Pipe, u64)> {
        if let Some(clocks) = self.product_clocks() {
            return Some((Pipe::Tensor, clocks));
        }
        let (_, pipe, clocks) = PIPES.iter().find(|(ops, ..)| ops.iter().any(|op| self.is(op)))?;
        Some((*pipe, *clocks))
    }
}

#[derive(Default)]
struct Warp {
    at: usize,
    ready: u64,
    rounds: usize,
    boards: [u64; NUM_SCOREBOARDS],
    /// Until the sums of its warpgroup's products are there.
    products: u64,
}

/// Clocks until all warps have ended so many rounds.
fn run(body: &[Instruction], rounds: usize) -> u64 {
    let mut warps: [Warp; WARPS] = Default::default();
    let mut busy: [u64; 4] = [0; 4];
    let (mut clock, mut last) = (0, 0);
    while warps.iter().any(|warp| warp.rounds < rounds) {
        let may_issue = |index: &usize| {
            let warp = &warps[*index];
            if warp.rounds == rounds || warp.ready > clock {
                return false;
            }
            let one = &body[warp.at];
            if one.is("WARPGROUP.DEPBAR") && warp.products > clock {
                return false;
            }
            let mut boards = warp.boards.iter().enumerate();
            let waits = boards.any(|(board, &until)| one.waits >> board & 1 == 1 && until > clock);
            let is_busy = one.pipe().is_some_and(|(pipe, _)| busy[pipe as usize] > clock);
            !waits && !is_busy
        };
        let next = (0..WARPS).map(|step| (last + step) % WARPS).find(may_issue);
        if let Some(index) = next {
            let warp = &mut warps[index];
            let one = &body[warp.at];
            let mut until = clock + one.latency();
            if let Some((pipe, clocks)) = one.pipe() {
                busy[pipe as usize] = clock + clocks;
                until += if pipe == Pipe::Shared { clocks } else { 0 };
            }
            if let Some(clocks) = one.product_clocks() {
                until = clock + clocks + PRODUCT_LATENCY;
                warp.products = until;
            }
            for (board, until) in [(one.writes, until), (one.reads, clock + READ_LATENCY)] {
                if let Some(set) = warp.boards.get_mut(board) {
                    *set = until.max(*set);
                }
            }
            warp.ready = clock + one.stall;
            warp.at += 1;
            if warp.at == body.len() {
                (warp.at, warp.rounds) = (0, warp.rounds + 1);
            }
            last = index;
        }
        clock += 1;
    }
    clock
}

/// Clocks of a round of all warps, which need not get as much as each other: as many more rounds take so much more.
fn of_a_round(body: &[Instruction]) -> u64 {
    let half = ROUNDS / 2;
    let clocks = (run(body, ROUNDS) - run(body, half)) as f64;
    (clocks / (ROUNDS - half) as f64).round() as u64
}

#[test]
fn a_chain_of_loads_takes_longer_than_loads_together() {
    let line = |text: &str, stall: u64, writes: u64, waits: u64| {
        Instruction::of(text, stall | writes << 5 | 7 << 8 | waits << 11)
    };
    let chain = [
        line("LDS R1, [R0] ;", 1, 0, 0),
        line("FADD R1, R1, R1 ;", 4, 7, 1),
        line("LDS R2, [R0] ;", 1, 0, 0),
        line("FADD R2, R2, R2 ;", 4, 7, 1),
    ];
    let together = [&chain[0], &chain[2], &chain[1], &chain[3]].map(Clone::clone);
    let [chain, together] = [chain, together].map(|body| run(&body, 1));
    assert!(chain > together + 20, "{chain} and {together} clocks");
}

#[test]
fn a_listing_is_read_with_its_control_bits() {
    let code = Code::parse(
        ".L_x_1:\n        /*0010*/              @!P0 LDS R4, [R8] ;   /* 0x000000200404723c */\n\
         \x20                                       /* 0x000fe60000001804 */\n\
         \x20       /*0020*/               @P1 BRA `(.L_x_1) ;   /* 0x0000002004047947 */\n\
         \x20                                       /* 0x000fea0003800000 */\n",
    );
    let [load, branch] = &code.instructions[..] else { panic!("{}", code.instructions.len()) };
    assert_eq!((load.op.as_str(), load.stall, load.writes, load.waits), ("LDS", 3, 7, 0));
    assert_eq!((branch.stall, branch.label.as_deref()), (5, Some(".L_x_1")));
    assert_eq!(code.body(&["LDS"]).map(|(first, body)| (first, body.len())), Some((0, 2)));
}
