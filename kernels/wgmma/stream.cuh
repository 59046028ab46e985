// What streams through shared memory: a stage of the ring has a unit of each tile of a pair, and, of many rows,
// the activations that meet them. One warp fills it as fast as memory delivers, the others empty it; a `full`
// barrier for each stage says that its bytes are there, an `empty` one that all have read them. Weights depend on
// no other kernel, so they are asked for before the kernel in front has ended.
#pragma once

constexpr uint32_t CONSUMER_WARPS = PAIR_TILES * WARPGROUP_WARPS;

// Few rows are staged by who multiplies them, and normed on the way, a long range of k at a time. Many come as
// halves, with the weights.
constexpr bool IS_STREAMED = ROWS > FEW_ROWS;
constexpr uint32_t X_BYTES = IS_STREAMED ? UNIT_K / X_ROW_K * X_BLOCK_BYTES : 0;
constexpr uint32_t STAGE_BYTES = PAIR_TILES * UNIT_BYTES + X_BYTES;
// With few rows two CTAs fit in a multiprocessor, the next kernel's beside this one's, whose ring then fills early.
constexpr uint32_t RING_BYTES = (ROWS == 8 ? 80 : ROWS == 16 ? 64 : 192) * 1024;
constexpr uint32_t STAGES = RING_BYTES / STAGE_BYTES;
constexpr uint32_t MOST_STAGES = 16;
static_assert(2 <= STAGES && STAGES <= MOST_STAGES, "stages that overlap, and their barriers");

// The thread that asks for weights arrives, and every lane for the rows that it has copied.
constexpr uint32_t FULL_ARRIVALS = IS_STREAMED ? 1 + 32 : 1;

#include "gemm/stages.cuh"

DEVICE uint8_t* stage_at(const Ring& ring, const Cursor& at) {
    return ring.stages + at.stage * STAGE_BYTES;
}

// Of a stage, the activations.
DEVICE uint8_t* x_of(uint8_t* stage) {
    return stage + PAIR_TILES * UNIT_BYTES;
}

// The units of a CTA, one after the other.
struct Walk {
    uint32_t unit;      // of the order
    uint32_t pair;
    uint32_t k_unit;
    Cursor at;
};

DEVICE Walk walk_from_first(const Order& order) {
    const Piece piece = piece_at(order, order.first);
    return {order.first, piece.pair, piece.k_first, {0, 0}};
}

DEVICE void step(const Order& order, Walk& walk) {
    ++walk.unit;
    const bool is_next = walk.k_unit + 1 == order.k_units;
    walk.pair = is_next ? walk.pair + 1 : walk.pair;
    walk.k_unit = is_next ? 0 : walk.k_unit + 1;
    advance(walk.at);
}

// Asks for the weights of a unit. The last pair may have one tile.
DEVICE void ask_for_weights(const Ring& ring, const uint8_t* image, const Order& order, const Walk& walk) {
    const uint32_t tile = walk.pair * PAIR_TILES;
    const uint32_t tiles = minimum(PAIR_TILES, order.tiles - tile);
    uint64_t* full = &ring.full[walk.at.stage];
    mbar_expect(full, tiles * UNIT_BYTES);
    uint8_t* stage = stage_at(ring, walk.at);
    for (uint32_t i = 0; i < tiles; ++i) {
        const uint64_t unit = uint64_t(tile + i) * order.k_units + walk.k_unit;
        bulk_copy(stage + i * UNIT_BYTES, image + unit * UNIT_BYTES, UNIT_BYTES, full);
    }
}

DEVICE void wait_until_empty(const Ring& ring, const Cursor& at) {
    mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
}

#if ROWS > FEW_ROWS
// Lanes that copy a row's elements of a unit, and rows that they copy side by side.
constexpr uint32_t ROW_LANES = UNIT_K / 8;
constexpr uint32_t ROWS_AT_ONCE = 32 / ROW_LANES;
// Copies the rows of a unit, zeros beyond k. Whoever waits for the stage waits for them.
DEVICE void copy_rows(const GemmParams& p, uint32_t k_len, uint32_t k_unit, uint8_t* x, uint64_t* full) {
    const uint32_t element = lane_index() % ROW_LANES * 8;
    const uint32_t k = k_unit * UNIT_K + element;
    const bool is_inside = k < k_len;
    const uint32_t first = lane_index() / ROW_LANES;
    const uint16_t* from = (const uint16_t*)p.input + (is_inside ? k : 0) + uint64_t(first) * k_len;
    for (uint32_t row = first; row < p.num_rows; row += ROWS_AT_ONCE) {
        async_copy16_zero(x + x_offset(row, element), from, is_inside);
        from += ROWS_AT_ONCE * k_len;
    }
    async_arrive(full);
}

// The producer warp's whole life: this CTA's units of the image, and their rows. It must not join a barrier of the
// CTA any more: it may wait for a consumer that waits there.
DEVICE void produce(const GemmParams& p, uint32_t k_len, const Ring& ring, const Order& order) {
    const bool is_leader = lane_index() == 0;
    // What the ring has room for is asked for before the kernel in front has ended.
    const uint32_t early = minimum(order.last, order.first + STAGES);
    Walk weights = walk_from_first(order);
    while (weights.unit < early) {
        if (is_leader) {
            ask_for_weights(ring, p.weights, order, weights);
        }
        step(order, weights);
    }
    grid_wait();
    for (Walk rows = walk_from_first(order); rows.unit < order.last; step(order, rows)) {
        if (rows.unit >= early) {
            wait_until_empty(ring, rows.at);
            if (is_leader) {
                ask_for_weights(ring, p.weights, order, rows);
            }
        }
        copy_rows(p, k_len, rows.k_unit, x_of(stage_at(ring, rows.at)), &ring.full[rows.at.stage]);
    }
    grid_launch_dependents();
    async_commit();
    async_wait<0>();
}
#else
// The same, without rows. The next kernel may begin when all units are asked for: its ring then fills while memory
// has nothing else to do, at this kernel's end, and not before, when what it took would be taken from this one.
DEVICE void produce(const GemmParams& p, uint32_t, const Ring& ring, const Order& order) {
    if (lane_index() != 0) {
        return;
    }
    for (Walk walk = walk_from_first(order); walk.unit < order.last; step(order, walk)) {
        wait_until_empty(ring, walk.at);
        ask_for_weights(ring, p.weights, order, walk);
    }
    // A few units may all be asked for before the kernel in front has ended.
    grid_wait();
    grid_launch_dependents();
}
#endif

// Waits for the unit at the cursor.
DEVICE uint8_t* acquire(const Ring& ring, const Cursor& at) {
    mbar_wait(&ring.full[at.stage], at.parity);
    // Lanes may leave the wait one by one; what follows takes whole warps.
    warp_sync();
    if constexpr (IS_STREAMED) {
        // Rows were copied like ordinary stores, which products do not see by themselves.
        fence_async_proxy();
    }
    return stage_at(ring, at);
}
