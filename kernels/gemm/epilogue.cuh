// What a finished tile of sums becomes. A warp finishes rows of it: lane l has outputs l and l + 32, which the image
// puts together where an epilogue needs two (a rotary pair, a gate and its up). What a row needs from memory is loaded
// for several rows before any of them is stored: behind a store no load may begin.
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

#if EPILOGUE == RAW
struct Before {};

DEVICE Before load_before(const GemmParams&, uint32_t, uint32_t, const Outputs&, uint32_t) {
    return {};
}

DEVICE void finish_row(
    const GemmParams& p, uint32_t n_len, uint32_t, const Outputs& outputs, uint32_t row, const Before&, Pair sums) {
    float* to = (float*)p.output + uint64_t(row) * n_len;
    const float values[2] = {scaled(outputs, 0, sums.low), scaled(outputs, 1, sums.high)};
    UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        if (outputs.n[i] < n_len) {
            to[outputs.n[i]] = values[i];
        }
    }
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

DEVICE void finish_row(
    const GemmParams& p, uint32_t n_len, uint32_t tile, const Outputs& outputs, uint32_t row, const Before& before,
    Pair sums) {
    float* to = (float*)p.output + uint64_t(row) * n_len;
    const float added[2] = {scaled(outputs, 0, sums.low), scaled(outputs, 1, sums.high)};
    float values[2];
    UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        const bool is_inside = outputs.n[i] < n_len;
        values[i] = is_inside ? before.old[i] + added[i] : 0.0f;
        if (is_inside) {
            to[outputs.n[i]] = values[i];
        }
    }
    const float sum = warp_sum(fmaf(values[1], values[1], values[0] * values[0]));
    if (lane_index() == 0) {
        p.squares[uint64_t(row) * divide_up(n_len, SQUARES_LEN) + tile] = sum;
    }
}
#endif

#if EPILOGUE == SWIGLU
struct Before {};

DEVICE Before load_before(const GemmParams&, uint32_t, uint32_t, const Outputs&, uint32_t) {
    return {};
}

// Tile t of the image has gates [32t, 32t + 32), then their ups.
DEVICE void finish_row(
    const GemmParams& p, uint32_t n_len, uint32_t tile, const Outputs& outputs, uint32_t row, const Before&, Pair sums) {
    const float gate = scaled(outputs, 0, sums.low);
    const float up = scaled(outputs, 1, sums.high);
    uint16_t* to = (uint16_t*)p.output + uint64_t(row) * (n_len / 2);
    to[tile * 32 + lane_index()] = float_to_half_sat(swiglu(gate, up));
}
#endif

#if EPILOGUE == HEAD
struct Before {};

DEVICE Before load_before(const GemmParams&, uint32_t, uint32_t, const Outputs&, uint32_t) {
    return {};
}

DEVICE void finish_row(
    const GemmParams& p, uint32_t n_len, uint32_t tile, const Outputs& outputs, uint32_t row, const Before&, Pair sums) {
    const float of[2] = {sums.low, sums.high};
    Best best = {-bits_float(0x7f800000u), tile * UNIT_OUTPUTS};
    UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t n = outputs.n[i];
        if (n < n_len) {
            const float logit = scaled(outputs, i, of[i]);
            ((float*)p.output)[uint64_t(row) * n_len + n] = logit;
            best = better(best, logit, n);
        }
    }
    best = warp_best(best);
    if (lane_index() == 0) {
        p.best[uint64_t(row) * divide_up(n_len, UNIT_OUTPUTS) + tile] = best;
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

DEVICE void finish_row(
    const GemmParams& p, uint32_t, uint32_t tile, const Outputs& outputs, uint32_t row, const Before& before, Pair sums) {
    if (before.sequence == NO_SEQUENCE) {
        return;
    }
    const HeadTile at = head_tile(p, tile);
    const Pair v = {scaled(outputs, 0, sums.low), scaled(outputs, 1, sums.high)};
    if (at.is_value) {
        const Cache cache = cache_of(p, p.num_kv_heads + at.kv_head);
        const uint32_t element = at.part * UNIT_OUTPUTS + lane_index();
        store_value(cache, before.slot, at.kv_head, element, v.low);
        store_value(cache, before.slot, at.kv_head, element + HALF_TILE, v.high);
        return;
    }
    const uint32_t i = at.part * HALF_TILE + lane_index();
    const Pair turned = rotate(before.angle, v);
    if (at.is_query) {
        uint16_t* to = (uint16_t*)p.output + (uint64_t(row) * p.num_heads + at.head) * HEAD_DIM;
        to[i] = float_to_half_sat(turned.low);
        to[i + HEAD_DIM / 2] = float_to_half_sat(turned.high);
        return;
    }
    const Cache cache = cache_of(p, at.kv_head);
    store_key(cache, before.slot, at.kv_head, i, turned.low);
    store_key(cache, before.slot, at.kv_head, i + HEAD_DIM / 2, turned.high);
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
    UNROLL
    for (uint32_t i = 0; i < COUNT; ++i) {
        const uint32_t row = first + i * stride;
        if (row < end) {
            finish_row(p, n_len, tile, outputs, row, before[i], sums_of(row));
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
