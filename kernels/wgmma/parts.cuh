// How the parts of a pair of tiles become one sum. Each CTA writes its part to a slot of its own; the last one to
// arrive adds the parts in the order of k, so the result does not depend on who was last. A thread adds what it has
// a share of itself: parts are written and read in the order of accumulators.
#pragma once

constexpr uint32_t WARPGROUP_THREADS = WARPGROUP_WARPS * 32;
constexpr uint32_t TILE_FLOATS = ROWS * UNIT_OUTPUTS;

DEVICE uint32_t warpgroup_index() {
    return warp_index() / WARPGROUP_WARPS;
}

// Where a CTA's part of this warpgroup's tile goes: [slot][tile][eight rows][thread][4]. From one piece to the next,
// of this CTA or of the one after it, the CTA or the pair grows, so no two have one slot.
DEVICE Float4* part_of(const GemmParams& p, uint32_t cta, uint32_t pair) {
    const uint64_t tile = uint64_t(cta + pair) * PAIR_TILES + warpgroup_index();
    return (Float4*)(p.partials + tile * TILE_FLOATS) + thread_index() % WARPGROUP_THREADS;
}

DEVICE bool has_rows(const GemmParams& p, uint32_t eight) {
    return eight * 8 < p.num_rows;
}

// Four sums of each eight rows.
DEVICE void write_part(const GemmParams& p, uint32_t cta, uint32_t pair, const Sums& sums) {
    Float4* part = part_of(p, cta, pair);
    UNROLL
    for (uint32_t i = 0; i < PRODUCTS; ++i) {
        UNROLL
        for (uint32_t j = 0; j < PRODUCT_ROWS / 8; ++j) {
            const float* four = sums.of[i] + j * 4;
            const uint32_t eight = i * (PRODUCT_ROWS / 8) + j;
            if (has_rows(p, eight)) {
                part[eight * WARPGROUP_THREADS] = {four[0], four[1], four[2], four[3]};
            }
        }
    }
}

// Parts whose loads are under way together.
constexpr uint32_t PARTS_AT_ONCE = 4;

// Adds up the parts of this warpgroup's tile, for the rows of a batch.
DEVICE void sum_parts(
    const GemmParams& p, const Order& order, uint32_t pair, uint32_t batch, Four (&sums)[FINISH_ROWS / 8]) {
    const Sharers sharers = sharers_of(order, pair);
    for (uint32_t j = 0; j < FINISH_ROWS / 8; ++j) {
        sums[j] = {};
    }
    for (uint32_t first = sharers.first; first <= sharers.last; first += PARTS_AT_ONCE) {
        Float4 loaded[PARTS_AT_ONCE][FINISH_ROWS / 8];
        UNROLL
        for (uint32_t i = 0; i < PARTS_AT_ONCE; ++i) {
            // Beyond the last part it is loaded again, and rows that there are not are others: a branch would keep
            // the loads apart.
            const Float4* part = part_of(p, minimum(first + i, sharers.last), pair);
            UNROLL
            for (uint32_t j = 0; j < FINISH_ROWS / 8; ++j) {
                const uint32_t eight = batch * (FINISH_ROWS / 8) + j;
                loaded[i][j] = part[(has_rows(p, eight) ? eight : 0) * WARPGROUP_THREADS];
            }
        }
        UNROLL
        for (uint32_t i = 0; i < PARTS_AT_ONCE; ++i) {
            const bool is_part = first + i <= sharers.last;
            UNROLL
            for (uint32_t j = 0; j < FINISH_ROWS / 8; ++j) {
                const float four[4] = {loaded[i][j].x, loaded[i][j].y, loaded[i][j].z, loaded[i][j].w};
                UNROLL
                for (uint32_t e = 0; e < 4; ++e) {
                    sums[j].of[e] = is_part ? sums[j].of[e] + four[e] : sums[j].of[e];
                }
            }
        }
    }
}
