// Rows of whole blocks of a prompt with a packed matrix, of e4m3 or halves as they are: y[row][n] = sum over k of rows[row][k] *
// weights[n][k], and what follows it in a layer. Rows come in units, as weights do, so both stream through shared memory by
// bulk copies, and warpgroups multiply them there. The CTAs of a cluster take tiles of outputs beside each other by the same ROWS
// rows, of which each loads a share for all of them: what the L2 cache delivers is predicted to bind. A CTA has all of k: what
// becomes of a row does not depend on the grid or on what other rows there are.
#include "common/prims.cuh"
#include "common/types.cuh"

#include "common/activation.cuh"
#include "common/cluster.cuh"
#include "common/image.cuh"
#include "common/scaling.cuh"
#include "common/squares.cuh"
#include "common/warpgroup.cuh"

#define RAW 1        // f32 [row][n up to whole tiles], without scales and bias
#define RESIDUAL 2   // adds to f32 [row][n]
#define SWIGLU 3     // f16 [row][n / 2]

struct MultiplyParams {
    const uint8_t* weights;   // units of [n][k]
    const uint8_t* rows;      // units of [place][k], in the same format
    Scaling scaling;          // of places, not of rows, and of FP8 alone, but for the bias; RAW: unused
    void* output;
    float* squares;           // RESIDUAL: of squares.cuh, of the output
    uint32_t n;
    uint32_t k_units;         // of a tile
    uint32_t first;           // place of the first row
    uint32_t num_rows;
};
static_assert(sizeof(MultiplyParams) == 72, "as on the host");

// CTAs of a cluster, and tiles of outputs of each.
constexpr uint32_t CLUSTER = 2;
constexpr uint32_t PAIR_TILES = 2;
constexpr uint32_t CONSUMER_WARPS = PAIR_TILES * WARPGROUP_WARPS;
// A warpgroup more, of which one thread loads, and which leaves its registers to the others: each quarter of a multiprocessor
// has 16384, and a warp of each warpgroup.
constexpr uint32_t THREADS = (PAIR_TILES + 1) * WARPGROUP_WARPS * 32;
constexpr uint32_t REGISTERS = 168;
constexpr uint32_t LOADING_REGISTERS = 24;
constexpr uint32_t MULTIPLYING_REGISTERS = 240;
static_assert((PAIR_TILES + 1) * REGISTERS * 32 <= 16384, "when it begins");
// More than a block has would be waited for without end.
static_assert(PAIR_TILES * MULTIPLYING_REGISTERS + LOADING_REGISTERS <= (PAIR_TILES + 1) * REGISTERS, "those of the block");

// A stage has a unit of each tile of a pair, and those of the rows that meet them.
constexpr uint32_t ROW_UNITS = ROWS / UNIT_OUTPUTS;
// Of these a CTA loads so many, for all.
constexpr uint32_t SHARED_UNITS = ROW_UNITS / CLUSTER;
static_assert(ROW_UNITS % CLUSTER == 0, "whole units");
constexpr uint32_t STAGE_BYTES = (PAIR_TILES + ROW_UNITS) * UNIT_BYTES;
constexpr uint32_t STAGES = 192 * 1024 / STAGE_BYTES;
// Behind the ring what the warps of a warpgroup share of a tile.
constexpr uint32_t RING_OFFSET = 1024;
constexpr uint32_t SCRATCH_OFFSET = RING_OFFSET + STAGES * STAGE_BYTES;
constexpr uint32_t FULL_ARRIVALS = 1;

#include "gemm/stages.cuh"

// Tiles of outputs for each CTA of a cluster, and the places that meet them.
struct ClusterTile {
    uint32_t outputs;   // of CLUSTER * PAIR_TILES tiles of them
    uint32_t places;    // tile of them
};

// Only places that have rows are multiplied.
struct Order {
    uint32_t outputs;   // tiles of them
    uint32_t first;     // tile of places
    uint32_t places;    // tiles of them
};

DEVICE Order order_of(const MultiplyParams& p) {
    const uint32_t first = p.first / ROWS;
    return {divide_up(p.n, UNIT_OUTPUTS), first, divide_up(p.first + p.num_rows, uint32_t(ROWS)) - first};
}

DEVICE uint32_t num_tiles(const Order& order) {
    return divide_up(order.outputs, CLUSTER * PAIR_TILES) * order.places;
}

// Those with the same outputs follow each other: clusters beside each other read the same weights.
DEVICE ClusterTile tile_at(const Order& order, uint32_t index) {
    return {index / order.places, order.first + index % order.places};
}

