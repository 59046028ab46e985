//! Kernels that are broken in one place, and how that shows.

/// How a broken kernel is found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// Other results.
    Wrong,
    /// The machine's message: threads that wait for ever, too many arrivals.
    Stopped,
    /// ThreadSanitizer's.
    Race,
}

/// An embedding and products of it that overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setup {
    /// Four tiles of eight units in blocks of eleven: whole tiles and parts, a ring that wraps; x is one
    /// segment.
    Short,
    /// Two tiles of twenty units in blocks of eight, twice: segments, in the old kernels of several chunks, and several
    /// parts to a tile. x is normalised, then copied.
    Long,
    /// A product that adds to the residual stream, and one of the sum.
    Sum,
    /// A head of four tiles for three blocks, with three segments.
    Head,
}

/// A kernel that is broken: `replacement` stands in `file` where `text` did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mutant {
    pub(crate) name: &'static str,
    pub(crate) found: Found,
    pub(crate) setup: Setup,
    pub(crate) file: &'static str,
    pub(crate) text: &'static str,
    pub(crate) replacement: &'static str,
}

/// On every architecture.
pub(crate) const MUTANTS: [Mutant; 30] = [
    Mutant {
        name: "no wait for a full stage",
        found: Found::Stopped,
        setup: Setup::Short,
        file: "gemm/ring.cuh",
        text: "mbar_wait(&ring.full[at.stage], at.parity);",
        replacement: "",
    },
    Mutant {
        name: "no wait for an empty stage",
        found: Found::Stopped,
        setup: Setup::Short,
        file: "gemm/ring.cuh",
        text: "mbar_wait(&ring.empty[at.stage], at.parity ^ 1);",
        replacement: "",
    },
    Mutant {
        name: "a warp too few empties a stage",
        found: Found::Stopped,
        setup: Setup::Short,
        file: "gemm/ring.cuh",
        text: "mbar_init(&ring.empty[stage], CONSUMER_WARPS)",
        replacement: "mbar_init(&ring.empty[stage], CONSUMER_WARPS - 1)",
    },
    Mutant {
        name: "a warp too many empties a stage",
        found: Found::Stopped,
        setup: Setup::Short,
        file: "gemm/ring.cuh",
        text: "mbar_init(&ring.empty[stage], CONSUMER_WARPS)",
        replacement: "mbar_init(&ring.empty[stage], CONSUMER_WARPS + 1)",
    },
    Mutant {
        name: "the parity of the ring stays",
        found: Found::Stopped,
        setup: Setup::Short,
        file: "gemm/ring.cuh",
        text: "at.parity ^= 1;",
        replacement: "",
    },
    Mutant {
        name: "no barrier before x is read",
        found: Found::Race,
        setup: Setup::Short,
        file: "gemm/input.cuh",
        text: "        store_batch(p, place, row, batch, weight, factors, x);\n    }\n    consumer_barrier();",
        replacement: "        store_batch(p, place, row, batch, weight, factors, x);\n    }\n",
    },
    Mutant {
        name: "no barrier between the factors and x",
        found: Found::Race,
        setup: Setup::Short,
        file: "gemm/input.cuh",
        text: "    consumer_barrier();\n    store_batch(p, place, place.first_row",
        replacement: "    store_batch(p, place, place.first_row",
    },
    Mutant {
        name: "no barrier after x was copied",
        found: Found::Race,
        setup: Setup::Sum,
        file: "gemm/input.cuh",
        text: "        copy_rows(p, k_len, place, x);\n        consumer_barrier();",
        replacement: "        copy_rows(p, k_len, place, x);",
    },
    Mutant {
        name: "no wait for the copies of x",
        found: Found::Wrong,
        setup: Setup::Sum,
        file: "gemm/input.cuh",
        text: "    async_wait<0>();\n",
        replacement: "",
    },
    Mutant {
        name: "no barrier between two slices",
        found: Found::Race,
        setup: Setup::Short,
        file: "gemm/tile.cuh",
        text: "        leave_sums(sums, half);\n    }\n    consumer_barrier();",
        replacement: "        leave_sums(sums, half);\n    }",
    },
    Mutant {
        name: "no barrier before the slices' sums are read",
        found: Found::Race,
        setup: Setup::Short,
        file: "gemm/tile.cuh",
        text: "        add_sums(sums, half);\n    }\n    consumer_barrier();",
        replacement: "        add_sums(sums, half);\n    }",
    },
    Mutant {
        name: "a lane's sums are written over before it has read them",
        found: Found::Race,
        setup: Setup::Short,
        file: "gemm/tile.cuh",
        text: "        warp_sync();  // all lanes",
        replacement: "        // all lanes",
    },
    Mutant {
        name: "no barrier before the next tile's sums",
        found: Found::Race,
        setup: Setup::Short,
        file: "gemm/gemm.cu",
        text: "    consumer_barrier();\n    reduce_slices",
        replacement: "    reduce_slices",
    },
    Mutant {
        name: "a part is counted before all warps have written it",
        found: Found::Race,
        setup: Setup::Short,
        file: "gemm/parts.cuh",
        text: "mbar_init(handover.written, CONSUMER_WARPS)",
        replacement: "mbar_init(handover.written, CONSUMER_WARPS - 1)",
    },
    Mutant {
        name: "a part is counted before it is written",
        found: Found::Race,
        setup: Setup::Short,
        file: "gemm/parts.cuh",
        text: "            mbar_wait(handover.written, parity);\n",
        replacement: "",
    },
    Mutant {
        name: "nobody waits for the counter",
        found: Found::Race,
        setup: Setup::Short,
        file: "gemm/parts.cuh",
        text: "    mbar_wait(handover.counted, pending.parity);\n",
        replacement: "",
    },
    Mutant {
        name: "the parity of the counter stays",
        found: Found::Race,
        setup: Setup::Long,
        file: "gemm/parts.cuh",
        text: "    pending.parity ^= 1;\n",
        replacement: "",
    },
    Mutant {
        name: "a part is counted without order",
        found: Found::Race,
        setup: Setup::Short,
        file: "gemm/parts.cuh",
        text: "atomic_add_acq_rel",
        replacement: "atomic_add",
    },
    Mutant {
        name: "a tile waits for a unit too many",
        found: Found::Wrong,
        setup: Setup::Short,
        file: "gemm/parts.cuh",
        text: "before + own == split.k_units",
        replacement: "before + own == split.k_units + 1",
    },
    Mutant {
        name: "a tile does not wait for its last part",
        found: Found::Wrong,
        setup: Setup::Long,
        file: "gemm/parts.cuh",
        text: "before + own == split.k_units",
        replacement: "before + 2 * own >= split.k_units",
    },
    Mutant {
        name: "the order of the parts depends on who adds them",
        found: Found::Wrong,
        setup: Setup::Long,
        file: "gemm/parts.cuh",
        text: "                sums[j][0] = is_part[i] ? sums[j][0] + loaded[i][j][0] : sums[j][0];",
        replacement: "                const uint32_t o = block_index() % 2 ? SUM_PARTS - 1 - i : i;\n                sums[j][0] = is_part[o] ? sums[j][0] + loaded[o][j][0] : sums[j][0];",
    },
    Mutant {
        name: "the counter stays",
        found: Found::Wrong,
        setup: Setup::Short,
        file: "gemm/gemm.cu",
        text: "        p.arrivals[pending.tile] = 0;\n",
        replacement: "",
    },
    Mutant {
        name: "a segment of the head forgets those before",
        found: Found::Wrong,
        setup: Setup::Head,
        file: "gemm/carry.cuh",
        text: "carried.of[i][j] + tile_sum(",
        replacement: "tile_sum(",
    },
    Mutant {
        name: "another swizzle",
        found: Found::Wrong,
        setup: Setup::Short,
        file: "common/image.cuh",
        text: "(row & 7)",
        replacement: "(row & 3)",
    },
    Mutant {
        name: "the embedding's squares lack a lane's",
        found: Found::Wrong,
        setup: Setup::Short,
        file: "common/squares.cuh",
        text: "LANES / 2",
        replacement: "LANES / 4",
    },
    Mutant {
        name: "the squares of a tile lack its upper half",
        found: Found::Wrong,
        setup: Setup::Sum,
        file: "gemm/epilogue.cuh",
        text: "fmaf(b, b, a * a)",
        replacement: "a * a",
    },
    Mutant {
        name: "the squares are those of what is added",
        found: Found::Wrong,
        setup: Setup::Sum,
        file: "gemm/epilogue.cuh",
        text: "    return *to += v;",
        replacement: "    *to += v;\n    return v;",
    },
    Mutant {
        name: "the next kernel begins before the one before has ended",
        found: Found::Stopped,
        setup: Setup::Short,
        file: "gemm/ring.cuh",
        text: "    grid_wait();\n    grid_launch_dependents();",
        replacement: "    grid_launch_dependents();",
    },
    Mutant {
        name: "no wait for the kernel before",
        found: Found::Wrong,
        setup: Setup::Short,
        file: "gemm/gemm.cu",
        text: "    grid_wait();\n    stage(",
        replacement: "    stage(",
    },
    Mutant {
        name: "the input is read before the kernel before has ended",
        found: Found::Wrong,
        setup: Setup::Short,
        file: "gemm/gemm.cu",
        text: "    grid_wait();\n    stage(p, matrix_k(p), range, weight, true, shared.factors, shared.x);\n",
        replacement: "    stage(p, matrix_k(p), range, weight, true, shared.factors, shared.x);\n    grid_wait();\n",
    },
];

/// Where there are no bulk copies, and a segment is staged in chunks.
pub(crate) const OLD_MUTANTS: [Mutant; 4] = [
    Mutant {
        name: "no barrier before x is replaced",
        found: Found::Race,
        setup: Setup::Long,
        file: "gemm/input.cuh",
        text: "    consumer_barrier();\n    store_batch(p, place, place.first_row",
        replacement: "    store_batch(p, place, place.first_row",
    },
    Mutant {
        name: "no barrier before x is copied over",
        found: Found::Race,
        setup: Setup::Long,
        file: "gemm/input.cuh",
        text: "        if (!is_first) {\n            consumer_barrier();\n        }\n",
        replacement: "",
    },
    Mutant {
        name: "an arrival that does not wait for its copies",
        found: Found::Wrong,
        setup: Setup::Short,
        file: "gemm/ring.cuh",
        text: "async_arrive(full);",
        replacement: "mbar_arrive(full);",
    },
    Mutant {
        name: "a lane too few fills a stage",
        found: Found::Stopped,
        setup: Setup::Short,
        file: "gemm/ring.cuh",
        text: "HAS_BULK_COPY ? 1 : 32",
        replacement: "HAS_BULK_COPY ? 1 : 31",
    },
];
