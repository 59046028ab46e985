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
pub(crate) enum Scene {
    /// Four tiles of eight units in blocks of eleven: whole tiles and parts, a ring that wraps; x is one
    /// chunk.
    Short,
    /// Two tiles of twenty units in blocks of eight: three parts to a tile, several chunks.
    Long,
    /// A product that adds to the residual stream, and one of the sum.
    Sum,
}

/// A kernel that is broken: `replacement` stands in `file` where `text` did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mutant {
    pub(crate) name: &'static str,
    pub(crate) found: Found,
    pub(crate) scene: Scene,
    pub(crate) file: &'static str,
    pub(crate) text: &'static str,
    pub(crate) replacement: &'static str,
}

/// On every architecture.
pub(crate) const MUTANTS: [Mutant; 22] = [
    Mutant {
        name: "no wait for a full stage",
        found: Found::Stopped,
        scene: Scene::Short,
        file: "gemm_ring.cuh",
        text: "mbar_wait(&ring.full[at.stage], at.parity);",
        replacement: "",
    },
    Mutant {
        name: "no wait for an empty stage",
        found: Found::Stopped,
        scene: Scene::Short,
        file: "gemm_ring.cuh",
        text: "mbar_wait(&ring.empty[at.stage], at.parity ^ 1);",
        replacement: "",
    },
    Mutant {
        name: "a warp too few empties a stage",
        found: Found::Stopped,
        scene: Scene::Short,
        file: "gemm_ring.cuh",
        text: "mbar_init(&ring.empty[stage], CONSUMER_WARPS)",
        replacement: "mbar_init(&ring.empty[stage], CONSUMER_WARPS - 1)",
    },
    Mutant {
        name: "a warp too many empties a stage",
        found: Found::Stopped,
        scene: Scene::Short,
        file: "gemm_ring.cuh",
        text: "mbar_init(&ring.empty[stage], CONSUMER_WARPS)",
        replacement: "mbar_init(&ring.empty[stage], CONSUMER_WARPS + 1)",
    },
    Mutant {
        name: "the parity of the ring stays",
        found: Found::Stopped,
        scene: Scene::Short,
        file: "gemm_ring.cuh",
        text: "at.parity ^= 1;",
        replacement: "",
    },
    Mutant {
        name: "no barrier before x is read",
        found: Found::Race,
        scene: Scene::Short,
        file: "gemm_input.cuh",
        text: "            store_group(x + row * X_STRIDE, k, group);\n        }\n    }\n    consumer_barrier();",
        replacement: "            store_group(x + row * X_STRIDE, k, group);\n        }\n    }",
    },
    Mutant {
        name: "no barrier before x is replaced",
        found: Found::Race,
        scene: Scene::Long,
        file: "gemm_input.cuh",
        text: "    consumer_barrier();\n    const uint32_t k_first",
        replacement: "    const uint32_t k_first",
    },
    Mutant {
        name: "no barrier between two slices",
        found: Found::Race,
        scene: Scene::Short,
        file: "gemm_tile.cuh",
        text: "        store_sums(sums, half, false);\n    }\n    consumer_barrier();",
        replacement: "        store_sums(sums, half, false);\n    }",
    },
    Mutant {
        name: "no barrier before the slices' sums are read",
        found: Found::Race,
        scene: Scene::Short,
        file: "gemm_tile.cuh",
        text: "        store_sums(sums, half, true);\n    }\n    consumer_barrier();",
        replacement: "        store_sums(sums, half, true);\n    }",
    },
    Mutant {
        name: "no barrier before the next tile's sums",
        found: Found::Race,
        scene: Scene::Short,
        file: "gemm.cu",
        text: "            p.arrivals[tile] = 0;\n        }\n    }\n    consumer_barrier();",
        replacement: "            p.arrivals[tile] = 0;\n        }\n    }",
    },
    Mutant {
        name: "no barrier before a part is announced",
        found: Found::Race,
        scene: Scene::Short,
        file: "gemm_split.cuh",
        text: "    consumer_barrier();\n    if (thread_index() == 0) {",
        replacement: "    if (thread_index() == 0) {",
    },
    Mutant {
        name: "a part is announced without order",
        found: Found::Race,
        scene: Scene::Short,
        file: "gemm_split.cuh",
        text: "atomic_add_acq_rel",
        replacement: "atomic_add",
    },
    Mutant {
        name: "a tile waits for a part too many",
        found: Found::Wrong,
        scene: Scene::Short,
        file: "gemm_split.cuh",
        text: "first_cta(split, tile) + 1;",
        replacement: "first_cta(split, tile) + 2;",
    },
    Mutant {
        name: "a tile does not wait for its last part",
        found: Found::Wrong,
        scene: Scene::Long,
        file: "gemm_split.cuh",
        text: "num_parts(split, tile) - 1;",
        replacement: "num_parts(split, tile) - 2;",
    },
    Mutant {
        name: "the last part to arrive is added first",
        found: Found::Wrong,
        scene: Scene::Long,
        file: "gemm_split.cuh",
        text: "    float sum = part_slot(p, cta, true)[place];\n    for (uint32_t i = 1; i < parts; ++i) {\n        sum += part_slot(p, cta + i, false)[place];",
        replacement: "    float sum = 0.0f;\n    for (uint32_t j = 0; j < parts; ++j) {\n        const uint32_t i = (block_index() - cta + j) % parts;\n        sum += part_slot(p, cta + i, i == 0)[place];",
    },
    Mutant {
        name: "the counter stays",
        found: Found::Wrong,
        scene: Scene::Short,
        file: "gemm.cu",
        text: "            p.arrivals[tile] = 0;\n",
        replacement: "",
    },
    Mutant {
        name: "another swizzle",
        found: Found::Wrong,
        scene: Scene::Short,
        file: "image.cuh",
        text: "(row & 7)",
        replacement: "(row & 3)",
    },
    Mutant {
        name: "the embedding's squares lack a lane's",
        found: Found::Wrong,
        scene: Scene::Short,
        file: "squares.cuh",
        text: "LANES / 2",
        replacement: "LANES / 4",
    },
    Mutant {
        name: "the squares of a tile lack its upper half",
        found: Found::Wrong,
        scene: Scene::Sum,
        file: "gemm_epilogue.cuh",
        text: "fmaf(b, b, a * a)",
        replacement: "a * a",
    },
    Mutant {
        name: "the squares are those of what is added",
        found: Found::Wrong,
        scene: Scene::Sum,
        file: "gemm_epilogue.cuh",
        text: "    return *to += v;",
        replacement: "    *to += v;\n    return v;",
    },
    Mutant {
        name: "no wait for the kernel before",
        found: Found::Stopped,
        scene: Scene::Short,
        file: "gemm.cu",
        text: "    grid_wait();\n",
        replacement: "",
    },
    Mutant {
        name: "the input is read before the kernel before has ended",
        found: Found::Wrong,
        scene: Scene::Short,
        file: "gemm.cu",
        text: "    grid_wait();\n    if (HAS_NORM && split.first < split.last) {\n        norm_factors(p, matrix_k(p), shared.factors);\n    }\n",
        replacement: "    if (HAS_NORM && split.first < split.last) {\n        norm_factors(p, matrix_k(p), shared.factors);\n    }\n    grid_wait();\n",
    },
];

/// Where there are no bulk copies.
pub(crate) const OLD_MUTANTS: [Mutant; 2] = [
    Mutant {
        name: "an arrival that does not wait for its copies",
        found: Found::Wrong,
        scene: Scene::Short,
        file: "gemm_ring.cuh",
        text: "async_arrive(full);",
        replacement: "mbar_arrive(full);",
    },
    Mutant {
        name: "a lane too few fills a stage",
        found: Found::Stopped,
        scene: Scene::Short,
        file: "gemm_ring.cuh",
        text: "HAS_BULK_COPY ? 1 : 32",
        replacement: "HAS_BULK_COPY ? 1 : 31",
    },
];
