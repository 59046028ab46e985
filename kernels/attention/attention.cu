// Attention of a few query rows over the paged keys and values of their sequence.
//
// The grid is persistent: blocks walk the items (tile of query rows, key head, node of the tree of
// splits of the positions). The pages of a split are summed up in four parts, which are added in
// order; splits are added as the tree says, inside an item by its block, above it by the block that
// arrives last at a node. So what a row gets depends on its query, on its sequence's keys and values
// and on the bounds of splits alone, to the bit: not on the other rows of its tile, on the tile's
// width, on the level of items, on the grid or on the order of arrival.
// Defines: KV (FP8 or FP16), HEAD_DIM (64 or 128), GROUP (query heads of a key head, 1..16), and
// TILE_ROWS (query rows times GROUP of a tile: 16, or 64 for many rows of a sequence); WINDOW, where rows see no
// positions before their first.
// Shared memory: RINGS_BYTES + sizeof(Plan).
#include "common/prims.cuh"

#include "common/types.cuh"
#include "common/unit.cuh"

#ifndef TILE_ROWS
#define TILE_ROWS 16
#endif

#include "attention/items.cuh"
#include "attention/page.cuh"

#include "attention/merge.cuh"

constexpr uint32_t KEYS_BYTES = PAGE_TOKENS * KEY_BYTES;  // the keys of a page, and its values
constexpr uint32_t PAGE_BYTES = 2 * KEYS_BYTES;           // of one head
constexpr float LOG2_E = 1.4426950408889634f;

// Pages come through rings: of each warp in narrow tiles, of the block in wide ones. A warp fills a
// stage as soon as it has left it; the block waits for the next page, to wait once a page.
constexpr uint32_t NUM_RINGS = IS_WIDE ? 1 : NUM_WARPS;
constexpr uint32_t NUM_COPIERS = NUM_THREADS / NUM_RINGS;
constexpr uint32_t STAGES = PAGE_BYTES > 4096 && !IS_WIDE ? 2 : 4;
constexpr uint32_t AHEAD = IS_WIDE ? STAGES - 1 : STAGES;
constexpr uint32_t RING_BYTES = STAGES * PAGE_BYTES;

// A ring's sums take its place.
constexpr uint32_t RING_STRIDE = maximum(RING_BYTES, 4 * TILE_ROWS * SUMS_STRIDE);
constexpr uint32_t RINGS_BYTES = NUM_RINGS * RING_STRIDE;

// Two blocks fit, and on Hopper one of a narrow tile beside the product of few rows behind it.
constexpr uint32_t REGISTERS = IS_WIDE ? 255 : ARCH >= 900 && ARCH < 1000 ? 176 : 216;

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

// Copies the page that the walk has come to, if there is one.
DEVICE void copy_next(const AttentionParams& p, const Unit& unit, Walk& ahead, uint8_t* stage) {
    if (has_page(ahead)) {
        const uint32_t page = unit.pages[ahead.page];
        copy_page(p, unit.item.kv_head, page, stage);
        advance(ahead);
    }
    async_commit();
}

