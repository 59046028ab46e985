// See block.h.
#include "block.h"

#include <algorithm>
#include <cstring>

#include "fiber.h"
#include "race.h"

namespace emu {

namespace {

constexpr uint8_t POISON = 0xff;
// Bytes after the shared memory that nobody may write, and what they hold.
constexpr size_t FENCE_BYTES = 1024;
constexpr uint8_t FENCE = 0xa5;
constexpr size_t SHARED_ALIGNMENT = 1024;

// Stacks that no warp uses, of this thread of the host.
struct StackPool {
    std::vector<uint8_t*> idle;
    ~StackPool() {
        std::for_each(idle.begin(), idle.end(), unmap_stacks);
    }
};
thread_local StackPool pool;

uint8_t* take_stacks() {
    if (pool.idle.empty()) {
        return map_stacks();
    }
    uint8_t* stacks = pool.idle.back();
    pool.idle.pop_back();
    return stacks;
}

void thread_main() {
    current->block->grid->launch->entry->invoke(current->block->grid->launch->params.data());
    end_thread();
}

void prepare_shared(Block& block, uint32_t bytes) {
    block.memory.resize(SHARED_ALIGNMENT + bytes + FENCE_BYTES);
    const uintptr_t start = reinterpret_cast<uintptr_t>(block.memory.data());
    const uintptr_t aligned = (start + SHARED_ALIGNMENT - 1) / SHARED_ALIGNMENT * SHARED_ALIGNMENT;
    block.shared = block.memory.data() + (aligned - start);
    memset(block.shared, POISON, bytes);
    memset(block.shared + bytes, FENCE, FENCE_BYTES + SHARED_ALIGNMENT - (aligned - start));
}

void prepare_warp(Block& block, uint32_t index) {
    Warp& warp = block.warps[index];
    if (!warp.stacks) {
        warp.stacks = take_stacks();
    }
    warp.block = &block;
    warp.index = index;
    warp.alive = ~0u;
    warp.ready = ~0u;
    warp.arrived = 0;
    warp.still_until = 0;
    warp.collective = Collective::None;
    warp.warpgroup = WarpgroupShare();
    warp.queued = false;
    for (uint32_t lane = 0; lane < LANES; lane++) {
        Thread& thread = warp.lanes[lane];
        warp.stack_pointers[lane] = fresh_stack(warp.stacks, lane, thread_main);
        thread.warp = &warp;
        thread.block = &block;
        thread.index = index * LANES + lane;
        thread.lane = lane;
        thread.num_threads = block.grid->launch->block;
        thread.block_index = block.index;
        thread.num_blocks = block.grid->launch->grid;
        thread.shared = block.shared;
        thread.call = "nothing";
        thread.open_group = 0;
        thread.num_issued = 0;
        thread.copies.clear();
        thread.polled = nullptr;
        thread.waited = false;
        thread.strand = race::create({block.grid->launch->entry->name, block.index, thread.index, false});
    }
}

// Takes its place among those that run at the same time.
void join_cluster(Block& block) {
    Grid& grid = *block.grid;
    const uint32_t num_blocks = grid.launch->entry->cluster;
    block.cluster = nullptr;
    if (num_blocks == 1) {
        return;
    }
    const uint32_t rank = block.index % num_blocks;
    if (rank == 0) {
        grid.clusters.emplace_back();
    }
    block.cluster = &grid.clusters.back();
    block.cluster->blocks[rank] = &block;
}

Block& idle_block() {
    Machine& m = *machine;
    if (m.idle_blocks.empty()) {
        m.blocks.push_back(std::make_unique<Block>());
        return *m.blocks.back();
    }
    Block* block = m.idle_blocks.back();
    m.idle_blocks.pop_back();
    return *block;
}

}  // namespace

Block& take_block(Grid& grid) {
    const Launch& launch = *grid.launch;
    Block& block = idle_block();
    block.grid = &grid;
    block.index = grid.started++;
    block.num_warps = launch.block / LANES;
    block.threads_alive = launch.block;
    block.copies_in_flight = 0;
    block.num_mbarriers = 0;
    block.triggered = false;
    block.waited = false;
    join_cluster(block);
    for (Barrier& barrier : block.barriers) {
        barrier = Barrier();
    }
    prepare_shared(block, launch.shared_bytes);
    while (block.warps.size() < block.num_warps) {
        block.warps.emplace_back();
    }
    for (uint32_t w = 0; w < block.num_warps; w++) {
        prepare_warp(block, w);
    }
    machine->resident.push_back(&block);
    return block;
}

void give_block(Block& block) {
    std::vector<Block*>& resident = machine->resident;
    resident.erase(std::find(resident.begin(), resident.end(), &block));
    if (block.cluster) {
        block.cluster->blocks[block.index % block.grid->launch->entry->cluster] = nullptr;
    }
    for (uint32_t w = 0; w < block.num_warps; w++) {
        for (Thread& thread : block.warps[w].lanes) {
            race::destroy(thread.strand);
        }
    }
    // Where races are watched, memory of a block that ended must not look like memory of the next.
    if (!race::WATCHED) {
        machine->idle_blocks.push_back(&block);
    }
}

void check_ended(const Block& block) {
    const Launch& launch = *block.grid->launch;
    const uint8_t* fence = block.shared + launch.shared_bytes;
    const uint8_t* end = block.memory.data() + block.memory.size();
    const uint8_t* broken = std::find_if(fence, end, [](uint8_t byte) { return byte != FENCE; });
    if (broken != end) {
        fail("the block wrote at %td of its %u bytes of shared memory", broken - block.shared,
             launch.shared_bytes);
    }
    if (block.copies_in_flight > 0) {
        fail("the block ended while %u of its copies were under way", block.copies_in_flight);
    }
    check_warpgroups(block);
    if (launch.overlap && block.grid->before && !block.waited) {
        fail("the block ended without grid_wait, but its launch overlaps the one before");
    }
}

void release_blocks() {
    for (const std::unique_ptr<Block>& block : machine->blocks) {
        for (Warp& warp : block->warps) {
            pool.idle.push_back(warp.stacks);
        }
    }
}

}  // namespace emu
