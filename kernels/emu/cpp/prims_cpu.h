// The CPU twins of prims.cuh: same names, same contracts. Small ones are here; whatever waits,
// orders memory or moves data goes to the machine.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernel.h"

// What kernels call of <cmath>, which takes a sixth of a kernel's time to compile: its templates.
extern "C" {
double exp(double) noexcept;
double log(double) noexcept;
double log1p(double) noexcept;
float copysignf(float, float) noexcept;
float exp2f(float) noexcept;
float fabsf(float) noexcept;
float fmaf(float, float, float) noexcept;
float fmaxf(float, float) noexcept;
float sqrtf(float) noexcept;
}

#ifndef EMU_ARCH
#define EMU_ARCH 900
#endif
#define ARCH EMU_ARCH
#define DEVICE inline
#define UNROLL
#define KEEP_LOOP

namespace emu {

void barrier(uint32_t id, uint32_t count, const char* call);
void warp_sync();
void mbar_init(uint64_t* mbar, uint32_t count);
void mbar_init_fence();
void mbar_arrive(uint64_t* mbar, uint32_t bytes);
void mbar_wait(uint64_t* mbar, uint32_t parity);
void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* mbar);
void async_copy(void* shared, const void* global);
void async_commit();
void async_wait(uint32_t pending);
void async_arrive(uint64_t* mbar);
void grid_wait();
void grid_launch_dependents(bool early);
void mma_f16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1);
void load_matrix_x4(uint32_t* r, const void* shared);
uint64_t shuffle_xor(uint64_t value, uint32_t mask);
uint64_t shuffle_from(uint64_t value, uint32_t lane);
uint64_t shuffle_up(uint64_t value, uint32_t distance);
uint32_t ballot(bool predicate);

enum class Update : uint8_t {
    Add,
    Max,
    Or,
};
uint32_t update(uint32_t* address, uint32_t value, Update kind, bool ordered);
uint32_t load(const uint32_t* address);
void store_release(uint32_t* address, uint32_t value);

template <class T>
uint64_t to_bits(T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "what a shuffle moves");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T>
T from_bits(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
}

}  // namespace emu

// The entry, and what unit.cpp registers about it.
#define ENTRY(name, Params, threads, blocks_per_sm, cluster)        \
    static void name(const Params p);                              \
    static void emu_invoke(const void* params) {                   \
        name(*static_cast<const Params*>(params));                 \
    }                                                              \
    constexpr size_t EMU_PARAMS_BYTES = sizeof(Params);            \
    constexpr uint32_t EMU_NUM_THREADS = threads;                  \
    constexpr uint32_t EMU_CLUSTER = cluster;                      \
    static_assert(cluster <= emu::MAX_CLUSTER, "what the machine knows"); \
    static_assert(blocks_per_sm > 0, "a multiprocessor holds one"); \
    static void name(const Params p)

#define KERNEL(name, Params, threads, blocks_per_sm) ENTRY(name, Params, threads, blocks_per_sm, 1)

#define KERNEL_OF_REGISTERS(name, Params, threads, registers) KERNEL(name, Params, threads, 1)

#include "common/vector.cuh"

DEVICE uint8_t* shared_memory() {
    return emu::view->shared;
}

DEVICE uint32_t thread_index() {
    return emu::view->index;
}

DEVICE uint32_t num_threads() {
    return emu::view->num_threads;
}

DEVICE uint32_t block_index() {
    return emu::view->block_index;
}

DEVICE uint32_t num_blocks() {
    return emu::view->num_blocks;
}

DEVICE uint32_t lane_index() {
    return emu::view->lane;
}

DEVICE uint32_t warp_index() {
    return emu::view->index / 32;
}

DEVICE uint32_t float_bits(float value) {
    return static_cast<uint32_t>(emu::to_bits(value));
}

DEVICE float bits_float(uint32_t bits) {
    return emu::from_bits<float>(bits);
}