// One page that has landed.
DEVICE void attend_page(const uint8_t* stage, const uint32_t (&query)[NUM_STEPS][4],
                        const View& view, uint32_t first_token, uint32_t unmasked, float scale,
                        Softmax& softmax) {
    float score[2][4] = {};
    score_page(stage, query, score);
    Uint2 seen = {0xffffffffu, 0xffffffffu};
    bool is_masked = first_token + PAGE_TOKENS > unmasked;
    if constexpr (IS_WINDOWED) {
        is_masked = is_masked || first_token < view.all_after;
    }
    if (is_masked) {
        seen = hide_page(view, first_token, score);
    }
    uint32_t weight[4];
    weigh_page(score, scale, softmax, weight);
    // Where rows are windowed there are no registers for two.
    if (IS_WINDOWED || is_masked) {
        add_values<true>(stage + KEYS_BYTES, weight, seen, softmax);
    } else {
        add_values<false>(stage + KEYS_BYTES, weight, seen, softmax);
    }
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

// Copies the first pages of a unit.
DEVICE void begin_unit(const AttentionParams& p, const Unit& unit, uint8_t* ring) {
    Walk ahead = begin_walk(p, unit.item, unit.split);
    KEEP_LOOP  // registers
    for (uint32_t i = 0; i < AHEAD; ++i) {
        copy_next(p, unit, ahead, ring + i * PAGE_BYTES);
    }
}

// Where the walk through a split is behind those pages.
DEVICE Walk walk_ahead(Walk walk) {
    KEEP_LOOP
    for (uint32_t i = 0; i < AHEAD && has_page(walk); ++i) {
        advance(walk);
    }
    return walk;
}

// Whether the pages with which a unit begins are older than the pass. On sm_120 there are no registers to make use of it.
DEVICE bool begins_old(const AttentionParams& p, const Unit& unit) {
    const uint32_t end = first_token(p, unit.split) + AHEAD * NUM_PARTS * PAGE_TOKENS;
    return ARCH < 1200 && end <= unit.item.rows.num_old;
}

// What a lane knows of its rows.
struct LaneRows {
    uint32_t query[NUM_STEPS][4];
    View view;
};

DEVICE void load_lane_rows(const AttentionParams& p, const Item& item, LaneRows& rows) {
    load_queries(p, item, rows.query);
    rows.view = load_view(p, item);
}

// The warp's pages of a unit, through the ring: of a narrow tile its part, of a wide one all parts.
DEVICE Softmax attend_unit(const AttentionParams& p, const Unit& unit, const LaneRows& rows, uint8_t* ring) {
    const Item& item = unit.item;
    Walk now = begin_walk(p, item, unit.split);
    Walk ahead = walk_ahead(now);
    const float scale = p.scale * LOG2_E * key_scale(unit);
    Softmax part = empty_softmax();
    Softmax total = empty_softmax();
    for (uint32_t round = 0; has_page(now); ++round) {
        async_wait<AHEAD - 1>();
        ring_sync();  // all copies to this stage have landed
        const uint8_t* stage = ring + round % STAGES * PAGE_BYTES;
        uint8_t* next = ring + (round + AHEAD) % STAGES * PAGE_BYTES;
        if constexpr (IS_WIDE) {
            copy_next(p, unit, ahead, next);  // all warps have left that stage
        }
        const uint32_t token = first_token(p, unit.split) + now.page * PAGE_TOKENS;
        attend_page(stage, rows.query, rows.view, token, item.reach.unmasked, scale, part);
        if constexpr (!IS_WIDE) {
            ring_sync();  // all lanes have left this stage
            copy_next(p, unit, ahead, next);
        }
        const uint32_t number = now.part;
        advance(now);
        if (IS_WIDE && (now.part != number || !has_page(now))) {
            end_part(scale, part);
            merge_part(part, total);
            part = empty_softmax();
        }
    }
    if constexpr (IS_WIDE) {
        ring_sync();  // all warps have left the ring
        return total;
    }
    end_part(scale, part);
    return part;
}

// Leaves the sums of a warp's rows where the ring was.
DEVICE void store_sums(const Softmax& softmax, float* sums) {
    const uint32_t quad = lane_index() % 4;
    UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        float* row = sums + lane_row(half) * SUMS_STRIDE;
        if (quad == 0) {
            *reinterpret_cast<Float2*>(row + HEAD_DIM) = {softmax.largest[half], softmax.sum[half]};
        }
        UNROLL
        for (uint32_t tile = 0; tile < OUT_TILES; ++tile) {
            const float* from = softmax.out[tile] + 2 * half;
            *reinterpret_cast<Float2*>(row + 8 * tile + 2 * quad) = {from[0], from[1]};
        }
    }
}

// Puts rows of a complete item into the output or into its partial.
DEVICE void end_item(const AttentionParams& p, const Unit& unit, const RowSums& rows) {
    const Item& item = unit.item;
    if (item.num_items > 1) {
        const uint32_t partial = item.partial + item.index * p.num_kv_heads;
        store_rows(item, rows, partial_at(p, partial));
        return;
    }
    UNROLL
    for (uint32_t i = 0; i < ROWS_AT_ONCE; ++i) {
        if (has_row(item, rows, i)) {
            store_output(p, unit, rows.packed + i * NUM_WARPS, rows.at[i]);
        }
    }
}

// Adds up the parts of a split, and the split to the item.
DEVICE void add_split(const AttentionParams& p, const Unit& unit, const float* sums, RowSums& lowest) {
    const Item& item = unit.item;
    RowSums rows = {};
    for (uint32_t first = 0; first < num_packed(item); first += NUM_WARPS * ROWS_AT_ONCE) {
        rows.packed = first + warp_index();
        const float* row = sums + rows.packed * SUMS_STRIDE;
        UNROLL
        for (uint32_t i = 0; i < ROWS_AT_ONCE; ++i) {
            if (has_row(item, rows, i)) {
                const float* parts = row + i * NUM_WARPS * SUMS_STRIDE;
                rows.at[i] = sum_parts<NUM_RINGS>(parts, NUM_RINGS, RING_STRIDE / 4);
            }
        }
        if (add_to_nodes(p, item, unit.split, lowest, rows)) {
            end_item(p, unit, rows);
        }
    }
}

