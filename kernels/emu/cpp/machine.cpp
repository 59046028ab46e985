// The loop of the machine: which blocks are resident, when a warp runs, when a launch has ended or
// can never end.
#include "machine.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <memory>

#include "block.h"
#include "collective.h"
#include "crash.h"
#include "fiber.h"
#include "race.h"
#include "schedule.h"

namespace emu {

__thread Thread* current = nullptr;
__thread const KernelView* view = nullptr;
__thread Machine* machine = nullptr;

namespace {

// Polls without any other event, for each thread, after which nobody is expected to move again.
constexpr uint64_t MAX_IDLE_POLLS = 256;

uint32_t rotate_right(uint32_t bits, uint32_t count) {
    return count == 0 ? bits : bits >> count | bits << (LANES - count);
}

// Takes the next ready lane of the warp, in the order that the schedule gave it.
Thread* take_lane(Warp& warp) {
    const uint32_t order = rotate_right(warp.ready, warp.first_lane);
    const uint32_t lane = (__builtin_ctz(order) + warp.first_lane) % LANES;
    warp.ready &= ~(1u << lane);
    // The stacks of a block do not fit in the first cache: the next one is fetched while this lane runs.
    const uint32_t left = order & (order - 1);
    if (left) {
        const uint32_t next = (__builtin_ctz(left) + warp.first_lane) % LANES;
        __builtin_prefetch(&warp.lanes[next]);
        __builtin_prefetch(warp.stack_pointers[next]);
        __builtin_prefetch(static_cast<const char*>(warp.stack_pointers[next]) + 64);
    }
    return &warp.lanes[lane];
}

void enqueue(Warp& warp) {
    if (!warp.queued) {
        warp.queued = true;
        machine->runnable.push_back(&warp);
    }
}

// Where the stack pointer of a thread is while it does not run.
void*& saved(const Thread& thread) {
    return thread.warp->stack_pointers[thread.lane];
}

void to_scheduler(void** save) {
    race::go_to(machine->strand);
    emu_switch(save, machine->stack_pointer);
}

// The same for a thread, which goes on as the current one.
void to_thread(void** save, Thread* thread) {
    current = thread;
    view = thread;
    race::go_to(thread->strand);
    emu_switch(save, saved(*thread));
}

std::string describe(const Thread& thread) {
    char text[256];
    snprintf(text, sizeof text, "kernel %s: block %u thread %u",
             thread.block->grid->launch->entry->name, thread.block->index, thread.index);
    return text;
}

void set_failure(std::string message) {
    machine->failed = true;
    machine->failure = std::move(message);
}

}  // namespace

void fail(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fail_for(*current, text);
    for (;;) {
        to_scheduler(&saved(*current));
    }
}

void fail_for(const Thread& thread, const char* message) {
    set_failure(describe(thread) + ": " + message);
}

void switch_away() {
    Thread* self = current;
    Warp& warp = *self->warp;
    if (!inside_stack(warp.stacks, self->lane, __builtin_frame_address(0))) {
        fail("its stack is too small for this kernel");
    }
    if (warp.ready == 0 || --warp.turns == 0) {
        to_scheduler(&saved(*self));
    } else {
        to_thread(&saved(*self), take_lane(warp));
    }
}

void wait_in(WaitList& list, const char* call, uint64_t first, uint64_t second) {
    Thread* self = current;
    self->call = call;
    self->detail[0] = first;
    self->detail[1] = second;
    self->next_waiting = list.head;
    list.head = self;
    switch_away();
}

void wake_all(WaitList& list) {
    machine->idle_polls = 0;
    Thread* thread = list.head;
    list.head = nullptr;
    while (thread) {
        thread->warp->ready |= 1u << thread->lane;
        if (!current || thread->warp != current->warp) {
            enqueue(*thread->warp);
        }
        thread = thread->next_waiting;
    }
}

void maybe_yield() {
    if (machine->schedule->disturbed && random_below(16) == 0) {
        current->warp->ready |= 1u << current->lane;
        to_scheduler(&saved(*current));
    }
}

void yield_poll() {
    machine->idle_polls++;
    current->warp->ready |= 1u << current->lane;
    current->call = "a loop that reads memory";
    to_scheduler(&saved(*current));
}

void end_thread() {
    Thread* self = current;
    Block& block = *self->block;
    self->warp->alive &= ~(1u << self->lane);
    machine->idle_polls = 0;
    block.threads_alive--;
    race::release(&block.grid->race_sync);
    if (block.threads_alive == 0) {
        check_ended(block);
        machine->ended_blocks.push_back(&block);
    }
    for (;;) {
        switch_away();
    }
}

namespace {

bool may_start(const Grid& grid) {
    const Launch& launch = *grid.launch;
    if (grid.started == launch.grid) {
        return false;
    }
    // A cluster begins as a whole.
    if (grid.started % launch.entry->cluster != 0) {
        return true;
    }
    if (launch.max_resident && grid.started - grid.ended >= launch.max_resident) {
        return false;
    }
    const Grid* before = grid.before;
    if (!before || before->complete) {
        return true;
    }
    // A block that ended counts as one that has let the next kernel begin.
    return launch.overlap && before->triggered == before->launch->grid;
}

void start_blocks() {
    for (Grid& grid : machine->grids) {
        while (may_start(grid)) {
            Block& block = take_block(grid);
            for (uint32_t w = 0; w < block.num_warps; w++) {
                enqueue(block.warps[w]);
                if (machine->schedule->disturbed && random_below(4) == 0) {
                    hold_back(block.warps[w]);
                }
            }
        }
    }
}

void end_blocks() {
    for (Block* block : machine->ended_blocks) {
        Grid& grid = *block->grid;
        if (!block->triggered) {
            grid.triggered++;
        }
        give_block(*block);
        if (++grid.ended == grid.launch->grid) {
            grid.complete = true;
            wake_all(grid.waiting);
            // What comes after a completed launch is ordered after it, unless it began before.
            race::acquire(&grid.race_sync);
        }
    }
    machine->ended_blocks.clear();
}

Warp* pick() {
    std::vector<Warp*>& runnable = machine->runnable;
    const uint32_t chosen = choose_warp();
    Warp* warp = runnable[chosen];
    runnable[chosen] = runnable.back();
    runnable.pop_back();
    warp->queued = false;
    return warp;
}

void run_warp(Warp& warp) {
    const bool disturbed = machine->schedule->disturbed;
    warp.first_lane = disturbed ? random_below(LANES) : 0;
    warp.turns = disturbed ? 1 + random_below(2048) : ~0u;
    machine->tick++;
    to_thread(&machine->stack_pointer, take_lane(warp));
    current = nullptr;
    view = nullptr;
    if (warp.ready) {
        enqueue(warp);
    }
}

std::string deadlock() {
    std::string message = "deadlock: ";
    size_t stuck = 0;
    for (const Block* block : machine->resident) {
        for (uint32_t w = 0; w < block->num_warps; w++) {
            const Warp& warp = block->warps[w];
            stuck += __builtin_popcount(warp.alive);
        }
    }
    message += std::to_string(stuck) + " threads wait for ever";
    size_t shown = 0;
    for (const Block* block : machine->resident) {
        for (uint32_t w = 0; w < block->num_warps; w++) {
            const Warp& warp = block->warps[w];
            if (!warp.alive || shown == 8) {
                continue;
            }
            const Thread& thread = warp.lanes[__builtin_ctz(warp.alive)];
            const bool is_joining = warp.arrived >> thread.lane & 1;
            const uint64_t first = is_joining ? warp.arrived : thread.detail[0];
            const uint64_t second = is_joining ? warp.alive : thread.detail[1];
            char text[256];
            snprintf(text, sizeof text, "; %s in %s (%llu, %llu)", describe(thread).c_str(),
                     is_joining ? name(warp.collective) : thread.call,
                     static_cast<unsigned long long>(first), static_cast<unsigned long long>(second));
            message += text;
            shown++;
        }
    }
    return message;
}

bool all_complete() {
    return std::all_of(machine->grids.begin(), machine->grids.end(),
                       [](const Grid& grid) { return grid.complete; });
}

void step() {
    start_blocks();
    if (machine->runnable.empty()) {
        if (machine->pending.empty()) {
            set_failure(deadlock());
        } else {
            land_one();
        }
        return;
    }
    run_warp(*pick());
    if (machine->failed) {
        return;
    }
    end_blocks();
    if (machine->schedule->landing == Landing::AnyTime && !machine->pending.empty() &&
        random_below(4) == 0) {
        land_one();
    }
    if (machine->idle_polls > MAX_IDLE_POLLS * (machine->runnable.size() * LANES + 1)) {
        if (machine->pending.empty()) {
            set_failure(deadlock());
        } else {
            land_one();
        }
    }
}

std::string wrong(const Launch& launch) {
    const Entry& entry = *launch.entry;
    const std::string kernel = std::string("kernel ") + entry.name + ": ";
    if (launch.params.size() != entry.params_bytes) {
        return kernel + "launched with " + std::to_string(launch.params.size()) +
               " bytes of arguments, takes " + std::to_string(entry.params_bytes);
    }
    if (launch.block != entry.num_threads || launch.block % LANES != 0) {
        return kernel + "launched with blocks of " + std::to_string(launch.block) +
               " threads, takes " + std::to_string(entry.num_threads);
    }
    if (launch.grid == 0) {
        return kernel + "launched with no blocks";
    }
    if (launch.grid % entry.cluster != 0) {
        return kernel + "launched with " + std::to_string(launch.grid) + " blocks, which are no whole clusters of " +
               std::to_string(entry.cluster);
    }
    return "";
}

void prepare(const std::vector<Launch>& launches, const Schedule& schedule) {
    Machine& m = *machine;
    seed_schedule(schedule);
    m.strand = race::here();
    for (const Launch& launch : launches) {
        Grid grid;
        grid.launch = &launch;
        grid.index = m.grids.size();
        grid.before = m.grids.empty() ? nullptr : &m.grids.back();
        m.grids.push_back(grid);
    }
}

}  // namespace

const Entry* find_entry(const std::string& name) {
    for (const Entry* const* entry = ENTRIES; *entry; entry++) {
        if ((*entry)->name == name) {
            return *entry;
        }
    }
    return nullptr;
}

std::string run(const std::vector<Launch>& launches, const Schedule& schedule) {
    for (const Launch& launch : launches) {
        const std::string message = wrong(launch);
        if (!message.empty()) {
            return message;
        }
    }
    std::unique_ptr<Machine> here = std::make_unique<Machine>();
    machine = here.get();
    catch_crashes();
    prepare(launches, schedule);
    while (!here->failed && !all_complete()) {
        step();
    }
    release_blocks();
    machine = nullptr;
    return here->failure;
}

}  // namespace emu
