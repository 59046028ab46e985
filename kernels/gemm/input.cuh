// The activations of a product, in shared memory as f16 and one range of k at a time, as `store_group` lays them out.
// Normalised on the way where the product follows an RMS norm. Beyond the matrix they are zero. How much is staged at a
// time changes no bit.
#pragma once

constexpr uint32_t CONSUMERS = CONSUMER_WARPS * 32;
constexpr uint32_t CHUNK_UNITS = CHUNK_K / UNIT_K;
// Elements that a thread has of a row; k is a multiple of it.
constexpr uint32_t GROUP_K = 4;
constexpr uint32_t ROW_THREADS = CHUNK_K / GROUP_K;
// Rows that are staged side by side.
constexpr uint32_t SIDE_ROWS = CONSUMERS / ROW_THREADS;
// Rows of a thread whose loads are under way together.
constexpr uint32_t BATCH_ROWS = minimum(ROWS / SIDE_ROWS, 8u);

// Units of a tile's k that are staged: [first, last).
struct Range {
    uint32_t first;
    uint32_t last;
};

DEVICE bool has_unit(const Range& range, uint32_t k_unit) {
    return range.first <= k_unit && k_unit < range.last;
}

// Row of the input that a row of the product reads.
DEVICE uint32_t input_row(const GemmParams& p, uint32_t row) {
    return p.row_index ? p.row_index[row] : row;
}

// Writes each row's factor of the norm to `factors`, for after the next barrier. A warp has every eighth row.
DEVICE void norm_factors(const GemmParams& p, uint32_t k_len, float* factors) {
    constexpr uint32_t WARP_ROWS = ROWS / CONSUMER_WARPS;
    float shares[WARP_ROWS];
    UNROLL
    for (uint32_t i = 0; i < WARP_ROWS; ++i) {
        // Rows beyond the last repeat it: a branch would keep the loads apart.
        const uint32_t row = minimum(warp_index() + i * CONSUMER_WARPS, p.num_rows - 1);
        const uint64_t first = uint64_t(input_row(p, row)) * divide_up(k_len, SQUARES_LEN);
        shares[i] = lane_squares(p.squares + first, k_len);
    }
    UNROLL
    for (uint32_t i = 0; i < WARP_ROWS; ++i) {
        const float factor = norm_factor(shares[i], k_len, p.eps);
        if (lane_index() == 0) {
            factors[warp_index() + i * CONSUMER_WARPS] = factor;
        }
    }
}

DEVICE uint32_t half_pair(float low, float high) {
    return float_to_half_sat(low) | uint32_t(float_to_half_sat(high)) << 16;
}

// What a thread stages: the same elements of some rows.
struct Place {
    uint32_t k;           // of the input; that of other threads if this one has nothing to read
    uint32_t to;          // of the staged range
    uint32_t first_row;
    bool is_inside;       // of the range
    bool is_real;         // is inside of the matrix too, which is padded with zeros
};

DEVICE Place place_of(const Range& range, uint32_t k_len) {
    Place place;
    place.to = thread_index() % ROW_THREADS * GROUP_K;
    place.first_row = thread_index() / ROW_THREADS;
    const uint32_t first = range.first * UNIT_K;
    place.is_inside = first + place.to < range.last * UNIT_K;
    place.is_real = place.is_inside && first + place.to < k_len;
    place.k = place.is_real ? first + place.to : first;
    return place;
}

// Where a thread's elements of a row begin in the input. Rows beyond the last repeat it: a branch would keep
// the loads apart.
DEVICE uint64_t input_place(const GemmParams& p, uint32_t k_len, const Place& place, uint32_t row) {
    return uint64_t(input_row(p, minimum(row, p.num_rows - 1))) * k_len + place.k;
}

#if !HAS_NORM
typedef Uint2 Group;
// Nothing is multiplied on the way.
struct Weight {};

DEVICE Weight load_weight(const GemmParams&, const Place&) {
    return {};
}

DEVICE Group load_group(const GemmParams& p, uint64_t place) {
    return *(const Uint2*)((const uint16_t*)p.input + place);
}

DEVICE Uint2 staged_group(const Group& group, const Weight&, const float*, uint32_t) {
    return group;
}
#else
typedef Float4 Group;
typedef Float4 Weight;

// The norm's weights of a thread's elements: constants, which may be read before the kernel ahead has ended.
DEVICE Weight load_weight(const GemmParams& p, const Place& place) {
    return *(const Float4*)(p.norm + place.k);
}

DEVICE Group load_group(const GemmParams& p, uint64_t place) {
    return *(const Float4*)((const float*)p.input + place);
}

DEVICE Uint2 staged_group(const Group& v, const Weight& w, const float* factors, uint32_t row) {
    const float factor = factors[row];
    return {
        half_pair(v.x * factor * w.x, v.y * factor * w.y),
        half_pair(v.z * factor * w.z, v.w * factor * w.w),
    };
}
#endif

// Some rows of a thread, as they are in the input.
struct Batch {
    Group of[BATCH_ROWS];
};

DEVICE Batch load_batch(const GemmParams& p, uint32_t k_len, const Place& place, uint32_t first) {
    Batch batch;
    UNROLL
    for (uint32_t i = 0; i < BATCH_ROWS; ++i) {
        batch.of[i] = load_group(p, input_place(p, k_len, place, first + i * SIDE_ROWS));
    }
    return batch;
}

DEVICE void store_batch(
    const GemmParams& p, const Place& place, uint32_t first, const Batch& batch,
    const Weight& weight, const float* factors, uint16_t* x) {
    UNROLL
    for (uint32_t i = 0; i < BATCH_ROWS; ++i) {
        const uint32_t row = first + i * SIDE_ROWS;
        if (place.is_inside && row < p.num_rows) {
            const Uint2 halves = staged_group(batch.of[i], weight, factors, row);
            store_group(x, row, place.to, place.is_real ? halves : Uint2{});
        }
    }
}

// Stages a range; `is_first` is the first of a CTA, for which nobody waits, but which needs the factors. The
// first batch is under way while the factors are computed, or the old range is still read.
DEVICE void stage(
    const GemmParams& p, uint32_t k_len, const Range& range, const Weight& weight, bool is_first,
    float* factors, uint16_t* x) {
    const Place place = place_of(range, k_len);
    Batch batch = load_batch(p, k_len, place, place.first_row);
    if (HAS_NORM && is_first) {
        norm_factors(p, k_len, factors);
    }
    consumer_barrier();
    store_batch(p, place, place.first_row, batch, weight, factors, x);
    for (uint32_t row = place.first_row + BATCH_ROWS * SIDE_ROWS; row < p.num_rows;
         row += BATCH_ROWS * SIDE_ROWS) {
        batch = load_batch(p, k_len, place, row);
        store_batch(p, place, row, batch, weight, factors, x);
    }
    publish_staged();
}
