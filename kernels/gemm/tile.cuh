// Sums of one tile of 64 outputs. Each of the eight warps multiplies a quarter of a unit's k with 32 of its
// outputs; the quarters are added through shared memory, always in the same order.
#pragma once

constexpr uint32_t ROW_TILES = ROWS / 8;
constexpr uint32_t SLICES = 4;
constexpr uint32_t SLICE_K = UNIT_K / SLICES;
// m16n8k16 products that a slice of a unit takes, one after the other.
constexpr uint32_t SLICE_STEPS = SLICE_K / 16;
constexpr uint32_t OUTPUT_TILES = 2;
// Floats of a row of sums; a warp's fragment, 8 outputs of 4 row pairs, then touches every bank once.
constexpr uint32_t SUMS_STRIDE = UNIT_OUTPUTS + 4;
constexpr uint32_t SUMS_SIZE = ROWS * SUMS_STRIDE;

// Accumulator fragments of one warp.
struct Sums {
    float of[OUTPUT_TILES][ROW_TILES][4];
};

// Two fragments of weights from a lane's 16 rows x 32 bytes.
DEVICE void unpack(uint32_t (&fragment)[4], const uint32_t (&loaded)[4], uint32_t step) {
    if constexpr (WEIGHT == FP8) {
        fragment[0] = e4m3_to_half2(loaded[2 * step]);
        fragment[1] = e4m3_to_half2(loaded[2 * step + 1]);
        fragment[2] = e4m3_to_half2(loaded[2 * step] >> 16);
        fragment[3] = e4m3_to_half2(loaded[2 * step + 1] >> 16);
    } else {
        for (uint32_t i = 0; i < 4; ++i) {
            fragment[i] = loaded[i];
        }
    }
}

// All of a segment where shared memory has room for it.
constexpr uint32_t CHUNK_K = ROWS <= 16 || IS_LARGE ? SEGMENT_K : 512 * 32 / ROWS;
// Halves of a row of activations: 32 bytes more than the chunk, so that the 8-byte loads of a half warp, four rows by four
// lanes, touch every bank once.
constexpr uint32_t X_STRIDE = CHUNK_K + 16;

// Four elements of k, in the order that makes a lane's four of 16 neighbours: pairs 0 4 1 5 2 6 3 7.
DEVICE void store_group(uint16_t* x, uint32_t row, uint32_t k, const Uint2& halves) {
    const uint32_t quarter = k / 4 % 4;
    uint32_t* words = (uint32_t*)(x + row * X_STRIDE + k / 16 * 16) + quarter % 2 * 4 + quarter / 2;
    words[0] = halves.x;
    words[2] = halves.y;
}

// Zeroes the rows that are never staged.
DEVICE void clear_unused_rows(const GemmParams& p, uint16_t* x) {
    const uint32_t first = p.num_rows * X_STRIDE;
    for (uint32_t i = first + 8 * thread_index(); i < ROWS * X_STRIDE; i += 8 * CONSUMER_WARPS * 32) {
        *(Uint4*)(x + i) = {};
    }
}

DEVICE void consumer_barrier() {
    barrier_named(1, CONSUMER_WARPS * 32);
}

// By who has staged something, before others read it.
DEVICE void publish_staged() {
    consumer_barrier();
}

// sums += unit * x; `x` points at the unit's k in the staged chunk.
DEVICE void multiply_unit(Sums& sums, const uint8_t* unit, const uint16_t* x) {
    const uint32_t lane = lane_index();
    const uint32_t slice = warp_index() % SLICES;
    const uint32_t first_tile = warp_index() / SLICES * OUTPUT_TILES;
    Uint2 operands[ROW_TILES][SLICE_STEPS];
    for (uint32_t j = 0; j < ROW_TILES; ++j) {
        for (uint32_t step = 0; step < SLICE_STEPS; ++step) {
            const uint32_t k = slice * SLICE_K + step * 16 + lane % 4 * 4;
            operands[j][step] = *(const Uint2*)(x + (j * 8 + lane / 4) * X_STRIDE + k);
        }
    }
    for (uint32_t i = 0; i < OUTPUT_TILES; ++i) {
        const uint32_t row = (first_tile + i) * 16 + lane % 16;
        uint32_t loaded[4];
        load_matrix_x4(loaded, unit + chunk_offset(row, slice * 2 + lane / 16));
        for (uint32_t step = 0; step < SLICE_STEPS; ++step) {
            uint32_t fragment[4];
            unpack(fragment, loaded, step);
            for (uint32_t j = 0; j < ROW_TILES; ++j) {
                mma_f16(sums.of[i][j], fragment, operands[j][step].x, operands[j][step].y);
            }
        }
    }
}