DEVICE uint64_t double_bits(double value) {
    return emu::to_bits(value);
}

DEVICE double bits_double(uint64_t bits) {
    return emu::from_bits<double>(bits);
}

DEVICE uint32_t count_ones(uint32_t value) {
    return __builtin_popcount(value);
}

DEVICE uint32_t count_ones(uint64_t value) {
    return __builtin_popcountll(value);
}

DEVICE uint32_t leading_zeros(uint32_t value) {
    return value == 0 ? 32 : __builtin_clz(value);
}

DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) {
    return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

DEVICE float half_to_float(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 31u;
    const uint32_t fraction = half & 0x3ffu;
    if (exponent == 31) {
        return bits_float(sign | 0x7f800000u | fraction << 13);
    }
    if (exponent == 0) {
        const float magnitude = static_cast<float>(fraction) * bits_float(0x33800000u);
        return sign ? -magnitude : magnitude;
    }
    return bits_float(sign | ((exponent + 112) << 23 | fraction << 13));
}

DEVICE uint16_t float_to_half(float value) {
    const uint32_t bits = float_bits(value);
    const uint16_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return 0x7fff;
    }
    if (magnitude >= 0x47800000u) {
        return sign | 0x7c00u;
    }
    if (magnitude < 0x38800000u) {
        // Subnormal: next to 0.5 a float has steps of 2^-24, as a half has near zero.
        return sign | (float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f));
    }
    magnitude += 0xfffu + ((magnitude >> 13) & 1u);
    return sign | ((magnitude >> 13) - (112u << 10));
}

DEVICE uint32_t multiply_half2(uint32_t a, uint32_t b) {
    const uint32_t low = float_to_half(half_to_float(a & 0xffffu) * half_to_float(b & 0xffffu));
    return low | uint32_t{float_to_half(half_to_float(a >> 16) * half_to_float(b >> 16))} << 16;
}

#include "common/convert.cuh"

namespace emu {

constexpr uint16_t e4m3_to_half(uint32_t byte) {
    const uint32_t sign = (byte & 0x80u) << 8;
    const uint32_t magnitude = byte & 0x7fu;
    if (magnitude == 0x7f) {
        return 0x7fff;
    }
    if (magnitude >= 8) {
        return static_cast<uint16_t>(sign | ((magnitude << 7) + (8u << 10)));
    }
    // Subnormal, a normal number as a half: `magnitude` units of 2^-9.
    uint32_t exponent = 15 - 6;
    uint32_t fraction = magnitude << 7;
    while (magnitude != 0 && fraction < 1024) {
        fraction <<= 1;
        exponent--;
    }
    return static_cast<uint16_t>(sign | (magnitude == 0 ? 0 : exponent << 10 | (fraction & 1023)));
}

struct E4m3Table {
    uint16_t halves[256] = {};
    constexpr E4m3Table() {
        for (uint32_t byte = 0; byte < 256; byte++) {
            halves[byte] = e4m3_to_half(byte);
        }
    }
};
constexpr E4m3Table E4M3;

}  // namespace emu

DEVICE uint32_t e4m3_to_half2(uint32_t pair) {
    if (ARCH < 890) {
        return e4m3_to_half2_bits(pair);
    }
    return emu::E4M3.halves[pair & 0xffu] | uint32_t{emu::E4M3.halves[(pair >> 8) & 0xffu]} << 16;
}

DEVICE uint8_t float_to_e4m3(float value) {
    return static_cast<uint8_t>(e4m3_bits(value));
}

DEVICE float ex2(float x) {
    const float y = exp2f(x);
    // As the instruction, which knows no subnormals.
    return y < bits_float(0x00800000u) ? 0.0f : y;
}

DEVICE float reciprocal(float x) {
    const auto flushed = [](float x) { return fabsf(x) < bits_float(0x00800000u) ? copysignf(0.0f, x) : x; };
    return flushed(1.0f / flushed(x));
}

