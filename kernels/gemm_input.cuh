// The activations of a product, in shared memory as f16 and one chunk of k at a time: [ROWS][X_STRIDE].
// Normalised on the way where the product follows an RMS norm. Rows that are not computed are zero, and so
// is k beyond the matrix: the products of a row depend on that row alone.
#pragma once

constexpr uint32_t CONSUMERS = CONSUMER_WARPS * 32;
constexpr uint32_t CHUNK_K = ROWS == 8 ? 2048 : ROWS == 16 ? 1024 : 512;
// 32 bytes more than the chunk: the 8-byte loads of a half warp, four rows by four lanes, then touch every
// bank once.
constexpr uint32_t X_STRIDE = CHUNK_K + 16;
constexpr uint32_t CHUNK_UNITS = CHUNK_K / UNIT_K;
// Elements that a thread loads at a time; k is a multiple of it.
constexpr uint32_t GROUP_K = 8;

DEVICE void consumer_barrier() {
    barrier_named(1, CONSUMERS);
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

// Four normalised elements as halves.
DEVICE Uint2 normalise(const float* input, const float* weight, float factor) {
    const Float4 v = *(const Float4*)input;
    const Float4 w = *(const Float4*)weight;
    return {
        half_pair(v.x * factor * w.x, v.y * factor * w.y),
        half_pair(v.z * factor * w.z, v.w * factor * w.w),
    };
}

// Elements [k, k + GROUP_K) of a row, as they go into the product.
DEVICE Uint4 load_group(const GemmParams& p, uint64_t first, uint32_t k, float factor) {
    if constexpr (!HAS_NORM) {
        return *(const Uint4*)((const uint16_t*)p.input + first + k);
    }
    const float* input = (const float*)p.input + first + k;
    const Uint2 low = normalise(input, p.norm + k, factor);
    const Uint2 high = normalise(input + 4, p.norm + k + 4, factor);
    return {low.x, low.y, high.x, high.y};
}

// FP8 keeps the order of k. FP16 weights meet their activations in the order that makes a lane's four
// elements of 16 neighbours: pairs 0 4 1 5 2 6 3 7.
DEVICE void store_group(uint16_t* row, uint32_t k, const Uint4& halves) {
    if constexpr (WEIGHT == FP8) {
        *(Uint4*)(row + k) = halves;
        return;
    }
    uint32_t* words = (uint32_t*)(row + k / 16 * 16) + k / GROUP_K % 2;
    words[0] = halves.x;
    words[2] = halves.y;
    words[4] = halves.z;
    words[6] = halves.w;
}

// Zeroes the rows that are never staged.
DEVICE void clear_unused_rows(const GemmParams& p, uint16_t* x) {
    const uint32_t first = p.num_rows * X_STRIDE;
    for (uint32_t i = first + GROUP_K * thread_index(); i < ROWS * X_STRIDE;
         i += GROUP_K * CONSUMERS) {
        *(Uint4*)(x + i) = {};
    }
}

// Replaces the chunk in shared memory, when no warp reads the old one any more and the factors are there.
DEVICE void stage_chunk(
    const GemmParams& p, uint32_t k_len, uint32_t chunk, const float* factors, uint16_t* x) {
    consumer_barrier();
    const uint32_t k_first = chunk * CHUNK_K;
    const uint32_t k_end = divide_up(k_len, UNIT_K) * UNIT_K;
    constexpr uint32_t ROW_GROUPS = CHUNK_K / GROUP_K;
    for (uint32_t i = thread_index(); i < p.num_rows * ROW_GROUPS; i += CONSUMERS) {
        const uint32_t row = i / ROW_GROUPS;
        const uint32_t k = i % ROW_GROUPS * GROUP_K;
        if (k_first + k < k_end) {
            Uint4 group = {};
            if (k_first + k < k_len) {
                const uint64_t first = uint64_t(input_row(p, row)) * k_len;
                group = load_group(p, first, k_first + k, HAS_NORM ? factors[row] : 1.0f);
            }
            store_group(x + row * X_STRIDE, k, group);
        }
    }
    consumer_barrier();
}
