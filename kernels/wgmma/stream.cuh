// What streams through shared memory: a stage of the ring has a unit of each tile of a pair, and the activations that
// meet them. A thread asks for weights as fast as memory delivers, warps copy the rows, the others empty the ring; of
// each stage a `full` barrier says that its weights are there, one of `rows` that its rows are, and an `empty` one that
// all have read them. Weights depend on no other kernel, so they are asked for before the kernel in front has ended.
#pragma once

constexpr uint32_t CONSUMER_WARPS = PAIR_TILES * WARPGROUP_WARPS;
// One warp that copies is too slow for many rows.
constexpr uint32_t COPY_WARPS = ROWS <= 32 ? 1 : 2;

constexpr uint32_t X_BYTES = UNIT_K / X_ROW_K * X_BLOCK_BYTES;
constexpr uint32_t STAGE_BYTES = PAIR_TILES * UNIT_BYTES + X_BYTES;
// As much as fits: what a ring holds when the kernel in front ends is time for what lies between the two.
constexpr uint32_t RING_BYTES = 200 * 1024;
constexpr uint32_t MOST_STAGES = 11;
constexpr uint32_t STAGES = minimum(RING_BYTES / STAGE_BYTES, MOST_STAGES);
static_assert(2 <= STAGES, "stages that overlap");
// Units that are asked for and not there yet, at most: enough for the memory's latency. More of them would only keep
// everything else that this and the other multiprocessors load waiting: above all what the kernel in front still does
// while the first round fills the ring. Not more than stages: a barrier tells this round from the one before it, and
// from no earlier one.
constexpr uint32_t UNITS_UNDER_WAY = minimum(4u, STAGES);
constexpr uint32_t FIRST_UNDER_WAY = 2;

// The thread that asks for weights.
constexpr uint32_t FULL_ARRIVALS = 1;
// Every lane that copies rows.
constexpr uint32_t ROWS_ARRIVALS = COPY_WARPS * 32;

#include "gemm/stages.cuh"

struct Stream {
    Ring ring;
    uint64_t* rows;
};

// By one thread, before a barrier of the whole CTA.
DEVICE void stream_init(const Stream& stream) {
    for (uint32_t stage = 0; stage < STAGES; ++stage) {
        mbar_init(&stream.rows[stage], ROWS_ARRIVALS);
    }
    ring_init(stream.ring);
}

DEVICE uint8_t* stage_at(const Ring& ring, const Cursor& at) {
    return ring.stages + at.stage * STAGE_BYTES;
}

// Of a stage, the activations.
template <class Byte>
DEVICE Byte* x_of(Byte* stage) {
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

// The whole life of the thread that asks for weights: this CTA's units of the image. The next kernel may begin when all
// are asked for: what its ring takes would before be taken from this one.
DEVICE void produce_weights(const GemmParams& p, const Ring& ring, const Order& order) {
    Cursor landed = {0, 0};
    uint32_t num_landed = 0;
    for (Walk walk = walk_from_first(order); walk.unit < order.last; step(order, walk)) {
        wait_until_empty(ring, walk.at);
        const uint32_t asked = walk.unit - order.first;
        const uint32_t most = asked < STAGES ? FIRST_UNDER_WAY : UNITS_UNDER_WAY;
        if (asked >= num_landed + most) {
            mbar_wait(&ring.full[landed.stage], landed.parity);
            advance(landed);
            ++num_landed;
        }
        ask_for_weights(ring, p.weights, order, walk);
    }
    // A few units may all be asked for before the kernel in front has ended.
    grid_wait();
    grid_launch_dependents();
}

// Lanes that copy a row's elements of a unit, and rows that all copy side by side.
constexpr uint32_t ROW_LANES = UNIT_K / 8;
constexpr uint32_t ROWS_SIDE_BY_SIDE = ROWS_ARRIVALS / ROW_LANES;

// Copies this lane's share of the rows of a unit, zeros beyond k.
DEVICE void copy_rows(const GemmParams& p, uint32_t k_len, uint32_t k_unit, uint8_t* x, uint64_t* arrived) {
    const uint32_t lane = thread_index() % ROWS_ARRIVALS;
    const uint32_t element = lane % ROW_LANES * 8;
    const uint32_t k = k_unit * UNIT_K + element;
    const bool is_inside = k < k_len;
    const uint32_t first = lane / ROW_LANES;
    const uint16_t* from = (const uint16_t*)p.input + (is_inside ? k : 0) + uint64_t(first) * k_len;
    for (uint32_t row = first; row < p.num_rows; row += ROWS_SIDE_BY_SIDE) {
        async_copy16_zero(x + x_offset(row, element), from, is_inside);
        from += ROWS_SIDE_BY_SIDE * k_len;
    }
    async_arrive(arrived);
}

// The whole life of the warps that copy rows. Like the one before they must not join a barrier of the CTA any more: they
// may wait for a consumer that waits there.
DEVICE void produce_rows(const GemmParams& p, uint32_t k_len, const Stream& stream, const Order& order) {
    grid_wait();
    for (Walk walk = walk_from_first(order); walk.unit < order.last; step(order, walk)) {
        wait_until_empty(stream.ring, walk.at);
        uint8_t* x = x_of(stage_at(stream.ring, walk.at));
        copy_rows(p, k_len, walk.k_unit, x, &stream.rows[walk.at.stage]);
    }
    async_commit();
    async_wait<0>();
}

// Waits for the unit at the cursor.
DEVICE uint8_t* acquire(const Stream& stream, const Cursor& at) {
    mbar_wait(&stream.ring.full[at.stage], at.parity);
    mbar_wait(&stream.rows[at.stage], at.parity);
    // Lanes may leave the wait one by one; what follows takes whole warps.
    warp_sync();
    // Rows were copied like ordinary stores, which products do not see by themselves.
    fence_async_proxy();
    return stage_at(stream.ring, at);
}
