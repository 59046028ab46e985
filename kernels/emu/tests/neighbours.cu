// Each thread adds to a byte of its own the byte of the next thread of its block: bytes of one word are several threads'.
#include "common/prims.cuh"

constexpr uint32_t NUM_THREADS = 64;

struct NeighboursParams {
    uint8_t* bytes;
};

KERNEL(neighbours, NeighboursParams, NUM_THREADS, 1) {
    uint8_t* bytes = p.bytes + block_index() * NUM_THREADS;
    bytes[thread_index()]++;
    barrier_all();
    const uint8_t next = bytes[(thread_index() + 1) % NUM_THREADS];
    barrier_all();
    bytes[thread_index()] += next;
}
