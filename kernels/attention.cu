// Attention of a few query rows over the paged keys and values of their sequence.
//
// The grid is persistent: blocks walk the items (tile of query rows, key head, split of the
// positions). Each warp takes every fourth page of its split, through a ring of asynchronous copies
// of its own, into softmax sums of its own; sums are added over warps in warp order, and over
// splits in split order by the block that arrives last. So what a row gets depends on its query, on
// its sequence's keys and values and on the bounds of splits alone, to the bit: not on the other
// rows of its tile, on the grid or on the order of arrival.
// Defines: KV (FP8 or FP16), HEAD_DIM (64 or 128), GROUP (query heads of a key head, 1..16).
// Shared memory: the warps' rings and the plan, NUM_WARPS * RING_BYTES + sizeof(Plan).
#include "prims.cuh"

#include "types.cuh"

#include "attention_items.cuh"
#include "attention_page.cuh"

constexpr uint32_t KEYS_BYTES = PAGE_TOKENS * KEY_BYTES;  // the keys of a page, and its values
constexpr uint32_t PAGE_BYTES = 2 * KEYS_BYTES;           // of one head
constexpr uint32_t STAGES = PAGE_BYTES > 4096 ? 2 : 4;    // pages of a ring: at most 16 KB a warp
constexpr uint32_t RING_BYTES = STAGES * PAGE_BYTES;
constexpr uint32_t LANE_DIM = HEAD_DIM / 32;              // outputs of a lane of a row's warp
constexpr uint32_t BLOCKS_PER_SM = 3;                    // what registers and shared memory allow
constexpr float LOG2_E = 1.4426950408889634f;

// A warp's sums take the place of its ring; the padding spreads rows over the banks.
constexpr uint32_t SUMS_STRIDE = HEAD_DIM + 8;
constexpr uint32_t PART_FLOATS = PACKED_ROWS * (HEAD_DIM + 2);
static_assert(4 * PACKED_ROWS * (SUMS_STRIDE + 2) <= RING_BYTES, "the sums fit into the ring");

// Sums of several parts of a softmax, `stride` floats apart: outputs of 16 rows, `row_stride`
// floats apart, then their largest scores (scaled, base 2), then their sums of weights.
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

