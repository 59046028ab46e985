// Blocks of a cluster that send each other parts: in each round a block copies its own to all, adds up what all have sent, and
// tells all that it has. Or, by `fault`, does something that it must not.
#include "common/prims.cuh"
#include "common/cluster.cuh"

constexpr uint32_t CLUSTER = 4;
constexpr uint32_t NUM_THREADS = 64;
constexpr uint32_t PART_BYTES = NUM_THREADS * 4;
constexpr uint32_t PARTS_OFFSET = 128;

enum Fault : uint32_t {
    NONE,
    ENDS_EARLY,
    NO_SUCH_RANK,
};

struct ClusterParams {
    const uint32_t* parts;   // [cluster][round][rank][thread]
    uint32_t* sums;          // [block][thread]
    uint32_t rounds;
    uint32_t fault;
};

KERNEL_OF_CLUSTERS(cluster, ClusterParams, NUM_THREADS, 64, CLUSTER) {
    uint64_t* full = (uint64_t*)shared_memory();
    uint64_t* empty = full + 1;
    uint8_t* parts = shared_memory() + PARTS_OFFSET;
    if (thread_index() == 0) {
        mbar_init(full, 1);
        mbar_init(empty, CLUSTER);
        mbar_init_fence();
    }
    cluster_sync();
    if (p.fault == NO_SUCH_RANK) {
        mbar_arrive_at(empty, CLUSTER);
    }
    uint32_t sum = cluster_rank();
    for (uint32_t round = 0; round < p.rounds; ++round) {
        if (thread_index() == 0) {
            mbar_wait(empty, round % 2 ^ 1);
            mbar_expect(full, CLUSTER * PART_BYTES);
            const uint32_t part = (block_index() / CLUSTER * p.rounds + round) * CLUSTER + cluster_rank();
            bulk_copy_to_cluster<CLUSTER>(
                parts + cluster_rank() * PART_BYTES, p.parts + part * NUM_THREADS, PART_BYTES, full);
        }
        mbar_wait(full, round % 2);
        for (uint32_t rank = 0; rank < CLUSTER; ++rank) {
            sum = sum * 3 + ((const uint32_t*)parts)[rank * NUM_THREADS + thread_index()];
        }
        barrier_all();
        if (thread_index() < CLUSTER) {
            mbar_arrive_at(empty, thread_index());
        }
    }
    p.sums[block_index() * NUM_THREADS + thread_index()] = sum;
    if (p.fault != ENDS_EARLY || cluster_rank() != 0) {
        cluster_sync();
    }
}
