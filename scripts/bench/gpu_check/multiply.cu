// Multiplies and adds fragments that stay in registers: the ceiling of the tensor cores for this instruction, f16 with
// f32 sums. Any grid; blocks of 256 threads.
#include "common/prims.cuh"

struct MultiplyParams {
    const uint32_t* fragments;   // pairs of halves, FRAGMENT a thread of a block
    float* sums;                 // one a thread
    uint32_t count;              // products of each chain
    uint32_t unused;
};

constexpr uint32_t THREADS = 256;
constexpr uint32_t FRAGMENT = 6;
// Independent chains hide the latency of one.
constexpr uint32_t CHAINS = 8;

KERNEL(multiply, MultiplyParams, THREADS, 2) {
    grid_wait();
    grid_launch_dependents();
    const uint32_t* from = p.fragments + thread_index() * FRAGMENT;
    const uint32_t a[4] = {from[0], from[1], from[2], from[3]};
    const uint32_t b[2] = {from[4], from[5]};
    float c[CHAINS][4] = {};
    for (uint32_t i = 0; i < p.count; ++i) {
        UNROLL for (uint32_t chain = 0; chain < CHAINS; ++chain) {
            mma_f16(c[chain], a, b[0], b[1]);
        }
    }
    float sum = 0.0f;
    UNROLL for (uint32_t chain = 0; chain < CHAINS; ++chain) {
        sum += c[chain][0] + c[chain][1] + c[chain][2] + c[chain][3];
    }
    p.sums[block_index() * num_threads() + thread_index()] = sum;
}
