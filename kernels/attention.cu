// Attention of a few query rows over the paged keys and values of their sequence.
//
// The grid is persistent: blocks walk the items (tile of query rows, key head, split of the
// positions). The pages of a split are summed up in four parts, which are added in order; splits
// are added in order by the block that arrives last. So what a row gets depends on its query, on
// its sequence's keys and values and on the bounds of splits alone, to the bit: not on the other
// rows of its tile, on the tile's width, on the grid or on the order of arrival.
// Defines: KV (FP8 or FP16), HEAD_DIM (64 or 128), GROUP (query heads of a key head, 1..16), and
// TILE_ROWS (query rows times GROUP of a tile: 16, or 64 for many rows of a sequence).
// Shared memory: SUMS_BYTES + sizeof(Plan).
#include "prims.cuh"

#include "types.cuh"

#ifndef TILE_ROWS
#define TILE_ROWS 16
#endif

#include "attention_items.cuh"
#include "attention_page.cuh"

constexpr uint32_t KEYS_BYTES = PAGE_TOKENS * KEY_BYTES;  // the keys of a page, and its values
constexpr uint32_t PAGE_BYTES = 2 * KEYS_BYTES;           // of one head
constexpr uint32_t LANE_DIM = HEAD_DIM / 32;              // outputs of a lane of a row's warp
constexpr float LOG2_E = 1.4426950408889634f;

// Pages come through rings: of each warp in narrow tiles, of the block in wide ones.
constexpr uint32_t NUM_RINGS = IS_WIDE ? 1 : NUM_WARPS;
constexpr uint32_t NUM_COPIERS = NUM_THREADS / NUM_RINGS;
constexpr uint32_t STAGES = PAGE_BYTES > 4096 && !IS_WIDE ? 2 : 4;
constexpr uint32_t RING_BYTES = STAGES * PAGE_BYTES;

// A ring's sums take its place; the padding spreads rows over the banks.
constexpr uint32_t SUMS_STRIDE = HEAD_DIM + 8;
constexpr uint32_t PART_BYTES = maximum(RING_BYTES, 4 * TILE_ROWS * (SUMS_STRIDE + 2));
constexpr uint32_t SUMS_BYTES = NUM_RINGS * PART_BYTES;
constexpr uint32_t PARTIAL_FLOATS = TILE_ROWS * (HEAD_DIM + 2);

// What registers allow.
constexpr uint32_t BLOCKS_PER_SM = IS_WIDE ? 2 : 3;

// Sums of several parts of a softmax, `stride` floats apart: outputs of the tile's rows,
// `row_stride` floats apart, then their largest scores (scaled, base 2), then their sums of
// weights.
struct Parts {
    const float* first;
    uint32_t count;
    uint32_t stride;
    uint32_t row_stride;
};

// A row as a warp has it.
struct MergedRow {
    float largest;
    float sum;
    float out[LANE_DIM];
};

// What sums of two parts are multiplied with when they are added.
struct Factors {
    float own;
    float other;
};

// Of a row with this largest score so far, which changes, and of a part that follows. A part that
// saw nothing has 0 and changes nothing; the first that saw something comes out as it is.
DEVICE Factors merge_factors(float& largest, float other) {
    const float before = largest;
    largest = fmaxf(before, other);
    const float own = before == largest ? 1.0f : ex2(before - largest);
    return {own, other == largest ? 1.0f : ex2(other - largest)};
}

DEVICE float merge(const Factors& factors, float own, float other) {
    return fmaf(factors.other, other, factors.own * own);
}

// All copiers of a ring.
DEVICE void ring_sync() {
    if constexpr (IS_WIDE) {
        barrier_all();
    } else {
        warp_sync();
    }
}

// Copies keys and values of a page and a head.
DEVICE void copy_page(const AttentionParams& p, uint32_t kv_head, uint32_t page, uint8_t* stage) {
    const uint32_t copier = thread_index() % NUM_COPIERS;
    const uint8_t* from = p.cache + (uint64_t{page} * p.num_kv_heads + kv_head) * PAGE_BYTES;
    from += 16 * copier;
    // An even number of keys a round: a copier's place in them stays.
    uint8_t* keys = stage + key_chunk_offset(copier / KEY_CHUNKS, copier % KEY_CHUNKS);
    uint8_t* values = stage + KEYS_BYTES + 16 * copier;
    if (KEYS_BYTES < 16 * NUM_COPIERS && 16 * copier >= KEYS_BYTES) {
        return;
    }
    UNROLL
    for (uint32_t done = 0; done < KEYS_BYTES; done += 16 * NUM_COPIERS) {
        async_copy16(keys + done, from + done);
        async_copy16(values + done, from + KEYS_BYTES + done);
    }
}

