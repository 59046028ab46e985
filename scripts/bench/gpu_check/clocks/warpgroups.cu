// Products of one warpgroup and of two, 4 and 16 of them a group of products, with 8 to 64 columns.
#include "common/prims.cuh"
#include "common/warpgroup.cuh"
#include "clocks.cuh"

constexpr uint32_t THREADS = 256;

// As in gemm.cu.
#define HAS_WARPGROUPS (ARCH >= 900 && ARCH < 1000)

struct WarpgroupsParams {
    uint64_t* out;   // clocks of ROUNDS groups: [columns 8, 16, 32, 64][4, 16 products][from registers, from memory]
    float* sums;     // one a thread
    uint32_t num_warpgroups;
    uint32_t unused;
};

constexpr uint32_t ROUNDS = 64;

#if HAS_WARPGROUPS
template <uint32_t N, uint32_t PRODUCTS, bool FROM_REGISTERS>
DEVICE uint64_t group_clocks(float& sum) {
    float c[N / 2] = {};
    uint32_t a[4] = {};
    UNROLL for (uint32_t i = 0; i < 4; ++i) {
        a[i] = thread_index() * 0x00010001 + i;
    }
    // What is in there does not matter: it is zeros.
    const uint64_t rows = matrix_descriptor(shared_memory(), 1024);
    const uint64_t weights = matrix_descriptor(shared_memory() + (16 << 10), 1024);
    const uint64_t begin = clocks();
    KEEP_LOOP for (uint32_t round = 0; round < ROUNDS; ++round) {
        warpgroup_fence();
        UNROLL for (uint32_t i = 0; i < PRODUCTS; ++i) {
            if constexpr (FROM_REGISTERS) {
                wgmma_f16<N>(c, a, rows);
            } else {
                wgmma_f16<N>(c, weights, rows);
            }
        }
        warpgroup_commit();
        warpgroup_wait<0>();
    }
    const uint64_t took = clocks() - begin;
    UNROLL for (uint32_t i = 0; i < N / 2; ++i) {
        sum += c[i];
    }
    return took;
}

template <uint32_t N>
DEVICE void all_kinds(uint64_t* out, float& sum) {
    const uint64_t took[4] = {group_clocks<N, 4, true>(sum), group_clocks<N, 4, false>(sum),
                              group_clocks<N, 16, true>(sum), group_clocks<N, 16, false>(sum)};
    if (block_index() == 0 && thread_index() == 0) {
        UNROLL for (uint32_t i = 0; i < 4; ++i) {
            out[i] = took[i];
        }
    }
}
#endif

KERNEL(warpgroups, WarpgroupsParams, THREADS, 1) {
    float sum = 0.0f;
    Uint4* words = reinterpret_cast<Uint4*>(shared_memory());
    for (uint32_t i = thread_index(); i < (32 << 10) / 16; i += THREADS) {
        words[i] = Uint4{0, 0, 0, 0};
    }
    fence_async_proxy();
    barrier_all();
#if HAS_WARPGROUPS
    if (warp_index() / WARPGROUP_WARPS < p.num_warpgroups) {
        all_kinds<8>(p.out, sum);
        all_kinds<16>(p.out + 4, sum);
        all_kinds<32>(p.out + 8, sum);
        all_kinds<64>(p.out + 12, sum);
    }
#endif
    p.sums[block_index() * THREADS + thread_index()] = sum;
}