// The warp copies keys and values of a page and a head.
DEVICE void copy_page(const AttentionParams& p, uint32_t kv_head, uint32_t page, uint8_t* stage) {
    const uint32_t lane = lane_index();
    const uint8_t* from = p.cache + (uint64_t{page} * p.num_kv_heads + kv_head) * PAGE_BYTES;
    from += 16 * lane;
    // An even number of keys a round: a lane's place in them stays.
    uint8_t* keys = stage + key_chunk_offset(lane / KEY_CHUNKS, lane % KEY_CHUNKS);
    uint8_t* values = stage + KEYS_BYTES + 16 * lane;
    UNROLL
    for (uint32_t done = 0; done < KEYS_BYTES; done += 16 * 32) {
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

// The warp's pages of the item, through its ring.
DEVICE void attend_pages(const AttentionParams& p, const Item& item, uint8_t* ring,
                         Softmax& softmax) {
    uint32_t query[NUM_STEPS][4];
    load_queries(p, item, query);
    const View view = load_view(p, item);
    const WarpPages own = warp_pages(p, item);
    const uint32_t* table = p.pages + uint64_t{item.sequence} * p.max_pages + own.first;
    const float scale = p.scale * LOG2_E;
    uint32_t ids = 0;  // of 32 pages, one a lane
    for (uint32_t next = 0; next < own.count + STAGES - 1; ++next) {
        async_wait<STAGES - 2>();
        // All lanes' copies have landed, and all lanes have left the stage that is filled now.
        warp_sync();
        if (next < own.count) {
            if (next % 32 == 0) {
                const uint32_t place = next + lane_index();
                ids = place < own.count ? table[NUM_WARPS * place] : 0;
            }
            const uint32_t page = shuffle_from(ids, next % 32);
            copy_page(p, item.kv_head, page, ring + next % STAGES * PAGE_BYTES);
        }
        async_commit();
        if (next >= STAGES - 1) {
            const uint32_t current = next - (STAGES - 1);
            const uint32_t first_token = (own.first + NUM_WARPS * current) * PAGE_TOKENS;
            attend_page(ring + current % STAGES * PAGE_BYTES, query, view, first_token,
                        item.unmasked, scale, softmax);
        }
    }
    warp_sync();
}

// Leaves the warp's sums where its ring was.
DEVICE void store_sums(const Softmax& softmax, float scale, float* sums) {
    const uint32_t quad = lane_index() % 4;
    UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t packed = lane_index() / 4 + 8 * half;
        float sum = softmax.sum[half];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        if (quad == 0) {
            sums[PACKED_ROWS * SUMS_STRIDE + packed] = softmax.largest[half] * scale;
            sums[PACKED_ROWS * (SUMS_STRIDE + 1) + packed] = sum;
        }
        UNROLL
        for (uint32_t tile = 0; tile < OUT_TILES; ++tile) {
            float* to = sums + packed * SUMS_STRIDE + 8 * tile + 2 * quad;
            const float* from = softmax.out[tile] + 2 * half;
            *reinterpret_cast<Float2*>(to) = {from[0], from[1]};
        }
    }
}

// A row of all parts, in their order. A part that saw nothing adds 0; a single part comes out as it
// is.
DEVICE MergedRow merge_row(const Parts& parts, uint32_t packed) {
    const float* scores = parts.first + PACKED_ROWS * parts.row_stride + packed;
    MergedRow merged = {minus_infinity(), 0.0f, {}};
    for (uint32_t part = lane_index(); part < parts.count; part += 32) {
        merged.largest = fmaxf(merged.largest, scores[uint64_t{part} * parts.stride]);
    }
    merged.largest = warp_max(merged.largest);
    const float* out = parts.first + packed * parts.row_stride + lane_index() * LANE_DIM;
    for (uint32_t part = 0; part < parts.count; ++part) {
        const uint64_t offset = uint64_t{part} * parts.stride;
        const float largest = scores[offset];
        const bool saw_nothing = largest == minus_infinity();
        const float factor = saw_nothing ? 0.0f : ex2(largest - merged.largest);
        merged.sum = fmaf(factor, scores[offset + PACKED_ROWS], merged.sum);
        UNROLL
        for (uint32_t i = 0; i < LANE_DIM; ++i) {
            merged.out[i] = fmaf(factor, out[offset + i], merged.out[i]);
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
        to[PACKED_ROWS * HEAD_DIM + packed] = row.largest;
        to[PACKED_ROWS * (HEAD_DIM + 1) + packed] = row.sum;
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
    uint8_t* ring = rings + warp_index() * RING_BYTES;
    Softmax softmax = {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}, {}};
    attend_pages(p, item, ring, softmax);
    store_sums(softmax, p.scale * LOG2_E, reinterpret_cast<float*>(ring));
    barrier_all();
    const uint64_t head = uint64_t{item.tile} * p.num_kv_heads + item.kv_head;
    float* partials = p.partials + head * p.max_splits * PART_FLOATS;
    const float* sums = reinterpret_cast<const float*>(rings);
    const Parts warps = {sums, NUM_WARPS, RING_BYTES / 4, SUMS_STRIDE};
    for (uint32_t packed = warp_index(); packed < num_packed(item); packed += NUM_WARPS) {
        const MergedRow row = merge_row(warps, packed);
        if (item.num_splits == 1) {
            store_output(p, row, p.output + row_offset(p, item, packed));
        } else {
            store_partial(row, packed, partials + uint64_t{item.split} * PART_FLOATS);
        }
    }
    if (item.num_splits > 1 && arrive(p, item, plan)) {
        const Parts splits = {partials, item.num_splits, PART_FLOATS, HEAD_DIM};
        for (uint32_t packed = warp_index(); packed < num_packed(item); packed += NUM_WARPS) {
            store_output(p, merge_row(splits, packed), p.output + row_offset(p, item, packed));
        }
    }
    barrier_all();  // the rings and the plan's mark are free again
}

KERNEL(attention, AttentionParams, NUM_THREADS, BLOCKS_PER_SM) {
    uint8_t* rings = shared_memory();
    Plan& plan = *reinterpret_cast<Plan*>(rings + NUM_WARPS * RING_BYTES);
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