// One page that has landed.
DEVICE void attend_page(const uint8_t* stage, const uint32_t (&query)[NUM_STEPS][4],
                        const View& view, uint32_t first_token, uint32_t unmasked, float scale,
                        Softmax& softmax) {
    float score[2][4] = {};
    score_page(stage, query, score);
    Uint2 seen = {0xffffffffu, 0xffffffffu};
    if (first_token + PAGE_TOKENS > unmasked) {
        seen = hide_page(view, first_token, score);
    }
    uint32_t weight[4];
    weigh_page(score, scale, softmax, weight);
    add_values(stage + KEYS_BYTES, weight, seen, softmax);
}

// Ends a part: sums over the lanes of a row, and scores as the merge wants them. The product is
// written as one that cannot become part of a later subtraction, which would not round it: tiles of
// both widths have to see the same number.
DEVICE void end_part(float scale, Softmax& softmax) {
    UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        softmax.largest[half] = fmaf(softmax.largest[half], scale, 0.0f);
        softmax.sum[half] += shuffle_xor(softmax.sum[half], 1);
        softmax.sum[half] += shuffle_xor(softmax.sum[half], 2);
    }
}

// Adds an ended part to those before it.
DEVICE void merge_part(const Softmax& part, Softmax& total) {
    Factors factors[2];
    UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        factors[half] = merge_factors(total.largest[half], part.largest[half]);
        total.sum[half] = merge(factors[half], total.sum[half], part.sum[half]);
    }
    UNROLL
    for (uint32_t tile = 0; tile < OUT_TILES; ++tile) {
        UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            const float other = part.out[tile][i];
            total.out[tile][i] = merge(factors[i / 2], total.out[tile][i], other);
        }
    }
}

// The warp's pages of the item, through the ring: of a narrow tile its part, of a wide one all
// parts.
DEVICE Softmax attend_pages(const AttentionParams& p, const Item& item, uint8_t* ring) {
    uint32_t query[NUM_STEPS][4];
    load_queries(p, item, query);
    const View view = load_view(p, item);
    const uint32_t* table = p.pages + uint64_t{item.sequence} * p.max_pages;
    const float scale = p.scale * LOG2_E;
    Softmax part = empty_softmax();
    Softmax total = empty_softmax();
    Walk now = begin_walk(p, item);
    Walk ahead = now;
    uint32_t page = has_page(ahead) ? table[ahead.page] : 0;
    for (uint32_t round = 0; has_page(now); ++round) {
        async_wait<STAGES - 2>();
        // All copies to this stage have landed, and all have left the stage that is filled now.
        ring_sync();
        if (has_page(ahead)) {
            copy_page(p, item.kv_head, page, ring + round % STAGES * PAGE_BYTES);
            advance(ahead);
            page = has_page(ahead) ? table[ahead.page] : 0;
        }
        async_commit();
        if (round < STAGES - 1) {
            continue;
        }
        const uint8_t* stage = ring + (round + 1) % STAGES * PAGE_BYTES;
        attend_page(stage, query, view, now.page * PAGE_TOKENS, item.unmasked, scale, part);
        const uint32_t number = now.part;
        advance(now);
        if (now.part != number) {
            end_part(scale, part);
            if constexpr (IS_WIDE) {
                merge_part(part, total);
                part = empty_softmax();
            }
        }
    }
    ring_sync();
    return IS_WIDE ? total : part;
}

// Leaves the sums of a warp's rows where the ring was.
DEVICE void store_sums(const Softmax& softmax, float* sums) {
    const uint32_t quad = lane_index() % 4;
    UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t packed = lane_row(half);
        if (quad == 0) {
            sums[TILE_ROWS * SUMS_STRIDE + packed] = softmax.largest[half];
            sums[TILE_ROWS * (SUMS_STRIDE + 1) + packed] = softmax.sum[half];
        }
        UNROLL
        for (uint32_t tile = 0; tile < OUT_TILES; ++tile) {
            float* to = sums + packed * SUMS_STRIDE + 8 * tile + 2 * quad;
            const float* from = softmax.out[tile] + 2 * half;
            *reinterpret_cast<Float2*>(to) = {from[0], from[1]};
        }
    }
}