DEVICE uint32_t cluster_index() {
    return block_index() / CLUSTER;
}

DEVICE uint32_t num_clusters() {
    return num_blocks() / CLUSTER;
}

// The first of this CTA's tiles of outputs.
DEVICE uint32_t first_output_tile(const ClusterTile& tile) {
    return (tile.outputs * CLUSTER + cluster_rank()) * PAIR_TILES;
}

DEVICE uint8_t* stage_at(const Ring& ring, const Cursor& at) {
    return ring.stages + at.stage * STAGE_BYTES;
}

// Asks for the weights of a stage, and says how much will come, rows of other CTAs among it. In place of tiles that there are
// not the last one comes: so who multiplies need not ask.
DEVICE void ask_for_weights(
    const MultiplyParams& p, const Order& order, const Ring& ring, const ClusterTile& tile, uint32_t k_unit,
    const Cursor& at) {
    uint64_t* full = &ring.full[at.stage];
    mbar_expect(full, STAGE_BYTES);
    UNROLL
    for (uint32_t i = 0; i < PAIR_TILES; ++i) {
        const uint64_t outputs = minimum(first_output_tile(tile) + i, order.outputs - 1);
        const uint8_t* unit = p.weights + (outputs * p.k_units + k_unit) * UNIT_BYTES;
        bulk_copy_kept(stage_at(ring, at) + i * UNIT_BYTES, unit, UNIT_BYTES, full);
    }
}

// This CTA's share of a stage's rows, for all of the cluster. They may come to a CTA before it has said how much will.
DEVICE void ask_for_rows(
    const MultiplyParams& p, const Ring& ring, const ClusterTile& tile, uint32_t k_unit, const Cursor& at) {
    uint8_t* to = stage_at(ring, at) + PAIR_TILES * UNIT_BYTES;
    UNROLL
    for (uint32_t i = 0; i < SHARED_UNITS; ++i) {
        const uint32_t own = cluster_rank() * SHARED_UNITS + i;
        const uint64_t rows = tile.places * ROW_UNITS + own;
        const uint8_t* unit = p.rows + (rows * p.k_units + k_unit) * UNIT_BYTES;
        bulk_copy_to_cluster<CLUSTER>(to + own * UNIT_BYTES, unit, UNIT_BYTES, &ring.full[at.stage]);
    }
}

// Weights are asked for before the kernel in front has ended, which makes the rows: so many stages of the first tile.
DEVICE uint32_t early_stages(const MultiplyParams& p, const Order& order) {
    return cluster_index() < num_tiles(order) ? minimum(STAGES, p.k_units) : 0;
}

DEVICE void ask_for_early_weights(const MultiplyParams& p, const Order& order, const Ring& ring) {
    Cursor at = {0, 0};
    for (uint32_t k_unit = 0; k_unit < early_stages(p, order); ++k_unit, advance(at)) {
        ask_for_weights(p, order, ring, tile_at(order, cluster_index()), k_unit, at);
    }
}

// What the thread that fills the ring does behind its early weights.
DEVICE void produce(const MultiplyParams& p, const Order& order, const Ring& ring) {
    grid_wait();
    uint32_t early = early_stages(p, order);
    Cursor at = {0, 0};
    for (uint32_t index = cluster_index(); index < num_tiles(order); index += num_clusters()) {
        const ClusterTile tile = tile_at(order, index);
        for (uint32_t k_unit = 0; k_unit < p.k_units; ++k_unit, advance(at)) {
            if (early > 0) {
                --early;
            } else {
                mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
                ask_for_weights(p, order, ring, tile, k_unit, at);
            }
            ask_for_rows(p, ring, tile, k_unit, at);
        }
    }
    grid_launch_dependents();
    // Until all have given back what they had of this CTA's ring: then nothing comes to its shared memory any more.
    for (uint32_t stage = 0; stage < STAGES; ++stage, advance(at)) {
        mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
    }
}

// A warp that multiplies.
struct Consumer {
    uint32_t group;   // of warpgroups
    uint32_t warp;    // of its warpgroup
    float* scales;    // of the places of a tile, which its warpgroup has
    float* told;      // what the warps of its warpgroup tell each other
};

// Of a thread: outputs g and g + 8 of its warp's 16, of two rows in eight each.
typedef float Sums[ROWS / 2];

// A descriptor, so many bytes further on.
DEVICE uint64_t further(uint64_t descriptor, uint32_t bytes) {
    return descriptor + bytes / 16;
}

