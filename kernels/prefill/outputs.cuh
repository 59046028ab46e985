// What becomes of a tile of sums: 64 outputs of a warpgroup by ROWS places. Sums stay in the registers that they are in; places
// without a row have sums too, of which nothing is made.
#pragma once

// The warps of a warpgroup.
DEVICE void warpgroup_barrier(const Consumer& own) {
    barrier_named(1 + own.group, WARPGROUP_WARPS * 32);
}

// A thread's outputs: this one of the tile, and the eighth behind it.
DEVICE uint32_t first_output(const Consumer& own) {
    return own.warp * 16 + lane_index() / 4;
}

// A thread's first place in a tile. Sums 4 * eight + i and 4 * eight + i + 2 belong to the one `8 * eight + i` behind it.
DEVICE uint32_t first_place() {
    return lane_index() % 4 * 2;
}

DEVICE bool has_row(const MultiplyParams& p, uint32_t place) {
    return place - p.first < p.num_rows;
}

// A thread's share of the places of a tile.
constexpr uint32_t WARPGROUP_THREADS = WARPGROUP_WARPS * 32;
constexpr uint32_t OWN_PLACES = ROWS / WARPGROUP_THREADS;

DEVICE uint32_t thread_of_warpgroup(const Consumer& own) {
    return own.warp * 32 + lane_index();
}

// What a tile's outputs need besides its sums. It is loaded ahead of the products: behind them nobody waits for it.
struct Ahead {
    // Of a thread's two outputs.
    float scale[2];
    float bias[2];
    // Of its share of the places.
    float place_scales[OWN_PLACES];
};

#if EPILOGUE == RAW
DEVICE Ahead load_ahead(const MultiplyParams&, const Consumer&, uint32_t, uint32_t) {
    return {};
}
#else
DEVICE Ahead load_ahead(const MultiplyParams& p, const Consumer& own, uint32_t tile, uint32_t first) {
    Ahead ahead = {};
    // Of a tile that there is not nothing is made.
    const uint32_t from = tile * UNIT_OUTPUTS < p.n ? tile * UNIT_OUTPUTS + first_output(own) : 0;
    UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        ahead.scale[i] = WEIGHT == FP8 ? p.scaling.outputs[from + i * 8] : 1.0f;
        ahead.bias[i] = p.scaling.bias ? p.scaling.bias[from + i * 8] : 0.0f;
    }
    UNROLL
    for (uint32_t i = 0; i < OWN_PLACES && WEIGHT == FP8; ++i) {
        ahead.place_scales[i] = p.scaling.rows[first + i * WARPGROUP_THREADS + thread_of_warpgroup(own)];
    }
    return ahead;
}

// Tells the warpgroup the scales of its places.
DEVICE void tell_scales(const Consumer& own, const Ahead& ahead) {
    if (WEIGHT == FP8) {
        UNROLL
        for (uint32_t i = 0; i < OWN_PLACES; ++i) {
            own.scales[i * WARPGROUP_THREADS + thread_of_warpgroup(own)] = ahead.place_scales[i];
        }
        warpgroup_barrier(own);
    }
}

// Of a place of a tile.
DEVICE float place_scale(const Consumer& own, uint32_t place) {
    return WEIGHT == FP8 ? own.scales[place] : 1.0f;
}

DEVICE float scaled(const Ahead& ahead, uint32_t i, float of_place, float sum) {
    return fmaf(sum * of_place, ahead.scale[i], ahead.bias[i]);
}
#endif

// Where a thread's first output of its first place goes in `[row][stride]`. There may be no such row.
template <class Element>
DEVICE Element* first_of_thread(Element* rows, const MultiplyParams& p, uint32_t stride, uint32_t place, uint32_t output) {
    return rows + (int64_t(place) - int64_t(p.first)) * stride + output;
}

// So many rows further on: one multiplication where `count` is known.
template <class Element>
DEVICE Element* rows_on(Element* row, uint32_t stride, uint32_t count) {
    return (Element*)((uint8_t*)row + uint64_t(stride) * (count * uint32_t(sizeof(Element))));
}

#if EPILOGUE == RAW
constexpr uint32_t TOLD_FLOATS = 0;
constexpr uint32_t EIGHTS = ROWS / 8;

