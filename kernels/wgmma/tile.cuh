// Sums of one tile of 64 outputs, which a warpgroup has to itself: one product of 64 outputs after the other along
// k, so a row's bits do not depend on how many rows there are.
//
// Activations lie in shared memory as products read them, and as their units have them: 64 elements of k of all ROWS rows,
// then the next 64.
#pragma once

// Rows of a product, and products that take them all.
constexpr uint32_t PRODUCT_ROWS = minimum(ROWS, 64);
constexpr uint32_t PRODUCTS = ROWS / PRODUCT_ROWS;
// Elements of k of a product.
constexpr uint32_t PRODUCT_K = 16;
constexpr uint32_t UNIT_STEPS = UNIT_K / PRODUCT_K;

constexpr uint32_t X_ROW_BYTES = UNIT_ROW_BYTES;
constexpr uint32_t X_ROW_K = UNIT_HALVES;
constexpr uint32_t X_BLOCK_BYTES = ROWS * X_ROW_BYTES;
// Of what meets a unit of weights.
constexpr uint32_t X_BLOCKS = UNIT_K / X_ROW_K;
// Eight rows, as the swizzle repeats.
constexpr uint32_t ATOM_BYTES = 8 * X_ROW_BYTES;

// Accumulators of a thread: of each eight rows four.
struct Sums {
    float of[PRODUCTS][PRODUCT_ROWS / 2];
};

// A descriptor, so many bytes further on.
DEVICE uint64_t further(uint64_t descriptor, uint32_t bytes) {
    return descriptor + bytes / 16;
}

// Where a step of a unit begins among its activations.
DEVICE uint32_t x_step(uint32_t step) {
    constexpr uint32_t ROW_STEPS = X_ROW_K / PRODUCT_K;
    return step / ROW_STEPS * X_BLOCK_BYTES + step % ROW_STEPS * PRODUCT_K * 2;
}

#if WEIGHT == FP8
typedef uint32_t Weights[UNIT_STEPS][4];

// A warp's 16 outputs of a unit, as halves.
DEVICE void load_weights(Weights& weights, const uint8_t* unit) {
    const uint32_t row = warp_index() % WARPGROUP_WARPS * 16 + lane_index() % 16;
    UNROLL
    for (uint32_t step = 0; step < UNIT_STEPS; step += 2) {
        uint32_t loaded[4];
        load_matrix_x4(loaded, unit + chunk_offset(row, step + lane_index() / 16));
        UNROLL
        for (uint32_t i = 0; i < 2; ++i) {
            weights[step + i][0] = e4m3_to_half2(loaded[2 * i]);
            weights[step + i][1] = e4m3_to_half2(loaded[2 * i + 1]);
            weights[step + i][2] = e4m3_to_half2(loaded[2 * i] >> 16);
            weights[step + i][3] = e4m3_to_half2(loaded[2 * i + 1] >> 16);
        }
    }
}

DEVICE const uint32_t (&weights_of(const Weights& weights, uint32_t step))[4] {
    return weights[step];
}
#else
// Read where they are.
typedef uint64_t Weights;

DEVICE void load_weights(Weights& weights, const uint8_t* unit) {
    weights = matrix_descriptor(unit, ATOM_BYTES);
}

DEVICE uint64_t weights_of(const Weights& weights, uint32_t step) {
    return further(weights, step * PRODUCT_K * 2);
}
#endif

// Begins sums += unit * x, of `x` from the unit's first element of k on.
DEVICE void begin_products(Sums& sums, const Weights& weights, const uint8_t* x) {
    const uint64_t rows = matrix_descriptor(x, ATOM_BYTES);
    warpgroup_fence();
    UNROLL
    for (uint32_t step = 0; step < UNIT_STEPS; ++step) {
        UNROLL
        for (uint32_t i = 0; i < PRODUCTS; ++i) {
            const uint64_t from = further(rows, x_step(step) + i * PRODUCT_ROWS * X_ROW_BYTES);
            wgmma_f16<PRODUCT_ROWS>(sums.of[i], weights_of(weights, step), from);
        }
    }
    warpgroup_commit();
}

// Rows whose sums go through shared memory together: more where there are registers for them.
constexpr uint32_t FINISH_ROWS = ROWS <= 32 ? ROWS : ROWS <= 192 ? 16 : 32;
// Floats of a row of sums: a warp's accumulators, eight outputs of four row pairs, then touch every bank once.
constexpr uint32_t SUMS_STRIDE = UNIT_OUTPUTS + 4;
constexpr uint32_t SUMS_SIZE = FINISH_ROWS * SUMS_STRIDE;

// Four sums of a thread: outputs g and g + 8 of its warp's 16, of two rows each.
struct Four {
    float of[4];
};

// Puts four sums of each eight rows of a batch where `finish_rows` finds them.
DEVICE void leave_sums(const Four (&sums)[FINISH_ROWS / 8], float* batch) {
    const uint32_t output = warp_index() % WARPGROUP_WARPS * 16 + lane_index() / 4;
    UNROLL
    for (uint32_t j = 0; j < FINISH_ROWS / 8; ++j) {
        UNROLL
        for (uint32_t e = 0; e < 4; ++e) {
            const uint32_t row = j * 8 + lane_index() % 4 * 2 + e % 2;
            batch[row * SUMS_STRIDE + output + e / 2 * 8] = sums[j].of[e];
        }
    }
}
