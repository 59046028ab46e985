// Warp sums and a product, for the emulator's own tests.
#include "prims.cuh"

struct ProbeParams {
    const float* input;
    float* output;
};

KERNEL(probe, ProbeParams, 64, 1) {
    const uint32_t thread = block_index() * num_threads() + thread_index();
    p.output[thread] = warp_sum(p.input[thread]);
}