DEVICE void finish_tile(
    const MultiplyParams& p, const Consumer& own, uint32_t tile, uint32_t first, const Ahead&,
    const Sums& sums) {
    const uint32_t stride = divide_up(p.n, UNIT_OUTPUTS) * UNIT_OUTPUTS;
    if (tile * UNIT_OUTPUTS >= stride) {
        return;
    }
    first += first_place();
    float* to = first_of_thread((float*)p.output, p, stride, first, tile * UNIT_OUTPUTS + first_output(own));
    UNROLL
    for (uint32_t eight = 0; eight < EIGHTS; ++eight) {
        UNROLL
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t place = eight * 8 + i;
            if (has_row(p, first + place)) {
                float* row = rows_on(to, stride, place);
                row[0] = sums[eight * 4 + i];
                row[8] = sums[eight * 4 + i + 2];
            }
        }
    }
}
#endif

#if EPILOGUE == RESIDUAL
// Places that are finished together: of each, the squares of the outputs of a thread, of all threads that have one.
constexpr uint32_t PLACES = 64;
constexpr uint32_t SQUARES = WARPGROUP_WARPS * 8;
// Floats of a place: a warp's places and squares then touch every bank once.
constexpr uint32_t TOLD_STRIDE = SQUARES + 4;
constexpr uint32_t TOLD_FLOATS = PLACES * TOLD_STRIDE;
// Of a thread, places whose residual is loaded together, and so those of a warp.
constexpr uint32_t AT_ONCE = 8;
constexpr uint32_t BATCH_PLACES = AT_ONCE * 4;
constexpr uint32_t BATCHES = ROWS / BATCH_PLACES;
// Threads that add up the squares of a place.
constexpr uint32_t ADDING = WARPGROUP_THREADS / PLACES;

// From a thread's first place.
DEVICE uint32_t place_of_batch(uint32_t batch, uint32_t at) {
    return batch * BATCH_PLACES + at / 2 * 8 + at % 2;
}

// Adds up the squares of a place and a tile, in an order that depends on nothing.
DEVICE void add_squares_of(const MultiplyParams& p, const Consumer& own, uint32_t tile, uint32_t first) {
    const uint32_t thread = thread_of_warpgroup(own);
    const uint32_t place = thread / ADDING;
    const float* from = own.told + place * TOLD_STRIDE + thread % ADDING * (SQUARES / ADDING);
    float sum = 0.0f;
    UNROLL
    for (uint32_t i = 0; i < SQUARES / ADDING; ++i) {
        sum += from[i];
    }
    sum = sum_of_lanes<ADDING>(sum);
    if (thread % ADDING == 0 && has_row(p, first + place)) {
        const uint64_t row = first + place - p.first;
        p.squares[row * divide_up(p.n, UNIT_OUTPUTS) + tile] = sum;
    }
}

DEVICE void finish_tile(
    const MultiplyParams& p, const Consumer& own, uint32_t tile, uint32_t first, const Ahead& ahead,
    const Sums& sums) {
    if (tile * UNIT_OUTPUTS >= p.n) {
        return;
    }
    tell_scales(own, ahead);
    // A warp's outputs are there together: n is a multiple of 32.
    const bool is_inside = tile * UNIT_OUTPUTS + own.warp * 16 < p.n;
    const uint32_t output = tile * UNIT_OUTPUTS + first_output(own);
    float* squares = own.told + first_place() * TOLD_STRIDE + own.warp * 8 + lane_index() / 4;
    // What there is not is another row, or output: a branch would keep the loads apart.
    float* residual = (float*)p.output + (is_inside ? output : 0);
    const auto row_of = [&](uint32_t place) {
        return residual + uint64_t(minimum(place - p.first, p.num_rows - 1)) * p.n;
    };
    const uint32_t from = first + first_place();
    // All loads of a batch come before the stores of the batch before it: behind a store none may begin.
    float old[2][AT_ONCE][2];
    float of_place[2][AT_ONCE];
    const auto load = [&](uint32_t batch) {
        UNROLL
        for (uint32_t at = 0; at < AT_ONCE; ++at) {
            const uint32_t place = place_of_batch(batch, at);
            const float* row = row_of(from + place);
            old[batch % 2][at][0] = row[0];
            old[batch % 2][at][1] = row[8];
            of_place[batch % 2][at] = place_scale(own, first_place() + place);
        }
    };
    load(0);
    UNROLL
    for (uint32_t batch = 0; batch < BATCHES; ++batch) {
        if (batch + 1 < BATCHES) {
            load(batch + 1);
        }
        UNROLL
        for (uint32_t at = 0; at < AT_ONCE; ++at) {
            const uint32_t place = place_of_batch(batch, at);
            const float* two = sums + place / 8 * 4 + place % 2;
            const float low = old[batch % 2][at][0] + scaled(ahead, 0, of_place[batch % 2][at], two[0]);
            const float high = old[batch % 2][at][1] + scaled(ahead, 1, of_place[batch % 2][at], two[2]);
            if (is_inside & has_row(p, from + place)) {
                float* row = row_of(from + place);
                row[0] = low;
                row[8] = high;
            }
            squares[place % PLACES * TOLD_STRIDE] = is_inside ? fmaf(high, high, low * low) : 0.0f;
        }
        const uint32_t done = (batch + 1) * BATCH_PLACES;
        if (done % PLACES == 0) {
            warpgroup_barrier(own);
            add_squares_of(p, own, tile, first + done - PLACES);
            // The next places' go there.
            warpgroup_barrier(own);
        }
    }
}
#endif

