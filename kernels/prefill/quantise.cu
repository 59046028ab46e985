// f16 rows, such as the attention's, as an operand of a product of many rows. Any grid: a CTA takes every
// num_blocks-th row. A row's bits depend on that row alone.
#include "common/prims.cuh"
#include "common/types.cuh"

#include "prefill/operand.cuh"

struct QuantiseParams {
    const uint16_t* input;   // f16 [row][k]
    Operand output;
    uint32_t num_rows;
    uint32_t k;              // a multiple of 4
};
static_assert(sizeof(QuantiseParams) == 48, "as on the host");

DEVICE Float4 four_floats(const Uint2& halves) {
    return {
        half_to_float(uint16_t(halves.x)),
        half_to_float(uint16_t(halves.x >> 16)),
        half_to_float(uint16_t(halves.y)),
        half_to_float(uint16_t(halves.y >> 16)),
    };
}

KERNEL(quantise, QuantiseParams, THREADS, 4) {
    grid_wait();
    grid_launch_dependents();
    for (uint32_t row = block_index(); row < p.num_rows; row += num_blocks()) {
        const uint16_t* input = p.input + uint64_t(row) * p.k;
        store_operand<4>(p.output, row, p.k, [&](uint32_t k) {
            return four_floats(*(const Uint2*)(input + k));
        });
    }
}
