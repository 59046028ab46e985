// See schedule.h.
#include "schedule.h"

namespace emu {

uint32_t random_below(uint32_t bound) {
    uint64_t& state = machine->random_state;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<uint32_t>(((state >> 32) * bound) >> 32);
}

void seed_schedule(const Schedule& schedule) {
    machine->schedule = &schedule;
    machine->random_state = (schedule.seed + 1) * 0x9e3779b97f4a7c15ull | 1;
    for (int i = 0; i < 4; i++) {
        random_below(2);
    }
    machine->favour = schedule.disturbed ? static_cast<int>(random_below(3)) - 1 : 0;
}

void hold_back(Warp& warp) {
    const uint32_t count = static_cast<uint32_t>(machine->runnable.size());
    warp.still_until = machine->tick + random_below(16 * count + 64);
}

namespace {

// Whether the schedule would rather run `a`: of two grids it may favour the earlier or the later.
bool preferred(const Warp& a, const Warp& b) {
    const size_t first = a.block->grid->index;
    const size_t second = b.block->grid->index;
    return machine->favour > 0 ? first > second : machine->favour < 0 && first < second;
}

}  // namespace

uint32_t choose_warp() {
    const std::vector<Warp*>& runnable = machine->runnable;
    const uint32_t count = static_cast<uint32_t>(runnable.size());
    if (!machine->schedule->disturbed) {
        return count - 1;
    }
    uint32_t chosen = random_below(count);
    if (random_below(32) == 0) {
        hold_back(*runnable[chosen]);
    }
    for (int i = 0; i < 8; i++) {
        const uint32_t other = random_below(count);
        const bool still = runnable[chosen]->still_until > machine->tick;
        const bool other_still = runnable[other]->still_until > machine->tick;
        if (still != other_still ? still : preferred(*runnable[other], *runnable[chosen])) {
            chosen = other;
        }
    }
    return chosen;
}

}  // namespace emu
