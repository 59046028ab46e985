// Takes the plain qkv product of models that norm each query and key head, or of many rows: norms where there
// are norms, rotates queries and keys, writes f16 queries and stores keys and values in the cache, as the
// few-row product's own epilogue does elsewhere. A warp takes a head of a row; any grid. Rows without a
// sequence store nothing in the cache.
#include "common/prims.cuh"
#include "common/types.cuh"

#include "common/kv_cache.cuh"
#include "common/rotary.cuh"
#include "common/scaling.cuh"

struct RopeParams {
    const float* input;      // [row][all heads], heads in the order of the qkv image
    Scaling scaling;         // of the input
    const float* q_norm;     // [HEAD_DIM], or null: no norm
    const float* k_norm;     // [HEAD_DIM], or null
    const float* rope;       // [position][cos | sin]
    const Row* rows;
    const uint32_t* pages;   // [sequence][max_pages]
    uint16_t* queries;       // f16 [row][num_heads][HEAD_DIM]
    uint8_t* cache;          // keys and values of this layer
    const float* kv_scales;  // of an FP8 cache: of each head's keys, then of each one's values; powers of two
    float eps;
    uint32_t num_rows;
    uint32_t num_heads;
    uint32_t num_kv_heads;
    uint32_t max_pages;
    uint32_t unused;
};
static_assert(sizeof(RopeParams) == 120, "as on the host");

constexpr uint32_t THREADS = 256;

// A lane's share of a head: pair or elements `lane` of each of its tiles.
struct Head {
    Pair of[HEAD_TILES];
};

DEVICE Head load_head(const RopeParams& p, uint32_t row, uint32_t head_idx) {
    const uint32_t num_heads = p.num_heads + 2 * p.num_kv_heads;
    const float* input = p.input + uint64_t(row) * num_heads * HEAD_DIM;
    Head head;
    for (uint32_t tile = 0; tile < HEAD_TILES; ++tile) {
        const uint32_t n = head_idx * HEAD_DIM + tile * 2 * HALF_TILE + lane_index();
        const uint32_t partner = n + HALF_TILE;
        head.of[tile] = {
            scaled(p.scaling, row, n, input[n]), scaled(p.scaling, row, partner, input[partner])};
    }
    return head;
}

// Scales a head to a mean square of one, then by its weights.
DEVICE void norm_head(Head& head, const float* weight, float eps) {
    float sum = 0.0f;
    for (uint32_t tile = 0; tile < HEAD_TILES; ++tile) {
        sum = fmaf(head.of[tile].low, head.of[tile].low, sum);
        sum = fmaf(head.of[tile].high, head.of[tile].high, sum);
    }
    const float factor = 1.0f / sqrtf(warp_sum(sum) / float(HEAD_DIM) + eps);
    for (uint32_t tile = 0; tile < HEAD_TILES; ++tile) {
        const uint32_t i = tile * HALF_TILE + lane_index();
        head.of[tile].low *= factor * weight[i];
        head.of[tile].high *= factor * weight[i + HEAD_DIM / 2];
    }
}

DEVICE void rotate_head(Head& head, const float* table, uint32_t position) {
    for (uint32_t tile = 0; tile < HEAD_TILES; ++tile) {
        const uint32_t i = tile * HALF_TILE + lane_index();
        head.of[tile] = rotate(angle_of(table, position, i), head.of[tile]);
    }
}

DEVICE void store_query(const RopeParams& p, uint32_t row, uint32_t head_idx, const Head& head) {
    uint16_t* to = p.queries + (uint64_t(row) * p.num_heads + head_idx) * HEAD_DIM;
    for (uint32_t tile = 0; tile < HEAD_TILES; ++tile) {
        const uint32_t i = tile * HALF_TILE + lane_index();
        to[i] = float_to_half_sat(head.of[tile].low);
        to[i + HEAD_DIM / 2] = float_to_half_sat(head.of[tile].high);
    }
}

// The cache, for what has this scale.
DEVICE Cache cache_of(const RopeParams& p, uint32_t scale) {
    const float factor = KV == FP8 ? one_over(p.kv_scales[scale]) : 1.0f;
    return {p.cache, p.num_kv_heads, KV == FP8, factor};
}

DEVICE void store_key_head(const RopeParams& p, const Row& row, uint32_t head_idx, const Head& head) {
    const Cache cache = cache_of(p, head_idx);
    const CacheSlot slot = cache_slot(p.pages, p.max_pages, row);
    for (uint32_t tile = 0; tile < HEAD_TILES; ++tile) {
        const uint32_t i = tile * HALF_TILE + lane_index();
        store_key(cache, slot, head_idx, i, head.of[tile].low);
        store_key(cache, slot, head_idx, i + HEAD_DIM / 2, head.of[tile].high);
    }
}

// Value heads are in natural order: a tile has 64 neighbours.
DEVICE void store_value_head(
    const RopeParams& p, const Row& row, uint32_t head_idx, const Head& head) {
    const Cache cache = cache_of(p, p.num_kv_heads + head_idx);
    const CacheSlot slot = cache_slot(p.pages, p.max_pages, row);
    for (uint32_t tile = 0; tile < HEAD_TILES; ++tile) {
        const uint32_t i = tile * 2 * HALF_TILE + lane_index();
        store_value(cache, slot, head_idx, i, head.of[tile].low);
        store_value(cache, slot, head_idx, i + HALF_TILE, head.of[tile].high);
    }
}

DEVICE void finish_head(const RopeParams& p, uint32_t row_idx, uint32_t head_idx) {
    const Row& row = p.rows[row_idx];
    if (row.sequence == NO_SEQUENCE) {
        return;
    }
    Head head = load_head(p, row_idx, head_idx);
    if (head_idx >= p.num_heads + p.num_kv_heads) {
        store_value_head(p, row, head_idx - p.num_heads - p.num_kv_heads, head);
        return;
    }
    const bool is_query = head_idx < p.num_heads;
    if (p.q_norm) {
        norm_head(head, is_query ? p.q_norm : p.k_norm, p.eps);
    }
    rotate_head(head, p.rope, row.position);
    if (is_query) {
        store_query(p, row_idx, head_idx, head);
    } else {
        store_key_head(p, row, head_idx - p.num_heads, head);
    }
}

KERNEL(rope, RopeParams, THREADS, 4) {
    grid_wait();
    grid_launch_dependents();
    const uint32_t num_heads = p.num_heads + 2 * p.num_kv_heads;
    const uint32_t warps = num_blocks() * (THREADS / 32);
    const uint32_t first = block_index() * (THREADS / 32) + warp_index();
    for (uint32_t i = first; i < p.num_rows * num_heads; i += warps) {
        finish_head(p, i / num_heads, i % num_heads);
    }
}
