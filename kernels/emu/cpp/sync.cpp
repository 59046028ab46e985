// What makes threads wait for each other: barriers of blocks, mbarriers, dependent grids, atomics.
#include "machine.h"
#include "prims_cpu.h"
#include "race.h"

namespace emu {

namespace {

// Upper half of an initialised mbarrier's word; the lower half is its index.
constexpr uint64_t MARK = 0x4d424152ull << 32;

uint64_t shared_offset(const void* address) {
    return static_cast<uint64_t>(static_cast<const uint8_t*>(address) - current->block->shared);
}

void check_place(const uint64_t* mbar) {
    const uint64_t offset = shared_offset(mbar);
    const uint32_t bytes = current->block->grid->launch->shared_bytes;
    if (offset % 8 != 0 || offset + 8 > bytes) {
        fail("an mbarrier at %llu of %u bytes of shared memory",
             static_cast<unsigned long long>(offset), bytes);
    }
}

// The last of a barrier's threads to come wakes the others.
void meet(Barrier& barrier, const char* call, uint32_t id) {
    if (++barrier.arrived == barrier.count) {
        barrier.arrived = 0;
        barrier.generation++;
        wake_all(barrier.waiting);
        maybe_yield();
    } else {
        wait_in(barrier.waiting, call, id, barrier.count);
    }
}

}  // namespace

MBarrier& find_mbar(const uint64_t* mbar) {
    check_place(mbar);
    return find_mbar_in(*current->block, mbar);
}

MBarrier& find_mbar_in(Block& block, const uint64_t* mbar) {
    race::reads(mbar, sizeof *mbar);
    const uint64_t word = *mbar;
    const uint64_t index = word - MARK;
    if (index >= block.num_mbarriers || block.mbarriers[index].address != mbar) {
        fail("the mbarrier at %td of block %u is not initialised, or was written over",
             reinterpret_cast<const uint8_t*>(mbar) - block.shared, block.index);
    }
    return block.mbarriers[index];
}

bool count_arrival(MBarrier& mbar, uint32_t arrivals, int64_t bytes) {
    if (mbar.pending < arrivals) {
        return false;
    }
    mbar.pending -= arrivals;
    mbar.bytes += bytes;
    if (mbar.pending == 0 && mbar.bytes == 0) {
        mbar.pending = mbar.count;
        mbar.parity ^= 1;
        wake_all(mbar.waiting);
    }
    return true;
}

void mbar_init(uint64_t* mbar, uint32_t count) {
    race::called_from(__builtin_return_address(0));
    check_place(mbar);
    if (count == 0) {
        fail("an mbarrier of no arrivals");
    }
    Block& block = *current->block;
    size_t index = 0;
    while (index < block.num_mbarriers && block.mbarriers[index].address != mbar) {
        index++;
    }
    if (index == block.num_mbarriers) {
        block.num_mbarriers++;
        if (block.mbarriers.size() < block.num_mbarriers) {
            block.mbarriers.emplace_back();
        }
    } else if (block.mbarriers[index].waiting.head) {
        fail("an mbarrier is initialised while threads wait for it");
    }
    MBarrier& state = block.mbarriers[index];
    state.address = mbar;
    state.count = count;
    state.pending = count;
    state.bytes = 0;
    state.parity = 0;
    state.waiting = WaitList();
    *mbar = MARK + index;
    race::writes(mbar, sizeof *mbar);
}

void mbar_arrive(uint64_t* mbar, uint32_t bytes) {
    race::called_from(__builtin_return_address(0));
    MBarrier& state = find_mbar(mbar);
    race::release(&state.race_sync[state.parity]);
    if (!count_arrival(state, 1, bytes)) {
        fail("more than %u arrivals in a phase of the mbarrier at %llu", state.count,
             static_cast<unsigned long long>(shared_offset(mbar)));
    }
    maybe_yield();
}

void mbar_wait(uint64_t* mbar, uint32_t parity) {
    race::called_from(__builtin_return_address(0));
    MBarrier& state = find_mbar(mbar);
    while (state.parity == (parity & 1)) {
        wait_in(state.waiting, "mbar_wait", shared_offset(mbar), parity);
    }
    race::acquire(&state.race_sync[parity & 1]);
}

void barrier(uint32_t id, uint32_t count, const char* call) {
    Block& block = *current->block;
    if (id >= 16 || count == 0 || count % LANES != 0 || count > block.grid->launch->block) {
        fail("%s(%u, %u) in a block of %u threads", call, id, count, block.grid->launch->block);
    }
    Barrier& barrier = block.barriers[id];
    if (barrier.arrived == 0) {
        barrier.count = count;
    } else if (barrier.count != count) {
        fail("%s(%u, %u) while others wait with a count of %u", call, id, count, barrier.count);
    }
    const char* sync = &barrier.race_sync[barrier.generation % 2];
    race::release(sync);
    meet(barrier, call, id);
    race::acquire(sync);
}

void mbar_init_fence() {
    if (current->block->cluster) {
        race::release(&current->block->cluster->race_sync);
    }
}

Block& block_of_cluster(uint32_t rank) {
    const Block& own = *current->block;
    const uint32_t num_blocks = own.grid->launch->entry->cluster;
    Block* block = own.cluster && rank < num_blocks ? own.cluster->blocks[rank] : nullptr;
    if (!block) {
        fail("the block of rank %u of its cluster of %u does not run", rank, num_blocks);
    }
    return *block;
}

uint32_t cluster_rank() {
    const Block& block = *current->block;
    return block.index % block.grid->launch->entry->cluster;
}

void cluster_sync() {
    race::called_from(__builtin_return_address(0));
    const Block& block = *current->block;
    if (!block.cluster) {
        fail("cluster_sync in a block without a cluster");
    }
    Barrier& barrier = block.cluster->barrier;
    barrier.count = block.grid->launch->entry->cluster * block.grid->launch->block;
    meet(barrier, "cluster_sync", 0);
    race::acquire(&block.cluster->race_sync);
}

void mbar_arrive_at(uint64_t* mbar, uint32_t rank) {
    race::called_from(__builtin_return_address(0));
    check_place(mbar);
    Block& there = block_of_cluster(rank);
    MBarrier& state = find_mbar_in(there, counterpart(there, mbar));
    race::release(&state.race_sync[state.parity]);
    if (!count_arrival(state, 1, 0)) {
        fail("more than %u arrivals in a phase of the mbarrier at %llu of block %u", state.count,
             static_cast<unsigned long long>(shared_offset(mbar)), there.index);
    }
    maybe_yield();
}

void grid_wait() {
    Block& block = *current->block;
    block.waited = true;
    Grid* before = block.grid->before;
    while (before && !before->complete) {
        wait_in(before->waiting, "grid_wait", before->index, before->ended);
    }
    current->waited = true;
    if (before) {
        race::acquire(&before->race_sync);
    }
}

void grid_launch_dependents(bool early) {
    Block& block = *current->block;
    const Grid* before = block.grid->before;
    if (block.grid->launch->overlap && before && !current->waited) {
        if (!early) {
            fail("grid_launch_dependents without grid_wait: three kernels would run at a time");
        }
        if (before->early) {
            fail("grid_launch_dependents_early behind another: four kernels would run at a time");
        }
    }
    block.grid->early = block.grid->early || early;
    if (!block.triggered) {
        block.triggered = true;
        block.grid->triggered++;
    }
    maybe_yield();
}

uint32_t update(uint32_t* address, uint32_t value, Update kind, bool ordered) {
    race::called_from(__builtin_return_address(0));
    if (reinterpret_cast<uintptr_t>(address) % 4 != 0) {
        fail("an atomic update of the misaligned address %p", static_cast<void*>(address));
    }
    maybe_yield();
    machine->idle_polls = 0;
    const uint32_t old = *address;
    const uint32_t now = kind == Update::Add   ? old + value
                         : kind == Update::Max ? (old < value ? value : old)
                                               : old | value;
    return race::exchange(address, now, ordered);
}

uint32_t load(const uint32_t* address) {
    race::called_from(__builtin_return_address(0));
    if (current->polled == address) {
        yield_poll();
    }
    current->polled = address;
    return race::load(address);
}

void store_release(uint32_t* address, uint32_t value) {
    race::called_from(__builtin_return_address(0));
    machine->idle_polls = 0;
    race::store_release(address, value);
}

}  // namespace emu
