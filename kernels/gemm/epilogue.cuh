// What a finished tile of sums becomes. A warp finishes a row of it: lane l has outputs l and l + 32, which
// the image puts together where an epilogue needs two (a rotary pair, a gate and its up).
#pragma once

DEVICE float scaled(const GemmParams& p, uint32_t n, float sum) {
    const float scale = WEIGHT == FP8 ? p.scales[n] : 1.0f;
    return fmaf(sum, scale, p.bias ? p.bias[n] : 0.0f);
}

#if EPILOGUE == RAW
DEVICE void store_output(const GemmParams& p, uint32_t n_len, uint32_t row, uint32_t n, float v) {
    if (n < n_len) {
        ((float*)p.output)[uint64_t(row) * n_len + n] = v;
    }
}

DEVICE void finish_row(
    const GemmParams& p, uint32_t n_len, uint32_t tile, uint32_t row, float low, float high) {
    const uint32_t n = tile * UNIT_OUTPUTS + lane_index();
    store_output(p, n_len, row, n, scaled(p, n, low));
    store_output(p, n_len, row, n + 32, scaled(p, n + 32, high));
}
#endif

#if EPILOGUE == RESIDUAL
// Returns what then stands there.
DEVICE float add_output(const GemmParams& p, uint32_t n_len, uint32_t row, uint32_t n, float v) {
    if (n >= n_len) {
        return 0.0f;
    }
    float* to = (float*)p.output + uint64_t(row) * n_len + n;
    return *to += v;
}

DEVICE void finish_row(
    const GemmParams& p, uint32_t n_len, uint32_t tile, uint32_t row, float low, float high) {
    const uint32_t n = tile * UNIT_OUTPUTS + lane_index();
    const float a = add_output(p, n_len, row, n, scaled(p, n, low));
    const float b = add_output(p, n_len, row, n + 32, scaled(p, n + 32, high));
    const float sum = warp_sum(fmaf(b, b, a * a));
    if (lane_index() == 0) {
        p.squares[uint64_t(row) * divide_up(n_len, SQUARES_LEN) + tile] = sum;
    }
}
#endif

#if EPILOGUE == SWIGLU
// Tile t of the image has gates [32t, 32t + 32), then their ups.
DEVICE void finish_row(
    const GemmParams& p, uint32_t n_len, uint32_t tile, uint32_t row, float low, float high) {
    const uint32_t n = tile * UNIT_OUTPUTS + lane_index();
    const float gate = scaled(p, n, low);
    const float up = scaled(p, n + 32, high);
    uint16_t* to = (uint16_t*)p.output + uint64_t(row) * (n_len / 2);
    to[tile * 32 + lane_index()] = float_to_half_sat(swiglu(gate, up));
}
#endif

#if EPILOGUE == HEAD
DEVICE void finish_row(
    const GemmParams& p, uint32_t n_len, uint32_t tile, uint32_t row, float low, float high) {
    const uint32_t first = tile * UNIT_OUTPUTS;
    const float sums[2] = {low, high};
    Best best = {-bits_float(0x7f800000u), first};
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t n = first + i * 32 + lane_index();
        if (n < n_len) {
            const float logit = scaled(p, n, sums[i]);
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
// The cache, for what has this scale.
DEVICE Cache cache_of(const GemmParams& p, uint32_t scale) {
    const bool is_fp8 = p.kv == FP8;
    const float factor = is_fp8 ? one_over(p.kv_scales[scale]) : 1.0f;
    return {p.cache, p.pages, p.max_pages, p.num_kv_heads, is_fp8, factor};
}

DEVICE void finish_value(const GemmParams& p, const Row& row, uint32_t head, uint32_t part, Pair v) {
    const Cache cache = cache_of(p, p.num_kv_heads + head);
    const CacheSlot slot = cache_slot(cache, row);
    const uint32_t element = part * UNIT_OUTPUTS + lane_index();
    store_value(cache, slot, head, element, v.low);
    store_value(cache, slot, head, element + HALF_TILE, v.high);
}

DEVICE void finish_key(const GemmParams& p, const Row& row, uint32_t head, uint32_t i, Pair v) {
    const Cache cache = cache_of(p, head);
    const CacheSlot slot = cache_slot(cache, row);
    store_key(cache, slot, head, i, v.low);
    store_key(cache, slot, head, i + HEAD_DIM / 2, v.high);
}

DEVICE void finish_query(const GemmParams& p, uint32_t row, uint32_t head, uint32_t i, Pair v) {
    uint16_t* to = (uint16_t*)p.output + (uint64_t(row) * p.num_heads + head) * HEAD_DIM;
    to[i] = float_to_half_sat(v.low);
    to[i + HEAD_DIM / 2] = float_to_half_sat(v.high);
}

// A row without a sequence may have any position: nothing is looked up for it, and nothing written.
DEVICE void finish_row(
    const GemmParams& p, uint32_t, uint32_t tile, uint32_t row_idx, float low, float high) {
    const Row& row = p.rows[row_idx];
    if (row.sequence == NO_SEQUENCE) {
        return;
    }
    const uint32_t n = tile * UNIT_OUTPUTS + lane_index();
    const Pair v = {scaled(p, n, low), scaled(p, n + HALF_TILE, high)};
    const uint32_t head = tile / HEAD_TILES;
    const uint32_t part = tile % HEAD_TILES;
    if (head >= p.num_heads + p.num_kv_heads) {
        finish_value(p, row, head - p.num_heads - p.num_kv_heads, part, v);
        return;
    }
    const uint32_t i = part * HALF_TILE + lane_index();
    const Pair turned = rotate(p.rope, row.position, i, v);
    if (head < p.num_heads) {
        finish_query(p, row_idx, head, i, turned);
    } else {
        finish_key(p, row, head - p.num_heads, i, turned);
    }
}
#endif
