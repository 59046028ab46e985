// The machine that kernels run on in tests: threads as fibers, blocks with poisoned shared memory,
// and a seeded schedule that decides who goes on and when asynchronous copies land. What kernels
// call is in prims_cpu.h; this header has the state behind it. One machine belongs to one thread of
// the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "kernel.h"
#include "race.h"

namespace emu {

constexpr uint32_t LANES = 32;

struct Block;
struct Cluster;
struct Grid;
struct Warp;

// When asynchronous copies land.
enum class Landing : uint8_t {
    AtOnce,
    AnyTime,
    AtTheEnd,
};

// How the machine behaves where a GPU is free to choose.
struct Schedule {
    uint64_t seed = 0;
    Landing landing = Landing::AtOnce;
    // Threads are interrupted at synchronising calls, and single warps stand still for a while.
    bool disturbed = false;
};

struct Launch {
    const Entry* entry = nullptr;
    uint32_t grid = 0;
    uint32_t block = 0;
    uint32_t shared_bytes = 0;
    std::vector<uint8_t> params;
    // Blocks may start before the launch before this one has ended.
    bool overlap = false;
    // Blocks in flight at once; 0 is all of them.
    uint32_t max_resident = 0;
};

// A copy of 16 bytes that its thread has issued as its `sequence`-th, in its group number `group`.
struct LaneCopy {
    void* shared;
    const void* global;
    uint32_t sequence;
    uint32_t group;
};

// What every switch reads is in one line of the cache.
struct alignas(64) Thread : KernelView {
    Warp* warp = nullptr;
    Block* block = nullptr;
    Thread* next_waiting = nullptr;
    // What it waits for, for messages: the call and two numbers that belong to it. Where its warp waits for other lanes, the
    // warp says so.
    const char* call = "";
    uint64_t detail[2] = {0, 0};
    uint32_t open_group = 0;
    uint32_t num_issued = 0;
    std::vector<LaneCopy> copies;
    const void* polled = nullptr;
    // For the launch before.
    bool waited = false;
    race::Strand* strand = nullptr;
    char race_sync = 0;
};

struct WaitList {
    Thread* head = nullptr;
};

enum class Collective : uint8_t {
    None,
    Sync,
    Mma,
    LoadMatrix,
    ShuffleXor,
    ShuffleFrom,
    ShuffleUp,
    Ballot,
    Wgmma,
    WarpgroupFence,
    WarpgroupCommit,
    WarpgroupWait,
};

// A warp's share of a product of its warpgroup, which has been issued and is not done: 16 rows of `a` by all columns of `b`.
struct WarpProduct {
    uint32_t columns;
    // Whether operands are bytes of e4m3; else halves.
    bool is_e4m3;
    // Of `a` from registers.
    bool has_fragments;
    uint16_t fragments[16][16];
    uint64_t a;
    uint64_t b;
    // Of each lane.
    float* sums[LANES];
    uint64_t group;
};

// What a warp has under way with the others of its warpgroup.
struct WarpgroupShare {
    std::vector<WarpProduct> products;
    uint64_t open_group = 0;
    uint64_t num_issued = 0;
    bool is_fenced = false;
};

struct Warp {
    Thread lanes[LANES];
    // Of the lanes that do not run.
    void* stack_pointers[LANES] = {};
    Block* block = nullptr;
    uint8_t* stacks = nullptr;
    uint32_t index = 0;
    uint32_t alive = 0;
    uint32_t ready = 0;
    uint32_t arrived = 0;
    uint32_t turns = 0;
    uint32_t first_lane = 0;
    uint64_t still_until = 0;
    uint64_t num_collectives = 0;
    Collective collective = Collective::None;
    bool queued = false;
    void* arguments[LANES] = {};
    WarpgroupShare warpgroup;
    char race_sync[2] = {};
};

struct Barrier {
    uint32_t count = 0;
    uint32_t arrived = 0;
    uint32_t generation = 0;
    WaitList waiting;
    char race_sync[2] = {};
};

// State of an mbarrier; the eight bytes in shared memory hold a mark and its index.
struct MBarrier {
    const uint64_t* address = nullptr;
    uint32_t count = 0;
    uint32_t pending = 0;
    int64_t bytes = 0;
    uint32_t parity = 0;
    WaitList waiting;
    char race_sync[2] = {};  // by parity
};

struct Block {
    Grid* grid = nullptr;
    uint32_t index = 0;
    // Null where it is alone.
    Cluster* cluster = nullptr;
    std::vector<uint8_t> memory;
    uint8_t* shared = nullptr;
    std::deque<Warp> warps;
    uint32_t num_warps = 0;
    uint32_t threads_alive = 0;
    uint32_t copies_in_flight = 0;
    Barrier barriers[16];
    std::deque<MBarrier> mbarriers;
    size_t num_mbarriers = 0;
    bool triggered = false;
    bool waited = false;
};

// Blocks that run at the same time, by rank; null where one has not begun or has ended.
struct Cluster {
    Block* blocks[MAX_CLUSTER] = {};
    Barrier barrier;
    char race_sync = 0;  // of mbar_init_fence
};

struct Grid {
    const Launch* launch = nullptr;
    std::deque<Cluster> clusters;
    Grid* before = nullptr;
    size_t index = 0;
    uint32_t started = 0;
    uint32_t ended = 0;
    uint32_t triggered = 0;
    bool early = false;  // without having waited
    bool complete = false;
    WaitList waiting;
    char race_sync = 0;
};

// A bulk copy to a block; or, with no bytes, an arrival that waits for the first `num_copies` copies of
// `thread`.
struct Pending {
    Thread* thread;
    Block* block;
    MBarrier* mbar;
    void* shared;
    const void* global;
    uint32_t bytes;
    uint32_t num_copies;
    race::Strand* strand;
};

struct Machine {
    const Schedule* schedule = nullptr;
    uint64_t random_state = 0;
    uint64_t tick = 0;
    uint64_t idle_polls = 0;
    uint64_t threads_alive = 0;
    int favour = 0;
    std::vector<Warp*> runnable;
    std::vector<Pending> pending;
    std::deque<Grid> grids;
    std::vector<Block*> resident;
    std::vector<Block*> ended_blocks;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<Block*> idle_blocks;
    void* stack_pointer = nullptr;
    race::Strand* strand = nullptr;
    bool failed = false;
    std::string failure;
};

// The thread that is running; null between launches.
extern __thread Thread* current __attribute__((tls_model("initial-exec")));
extern __thread Machine* machine __attribute__((tls_model("initial-exec")));

// All that is compiled; a null ends it. Written by the build.
extern const Entry* const ENTRIES[];

// Null where there is none of that name.
const Entry* find_entry(const std::string& name);

// Runs launches one after the other. Returns "" or what went wrong; then the rest did not run.
std::string run(const std::vector<Launch>& launches, const Schedule& schedule);

// Next of the schedule's numbers, below `bound`.
uint32_t random_below(uint32_t bound);

// Ends the launches with a message about the running thread. Does not return.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// The same about a thread that is not running; the scheduler notices.
void fail_for(const Thread& thread, const char* message);

// The running thread waits in `list` until somebody wakes it. `first` and `second` are for
// messages.
void wait_in(WaitList& list, const char* call, uint64_t first, uint64_t second);
void wake_all(WaitList& list);

// Lets other threads run, where the schedule wants it.
void maybe_yield();

// Lets other threads run, as the running one looks at memory that they may change.
void yield_poll();

// Gives the processor away; the caller has recorded who will wake it.
void switch_away();

// Lands a bulk copy, or lets an arrival happen, that the schedule chooses. One must be pending.
void land_one();

// The state of an mbarrier of the running thread's block.
MBarrier& find_mbar(const uint64_t* mbar);

// The block of that rank in the running thread's cluster. Fails where it does not run.
Block& block_of_cluster(uint32_t rank);

// What stands there as `own` stands in the running thread's block.
template <class T>
T* counterpart(Block& there, T* own) {
    const auto offset = reinterpret_cast<uintptr_t>(own) - reinterpret_cast<uintptr_t>(current->block->shared);
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(there.shared) + offset);
}

// The state of the barrier at an address in the shared memory of a block.
MBarrier& find_mbar_in(Block& block, const uint64_t* mbar);

// One arrival, and bytes that the phase is to wait for (or that have come, negative). False: too
// many arrivals.
bool count_arrival(MBarrier& mbar, uint32_t arrivals, int64_t bytes);

}  // namespace emu
