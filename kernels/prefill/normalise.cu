// RMS norm of rows of the residual stream, or of some of them, as an operand of a product of many rows. Any grid: a
// CTA takes every num_blocks-th row. A row's bits depend on that row alone.
#include "common/prims.cuh"
#include "common/types.cuh"

#include "prefill/operand.cuh"
#include "common/squares.cuh"

struct NormaliseParams {
    const float* input;          // [row][k]
    const float* squares;        // of squares.cuh, of the input
    const float* weight;         // [k]
    Operand output;
    const uint32_t* row_index;   // input row of each row, or null: its own
    float eps;
    uint32_t num_rows;
    uint32_t k;                  // a multiple of 4
    uint32_t unused;
};
static_assert(sizeof(NormaliseParams) == 80, "as on the host");

// The next kernel may begin before this one has waited: a product's weights are then on their way while the kernel in front
// still runs.
KERNEL(normalise, NormaliseParams, THREADS, 4) {
    grid_launch_dependents_early();
    // While memory is about to be kept busy by the next kernel's weights.
    for (uint32_t k = PREFETCHED / 4 * thread_index(); k < p.k; k += PREFETCHED / 4 * THREADS) {
        prefetch(p.weight + k);
    }
    grid_wait();
    for (uint32_t row = block_index(); row < p.num_rows; row += num_blocks()) {
        const uint64_t from = p.row_index ? p.row_index[row] : row;
        const float* input = p.input + from * p.k;
        const float* squares = p.squares + from * divide_up(p.k, SQUARES_LEN);
        const float factor = norm_factor(lane_squares(squares, p.k), p.k, p.eps);
        store_operand<4>(p.output, row, p.k, [&](uint32_t k) {
            const Float4 v = *(const Float4*)(input + k);
            const Float4 w = *(const Float4*)(p.weight + k);
            return Float4{
                v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w};
        });
    }
}
