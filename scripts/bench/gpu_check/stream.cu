// Reads memory once: the ceiling of what streams weights. Each thread leaves the exclusive or of the words that it
// has read, so that nothing can be left out. Any grid and block.
#include "common/prims.cuh"

struct StreamParams {
    const Uint4* from;
    uint32_t* words;   // one a thread
    uint64_t count;    // of 16 bytes
};

constexpr uint32_t THREADS = 512;
constexpr uint32_t IN_FLIGHT = 8;

DEVICE uint32_t folded(const Uint4& four) {
    return four.x ^ four.y ^ four.z ^ four.w;
}

KERNEL(stream, StreamParams, THREADS, 2) {
    grid_wait();
    grid_launch_dependents();
    const uint64_t stride = uint64_t(num_blocks()) * num_threads();
    const uint64_t first = uint64_t(block_index()) * num_threads() + thread_index();
    uint32_t word = 0;
    uint64_t at = first;
    for (; at + (IN_FLIGHT - 1) * stride < p.count; at += IN_FLIGHT * stride) {
        Uint4 held[IN_FLIGHT];
        UNROLL for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
            held[i] = p.from[at + i * stride];
        }
        UNROLL for (uint32_t i = 0; i < IN_FLIGHT; ++i) {
            word ^= folded(held[i]);
        }
    }
    for (; at < p.count; at += stride) {
        word ^= folded(p.from[at]);
    }
    p.words[first] = word;
}