#if EPILOGUE == SWIGLU
// Tile t of the image has gates [32t, 32t + 32), then their ups: two warps have gates, and two the ups of the same places. Of
// 64 places each half is made by those who have one of the two; they are told the other.
constexpr uint32_t GATES = UNIT_OUTPUTS / 2;
constexpr uint32_t HALF = 32;
constexpr uint32_t EIGHTS = ROWS / 8;
// Floats of a place: a warp's places and outputs then touch every bank once.
constexpr uint32_t TOLD_STRIDE = GATES + 4;
constexpr uint32_t HALF_FLOATS = HALF * TOLD_STRIDE;
constexpr uint32_t TOLD_FLOATS = 2 * HALF_FLOATS;

DEVICE void finish_tile(
    const MultiplyParams& p, const Consumer& own, uint32_t tile, uint32_t first, const Ahead& ahead,
    const Sums& sums) {
    if (tile * UNIT_OUTPUTS >= p.n) {
        return;
    }
    tell_scales(own, ahead);
    const bool has_gates = first_output(own) < GATES;
    const uint32_t output = first_output(own) % GATES;
    // Who has gates makes the first half of the places, and tells those of the second.
    const uint32_t kept_half = has_gates ? 0 : 1;
    const uint32_t place_in_half = first_place() * TOLD_STRIDE + output;
    const float* told_to_us = own.told + kept_half * HALF_FLOATS + place_in_half;
    float* told_by_us = own.told + (1 - kept_half) * HALF_FLOATS + place_in_half;
    const uint32_t kept = first + kept_half * HALF + first_place();
    const uint32_t given = first + (1 - kept_half) * HALF + first_place();
    const uint32_t stride = p.n / 2;
    uint16_t* activated = first_of_thread((uint16_t*)p.output, p, stride, kept, tile * GATES + output);
    UNROLL
    for (uint32_t eight = 0; eight < EIGHTS; eight += 2 * HALF / 8) {
        float of_kept[HALF / 4];
        float of_given[HALF / 4];
        UNROLL
        for (uint32_t at = 0; at < HALF / 4; ++at) {
            const uint32_t place = eight * 8 + at / 2 * 8 + at % 2;
            of_kept[at] = place_scale(own, kept - first + place);
            of_given[at] = place_scale(own, given - first + place);
        }
        float mine[HALF / 2];
        UNROLL
        for (uint32_t at = 0; at < HALF / 2; ++at) {
            const uint32_t i = at / 2 % 2;
            const uint32_t place = at / 4 * 8 + at % 2;
            const uint32_t pair = at / 4 * 2 + at % 2;
            const float of_first = sums[eight * 4 + at];
            const float of_second = sums[eight * 4 + HALF / 2 + at];
            mine[at] = scaled(ahead, i, of_kept[pair], has_gates ? of_first : of_second);
            told_by_us[place * TOLD_STRIDE + i * 8] =
                scaled(ahead, i, of_given[pair], has_gates ? of_second : of_first);
        }
        warpgroup_barrier(own);
        UNROLL
        for (uint32_t at = 0; at < HALF / 2; ++at) {
            const uint32_t i = at / 2 % 2;
            const uint32_t place = at / 4 * 8 + at % 2;
            const float other = told_to_us[place * TOLD_STRIDE + i * 8];
            const float half = swiglu(has_gates ? mine[at] : other, has_gates ? other : mine[at]);
            if (has_row(p, kept + eight * 8 + place)) {
                rows_on(activated, stride, eight * 8 + place)[i * 8] = float_to_half_sat(half);
            }
        }
        // The next places go there.
        warpgroup_barrier(own);
    }
}
#endif
