// What blocks of a cluster do together on Hopper: they run at the same time, and reach each other's shared memory. The CPU
// twins are in emu/cpp/cluster_cpu.h.
#pragma once

#ifdef __CUDACC_RTC__

// Opens the entry of a file whose grids are whole clusters of so many blocks, with so many registers a thread at most.
#define KERNEL_OF_CLUSTERS(name, Params, threads, registers, blocks)                          \
    extern "C" __global__ void __cluster_dims__(blocks, 1, 1) __maxnreg__(registers) name(    \
        const __grid_constant__ Params p)

// Of this block, from 0.
DEVICE uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all blocks of the cluster, by whole warps. Of memory it orders only barriers behind mbar_init_fence.
DEVICE void cluster_sync() {
    warp_sync();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// As mbar_arrive at the barrier that stands at the same place in a block of this rank. It says that products and copies are
// done; stores of this thread it does not order for the other block, which would take a fence of the whole GPU.
DEVICE void mbar_arrive_at(uint64_t* mbar, uint32_t rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
        " mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(mbar)),
        "r"(rank)
        : "memory");
}

// As bulk_copy_kept to the same place in each of the first BLOCKS blocks, whose barriers there count the bytes.
template <uint32_t BLOCKS>
DEVICE void bulk_copy_to_cluster(void* shared, const void* global, uint32_t bytes, uint64_t* mbar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(mbar)), "h"(static_cast<uint16_t>((1u << BLOCKS) - 1))
        : "memory");
}

#endif