DEVICE float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}

DEVICE void barrier_all() {
    emu::barrier(0, num_threads(), "barrier_all");
}

DEVICE void barrier_named(uint32_t id, uint32_t count) {
    emu::barrier(id, count, "barrier_named");
}

DEVICE void warp_sync() {
    emu::warp_sync();
}

DEVICE void mbar_init(uint64_t* mbar, uint32_t count) {
    emu::mbar_init(mbar, count);
}

DEVICE void mbar_init_fence() {
    emu::mbar_init_fence();
}

DEVICE void mbar_arrive(uint64_t* mbar) {
    emu::mbar_arrive(mbar, 0);
}

DEVICE void mbar_wait(uint64_t* mbar, uint32_t parity) {
    emu::mbar_wait(mbar, parity);
}

#if ARCH >= 900

DEVICE void mbar_expect(uint64_t* mbar, uint32_t bytes) {
    emu::mbar_arrive(mbar, bytes);
}

DEVICE void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* mbar) {
    emu::bulk_copy(shared, global, bytes, mbar);
}

DEVICE void bulk_copy_kept(void* shared, const void* global, uint32_t bytes, uint64_t* mbar) {
    emu::bulk_copy(shared, global, bytes, mbar);
}

#endif

DEVICE void async_copy16(void* shared, const void* global) {
    emu::async_copy(shared, global);
}

DEVICE void async_commit() {
    emu::async_commit();
}

template <int PENDING>
DEVICE void async_wait() {
    emu::async_wait(PENDING);
}

DEVICE void async_arrive(uint64_t* mbar) {
    emu::async_arrive(mbar);
}

constexpr uint32_t PREFETCHED = 128;
DEVICE void prefetch(const void*) {}

DEVICE void grid_wait() {
    emu::grid_wait();
}

DEVICE void grid_launch_dependents() {
    emu::grid_launch_dependents(false);
}

DEVICE void grid_launch_dependents_early() {
    emu::grid_launch_dependents(true);
}

DEVICE void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    emu::mma_f16(c, a, b0, b1);
}

DEVICE void load_matrix_x4(uint32_t (&r)[4], const void* shared) {
    emu::load_matrix_x4(r, shared);
}

template <class T>
DEVICE T shuffle_xor(T value, uint32_t mask) {
    return emu::from_bits<T>(emu::shuffle_xor(emu::to_bits(value), mask));
}

template <class T>
DEVICE T shuffle_from(T value, uint32_t lane) {
    return emu::from_bits<T>(emu::shuffle_from(emu::to_bits(value), lane));
}

template <class T>
DEVICE T shuffle_up(T value, uint32_t distance) {
    return emu::from_bits<T>(emu::shuffle_up(emu::to_bits(value), distance));
}

DEVICE uint32_t ballot(bool predicate) {
    return emu::ballot(predicate);
}

DEVICE uint32_t atomic_add(uint32_t* address, uint32_t value) {
    return emu::update(address, value, emu::Update::Add, false);
}

DEVICE uint32_t atomic_max(uint32_t* address, uint32_t value) {
    return emu::update(address, value, emu::Update::Max, false);
}

DEVICE uint32_t atomic_or(uint32_t* address, uint32_t value) {
    return emu::update(address, value, emu::Update::Or, false);
}

DEVICE uint32_t atomic_add_acq_rel(uint32_t* address, uint32_t value) {
    return emu::update(address, value, emu::Update::Add, true);
}

DEVICE uint32_t load_volatile(const uint32_t* address) {
    return emu::load(address);
}

DEVICE float load_volatile(const float* address) {
    return bits_float(emu::load(reinterpret_cast<const uint32_t*>(address)));
}

DEVICE void store_release_system(uint32_t* address, uint32_t value) {
    emu::store_release(address, value);
}

#if ARCH >= 900 && ARCH < 1000
#include "cluster_cpu.h"
#include "warpgroup_cpu.h"
#endif
