// What a finished tile of sums becomes. A warp finishes rows of it: lane l has outputs l and l + 32, which the image
// puts together where an epilogue needs two (a rotary pair, a gate and its up). Several rows are loaded, then made, then
// stored, each time all of them: behind a store no load may begin, and what one row waits for others may use.
#pragma once

// What a lane's two outputs have in common in all rows.
struct Outputs {
    uint32_t n[2];
    float scale[2];
    float bias[2];
};

DEVICE Outputs outputs_of(const GemmParams& p, uint32_t tile) {
    Outputs outputs;
    UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t n = tile * UNIT_OUTPUTS + i * 32 + lane_index();
        outputs.n[i] = n;
        outputs.scale[i] = WEIGHT == FP8 ? p.scales[n] : 1.0f;
        outputs.bias[i] = p.bias ? p.bias[n] : 0.0f;
    }
    return outputs;
}

DEVICE float scaled(const Outputs& outputs, uint32_t i, float sum) {
    return fmaf(sum, outputs.scale[i], outputs.bias[i]);
}

#if EPILOGUE == RAW || EPILOGUE == RESIDUAL
// Stores a lane's two outputs of a row of floats.
DEVICE void store_two(
    const GemmParams& p, uint32_t n_len, const Outputs& outputs, uint32_t row, const float (&two)[2]) {
    float* to = (float*)p.output + uint64_t(row) * n_len;
    UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        if (outputs.n[i] < n_len) {
            to[outputs.n[i]] = two[i];
        }
    }
}
#endif

#if EPILOGUE == RAW
struct Before {};

DEVICE Before load_before(const GemmParams&, uint32_t, uint32_t, const Outputs&, uint32_t) {
    return {};
}

struct Made {
    float of[2];
};

DEVICE Made make_row(const GemmParams&, uint32_t, uint32_t, const Outputs& outputs, const Before&, Pair sums) {
    return {{scaled(outputs, 0, sums.low), scaled(outputs, 1, sums.high)}};
}

DEVICE void store_row(
    const GemmParams& p, uint32_t n_len, uint32_t, const Outputs& outputs, uint32_t row, const Before&,
    const Made& made) {
    store_two(p, n_len, outputs, row, made.of);
}
#endif

#if EPILOGUE == RESIDUAL
// The residual.
struct Before {
    float old[2];
};

DEVICE Before load_before(
    const GemmParams& p, uint32_t n_len, uint32_t, const Outputs& outputs, uint32_t row) {
    const float* from = (const float*)p.output + uint64_t(row) * n_len;
    Before before;
    UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        before.old[i] = outputs.n[i] < n_len ? from[outputs.n[i]] : 0.0f;
    }
    return before;
}

struct Made {
    float of[2];
    float squares;   // of the whole row of the tile
};

DEVICE Made make_row(
    const GemmParams&, uint32_t n_len, uint32_t, const Outputs& outputs, const Before& before, Pair sums) {
    const float added[2] = {scaled(outputs, 0, sums.low), scaled(outputs, 1, sums.high)};
    Made made;
    UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        made.of[i] = outputs.n[i] < n_len ? before.old[i] + added[i] : 0.0f;
    }
    made.squares = warp_sum(fmaf(made.of[1], made.of[1], made.of[0] * made.of[0]));
    return made;
}

DEVICE void store_row(
    const GemmParams& p, uint32_t n_len, uint32_t tile, const Outputs& outputs, uint32_t row, const Before&,
    const Made& made) {
    store_two(p, n_len, outputs, row, made.of);
    if (lane_index() == 0) {
        p.squares[uint64_t(row) * divide_up(n_len, SQUARES_LEN) + tile] = made.squares;
    }
}
#endif

#if EPILOGUE == SWIGLU
struct Before {};

DEVICE Before load_before(const GemmParams&, uint32_t, uint32_t, const Outputs&, uint32_t) {
    return {};
}

struct Made {
    uint16_t half;
};

