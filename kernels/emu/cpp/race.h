// What ThreadSanitizer is told: each CUDA thread is a fiber of its own, and only what orders memory
// on a GPU is an edge. Empty unless EMU_RACES is set; the machine itself is never instrumented.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef EMU_RACES

extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
int __tsan_atomic32_load(const volatile int* address, int order);
void __tsan_atomic32_store(volatile int* address, int value, int order);
int __tsan_atomic32_compare_exchange_val(volatile int* address, int expected, int value, int order,
                                         int order_of_failure);
}

namespace emu::race {

constexpr bool WATCHED = true;

// While it lives, what the machine allocates or copies for itself in a kernel's thread is not seen.
struct Unseen {
    Unseen() {
        AnnotateIgnoreReadsBegin("", 0);
        AnnotateIgnoreWritesBegin("", 0);
    }
    ~Unseen() {
        AnnotateIgnoreWritesEnd("", 0);
        AnnotateIgnoreReadsEnd("", 0);
    }
};

inline void* here() {
    return __tsan_get_current_fiber();
}
// Ordered after all that the running fiber has done so far.
inline void* create() {
    return __tsan_create_fiber(0);
}
inline void destroy(void* fiber) {
    __tsan_destroy_fiber(fiber);
}
// Without an edge.
inline void go_to(void* fiber) {
    __tsan_switch_to_fiber(fiber, 1);
}
inline void acquire(const void* address) {
    __tsan_acquire(const_cast<void*>(address));
}
inline void release(const void* address) {
    __tsan_release(const_cast<void*>(address));
}
inline void reads(const void* address, size_t bytes) {
    __tsan_read_range(const_cast<void*>(address), bytes);
}
inline void writes(void* address, size_t bytes) {
    __tsan_write_range(address, bytes);
}

inline uint32_t load(const uint32_t* address) {
    return __tsan_atomic32_load(reinterpret_cast<const volatile int*>(address), __ATOMIC_RELAXED);
}
inline void store_release(uint32_t* address, uint32_t value) {
    __tsan_atomic32_store(reinterpret_cast<volatile int*>(address), value, __ATOMIC_RELEASE);
}
// Exchanges a value that nothing can have changed since it was read: there is one host thread.
inline uint32_t exchange(uint32_t* address, uint32_t value, bool ordered) {
    const int order = ordered ? __ATOMIC_ACQ_REL : __ATOMIC_RELAXED;
    const int failure = ordered ? __ATOMIC_ACQUIRE : __ATOMIC_RELAXED;
    const int old = static_cast<int>(*address);
    volatile int* place = reinterpret_cast<volatile int*>(address);
    return __tsan_atomic32_compare_exchange_val(place, old, value, order, failure);
}

}  // namespace emu::race

#else

namespace emu::race {

constexpr bool WATCHED = false;

struct Unseen {
    Unseen() {}
};

inline void* here() {
    return nullptr;
}
inline void* create() {
    return nullptr;
}
inline void destroy(void*) {}
inline void go_to(void*) {}
inline void acquire(const void*) {}
inline void release(const void*) {}
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

}  // namespace emu::race

#endif
