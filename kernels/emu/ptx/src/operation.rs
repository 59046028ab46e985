//! What instructions are once they are read: everything that a text leaves to names is resolved here.

/// Where a thread keeps a register. All hold 64 bits; narrower ones have zeros above, predicates are 0 or 1.
pub(crate) type Slot = u32;

/// Slots that every thread begins with.
pub(crate) const THREAD: Slot = 0;
pub(crate) const NUM_THREADS: Slot = 1;
pub(crate) const BLOCK: Slot = 2;
pub(crate) const NUM_BLOCKS: Slot = 3;
pub(crate) const RANK: Slot = 4;
pub(crate) const FIRST_FREE: Slot = 5;

/// Threads of a warp.
pub(crate) const LANES: usize = 32;

/// What an instruction reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Source {
    Slot(Slot),
    Value(u64),
}

/// A place in memory: a sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) base: Source,
    pub(crate) offset: u64,
}

/// A kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    Shared,
    Param,
    /// Global, or shared in a window of its own.
    Generic,
}

/// One instruction.
#[derive(Debug)]
pub(crate) struct Instruction {
    /// A predicate, and the value of it that lets the instruction happen.
    pub(crate) guard: Option<(Slot, bool)>,
    pub(crate) operation: Operation,
    /// Line of the text, from 1, and the statement there.
    pub(crate) line: usize,
    pub(crate) text: String,
}

impl Instruction {
    /// The product of a warpgroup that it is, if it is one.
    pub(crate) fn product(&self) -> Option<&WarpProduct> {
        match &self.operation {
            Operation::Together(Together::Product(product)) => Some(product),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub(crate) enum Operation {
    Nothing,
    Exit,
    /// To an instruction by its index.
    Branch(usize),
    One(fn(u64) -> u64, Slot, Source),
    Two(fn(u64, u64) -> u64, Slot, [Source; 2]),
    Three(fn(u64, u64, u64) -> u64, Slot, [Source; 3]),
    /// Bits of the first in the second, from a position on, so many.
    Insert {
        to: Slot,
        from: [Source; 4],
        bits: u32,
    },
    /// Parts of so many bits, the lowest first.
    Join {
        to: Slot,
        parts: Vec<Source>,
        bits: u32,
    },
    Split {
        to: Vec<Slot>,
        from: Source,
        bits: u32,
    },
    /// Elements of so many bytes.
    Load {
        space: Space,
        bytes: usize,
        to: Vec<Slot>,
        from: Place,
    },
    Store {
        space: Space,
        bytes: usize,
        to: Place,
        values: Vec<Source>,
    },
    Update {
        space: Space,
        update: fn(u32, u32) -> u32,
        old: Slot,
        at: Place,
        value: Source,
    },
    /// The same place in the shared memory of the block of a rank.
    Map {
        to: Slot,
        address: Source,
        rank: Source,
    },
    Asynchronous(Asynchronous),
    /// Whatever threads do together.
    Together(Together),
}

/// Copies that arrive later, and barriers in shared memory.
#[derive(Debug)]
pub(crate) enum Asynchronous {
    Init {
        at: Place,
        count: Source,
    },
    /// Arrives, after announcing bytes.
    Arrive {
        at: Place,
        state: Slot,
        bytes: Source,
    },
    /// The same at a barrier of any block of the cluster, without bytes or a state.
    ArriveAtPeer(Place),
    /// Whether the phase of a parity is complete.
    Test {
        to: Slot,
        at: Place,
        parity: Source,
    },
    Policy(Slot),
    /// To one place, or with a mask to the same place of each block whose bit is set.
    Bulk {
        to: Place,
        from: Place,
        bytes: Source,
        at: Place,
        mask: Option<Source>,
        policy: Option<Source>,
    },
    /// 16 bytes, of which so many are read and the others are zeros.
    Copy {
        to: Place,
        from: Place,
        bytes: Source,
    },
    Commit,
    /// But for so many groups.
    Wait(u64),
    /// Between ordinary stores and what bulk copies and products do.
    Fence,
    /// Once this thread's copies are there; part of the count from the beginning, or an arrival more.
    ArriveBehind {
        at: Place,
        is_counted: bool,
    },
}

/// What all lanes of a warp, or of its mask, come together for.
#[derive(Debug)]
pub(crate) enum Together {
    Shuffle {
        mode: Shuffle,
        to: Slot,
        is_in_range: Option<Slot>,
        value: Source,
        lane: Source,
        clamp: Source,
        mask: Source,
    },
    Ballot {
        to: Slot,
        predicate: Source,
        mask: Source,
    },
    Sync {
        mask: Source,
    },
    Multiply {
        to: [Slot; 4],
        a: [Source; 4],
        b: [Source; 2],
        c: [Source; 4],
    },
    Matrices {
        to: [Slot; 4],
        from: Place,
    },
    /// Threads of the block, or so many of them.
    Barrier {
        id: Source,
        count: Option<Source>,
    },
    /// At the barrier of the cluster's threads.
    ClusterArrive,
    ClusterWait,
    /// Of a warpgroup, of which each warp does its share.
    Product(WarpProduct),
    WarpgroupFence,
    WarpgroupCommit,
    /// But for so many groups.
    WarpgroupWait(u64),
}

/// A product of a warpgroup.
#[derive(Debug)]
pub(crate) struct WarpProduct {
    pub(crate) element: Element,
    pub(crate) sums: Vec<Slot>,
    pub(crate) a: Left,
    /// A descriptor.
    pub(crate) b: Source,
    /// Whether to what the sums were.
    pub(crate) adds: Source,
}

/// What both operands are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    Half,
    E4m3,
}

/// The left operand.
#[derive(Debug)]
pub(crate) enum Left {
    Fragments([Source; 4]),
    Descriptor(Source),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shuffle {
    Up,
    Butterfly,
    Index,
}
