// y[rows][n] = x[rows][k] * W^T for up to ROWS rows, with what precedes and follows it in a layer: an RMS
// norm before, and one of five epilogues. The matrix is streamed once, evenly over the grid, by a warp that
// does nothing else. A row's bits depend on its own data, the matrix and the grid alone: not on ROWS, on the
// number of rows, on the other rows or on the order in which CTAs end.
#include "prims.cuh"
#include "types.cuh"

#define QKV 1        // rotates queries and keys; f16 queries, keys and values to the cache
#define RAW 2        // f32 [row][n]
#define RESIDUAL 3   // adds to f32 [row][n]
#define SWIGLU 4     // f16 [row][n / 2]
#define HEAD 5       // f32 [row][n], and the best of each 64

struct GemmParams {
    const uint8_t* weights;      // units of image.cuh
    const float* scales;         // [n up to a whole tile], of FP8 weights
    const float* bias;           // [n up to a whole tile], or null
    const void* input;           // f32 residual [.][k]; RESIDUAL: f16 [.][k]
    const float* norm;           // [k]; RESIDUAL: unused
    float* squares;              // of squares.cuh: of the input; RESIDUAL: of the output
    const Row* rows;             // QKV: of each row
    const uint32_t* row_index;   // input row of each row, or null: its own
    float* partials;             // [grid][2][ROWS][64]
    uint32_t* arrivals;          // [tiles of n], zero before and after
    void* output;
    uint8_t* cache;              // QKV: keys and values of this layer
    const float* rope;           // QKV: [position][cos | sin]
    const uint32_t* pages;       // QKV: [sequence][max_pages]
    Best* best;                  // HEAD: [row][tiles of n]
    float eps;
    float k_scale;               // multiply keys and values before they are stored as e4m3
    float v_scale;
    uint32_t num_rows;           // 1 ..= ROWS
    uint32_t n;
    uint32_t k;                  // a multiple of 8
    uint32_t num_heads;
    uint32_t num_kv_heads;
    uint32_t max_pages;
    uint32_t kv;                 // FP8 or FP16
};
static_assert(sizeof(GemmParams) == 160, "as on the host");

constexpr bool HAS_NORM = EPILOGUE != RESIDUAL;

#include "image.cuh"
#include "squares.cuh"
#include "gemm_ring.cuh"
#include "gemm_input.cuh"
#include "gemm_tile.cuh"
#include "gemm_split.cuh"
#if EPILOGUE == QKV
#include "kv_cache.cuh"
#include "rotary.cuh"
#endif
#include "gemm_epilogue.cuh"

// Shared memory of a CTA. The host launches with SHARED_BYTES.
constexpr uint32_t X_OFFSET = STAGES * UNIT_BYTES;
constexpr uint32_t SUMS_OFFSET = X_OFFSET + ROWS * X_STRIDE * 2;
constexpr uint32_t FACTORS_OFFSET = SUMS_OFFSET + 2 * SUMS_SIZE * 4;
constexpr uint32_t BARRIERS_OFFSET = FACTORS_OFFSET + ROWS * 4;
constexpr uint32_t IS_LAST_OFFSET = BARRIERS_OFFSET + 2 * STAGES * 8;
constexpr uint32_t SHARED_BYTES = IS_LAST_OFFSET + 16;
static_assert(SHARED_BYTES <= 99 * 1024, "all that a CTA may have on sm_89 and sm_120");

constexpr uint32_t THREADS = CONSUMERS + 32;

struct Shared {
    Ring ring;
    uint16_t* x;
    float* halves;     // of the sums
    float* factors;
    uint32_t* is_last;
};

DEVICE Shared carve(uint8_t* memory) {
    uint64_t* barriers = (uint64_t*)(memory + BARRIERS_OFFSET);
    Shared shared;
    shared.ring = {memory, barriers, barriers + STAGES};
    shared.x = (uint16_t*)(memory + X_OFFSET);
    shared.halves = (float*)(memory + SUMS_OFFSET);
    shared.factors = (float*)(memory + FACTORS_OFFSET);
    shared.is_last = (uint32_t*)(memory + IS_LAST_OFFSET);
    return shared;
}

// A matrix shape may be compiled in.
DEVICE uint32_t matrix_n(const GemmParams& p) {
#ifdef SHAPE_N
    return SHAPE_N;
#else
    return p.n;
#endif
}

DEVICE uint32_t matrix_k(const GemmParams& p) {
#ifdef SHAPE_K
    return SHAPE_K;
#else
    return p.k;
#endif
}

// Turns the sums of this CTA's units of a tile into output, or into a part of it.
DEVICE void finish_tile(
    const GemmParams& p, const Split& split, uint32_t tile, const Sums& sums, const Shared& shared) {
    reduce_slices(sums, shared.halves);
    const bool is_whole = num_parts(split, tile) == 1;
    if (is_whole || publish_part(p, split, tile, shared.halves, shared.is_last)) {
        const uint32_t lane = lane_index();
        for (uint32_t row = warp_index(); row < p.num_rows; row += CONSUMER_WARPS) {
            const float low = is_whole ? tile_sum(shared.halves, row, lane)
                                       : sum_parts(p, split, tile, row, lane);
            const float high = is_whole ? tile_sum(shared.halves, row, lane + 32)
                                        : sum_parts(p, split, tile, row, lane + 32);
            finish_row(p, matrix_n(p), tile, row, low, high);
        }
        if (!is_whole && thread_index() == 0) {
            p.arrivals[tile] = 0;
        }
    }
    consumer_barrier();
}

// All units of this CTA, tile by tile.
DEVICE void consume(const GemmParams& p, const Split& split, const Shared& shared) {
    uint32_t staged = split.first % split.k_units / CHUNK_UNITS;
    if (split.first < split.last) {
        stage_chunk(p, matrix_k(p), staged, shared.factors, shared.x);
    }
    grid_launch_dependents();
    Cursor at = {0, 0};
    for (uint32_t unit = split.first; unit < split.last;) {
        const uint32_t tile = unit / split.k_units;
        const uint32_t end = minimum((tile + 1) * split.k_units, split.last);
        Sums sums = {};
        for (; unit < end; ++unit) {
            const uint32_t k_unit = unit - tile * split.k_units;
            if (k_unit / CHUNK_UNITS != staged) {
                staged = k_unit / CHUNK_UNITS;
                stage_chunk(p, matrix_k(p), staged, shared.factors, shared.x);
            }
            const uint8_t* weights = acquire(shared.ring, at);
            multiply_unit(sums, weights, shared.x + k_unit % CHUNK_UNITS * UNIT_K);
            release(shared.ring, at);
        }
        finish_tile(p, split, tile, sums, shared);
    }
}

KERNEL(gemm, GemmParams, THREADS, 2) {
    const Shared shared = carve(shared_memory());
    const Split split = split_units(matrix_n(p), matrix_k(p));
    if (thread_index() == 0) {
        ring_init(shared.ring);
    }
    barrier_all();
    if (warp_index() == CONSUMER_WARPS) {
        produce(shared.ring, p.weights, split.first, split.last);
        return;
    }
    clear_unused_rows(p, shared.x);
    grid_wait();
    if (HAS_NORM && split.first < split.last) {
        norm_factors(p, matrix_k(p), shared.factors);
    }
    consume(p, split, shared);
}