// Begins the products of a stage with this warpgroup's tile.
DEVICE void begin_products(Sums& sums, const Consumer& own, const uint8_t* stage) {
    constexpr uint32_t ATOM_BYTES = 8 * UNIT_ROW_BYTES;
    constexpr uint32_t STEP_BYTES = 32;
    const uint64_t weights = matrix_descriptor(stage + own.group * UNIT_BYTES, ATOM_BYTES);
    const uint64_t rows = matrix_descriptor(stage + PAIR_TILES * UNIT_BYTES, ATOM_BYTES);
    warpgroup_fence();
    UNROLL
    for (uint32_t step = 0; step < UNIT_ROW_BYTES; step += STEP_BYTES) {
#if WEIGHT == FP8
        wgmma_e4m3<ROWS>(sums, further(weights, step), further(rows, step));
#else
        wgmma_f16<ROWS>(sums, further(weights, step), further(rows, step));
#endif
    }
    warpgroup_commit();
}

// By every consumer warp: a stage is filled by all CTAs of the cluster, and waits for the consumers of all.
DEVICE void release_to_cluster(const Ring& ring, Cursor& at) {
    warp_sync();
    if (lane_index() < CLUSTER) {
        mbar_arrive_at(&ring.empty[at.stage], lane_index());
    }
    advance(at);
}

// All of k. A stage is given back when its products are done, while those of the next one run.
DEVICE void multiply_tile(Sums& sums, const Consumer& own, const Ring& ring, uint32_t k_units, Cursor& at) {
    Cursor done = at;
    for (uint32_t k_unit = 0; k_unit < k_units; ++k_unit, advance(at)) {
        mbar_wait(&ring.full[at.stage], at.parity);
        // Lanes may leave the wait one by one; what follows takes whole warps.
        warp_sync();
        begin_products(sums, own, stage_at(ring, at));
        if (k_unit > 0) {
            warpgroup_wait<1>();
            release_to_cluster(ring, done);
        }
    }
    warpgroup_wait<0>();
    release_to_cluster(ring, done);
}

#include "prefill/outputs.cuh"

// What a warpgroup has there: the scales of a tile's places, and what its warps tell each other.
constexpr uint32_t SCRATCH_FLOATS = ROWS + TOLD_FLOATS;
static_assert(SCRATCH_OFFSET + PAIR_TILES * SCRATCH_FLOATS * 4 <= 214 * 1024, "what the host launches with");

DEVICE void consume(const MultiplyParams& p, const Order& order, const Ring& ring, float* scratch) {
    // All lanes have the same, and the compiler is to know: branches by it are then the warp's.
    const uint32_t warp = shuffle_from(warp_index(), 0);
    const uint32_t group = warp / WARPGROUP_WARPS;
    scratch += group * SCRATCH_FLOATS;
    const Consumer own = {group, warp % WARPGROUP_WARPS, scratch, scratch + ROWS};
    // Rows come behind the same wait of who asks for them: what is written rests on this one.
    grid_wait();
    Cursor at = {0, 0};
    for (uint32_t index = cluster_index(); index < num_tiles(order); index += num_clusters()) {
        const ClusterTile tile = tile_at(order, index);
        const uint32_t outputs = first_output_tile(tile) + group;
        const Ahead ahead = load_ahead(p, own, outputs, tile.places * ROWS);
        Sums sums = {};
        multiply_tile(sums, own, ring, p.k_units, at);
        finish_tile(p, own, outputs, tile.places * ROWS, ahead, sums);
    }
}

KERNEL_OF_CLUSTERS(multiply, MultiplyParams, THREADS, REGISTERS, CLUSTER) {
    uint64_t* barriers = (uint64_t*)shared_memory();
    const Ring ring = {shared_memory() + RING_OFFSET, barriers, barriers + STAGES};
    const Order order = order_of(p);
    const bool is_producer = thread_index() == CONSUMER_WARPS * 32;
    if (is_producer) {
        ring_init(ring, CLUSTER * CONSUMER_WARPS);
        ask_for_early_weights(p, order, ring);
    }
    // Behind this the barriers of all CTAs are there.
    cluster_sync();
    if (warp_index() < CONSUMER_WARPS) {
        take_registers<MULTIPLYING_REGISTERS>();
        consume(p, order, ring, (float*)(shared_memory() + SCRATCH_OFFSET));
    } else {
        leave_registers<LOADING_REGISTERS>();
        if (is_producer) {
            produce(p, order, ring);
        }
    }
}