// Tile t of the image has gates [32t, 32t + 32), then their ups.
DEVICE Made make_row(const GemmParams&, uint32_t, uint32_t, const Outputs& outputs, const Before&, Pair sums) {
    const float gate = scaled(outputs, 0, sums.low);
    const float up = scaled(outputs, 1, sums.high);
    return {float_to_half_sat(swiglu(gate, up))};
}

DEVICE void store_row(
    const GemmParams& p, uint32_t n_len, uint32_t tile, const Outputs&, uint32_t row, const Before&, const Made& made) {
    const uint32_t len = n_len / 2;
    const uint32_t k = tile * 32 + lane_index();
    const uint64_t offset = HAS_WARPGROUPS ? half_offset(row, k, row_units(len)) : (uint64_t(row) * len + k) * 2;
    *(uint16_t*)((uint8_t*)p.output + offset) = made.half;
}
#endif

#if EPILOGUE == HEAD
struct Before {};

DEVICE Before load_before(const GemmParams&, uint32_t, uint32_t, const Outputs&, uint32_t) {
    return {};
}

struct Made {
    float logits[2];
    Best best;   // of the whole row of the tile
};

DEVICE Made make_row(
    const GemmParams&, uint32_t n_len, uint32_t tile, const Outputs& outputs, const Before&, Pair sums) {
    Made made = {
        {scaled(outputs, 0, sums.low), scaled(outputs, 1, sums.high)},
        {-bits_float(0x7f800000u), tile * UNIT_OUTPUTS}};
    UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        if (outputs.n[i] < n_len) {
            made.best = better(made.best, made.logits[i], outputs.n[i]);
        }
    }
    made.best = warp_best(made.best);
    return made;
}

DEVICE void store_row(
    const GemmParams& p, uint32_t n_len, uint32_t tile, const Outputs& outputs, uint32_t row, const Before&,
    const Made& made) {
    UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        if (outputs.n[i] < n_len) {
            ((float*)p.output)[uint64_t(row) * n_len + outputs.n[i]] = made.logits[i];
        }
    }
    if (lane_index() == 0) {
        p.best[uint64_t(row) * divide_up(n_len, UNIT_OUTPUTS) + tile] = made.best;
    }
}
#endif

#if EPILOGUE == QKV
#include "common/kv_cache.cuh"
#include "common/rotary.cuh"

// A tile of a head: queries, then keys, then values.
struct HeadTile {
    uint32_t head;       // of all
    uint32_t part;       // of the head
    bool is_query;
    bool is_value;
    uint32_t kv_head;    // of keys or of values
};

DEVICE HeadTile head_tile(const GemmParams& p, uint32_t tile) {
    const uint32_t head = tile / HEAD_TILES;
    const bool is_value = head >= p.num_heads + p.num_kv_heads;
    const uint32_t kv_head = head - p.num_heads - (is_value ? p.num_kv_heads : 0);
    return {head, tile % HEAD_TILES, head < p.num_heads, is_value, kv_head};
}

// Where the row's keys and values go, and by which angle it turns.
struct Before {
    uint32_t sequence;
    CacheSlot slot;
    Angle angle;
};

// A row without a sequence may have any position: nothing is looked up for it, and nothing written.
DEVICE Before load_before(
    const GemmParams& p, uint32_t, uint32_t tile, const Outputs&, uint32_t row_idx) {
    const HeadTile at = head_tile(p, tile);
    Row row = p.rows[row_idx];
    const bool is_active = row.sequence != NO_SEQUENCE;
    Before before = {row.sequence, {}, {}};
    if (!at.is_query) {
        const Row place = is_active ? row : Row{};
        before.slot = cache_slot(p.pages, p.max_pages, place);
    }
    if (!at.is_value) {
        const uint32_t position = is_active ? row.position : 0;
        before.angle = angle_of(p.rope, position, at.part * HALF_TILE + lane_index());
    }
    return before;
}

