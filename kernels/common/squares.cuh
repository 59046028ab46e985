// Sums of squares of the residual stream: f32 [row][tiles of 64 elements]. Whoever writes a row writes them
// too, whoever normalises it adds them up. Both do so in an order that depends on nothing but the row's length.
#pragma once

// Elements of a sum.
constexpr uint32_t SQUARES_LEN = 64;

DEVICE float add_squares(const Float4& v, float sum) {
    sum = fmaf(v.x, v.x, sum);
    sum = fmaf(v.y, v.y, sum);
    sum = fmaf(v.z, v.z, sum);
    return fmaf(v.w, v.w, sum);
}

// The sum over LANES neighbours, a power of two, in each of them. All lanes of the warp take part.
template <uint32_t LANES>
DEVICE float sum_of_lanes(float value) {
    UNROLL
    for (uint32_t mask = LANES / 2; mask > 0; mask /= 2) {
        value += shuffle_xor(value, mask);
    }
    return value;
}

// Of a lane, loads that are under way together: more make code that takes longer to fetch than to run.
constexpr uint32_t SQUARES_AT_ONCE = 4;

// A lane's share of the sums of a row of `len` elements.
DEVICE float lane_squares(const float* squares, uint32_t len) {
    float sum = 0.0f;
    const uint32_t tiles = divide_up(len, SQUARES_LEN);
    KEEP_LOOP
    for (uint32_t first = lane_index(); first < tiles; first += 32 * SQUARES_AT_ONCE) {
        float loaded[SQUARES_AT_ONCE];
        UNROLL
        for (uint32_t i = 0; i < SQUARES_AT_ONCE; ++i) {
            const uint32_t tile = first + 32 * i;
            loaded[i] = tile < tiles ? squares[tile] : 0.0f;
        }
        UNROLL
        for (uint32_t i = 0; i < SQUARES_AT_ONCE; ++i) {
            sum += loaded[i];
        }
    }
    return sum;
}

// 1 / sqrt(mean of squares + eps), in each lane, from the shares of all.
DEVICE float norm_factor(float share, uint32_t len, float eps) {
    return 1.0f / sqrtf(warp_sum(share) / float(len) + eps);
}
