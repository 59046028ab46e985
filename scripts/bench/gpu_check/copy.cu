// Copies: the ceiling of what reads and writes device memory. Any grid and block.
#include "common/prims.cuh"

struct CopyParams {
    const Uint4* from;
    Uint4* to;
    uint64_t count;   // of 16 bytes
};

constexpr uint32_t THREADS = 512;
constexpr uint32_t IN_FLIGHT = 4;

KERNEL(copy, CopyParams, THREADS, 2) {
    grid_wait();
    grid_launch_dependents();
    const uint64_t stride = uint64_t(num_blocks()) * num_threads();
    const uint64_t first = uint64_t(block_index()) * num_threads() + thread_index();
    uint64_t at = first;
    for (; at + (IN_FLIGHT - 1) * stride < p.count; at += IN_FLIGHT * stride) {
        Uint4 held[IN_FLIGHT];
        UNROLL for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
            held[i] = p.from[at + i * stride];
        }
        UNROLL for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
            p.to[at + i * stride] = held[i];
        }
    }
    for (; at < p.count; at += stride) {
        p.to[at] = p.from[at];
    }
}
