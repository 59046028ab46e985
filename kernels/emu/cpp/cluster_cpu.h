// The CPU twins of cluster.cuh.
#pragma once

namespace emu {

uint32_t cluster_rank();
void cluster_sync();
void mbar_arrive_at(uint64_t* mbar, uint32_t rank);
void bulk_copy_to_cluster(void* shared, const void* global, uint32_t bytes, uint64_t* mbar, uint32_t blocks);

}  // namespace emu

#define KERNEL_OF_CLUSTERS(name, Params, threads, registers, blocks) ENTRY(name, Params, threads, 1, blocks)

DEVICE uint32_t cluster_rank() {
    return emu::cluster_rank();
}

DEVICE void cluster_sync() {
    emu::cluster_sync();
}

DEVICE void mbar_arrive_at(uint64_t* mbar, uint32_t rank) {
    emu::mbar_arrive_at(mbar, rank);
}

template <uint32_t BLOCKS>
DEVICE void bulk_copy_to_cluster(void* shared, const void* global, uint32_t bytes, uint64_t* mbar) {
    emu::bulk_copy_to_cluster(shared, global, bytes, mbar, BLOCKS);
}
