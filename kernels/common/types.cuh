// What several kernels agree on: number formats and the tables that describe the rows of a pass.
// The host has the same structs, field by field: the executor's `params.rs`.
#pragma once

// Number formats; the defines WEIGHT and KV of a variant name one of them.
#define FP8 1
#define FP16 2

// The key of a Row whose results nobody wants.
constexpr uint32_t NO_SEQUENCE = 0xffffffffu;

// Positions in a page of the KV cache.
constexpr uint32_t PAGE_TOKENS = 16;

// One row of a forward pass. It sees the keys of its sequence below `base`, and `base + j` for each set
// bit j of `ancestors`.
struct Row {
    uint32_t token;
    uint32_t position;   // for the rotation
    uint32_t slot;       // where its key and value go, counted from the start of the sequence
    uint32_t base;
    uint64_t ancestors;
    uint32_t sequence;   // row of the page table, or NO_SEQUENCE: it writes nothing to the cache
    uint32_t first;      // of a head on hidden states: the first slot that it sees
};
static_assert(sizeof(Row) == 32, "as on the host");

// Consecutive rows of one sequence that attend together; `num_rows` 0 is an empty place. Keys and values of the sequence's
// first `num_old` positions are older than the pass; it may have more of them.
struct Tile {
    uint32_t first_row;
    uint32_t num_rows;
    uint32_t num_old;
};
static_assert(sizeof(Tile) == 12, "as on the host");

// The largest of some logits and the lowest index that has it.
struct Best {
    float value;
    uint32_t index;
};
static_assert(sizeof(Best) == 8, "as on the host");
