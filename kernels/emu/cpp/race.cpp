// See race.h. Vector clocks, and of each eight bytes of memory the last accesses that nothing has superseded. One thread of the
// host does all of it, so nothing here is atomic.
#include "race.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <unistd.h>
#include <unordered_map>
#include <vector>

namespace emu::race {

namespace {

// By strand: the newest of its epochs that is ordered before.
using Clock = std::vector<uint32_t>;

// What the host's side of a program ends with that has a race, for `Program`.
constexpr int RACE_EXIT = 66;

// Idle numbers that are looked at for one that a new strand may take.
constexpr size_t MAX_TRIES = 64;

__attribute__((target_clones("avx2", "default"), optimize("O3"))) void raise(uint32_t* clock, const uint32_t* other,
                                                                             size_t count) {
    for (size_t idx = 0; idx < count; idx++) {
        clock[idx] = clock[idx] < other[idx] ? other[idx] : clock[idx];
    }
}

void join(Clock& clock, const Clock& other) {
    if (clock.size() < other.size()) {
        clock.resize(other.size());
    }
    raise(clock.data(), other.data(), other.size());
}

}  // namespace

struct Strand {
    uint32_t number;
    uint32_t owner;  // index
    Clock clock;
    const void* code = nullptr;  // where the kernel has called the machine

    uint32_t epoch() const {
        return clock[number];
    }
};

namespace {

enum Kind : uint8_t {
    READ = 0,
    WRITE = 1,
    ATOMIC = 2,
};

// An access to some of eight bytes.
struct Access {
    uint32_t strand;
    uint32_t epoch;
    uint32_t owner;
    uint32_t code;  // from the program's beginning
    uint8_t bytes;  // a bit each; 0 is none
    uint8_t kind;
};

// Each of the eight may be another thread's.
constexpr size_t ACCESSES = 8;
using Cell = std::array<Access, ACCESSES>;

constexpr uintptr_t PAGE_BYTES = 4096;
using Page = std::array<Cell, PAGE_BYTES / 8>;

// A number that is free, and the epoch in which its strand did what it did last.
struct Idle {
    uint32_t number;
    uint32_t epoch;
};

struct Watch {
    std::vector<Owner> owners;  // of all strands that there were
    uint32_t numbers = 1;
    std::deque<Idle> idle;
    std::unordered_map<const void*, Clock> syncs;
    std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
    uintptr_t last_page = 0;
    Page* last = nullptr;
    uint32_t dice = 1;
    Strand* here;

    Watch() : owners{{"the machine", 0, 0, false}}, here(new Strand{0, 0, {1}}) {}

    Page& page(uintptr_t number) {
        if (!last || last_page != number) {
            std::unique_ptr<Page>& found = pages[number];
            if (!found) {
                found = std::make_unique<Page>();
            }
            last_page = number;
            last = found.get();
        }
        return *last;
    }

