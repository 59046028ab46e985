// What a CTA has summed up of a tile of its own, from one segment to the next: it waits where the output will be. A
// thread reads what it wrote itself, so there is nothing to put in order.
#pragma once

// A thread's sums: of each eighth row, outputs l and l + 32.
struct Carried {
    float of[ROWS / CONSUMER_WARPS][2];
};

DEVICE float* carried_place(const GemmParams& p, uint32_t n_len, uint32_t row, uint32_t n) {
    return (float*)p.output + uint64_t(row) * n_len + n;
}

// The sums of all segments before this one, all loads under way together: well before they are needed.
DEVICE Carried load_carried(const GemmParams& p, uint32_t n_len, const Block& block) {
    Carried carried = {};
    UNROLL
    for (uint32_t i = 0; i < ROWS / CONSUMER_WARPS; ++i) {
        UNROLL
        for (uint32_t j = 0; j < 2; ++j) {
            const uint32_t row = warp_index() + i * CONSUMER_WARPS;
            const uint32_t n = block.tile * UNIT_OUTPUTS + j * 32 + lane_index();
            const bool is_carried = block.segment > 0 && row < p.num_rows && n < n_len;
            carried.of[i][j] = is_carried ? *carried_place(p, n_len, row, n) : 0.0f;
        }
    }
    return carried;
}

// Adds this segment's sums to those before, where `tile_sum` finds them.
DEVICE void add_carried(const Carried& carried, float* halves) {
    UNROLL
    for (uint32_t i = 0; i < ROWS / CONSUMER_WARPS; ++i) {
        UNROLL
        for (uint32_t j = 0; j < 2; ++j) {
            const uint32_t row = warp_index() + i * CONSUMER_WARPS;
            const uint32_t output = j * 32 + lane_index();
            set_tile_sum(halves, row, output, carried.of[i][j] + tile_sum(halves, row, output));
        }
    }
}

// Leaves a tile's sums for its next segment.
DEVICE void carry(const GemmParams& p, uint32_t n_len, uint32_t tile, const float* halves) {
    for (uint32_t row = warp_index(); row < p.num_rows; row += CONSUMER_WARPS) {
        for (uint32_t output = lane_index(); output < UNIT_OUTPUTS; output += 32) {
            const uint32_t n = tile * UNIT_OUTPUTS + output;
            if (n < n_len) {
                *carried_place(p, n_len, row, n) = tile_sum(halves, row, output);
            }
        }
    }
}