// Whether this block is the last of so many. If so it sees the partials of all: the barriers put all threads' stores
// before the counter that one of them moves, and their loads behind it. No thread needs a fence of its own.
DEVICE bool arrive(uint32_t* counter, uint32_t count, Plan& plan) {
    barrier_all();
    if (thread_index() == 0) {
        const bool is_last = atomic_add_acq_rel(counter, 1) == count - 1;
        plan.arrived_last = is_last ? 1 : 0;
        if (is_last) {
            *counter = 0;
        }
    }
    barrier_all();
    return plan.arrived_last != 0;
}

// Adds up the children of a node, into the first one's partial or, of the root, into the output.
DEVICE void add_children(const AttentionParams& p, const Unit& unit, uint32_t partial,
                         uint32_t count, uint32_t distance, bool is_root) {
    float* first = partial_at(p, partial);
    for (uint32_t packed = warp_index(); packed < num_packed(unit.item); packed += NUM_WARPS) {
        float* row = first + packed * ROW_FLOATS;
        const RowSum sum = sum_parts<RADIX>(row, count, distance * PARTIAL_FLOATS);
        if (is_root) {
            store_output(p, unit, packed, sum);
        } else {
            warp_sync();  // all lanes have read the first child
            store_row(row, sum);
        }
    }
}

// Completes the nodes above an item to which this block is the last to arrive. The counter of a node
// is that of its second child, which is the second child of no other.
DEVICE void climb(const AttentionParams& p, const Unit& unit, Plan& plan) {
    const Item& item = unit.item;
    uint32_t index = item.index;
    uint32_t num_nodes = item.num_items;
    uint32_t distance = p.num_kv_heads;  // between the partials of neighbours
    for (uint32_t level = item.level; num_nodes > 1; ++level) {
        const uint32_t bits = level_bits(level + 1) - level_bits(level);
        const uint32_t first = index >> bits << bits;
        const uint32_t count = minimum(num_nodes - first, 1u << bits);
        const uint32_t partial = item.partial + first * distance;
        num_nodes = divide_up(num_nodes, 1u << bits);
        if (count > 1) {
            if (!arrive(p.arrivals + partial + distance, count, plan)) {
                return;
            }
            add_children(p, unit, partial, count, distance, num_nodes == 1);
        }
        index >>= bits;
        distance <<= bits;
    }
}

DEVICE uint8_t* ring_of(uint8_t* rings) {
    return rings + thread_index() / NUM_COPIERS * RING_STRIDE;
}

// Adds up what all warps have of a unit.
DEVICE void add_warps(
    const AttentionParams& p, const Softmax& softmax, uint8_t* rings, const Unit& unit, RowSums& lowest) {
    store_sums(softmax, reinterpret_cast<float*>(ring_of(rings)));
    barrier_all();
    add_split(p, unit, reinterpret_cast<const float*>(rings), lowest);
    barrier_all();  // the rings are free again, and the unit may be forgotten
}

// Rows, tiles, pages and all but the newest keys and values are older than the kernel in front, which has let this one
// begin behind its own wait: when the queries are there a block knows its first two units, and has asked for its first
// pages. Each later one is planned while the pages of the one in front arrive.
KERNEL_OF_REGISTERS(attention, AttentionParams, NUM_THREADS, REGISTERS) {
    uint8_t* rings = shared_memory();
    uint8_t* ring = ring_of(rings);
    Plan& plan = *reinterpret_cast<Plan*>(rings + RINGS_BYTES);
    plan_level(p, plan);
    plan_tiles(p, 0, plan);
    plan_item(p, block_index(), plan, plan.units[0]);
    const bool has_work = plan.units[0].split != NO_SPLIT;
    const bool has_begun = has_work && begins_old(p, plan.units[0]);
    if (has_begun) {
        begin_unit(p, plan.units[0], ring);
    }
    if (has_work) {
        plan_next(p, plan.units[0], plan, plan.units[1]);
    }
    grid_wait();
    grid_launch_dependents();
    LaneRows rows;
    RowSums lowest = {};  // of the item's nodes
    if (has_work) {
        if (!has_begun) {
            begin_unit(p, plan.units[0], ring);
        }
        load_lane_rows(p, plan.units[0].item, rows);
    }
    for (uint32_t i = 0; plan.units[i].split != NO_SPLIT; i ^= 1) {
        Unit& now = plan.units[i];
        const Unit& next = plan.units[i ^ 1];
        const Softmax softmax = attend_unit(p, now, rows, ring);
        const bool has_next = next.split != NO_SPLIT;
        const bool ends_item = now.split + 1 == now.item.end_split;
        if (has_next) {
            load_lane_rows(p, next.item, rows);
        }
        add_warps(p, softmax, rings, now, lowest);
        if (has_next) {
            begin_unit(p, next, ring);
        }
        if (ends_item) {
            climb(p, now, plan);
            barrier_all();  // all have left the unit
        }
        if (has_next) {
            plan_next(p, next, plan, now);
        }
    }
}