// Where element `e` of a fragment stands among [ROWS][SUMS_STRIDE] sums.
DEVICE uint32_t sum_place(uint32_t i, uint32_t j, uint32_t e) {
    const uint32_t lane = lane_index();
    const uint32_t output = (warp_index() / SLICES * OUTPUT_TILES + i) * 16 + lane / 4 + e / 2 * 8;
    const uint32_t row = j * 8 + lane % 4 * 2 + e % 2;
    return row * SUMS_STRIDE + output;
}

// Where a lane leaves four sums for the same lane of another warp: in the eight rows and 32 outputs of which `sum_place`
// has them too, so that nobody else's are touched. Eight lanes touch every bank once.
DEVICE uint32_t lane_place(uint32_t i, uint32_t j) {
    const uint32_t lane = lane_index();
    const uint32_t output = warp_index() / SLICES * OUTPUT_TILES * 16 + lane % 8 * 4;
    return (j * 8 + i * 4 + lane / 8) * SUMS_STRIDE + output;
}

DEVICE void leave_sums(const Sums& sums, float* half) {
    UNROLL
    for (uint32_t j = 0; j < ROW_TILES; ++j) {
        UNROLL
        for (uint32_t i = 0; i < OUTPUT_TILES; ++i) {
            const float (&own)[4] = sums.of[i][j];
            *(Float4*)(half + lane_place(i, j)) = {own[0], own[1], own[2], own[3]};
        }
    }
}

// Tiles of rows whose sums are fetched together, as far as registers allow.
constexpr uint32_t TILES_AT_ONCE = ROW_TILES == 8 ? 2 : ROW_TILES;

// Adds what another warp has left to its own sums, and stores them as `sum_place` says.
DEVICE void add_sums(const Sums& sums, float* half) {
    UNROLL
    for (uint32_t first = 0; first < ROW_TILES; first += TILES_AT_ONCE) {
        float left[TILES_AT_ONCE][OUTPUT_TILES][4];
        UNROLL
        for (uint32_t j = 0; j < TILES_AT_ONCE; ++j) {
            UNROLL
            for (uint32_t i = 0; i < OUTPUT_TILES; ++i) {
                const Float4 four = *(const Float4*)(half + lane_place(i, first + j));
                left[j][i][0] = four.x;
                left[j][i][1] = four.y;
                left[j][i][2] = four.z;
                left[j][i][3] = four.w;
            }
        }
        warp_sync();  // all lanes have read what is now written over
        UNROLL
        for (uint32_t j = 0; j < TILES_AT_ONCE; ++j) {
            UNROLL
            for (uint32_t i = 0; i < OUTPUT_TILES; ++i) {
                UNROLL
                for (uint32_t e = 0; e < 4; ++e) {
                    const float sum = sums.of[i][first + j][e] + left[j][i][e];
                    half[sum_place(i, first + j, e)] = sum;
                }
            }
        }
    }
}

// Adds slices 2 and 3 to 0 and 1: leaves two halves in `halves`, [2][ROWS][SUMS_STRIDE], for `tile_sum`.
DEVICE void reduce_slices(const Sums& sums, float* halves) {
    const uint32_t slice = warp_index() % SLICES;
    float* half = halves + slice % 2 * SUMS_SIZE;
    if (slice >= 2) {
        leave_sums(sums, half);
    }
    consumer_barrier();
    if (slice < 2) {
        add_sums(sums, half);
    }
    consumer_barrier();
}

// Puts what `tile_sum` then finds.
DEVICE void set_tile_sum(float* halves, uint32_t row, uint32_t output, float sum) {
    const uint32_t place = row * SUMS_STRIDE + output;
    halves[place] = sum;
    halves[SUMS_SIZE + place] = 0.0f;
}

DEVICE float tile_sum(const float* halves, uint32_t row, uint32_t output) {
    const uint32_t place = row * SUMS_STRIDE + output;
    return halves[place] + halves[SUMS_SIZE + place];
}
