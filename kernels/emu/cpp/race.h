// Races between a kernel's threads: each CUDA thread, and each copy that goes on by itself, is a strand of its own, and only
// what orders memory on a GPU is an edge. The kernels are compiled with the compiler's calls for ThreadSanitizer, which
// race.cpp answers; what the machine does for them it says here. Without EMU_RACES nothing is watched.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emu::race {

// Whose accesses a strand's are.
struct Owner {
    const char* kernel;
    uint32_t block;
    uint32_t thread;
    bool is_copy;
};

struct Strand;

#ifdef EMU_RACES

constexpr bool WATCHED = true;

// The strand whose accesses are those to come.
Strand* here();
// Ordered after all that the strand here has done so far.
Strand* create(const Owner& owner);
// Behind its last release, where nothing of it is to come.
void destroy(Strand* strand);
// Without an edge.
void go_to(Strand* strand);

// What released an address before is ordered before what comes after acquiring it.
void acquire(const void* address);
void release(const void* address);

// Where the kernel has called the machine, whose accesses to come are of that call.
void called_from(const void* code);

void reads(const void* address, size_t bytes);
void writes(void* address, size_t bytes);

// Atomic accesses race with others alone.
uint32_t load(const uint32_t* address);
void store_release(uint32_t* address, uint32_t value);
uint32_t exchange(uint32_t* address, uint32_t value, bool ordered);

#else

constexpr bool WATCHED = false;

inline Strand* here() {
    return nullptr;
}
inline Strand* create(const Owner&) {
    return nullptr;
}
inline void destroy(Strand*) {}
inline void go_to(Strand*) {}
inline void acquire(const void*) {}
inline void release(const void*) {}
inline void called_from(const void*) {}
inline void reads(const void*, size_t) {}
inline void writes(void*, size_t) {}

inline uint32_t load(const uint32_t* address) {
    return *static_cast<const volatile uint32_t*>(address);
}
inline void store_release(uint32_t* address, uint32_t value) {
    *address = value;
}
inline uint32_t exchange(uint32_t* address, uint32_t value, bool) {
    const uint32_t old = *address;
    *address = value;
    return old;
}

#endif

}  // namespace emu::race