// The cache, for what has this scale; all rows have the same one.
DEVICE Cache cache_of(const GemmParams& p, uint32_t scale) {
    const bool is_fp8 = p.kv == FP8;
    const float factor = is_fp8 ? one_over(p.kv_scales[scale]) : 1.0f;
    return {p.cache, p.num_kv_heads, is_fp8, factor};
}

typedef Pair Made;

DEVICE Made make_row(
    const GemmParams& p, uint32_t, uint32_t tile, const Outputs& outputs, const Before& before, Pair sums) {
    const Pair v = {scaled(outputs, 0, sums.low), scaled(outputs, 1, sums.high)};
    return head_tile(p, tile).is_value ? v : rotate(before.angle, v);
}

DEVICE void store_row(
    const GemmParams& p, uint32_t, uint32_t tile, const Outputs&, uint32_t row, const Before& before, const Made& made) {
    if (before.sequence == NO_SEQUENCE) {
        return;
    }
    const HeadTile at = head_tile(p, tile);
    if (at.is_value) {
        const Cache cache = cache_of(p, p.num_kv_heads + at.kv_head);
        const uint32_t element = at.part * UNIT_OUTPUTS + lane_index();
        store_value(cache, before.slot, at.kv_head, element, made.low);
        store_value(cache, before.slot, at.kv_head, element + HALF_TILE, made.high);
        return;
    }
    const uint32_t i = at.part * HALF_TILE + lane_index();
    if (at.is_query) {
        uint16_t* to = (uint16_t*)p.output + (uint64_t(row) * p.num_heads + at.head) * HEAD_DIM;
        to[i] = float_to_half_sat(made.low);
        to[i + HEAD_DIM / 2] = float_to_half_sat(made.high);
        return;
    }
    const Cache cache = cache_of(p, at.kv_head);
    store_key(cache, before.slot, at.kv_head, i, made.low);
    store_key(cache, before.slot, at.kv_head, i + HEAD_DIM / 2, made.high);
}
#endif

// What some rows of a tile need from memory: `first`, and `stride` further on so many times, below `end`.
template <uint32_t COUNT>
DEVICE void load_rows(
    const GemmParams& p, uint32_t n_len, uint32_t tile, const Outputs& outputs, uint32_t first, uint32_t stride,
    uint32_t end, Before (&before)[COUNT]) {
    UNROLL
    for (uint32_t i = 0; i < COUNT; ++i) {
        // Those beyond the last repeat the first: a branch would keep the loads apart.
        const uint32_t row = first + i * stride;
        before[i] = load_before(p, n_len, tile, outputs, row < end ? row : first);
    }
}

// Makes outputs of these rows. `sums_of(row)` has a lane's two.
template <uint32_t COUNT, class SumsOf>
DEVICE void finish_loaded(
    const GemmParams& p, uint32_t n_len, uint32_t tile, const Outputs& outputs, uint32_t first, uint32_t stride,
    uint32_t end, const Before (&before)[COUNT], SumsOf sums_of) {
    Made made[COUNT];
    UNROLL
    for (uint32_t i = 0; i < COUNT; ++i) {
        const uint32_t row = first + i * stride;
        made[i] = make_row(p, n_len, tile, outputs, before[i], sums_of(row < end ? row : first));
    }
    UNROLL
    for (uint32_t i = 0; i < COUNT; ++i) {
        const uint32_t row = first + i * stride;
        if (row < end) {
            store_row(p, n_len, tile, outputs, row, before[i], made[i]);
        }
    }
}

// Both.
template <uint32_t COUNT, class SumsOf>
DEVICE void finish_rows(
    const GemmParams& p, uint32_t n_len, uint32_t tile, const Outputs& outputs, uint32_t first, uint32_t stride,
    uint32_t end, SumsOf sums_of) {
    Before before[COUNT];
    load_rows(p, n_len, tile, outputs, first, stride, end, before);
    finish_loaded(p, n_len, tile, outputs, first, stride, end, before, sums_of);
}
