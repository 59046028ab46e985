// A kernel with every mistake that the machine knows, one at a time.
#include "common/prims.cuh"

struct FaultParams {
    const uint8_t* global;
    uint32_t* flag;
    uint32_t fault;
    uint32_t unused;
};

DEVICE uint32_t use_stack(uint32_t depth) {
    volatile uint32_t words[1024];
    words[depth % 1024] = depth;
    warp_sync();
    return depth == 0 ? words[0] : use_stack(depth - 1) + words[depth % 1024];
}

DEVICE void break_barriers(uint32_t fault, uint64_t* mbar) {
    switch (fault) {
        case 1:
            if (warp_index() == 0) {
                barrier_all();
            }
            break;
        case 2:
            barrier_named(1, warp_index() == 0 ? 64 : 32);
            break;
        case 3:
            barrier_named(1, 40);
            break;
        case 4:
            mbar_arrive(&mbar[1]);
            break;
        case 5:
            // Two arrivals complete the phase; a third before the bytes have come is one too many.
            if (thread_index() == 0) {
                mbar_expect(mbar, 16);
                mbar_arrive(mbar);
                mbar_arrive(mbar);
            }
            break;
        case 6:
            mbar_wait(mbar, 0);
            break;
        case 7:
            mbar_arrive(reinterpret_cast<uint64_t*>(reinterpret_cast<uint8_t*>(mbar) + 4));
            break;
    }
}

DEVICE void break_copies(const FaultParams& p, uint8_t* shared, uint64_t* mbar) {
    if (thread_index() != 0) {
        return;
    }
    switch (p.fault) {
        case 10:
            bulk_copy(shared + 8, p.global, 16, mbar);
            break;
        case 11:
            bulk_copy(shared + 4096, p.global, 16, mbar);
            break;
        case 12:
            bulk_copy(shared, p.global, 24, mbar);
            break;
        case 13:
            bulk_copy(shared + 64, p.global, 16, mbar);
            break;
        case 14:
            async_copy16(shared, p.global + 4);
            break;
        case 15:
            async_copy16(shared - 16, p.global);
            break;
        case 16:
            for (uint32_t i = 0; i < 3; i++) {
                async_arrive(mbar);
            }
            mbar_wait(mbar, 1);
            break;
    }
}

DEVICE void break_warps(const FaultParams& p, uint8_t* shared) {
    uint32_t r[4];
    switch (p.fault) {
        case 20:
            if (lane_index() < 16) {
                warp_sync();
            } else {
                ballot(true);
            }
            break;
        case 21:
            if (lane_index() != 7) {
                warp_sum(1.0f);
            }
            break;
        case 22:
            load_matrix_x4(r, shared + lane_index() * 16 + 4);
            break;
        case 23:
            load_matrix_x4(r, shared + 4096 - 16 * lane_index());
            break;
        case 24:
            while (load_volatile(p.flag) == 0) {
            }
            break;
        case 25:
            shared[4096 + 5] = 0;
            break;
        case 26:
            *p.flag = use_stack(40);
            break;
        case 27:
            atomic_add(reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(p.flag) + 2), 1);
            break;
        case 28:
            p.flag[1ull << 40] = 1;
            break;
        case 29:
            *p.flag = num_threads() / *p.flag;
            break;
    }
}

KERNEL(fault, FaultParams, 64, 1) {
    uint8_t* shared = shared_memory();
    uint64_t* mbar = reinterpret_cast<uint64_t*>(shared);
    if (thread_index() == 0) {
        mbar_init(mbar, 2);
        mbar_init_fence();
    }
    barrier_all();
    if (p.fault == 31) {
        grid_launch_dependents();
    }
    if (p.fault >= 32) {
        grid_launch_dependents_early();
    }
    if (p.fault != 30) {
        grid_wait();
    }
    break_barriers(p.fault, mbar);
    break_copies(p, shared, mbar);
    break_warps(p, shared);
}
