// Asynchronous copies: issued by threads, landing when the schedule wants, at the latest when a
// thread waits for them.
#include <cstring>

#include "machine.h"
#include "prims_cpu.h"
#include "race.h"

namespace emu {

namespace {

void check_copy(const void* shared, const void* global, uint32_t bytes, const char* call) {
    const uint32_t limit = current->block->grid->launch->shared_bytes;
    const uintptr_t to = reinterpret_cast<uintptr_t>(shared);
    const uintptr_t start = reinterpret_cast<uintptr_t>(current->block->shared);
    if (to % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0 || bytes % 16 != 0) {
        fail("%s of %u bytes from %p to %p: all must be multiples of 16", call, bytes, global,
             shared);
    }
    if (to < start || to + bytes > start + limit) {
        fail("%s of %u bytes to %lld of %u bytes of shared memory", call, bytes,
             static_cast<long long>(to - start), limit);
    }
}

void move_lane_copy(const LaneCopy& copy) {
    race::writes(copy.shared, 16);
    race::reads(copy.global, 16);
    memcpy(copy.shared, copy.global, 16);
}

// Lands the copies of a thread for which `due` says so.
template <class Due>
void land_copies(Thread& thread, Due due) {
    size_t kept = 0;
    for (const LaneCopy& copy : thread.copies) {
        if (due(copy)) {
            move_lane_copy(copy);
        } else {
            thread.copies[kept++] = copy;
        }
    }
    thread.copies.resize(kept);
}

// A copy goes on by itself, ordered after what its issuer had done.
race::Strand* copier() {
    return race::create({current->block->grid->launch->entry->name, current->block->index, current->index, true});
}

void land(Pending& pending) {
    race::Strand* here = race::here();
    race::go_to(pending.strand);
    if (pending.bytes > 0) {
        race::reads(pending.global, pending.bytes);
        race::writes(pending.shared, pending.bytes);
        memcpy(pending.shared, pending.global, pending.bytes);
    } else {
        const uint32_t limit = pending.num_copies;
        Thread& thread = *pending.thread;
        land_copies(thread, [&](const LaneCopy& copy) { return copy.sequence < limit; });
        // Some may have landed for a later arrival of the same thread.
        race::release(&thread.race_sync);
        race::acquire(&thread.race_sync);
    }
    race::release(&pending.mbar->race_sync[pending.mbar->parity]);
    race::go_to(here);
    race::destroy(pending.strand);
    pending.block->copies_in_flight--;
    const uint32_t arrivals = pending.bytes > 0 ? 0 : 1;
    if (!count_arrival(*pending.mbar, arrivals, -static_cast<int64_t>(pending.bytes))) {
        fail_for(*pending.thread, "more arrivals by async_arrive than the mbarrier counts");
    }
}

void issue(Pending pending) {
    pending.block->copies_in_flight++;
    if (machine->schedule->landing == Landing::AtOnce) {
        land(pending);
    } else {
        machine->pending.push_back(pending);
    }
    maybe_yield();
}

}  // namespace

void land_one() {
    std::vector<Pending>& all = machine->pending;
    const uint32_t chosen = random_below(static_cast<uint32_t>(all.size()));
    Pending pending = all[chosen];
    all[chosen] = all.back();
    all.pop_back();
    land(pending);
}

void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* mbar) {
    race::called_from(__builtin_return_address(0));
    check_copy(shared, global, bytes, "bulk_copy");
    if (bytes == 0) {
        fail("a bulk_copy of nothing");
    }
    issue(Pending{current, current->block, &find_mbar(mbar), shared, global, bytes, 0, copier()});
}

void bulk_copy_to_cluster(void* shared, const void* global, uint32_t bytes, uint64_t* mbar, uint32_t blocks) {
    race::called_from(__builtin_return_address(0));
    check_copy(shared, global, bytes, "bulk_copy_to_cluster");
    if (bytes == 0 || blocks == 0) {
        fail("a bulk_copy_to_cluster of %u bytes to %u blocks", bytes, blocks);
    }
    find_mbar(mbar);
    for (uint32_t rank = 0; rank < blocks; rank++) {
        Block& there = block_of_cluster(rank);
        MBarrier& state = find_mbar_in(there, counterpart(there, mbar));
        issue(Pending{current, &there, &state, counterpart(there, shared), global, bytes, 0, copier()});
    }
}

void async_copy(void* shared, const void* global) {
    race::called_from(__builtin_return_address(0));
    check_copy(shared, global, 16, "async_copy16");
    const LaneCopy copy{shared, global, current->num_issued++, current->open_group};
    const Landing landing = machine->schedule->landing;
    const bool at_once =
        landing == Landing::AtOnce || (landing == Landing::AnyTime && random_below(2) == 0);
    if (at_once || race::WATCHED) {
        move_lane_copy(copy);
    }
    if (!at_once || race::WATCHED) {
        current->copies.push_back(copy);
    }
}

void async_commit() {
    current->open_group++;
}

void async_wait(uint32_t pending) {
    race::called_from(__builtin_return_address(0));
    const uint32_t open = current->open_group;
    land_copies(*current, [&](const LaneCopy& copy) { return copy.group + pending < open; });
    // An arrival that comes later brings what has landed here.
    race::release(&current->race_sync);
    race::acquire(&current->race_sync);
    maybe_yield();
}

void async_arrive(uint64_t* mbar) {
    race::called_from(__builtin_return_address(0));
    issue(Pending{current, current->block, &find_mbar(mbar), nullptr, nullptr, 0, current->num_issued, copier()});
}

}  // namespace emu
