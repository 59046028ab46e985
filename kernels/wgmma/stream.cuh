// What streams through shared memory: a stage of the ring has a unit of each tile of a pair, and the activations that
// meet them. A thread asks for weights as fast as memory delivers, a warp copies the rows or a thread asks for them, the
// others empty the ring; of each stage a `full` barrier says that its weights are there, one of `rows` that its rows are, and
// an `empty` one that all have read them. Weights depend on no other kernel, so they are asked for before the kernel in front
// has ended.
#pragma once

constexpr uint32_t CONSUMER_WARPS = PAIR_TILES * WARPGROUP_WARPS;
// Few rows are there sooner if they are copied by lanes; of many a thread asks for runs.
constexpr bool COPIES_ROWS = ROWS <= 64;
// One warp that copies is too slow for 64.
constexpr uint32_t COPY_WARPS = ROWS == 64 ? 2 : 1;

constexpr uint32_t X_BYTES = X_BLOCKS * X_BLOCK_BYTES;
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
// Every lane that copies rows, or the thread that asks for them.
constexpr uint32_t ROWS_ARRIVALS = COPIES_ROWS ? COPY_WARPS * 32 : 1;

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
    ring_init(stream.ring, CLUSTER * CONSUMER_WARPS);
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

// Of each 64 rows, what meets a unit of weights: so many bytes of each, X_BLOCKS times.
DEVICE const uint8_t* rows_at(const GemmParams& p, uint32_t k_len, uint32_t k_unit, uint32_t sixty_four) {
    const uint64_t unit = uint64_t(sixty_four) * row_units(k_len) + k_unit * X_BLOCKS;
    return (const uint8_t*)p.input + unit * UNIT_BYTES;
}

#if ROWS <= 64
// Lanes that copy a row's elements of a unit, and rows that all copy side by side.
constexpr uint32_t ROW_LANES = UNIT_K / 8;
constexpr uint32_t ROWS_SIDE_BY_SIDE = ROWS_ARRIVALS / ROW_LANES;

// This lane's share of what meets a unit.
DEVICE void bring_rows(const GemmParams& p, uint32_t k_len, uint32_t k_unit, uint8_t* x, uint64_t* arrived) {
    constexpr uint32_t BLOCK_LANES = X_ROW_BYTES / CHUNK_BYTES;
    const uint32_t lane = thread_index() % ROWS_ARRIVALS;
    const uint32_t block = lane % ROW_LANES / BLOCK_LANES;
    const uint32_t first = lane / ROW_LANES;
    const uint32_t offset = first * X_ROW_BYTES + lane % BLOCK_LANES * CHUNK_BYTES;
    const uint8_t* from = rows_at(p, k_len, k_unit, 0) + block * UNIT_BYTES + offset;
    x += block * X_BLOCK_BYTES + offset;
    for (uint32_t row = first; row < p.num_rows; row += ROWS_SIDE_BY_SIDE) {
        async_copy16(x, from);
        x += ROWS_SIDE_BY_SIDE * X_ROW_BYTES;
        from += ROWS_SIDE_BY_SIDE * X_ROW_BYTES;
    }
    async_arrive(arrived);
}
#else
// All that meets a unit is to arrive; this CTA asks for it, or for its share of each 64 rows, which the other CTA gets too.
// That may get it before it has said how much will arrive.
DEVICE void bring_rows(
    const GemmParams& p, uint32_t k_len, uint32_t k_unit, bool is_shared, uint8_t* x, uint64_t* arrived) {
    constexpr uint32_t SHARE_ROWS = UNIT_OUTPUTS / CLUSTER;
    mbar_expect(arrived, p.num_rows * X_BLOCKS * X_ROW_BYTES);
    const uint32_t each = is_shared ? SHARE_ROWS : UNIT_OUTPUTS;
    const uint32_t own = is_shared ? cluster_rank() * SHARE_ROWS : 0;
    for (uint32_t row = own; row < p.num_rows; row += UNIT_OUTPUTS) {
        const uint8_t* from = rows_at(p, k_len, k_unit, row / UNIT_OUTPUTS) + own * X_ROW_BYTES;
        const uint32_t bytes = minimum(p.num_rows - row, each) * X_ROW_BYTES;
        UNROLL
        for (uint32_t block = 0; block < X_BLOCKS; ++block) {
            uint8_t* to = x + block * X_BLOCK_BYTES + row * X_ROW_BYTES;
            const uint8_t* rows = from + block * UNIT_BYTES;
            if (is_shared) {
                bulk_copy_to_cluster<CLUSTER>(to, rows, bytes, arrived);
            } else {
                bulk_copy_kept(to, rows, bytes, arrived);
            }
        }
    }
}
#endif

// The whole life of who brings the rows. Like the one before they must not join a barrier of the CTA any more: they
// may wait for a consumer that waits there.
DEVICE void produce_rows(const GemmParams& p, uint32_t k_len, const Stream& stream, const Order& order) {
    if (!COPIES_ROWS && lane_index() != 0) {
        return;
    }
    grid_wait();
    Walk walk = walk_from_first(order);
    for (; walk.unit < order.last; step(order, walk)) {
        wait_until_empty(stream.ring, walk.at);
        uint8_t* x = x_of(stage_at(stream.ring, walk.at));
        uint64_t* arrived = &stream.rows[walk.at.stage];
#if ROWS <= 64
        bring_rows(p, k_len, walk.k_unit, x, arrived);
#else
        bring_rows(p, k_len, walk.k_unit, walk.unit - order.first < order.num_shared, x, arrived);
#endif
    }
    if constexpr (COPIES_ROWS) {
        async_commit();
        async_wait<0>();
    } else if (order.num_shared > 0) {
        // Until the other CTA has given back what it had of this one's ring: then nothing comes to its shared memory any more.
        for (uint32_t stage = 0; stage < STAGES; ++stage, advance(walk.at)) {
            wait_until_empty(stream.ring, walk.at);
        }
    }
}

// Waits for the unit at the cursor.
DEVICE uint8_t* acquire(const Stream& stream, const Cursor& at) {
    mbar_wait(&stream.ring.full[at.stage], at.parity);
    mbar_wait(&stream.rows[at.stage], at.parity);
    // Lanes may leave the wait one by one; what follows takes whole warps.
    warp_sync();
    if constexpr (COPIES_ROWS) {
        // Like ordinary stores, which products do not see by themselves.
        fence_async_proxy();
    }
    return stage_at(stream.ring, at);
}

// By every consumer warp of a cluster, when it has read the unit at the cursor: a stage that both CTAs fill waits for both.
DEVICE void release_to_cluster(const Ring& ring, bool is_shared, Cursor& at) {
    warp_sync();
    if (lane_index() < CLUSTER) {
        mbar_arrive_at(&ring.empty[at.stage], is_shared ? lane_index() : cluster_rank());
    }
    advance(at);
}
