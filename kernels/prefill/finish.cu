// What follows a product of many rows that a library has made: from its plain sums, in image order, to the
// residual stream or to the operand of the next product. Any grid: a CTA takes every num_blocks-th row. A row's
// bits depend on that row alone.
#include "common/prims.cuh"
#include "common/types.cuh"

#include "common/activation.cuh"
#include "prefill/operand.cuh"
#include "common/scaling.cuh"
#include "common/squares.cuh"

#define RESIDUAL 1   // adds to f32 [row][n]
#define SWIGLU 2     // silu(gate) * up, an operand of n / 2 elements

struct FinishParams {
    const float* sums;   // [row][n up to whole tiles]
    Scaling scaling;
    float* residual;     // RESIDUAL: [row][n]
    float* squares;      // RESIDUAL: of squares.cuh, of the residual
    Operand output;      // SWIGLU; its scales are not those of `scaling`
    uint32_t num_rows;
    uint32_t n;          // a multiple of 4; SWIGLU: of 64
};
static_assert(sizeof(FinishParams) == 88, "as on the host");

constexpr uint32_t TILE = 64;

DEVICE Float4 scaled_four(const FinishParams& p, uint32_t row, const float* sums, uint32_t n) {
    const Float4 v = *(const Float4*)(sums + n);
    return {
        scaled(p.scaling, row, n, v.x),
        scaled(p.scaling, row, n + 1, v.y),
        scaled(p.scaling, row, n + 2, v.z),
        scaled(p.scaling, row, n + 3, v.w),
    };
}

#if EPILOGUE == RESIDUAL
constexpr uint32_t SQUARES_LANES = SQUARES_LEN / 4;

// Adds to four elements of the residual; the sum of their squares.
DEVICE float add_four(float* residual, const Float4& v) {
    const Float4 old = *(const Float4*)residual;
    const Float4 sum = {old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w};
    *(Float4*)residual = sum;
    return add_squares(sum, 0.0f);
}

DEVICE void finish_row(const FinishParams& p, uint32_t row, const float* sums) {
    float* residual = p.residual + uint64_t(row) * p.n;
    float* squares = p.squares + uint64_t(row) * divide_up(p.n, SQUARES_LEN);
    // Whole warps go round, for their sums.
    for (uint32_t first = 4 * 32 * warp_index(); first < p.n; first += 4 * THREADS) {
        const uint32_t n = first + 4 * lane_index();
        const bool is_inside = n < p.n;
        const float own = is_inside ? add_four(residual + n, scaled_four(p, row, sums, n)) : 0.0f;
        const float sum = sum_of_lanes<SQUARES_LANES>(own);
        if (is_inside && n % SQUARES_LEN == 0) {
            squares[n / SQUARES_LEN] = sum;
        }
    }
}
#endif

#if EPILOGUE == SWIGLU
// Tile t of the image has gates [32t, 32t + 32), then their ups.
DEVICE void finish_row(const FinishParams& p, uint32_t row, const float* sums) {
    store_operand<2>(p.output, row, p.n / 2, [&](uint32_t k) {
        const uint32_t n = k / (TILE / 2) * TILE + k % (TILE / 2);
        const Float4 gate = scaled_four(p, row, sums, n);
        const Float4 up = scaled_four(p, row, sums, n + TILE / 2);
        return Float4{
            swiglu(gate.x, up.x), swiglu(gate.y, up.y), swiglu(gate.z, up.z), swiglu(gate.w, up.w)};
    });
}
#endif

KERNEL(finish, FinishParams, THREADS, 4) {
    grid_wait();
    grid_launch_dependents();
    const uint64_t stride = uint64_t(divide_up(p.n, TILE)) * TILE;
    for (uint32_t row = block_index(); row < p.num_rows; row += num_blocks()) {
        finish_row(p, row, p.sums + row * stride);
    }
}