    // A number whose strand has done nothing that the one here does not know to be over, or a new one.
    uint32_t take_number() {
        const Clock& clock = here->clock;
        for (size_t tries = std::min(idle.size(), MAX_TRIES); tries > 0; tries--) {
            const Idle first = idle.front();
            idle.pop_front();
            if (first.number < clock.size() && clock[first.number] >= first.epoch) {
                return first.number;
            }
            idle.push_back(first);
        }
        return numbers++;
    }
};

Watch& watch() {
    static Watch watch;
    return watch;
}

// The program's own beginning.
extern "C" const char __executable_start;

std::string place(uint32_t code) {
    std::array<char, 512> text{};
    const ssize_t length = readlink("/proc/self/exe", text.data(), text.size() - 1);
    const std::string program(text.data(), std::max<ssize_t>(length, 0));
    std::array<char, 640> command{};
    snprintf(command.data(), command.size(), "addr2line -i -s -e '%s' 0x%x 2>/dev/null", program.c_str(), code);
    FILE* lines = popen(command.data(), "r");
    std::string line;
    // What is inlined comes first, and what every kernel calls says nothing.
    while (lines && fgets(text.data(), static_cast<int>(text.size()), lines)) {
        line = text.data();
        if (line.find("_cpu.h:") == std::string::npos) {
            break;
        }
    }
    if (lines) {
        pclose(lines);
    }
    return line.substr(0, line.find('\n'));
}

std::string describe(const Access& access) {
    const Owner& owner = watch().owners[access.owner];
    static const char* const KINDS[] = {"read", "wrote", "atomically read", "atomically wrote"};
    std::array<char, 256> text{};
    snprintf(text.data(), text.size(), "block %u thread %u of %s%s %s it at ", owner.block, owner.thread, owner.kernel,
             owner.is_copy ? ", by a copy," : "", KINDS[access.kind]);
    return text.data() + place(access.code);
}

[[noreturn]] void tell(uintptr_t address, const Access& before, const Access& now) {
    fprintf(stderr, "nothing orders two accesses to %#lx: %s; %s\n", static_cast<unsigned long>(address),
            describe(before).c_str(), describe(now).c_str());
    fflush(stderr);
    _exit(RACE_EXIT);
}

bool conflict(const Access& a, const Access& b) {
    const bool are_reads = (a.kind & WRITE) == 0 && (b.kind & WRITE) == 0;
    const bool are_atomic = (a.kind & ATOMIC) != 0 && (b.kind & ATOMIC) != 0;
    return (a.bytes & b.bytes) != 0 && !are_reads && !are_atomic;
}

// Whether whatever conflicts with `before`, which is ordered before `now`, conflicts with `now`.
bool supersedes(const Access& now, const Access& before) {
    const bool covers = (before.bytes & ~now.bytes) == 0;
    const bool is_stronger = (now.kind & WRITE) != 0 || (before.kind & WRITE) == 0;
    const bool is_as_plain = (now.kind & ATOMIC) == 0 || (before.kind & ATOMIC) != 0;
    return covers && is_stronger && is_as_plain;
}

void note(Cell& cell, uintptr_t address, const Access& now, const Clock& clock) {
    Access* kept = nullptr;
    for (Access& before : cell) {
        if (before.bytes == 0) {
            kept = kept ? kept : &before;
            continue;
        }
        const bool is_ordered = before.strand < clock.size() && clock[before.strand] >= before.epoch;
        if (!is_ordered && conflict(before, now)) {
            tell(address, before, now);
        }
        if (is_ordered && supersedes(now, before)) {
            before.bytes = 0;
            kept = kept ? kept : &before;
        }
    }
    if (!kept) {
        Watch& w = watch();
        w.dice = w.dice * 1664525u + 1013904223u;
        kept = &cell[(w.dice >> 24) % ACCESSES];
        // Many may read what one has written.
        if ((now.kind & WRITE) == 0 && (kept->kind & WRITE) != 0) {
            return;
        }
    }
    *kept = now;
}

void access(const void* address, size_t bytes, uint8_t kind, const void* code) {
    Watch& w = watch();
    const Strand& strand = *w.here;
    const uintptr_t first = reinterpret_cast<uintptr_t>(address);
    const uintptr_t end = first + bytes;
    // Inside of the call that comes back there.
    const uintptr_t call = reinterpret_cast<uintptr_t>(code) - 1;
    const uintptr_t from_beginning = call - reinterpret_cast<uintptr_t>(&__executable_start);
    Access now = {strand.number, strand.epoch(), strand.owner, static_cast<uint32_t>(from_beginning), 0, kind};
    for (uintptr_t eight = first / 8 * 8; eight < end; eight += 8) {
        const uint32_t low = static_cast<uint32_t>(std::max(first, eight) - eight);
        const uint32_t high = static_cast<uint32_t>(std::min(end, eight + 8) - eight);
        now.bytes = static_cast<uint8_t>((1u << high) - (1u << low));
        note(w.page(eight / PAGE_BYTES)[eight % PAGE_BYTES / 8], eight, now, strand.clock);
    }
}

}  // namespace

Strand* here() {
    return watch().here;
}

Strand* create(const Owner& owner) {
    Watch& w = watch();
    const uint32_t number = w.take_number();
    w.owners.push_back(owner);
    Strand* strand = new Strand{number, static_cast<uint32_t>(w.owners.size() - 1), w.here->clock, w.here->code};
    if (strand->clock.size() <= number) {
        strand->clock.resize(number + 1);
    }
    strand->clock[number]++;
    w.here->clock[w.here->number]++;
    return strand;
}

void destroy(Strand* strand) {
    // It has released all that it did, which began an epoch in which it does nothing.
    watch().idle.push_back({strand->number, strand->epoch() - 1});
    delete strand;
}

void go_to(Strand* strand) {
    watch().here = strand;
}

void acquire(const void* address) {
    Watch& w = watch();
    const auto found = w.syncs.find(address);
    if (found != w.syncs.end()) {
        join(w.here->clock, found->second);
    }
}

void release(const void* address) {
    Watch& w = watch();
    Strand& strand = *w.here;
    join(w.syncs[address], strand.clock);
    strand.clock[strand.number]++;
}

void called_from(const void* code) {
    watch().here->code = code;
}

void reads(const void* address, size_t bytes) {
    access(address, bytes, READ, here()->code);
}

void writes(void* address, size_t bytes) {
    access(address, bytes, WRITE, here()->code);
}

uint32_t load(const uint32_t* address) {
    access(address, sizeof *address, READ | ATOMIC, here()->code);
    return *static_cast<const volatile uint32_t*>(address);
}

void store_release(uint32_t* address, uint32_t value) {
    access(address, sizeof *address, WRITE | ATOMIC, here()->code);
    Watch& w = watch();
    Strand& strand = *w.here;
    w.syncs[address] = strand.clock;
    strand.clock[strand.number]++;
    *address = value;
}

uint32_t exchange(uint32_t* address, uint32_t value, bool ordered) {
    access(address, sizeof *address, WRITE | ATOMIC, here()->code);
    if (ordered) {
        acquire(address);
        release(address);
    }
    const uint32_t old = *address;
    *address = value;
    return old;
}

}  // namespace emu::race

// What the compiler calls.
extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define ACCESS_OF(bytes)                                                                       \
    void __tsan_read##bytes(void* address) {                                                   \
        emu::race::access(address, bytes, emu::race::READ, __builtin_return_address(0));       \
    }                                                                                          \
    void __tsan_write##bytes(void* address) {                                                  \
        emu::race::access(address, bytes, emu::race::WRITE, __builtin_return_address(0));      \
    }                                                                                          \
    void __tsan_unaligned_read##bytes(void* address) {                                         \
        emu::race::access(address, bytes, emu::race::READ, __builtin_return_address(0));       \
    }                                                                                          \
    void __tsan_unaligned_write##bytes(void* address) {                                        \
        emu::race::access(address, bytes, emu::race::WRITE, __builtin_return_address(0));      \
    }

ACCESS_OF(1)
ACCESS_OF(2)
ACCESS_OF(4)
ACCESS_OF(8)
ACCESS_OF(16)

void __tsan_read_range(void* address, size_t bytes) {
    emu::race::access(address, bytes, emu::race::READ, __builtin_return_address(0));
}

void __tsan_write_range(void* address, size_t bytes) {
    emu::race::access(address, bytes, emu::race::WRITE, __builtin_return_address(0));
}

void __tsan_vptr_update(void* address, void*) {
    emu::race::access(address, sizeof(void*), emu::race::WRITE, __builtin_return_address(0));
}

}
