// RMS norm of rows of the residual stream, as an operand of a product of many rows. Any grid: a CTA takes every
// num_blocks-th row. A row's bits depend on that row alone.
#include "prims.cuh"
#include "types.cuh"

#include "operand.cuh"

struct NormaliseParams {
    const float* input;    // [row][k]
    const float* weight;   // [k]
    Operand output;
    float eps;
    uint32_t num_rows;
    uint32_t k;            // a multiple of 4
    uint32_t unused;
};
static_assert(sizeof(NormaliseParams) == 56, "as on the host");

DEVICE float norm_factor(const NormaliseParams& p, const float* row) {
    float sum = 0.0f;
    for (uint32_t k = 4 * thread_index(); k < p.k; k += 4 * THREADS) {
        const Float4 v = *(const Float4*)(row + k);
        sum = fmaf(v.x, v.x, sum);
        sum = fmaf(v.y, v.y, sum);
        sum = fmaf(v.z, v.z, sum);
        sum = fmaf(v.w, v.w, sum);
    }
    return 1.0f / sqrtf(block_sum(sum) / float(p.k) + p.eps);
}

KERNEL(normalise, NormaliseParams, THREADS, 4) {
    grid_wait();
    grid_launch_dependents();
    for (uint32_t row = block_index(); row < p.num_rows; row += num_blocks()) {
        const float* input = p.input + uint64_t(row) * p.k;
        const float factor = norm_factor(p, input);
        store_operand(p.output, row, p.k, [&](uint32_t k) {
            const Float4 v = *(const Float4*)(input + k);
            const Float4 w = *(const Float4*)(p.weight + k);
            return Float4{
                v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w};
        });
    }
}
