// Rows of whole blocks of a prompt with a packed matrix, of e4m3 or halves as they are: y[row][n] = sum over k of rows[row][k] *
// weights[n][k], and what follows it in a layer. Rows come in units, as weights do, so both stream through shared memory by
// bulk copies, and warpgroups multiply them there. A CTA takes every num_blocks-th tile of two tiles of outputs by ROWS rows,
// and has all of k: what becomes of a row does not depend on the grid or on what other rows there are.
#include "common/prims.cuh"
#include "common/types.cuh"

#include "common/activation.cuh"
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

constexpr uint32_t PAIR_TILES = 2;
constexpr uint32_t CONSUMER_WARPS = PAIR_TILES * WARPGROUP_WARPS;
// A warpgroup more, of which one thread loads, and which leaves its registers to the others: each quarter of a multiprocessor
// has 16384, and a warp of each warpgroup.
constexpr uint32_t THREADS = (PAIR_TILES + 1) * WARPGROUP_WARPS * 32;
constexpr uint32_t REGISTERS = 168;
constexpr uint32_t LOADING_REGISTERS = 24;
constexpr uint32_t MULTIPLYING_REGISTERS = 240;
static_assert((PAIR_TILES + 1) * REGISTERS * 32 <= 16384, "when it begins");
static_assert((PAIR_TILES * MULTIPLYING_REGISTERS + LOADING_REGISTERS) * 32 <= 16384, "after that");

// A stage has a unit of each tile of a pair, and those of the rows that meet them.
constexpr uint32_t ROW_UNITS = ROWS / UNIT_OUTPUTS;
constexpr uint32_t STAGE_BYTES = (PAIR_TILES + ROW_UNITS) * UNIT_BYTES;
constexpr uint32_t STAGES = 192 * 1024 / STAGE_BYTES;
// Behind the ring what the warps of a warpgroup tell each other of a tile.
constexpr uint32_t RING_OFFSET = 1024;
constexpr uint32_t TOLD_OFFSET = RING_OFFSET + STAGES * STAGE_BYTES;
constexpr uint32_t FULL_ARRIVALS = 1;

#include "gemm/stages.cuh"

// Two tiles of outputs, and the places that meet them.
struct OutputTile {
    uint32_t pair;
    uint32_t places;   // tile of them
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
    return divide_up(order.outputs, PAIR_TILES) * order.places;
}

// Those of one pair follow each other: CTAs beside each other read the same weights.
DEVICE OutputTile tile_at(const Order& order, uint32_t index) {
    return {index / order.places, order.first + index % order.places};
}

DEVICE uint8_t* stage_at(const Ring& ring, const Cursor& at) {
    return ring.stages + at.stage * STAGE_BYTES;
}

DEVICE void copy_unit(uint8_t* to, const uint8_t* image, uint64_t unit, uint64_t* full) {
    bulk_copy_kept(to, image + unit * UNIT_BYTES, UNIT_BYTES, full);
}

// Asks for the weights of a stage, and says how much will come. Of an odd number of tiles the last one comes twice: so who
// multiplies need not ask.
DEVICE void ask_for_weights(
    const MultiplyParams& p, const Order& order, const Ring& ring, const OutputTile& tile, uint32_t k_unit,
    const Cursor& at) {
    uint64_t* full = &ring.full[at.stage];
    mbar_expect(full, STAGE_BYTES);
    UNROLL
    for (uint32_t i = 0; i < PAIR_TILES; ++i) {
        const uint64_t outputs = minimum(tile.pair * PAIR_TILES + i, order.outputs - 1);
        copy_unit(stage_at(ring, at) + i * UNIT_BYTES, p.weights, outputs * p.k_units + k_unit, full);
    }
}

DEVICE void ask_for_rows(
    const MultiplyParams& p, const Ring& ring, const OutputTile& tile, uint32_t k_unit, const Cursor& at) {
    uint8_t* to = stage_at(ring, at) + PAIR_TILES * UNIT_BYTES;
    UNROLL
    for (uint32_t i = 0; i < ROW_UNITS; ++i) {
        const uint64_t rows = tile.places * ROW_UNITS + i;
        copy_unit(to + i * UNIT_BYTES, p.rows, rows * p.k_units + k_unit, &ring.full[at.stage]);
    }
}

// The whole life of the thread that fills the ring. The first weights are on their way before the kernel in front has ended,
// which makes the rows.
DEVICE void produce(const MultiplyParams& p, const Order& order, const Ring& ring) {
    const uint32_t tiles = num_tiles(order);
    uint32_t early = 0;
    if (block_index() < tiles) {
        for (Cursor at = {0, 0}; early < minimum(STAGES, p.k_units); ++early, advance(at)) {
            ask_for_weights(p, order, ring, tile_at(order, block_index()), early, at);
        }
    }
    grid_wait();
    Cursor at = {0, 0};
    for (uint32_t index = block_index(); index < tiles; index += num_blocks()) {
        const OutputTile tile = tile_at(order, index);
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
}

// A warp that multiplies.
struct Consumer {
    uint32_t group;   // of warpgroups
    uint32_t warp;    // of its warpgroup
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
            release(ring, done);
        }
    }
    warpgroup_wait<0>();
    release(ring, done);
}

#include "prefill/outputs.cuh"

static_assert(TOLD_OFFSET + PAIR_TILES * TOLD_FLOATS * 4 <= 212 * 1024, "what the host launches with");

DEVICE void consume(const MultiplyParams& p, const Order& order, const Ring& ring, uint8_t* told) {
    // All lanes have the same, and the compiler is to know: branches by it are then the warp's.
    const uint32_t warp = shuffle_from(warp_index(), 0);
    const uint32_t group = warp / WARPGROUP_WARPS;
    const Consumer own = {group, warp % WARPGROUP_WARPS, (float*)told + group * TOLD_FLOATS};
    // Rows come behind the same wait of who asks for them: what is written rests on this one.
    grid_wait();
    Cursor at = {0, 0};
    for (uint32_t index = block_index(); index < num_tiles(order); index += num_blocks()) {
        const OutputTile tile = tile_at(order, index);
        Sums sums = {};
        multiply_tile(sums, own, ring, p.k_units, at);
        finish_tile(p, own, tile.pair * PAIR_TILES + group, tile.places * ROWS, sums);
    }
}

KERNEL_OF_REGISTERS(multiply, MultiplyParams, THREADS, REGISTERS) {
    uint64_t* barriers = (uint64_t*)shared_memory();
    const Ring ring = {shared_memory() + RING_OFFSET, barriers, barriers + STAGES};
    if (thread_index() == 0) {
        ring_init(ring);
    }
    barrier_all();
    const Order order = order_of(p);
    if (warp_index() < CONSUMER_WARPS) {
        take_registers<MULTIPLYING_REGISTERS>();
        consume(p, order, ring, shared_memory() + TOLD_OFFSET);
    } else {
        leave_registers<LOADING_REGISTERS>();
        if (warp_index() == CONSUMER_WARPS && lane_index() == 0) {
            produce(p, order, ring);
        }
    }
}