// A row of all parts, in their order.
DEVICE MergedRow merge_row(const Parts& parts, uint32_t packed) {
    const float* scores = parts.first + TILE_ROWS * parts.row_stride + packed;
    const float* out = parts.first + packed * parts.row_stride + lane_index() * LANE_DIM;
    MergedRow merged = {minus_infinity(), 0.0f, {}};
    for (uint32_t part = 0; part < parts.count; ++part) {
        const uint64_t offset = uint64_t{part} * parts.stride;
        const Factors factors = merge_factors(merged.largest, scores[offset]);
        merged.sum = merge(factors, merged.sum, scores[offset + TILE_ROWS]);
        UNROLL
        for (uint32_t i = 0; i < LANE_DIM; ++i) {
            merged.out[i] = merge(factors, merged.out[i], out[offset + i]);
        }
    }
    return merged;
}

DEVICE void store_output(const AttentionParams& p, const MergedRow& row, uint16_t* to) {
    const float scale = row.sum > 0.0f ? p.v_scale / row.sum : 0.0f;
    UNROLL
    for (uint32_t i = 0; i < LANE_DIM; ++i) {
        to[lane_index() * LANE_DIM + i] = float_to_half_sat(row.out[i] * scale);
    }
}

DEVICE void store_partial(const MergedRow& row, uint32_t packed, float* to) {
    if (lane_index() == 0) {
        to[TILE_ROWS * HEAD_DIM + packed] = row.largest;
        to[TILE_ROWS * (HEAD_DIM + 1) + packed] = row.sum;
    }
    UNROLL
    for (uint32_t i = 0; i < LANE_DIM; ++i) {
        to[packed * HEAD_DIM + lane_index() * LANE_DIM + i] = row.out[i];
    }
}

// Whether this block is the last of the item's splits. If so it sees the partials of all.
DEVICE bool arrive(const AttentionParams& p, const Item& item, Plan& plan) {
    fence_gpu();
    barrier_all();
    if (thread_index() == 0) {
        uint32_t* counter = p.arrivals + uint64_t{item.tile} * p.num_kv_heads + item.kv_head;
        const bool is_last = atomic_add_acq_rel(counter, 1) == item.num_splits - 1;
        plan.arrived_last = is_last ? 1 : 0;
        if (is_last) {
            *counter = 0;
        }
    }
    barrier_all();
    fence_gpu();
    return plan.arrived_last != 0;
}

DEVICE void attend(const AttentionParams& p, const Item& item, uint8_t* rings, Plan& plan) {
    uint8_t* ring = rings + thread_index() / NUM_COPIERS * PART_BYTES;
    const Softmax softmax = attend_pages(p, item, ring);
    store_sums(softmax, reinterpret_cast<float*>(ring));
    barrier_all();
    const uint64_t head = uint64_t{item.tile} * p.num_kv_heads + item.kv_head;
    float* partials = p.partials + head * p.max_splits * PARTIAL_FLOATS;
    const float* sums = reinterpret_cast<const float*>(rings);
    const Parts parts = {sums, NUM_RINGS, PART_BYTES / 4, SUMS_STRIDE};
    for (uint32_t packed = warp_index(); packed < num_packed(item); packed += NUM_WARPS) {
        const MergedRow row = merge_row(parts, packed);
        if (item.num_splits == 1) {
            store_output(p, row, p.output + row_offset(p, item, packed));
        } else {
            store_partial(row, packed, partials + uint64_t{item.split} * PARTIAL_FLOATS);
        }
    }
    if (item.num_splits > 1 && arrive(p, item, plan)) {
        const Parts splits = {partials, item.num_splits, PARTIAL_FLOATS, HEAD_DIM};
        for (uint32_t packed = warp_index(); packed < num_packed(item); packed += NUM_WARPS) {
            store_output(p, merge_row(splits, packed), p.output + row_offset(p, item, packed));
        }
    }
    barrier_all();  // the rings and the plan's mark are free again
}

KERNEL(attention, AttentionParams, NUM_THREADS, BLOCKS_PER_SM) {
    uint8_t* rings = shared_memory();
    Plan& plan = *reinterpret_cast<Plan*>(rings + SUMS_BYTES);
    grid_wait();
    grid_launch_dependents();
    uint32_t index = block_index();
    for (uint32_t first = 0; first < p.num_tiles; first += NUM_THREADS) {
        plan_tiles(p, first, plan);
        const uint32_t num_items = plan.ends[NUM_THREADS - 1] * p.num_kv_heads;
        for (; index < num_items; index += num_blocks()) {
            attend(p, find_item(p, plan, first, index), rings, plan);
        }
        index -= num_items;
    }
}
