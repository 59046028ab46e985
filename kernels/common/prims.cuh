// Every instruction that kernels use beyond plain C++, one function each; no kernel has inline
// assembly of its own. The CPU twins, with the same names and contracts, are in
// emu/cpp/prims_cpu.h. Indices are one-dimensional; addresses handed to asynchronous copies are
// aligned to 16 bytes.
#pragma once

#ifdef __CUDACC_RTC__

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;

#define ARCH __CUDA_ARCH__
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define KEEP_LOOP _Pragma("unroll 1")

// Opens the entry of a file; `p` is then its argument.
#define KERNEL(name, Params, threads, blocks_per_sm)                             \
    extern "C" __global__ void __launch_bounds__(threads, blocks_per_sm)         \
        name(const __grid_constant__ Params p)

// The same with so many registers a thread at most.
#define KERNEL_OF_REGISTERS(name, Params, threads, registers) \
    extern "C" __global__ void __maxnreg__(registers) name(const __grid_constant__ Params p)

#include "common/vector.cuh"

extern __shared__ __align__(1024) uint8_t dynamic_shared_memory[];

// The launch's shared memory, aligned to 1024 bytes.
DEVICE uint8_t* shared_memory() {
    return dynamic_shared_memory;
}

DEVICE uint32_t thread_index() {
    return threadIdx.x;
}

DEVICE uint32_t num_threads() {
    return blockDim.x;
}

DEVICE uint32_t block_index() {
    return blockIdx.x;
}

DEVICE uint32_t num_blocks() {
    return gridDim.x;
}

DEVICE uint32_t lane_index() {
    return threadIdx.x % 32;
}

DEVICE uint32_t warp_index() {
    return threadIdx.x / 32;
}

DEVICE uint32_t float_bits(float value) {
    return __float_as_uint(value);
}

DEVICE float bits_float(uint32_t bits) {
    return __uint_as_float(bits);
}

DEVICE uint64_t double_bits(double value) {
    return static_cast<uint64_t>(__double_as_longlong(value));
}

DEVICE double bits_double(uint64_t bits) {
    return __longlong_as_double(static_cast<long long>(bits));
}

DEVICE uint32_t count_ones(uint32_t value) {
    return __popc(value);
}

DEVICE uint32_t count_ones(uint64_t value) {
    return __popcll(value);
}

// Zeros above the highest one; 32 for 0.
DEVICE uint32_t leading_zeros(uint32_t value) {
    return __clz(value);
}

// The upper half of a product.
DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) {
    return __umulhi(a, b);
}

// Two products of halves.
DEVICE uint32_t multiply_half2(uint32_t a, uint32_t b) {
    uint32_t products;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(products) : "r"(a), "r"(b));
    return products;
}

#include "common/convert.cuh"

DEVICE float half_to_float(uint16_t half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

// To nearest, ties to even; beyond 65504 becomes infinite.
DEVICE uint16_t float_to_half(float value) {
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

// Two bytes of e4m3, the lower first, as two halves; exact, NaN stays NaN.
DEVICE uint32_t e4m3_to_half2(uint32_t pair) {
#if ARCH >= 890
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
    return halves;
#else
    return e4m3_to_half2_bits(pair);
#endif
}

DEVICE uint8_t float_to_e4m3(float value) {
#if ARCH >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
    return static_cast<uint8_t>(pair);
#else
    return static_cast<uint8_t>(e4m3_bits(value));
#endif
}

// 2^x, to about two units in the last place; 0 for -infinity.
DEVICE float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x, off by one unit in the last place at most; subnormal numbers are zeros.
DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// All threads of the block.
DEVICE void barrier_all() {
    __syncthreads();
}

// `count` threads of the block, whole warps; 0 is the barrier of barrier_all.
DEVICE void barrier_named(uint32_t id, uint32_t count) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

DEVICE void warp_sync() {
    __syncwarp();
}

// A barrier in shared memory that completes a phase after `count` arrivals and all expected bytes.
DEVICE void mbar_init(uint64_t* mbar, uint32_t count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(mbar)), "r"(count)
                 : "memory");
}

// Makes initialised barriers known to asynchronous copies; a barrier_all must follow.
DEVICE void mbar_init_fence() {
#if ARCH >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

DEVICE void mbar_arrive(uint64_t* mbar) {
    asm volatile(
        "{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(mbar))
        : "memory");
}

// Returns when the phase of this parity (0 is the first) is complete.
DEVICE void mbar_wait(uint64_t* mbar, uint32_t parity) {
    uint32_t complete;
    do {
#if ARCH >= 900
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2;"
            " selp.u32 %0, 1, 0, p; }"
            : "=r"(complete)
            : "r"(shared_address(mbar)), "r"(parity)
            : "memory");
#else
        asm volatile(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2;"
            " selp.u32 %0, 1, 0, p; }"
            : "=r"(complete)
            : "r"(shared_address(mbar)), "r"(parity)
            : "memory");
#endif
    } while (!complete);
}

#if ARCH >= 900

// Arrives, and lets the phase wait for that many bytes more.
DEVICE void mbar_expect(uint64_t* mbar, uint32_t bytes) {
    asm volatile(
        "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(
            shared_address(mbar)),
        "r"(bytes)
        : "memory");
}

// Copies data that is read once to shared memory; the bytes count towards the phase of `mbar`.
DEVICE void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* mbar) {
    asm volatile(
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], policy; }" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(mbar))
        : "memory");
}

// The same of data that other CTAs read too.
DEVICE void bulk_copy_kept(void* shared, const void* global, uint32_t bytes, uint64_t* mbar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(mbar))
        : "memory");
}

#endif

// Copies 16 bytes to shared memory, in this thread's open group.
DEVICE void async_copy16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
                 "l"(global)
                 : "memory");
}

// Closes this thread's group.
DEVICE void async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns when all but the newest PENDING groups of this thread have arrived.
template <int PENDING>
DEVICE void async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Arrives at `mbar`, as one of its count, when all copies of this thread so far have arrived.
DEVICE void async_arrive(uint64_t* mbar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(mbar))
                 : "memory");
}

// Brings what an address is in, so many bytes, to the L2 cache.
constexpr uint32_t PREFETCHED = 128;
DEVICE void prefetch(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Returns when the kernel before this one has ended and what it wrote can be read.
DEVICE void grid_wait() {
#if ARCH >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the kernel after this one begin as soon as one thread of each block has said so. That thread has waited for
// the kernel before: so two kernels run at a time, and all that is older than the one in front can be read at once.
DEVICE void grid_launch_dependents() {
#if ARCH >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The same before that thread has waited: three kernels run at a time, and the last of them must not read anything but
// constants before it waits.
DEVICE void grid_launch_dependents_early() {
    grid_launch_dependents();
}

// c[16][8] += a[16][16] * b[16][8], halves into floats. Lane 4g + t holds of a: rows g and g + 8 at
// columns 2t, 2t + 1 (a[0], a[1]) and 2t + 8, 2t + 9 (a[2], a[3]); of b: rows as a's columns,
// column g; of c: rows g (c[0], c[1]) and g + 8 (c[2], c[3]), columns 2t, 2t + 1.
DEVICE void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four matrices of 8 rows of 16 bytes: lane 8i + r gives the address of row r of matrix i; r[i] is
// then the word `lane % 4` of row `lane / 4` of matrix i.
DEVICE void load_matrix_x4(uint32_t (&r)[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared))
                 : "memory");
}

constexpr uint32_t ALL_LANES = 0xffffffffu;

// The value of lane `lane_index() ^ mask`.
template <class T>
DEVICE T shuffle_xor(T value, uint32_t mask) {
    return __shfl_xor_sync(ALL_LANES, value, mask);
}

template <class T>
DEVICE T shuffle_from(T value, uint32_t lane) {
    return __shfl_sync(ALL_LANES, value, lane);
}

// The value of the lane `distance` below; a lane without one gets its own.
template <class T>
DEVICE T shuffle_up(T value, uint32_t distance) {
    return __shfl_up_sync(ALL_LANES, value, distance);
}

// Bit i is lane i's predicate.
DEVICE uint32_t ballot(bool predicate) {
    return __ballot_sync(ALL_LANES, predicate);
}

// Adds in device memory or shared memory, orders nothing, returns what was there.
DEVICE uint32_t atomic_add(uint32_t* address, uint32_t value) {
    return atomicAdd(address, value);
}

DEVICE uint32_t atomic_max(uint32_t* address, uint32_t value) {
    return atomicMax(address, value);
}

DEVICE uint32_t atomic_or(uint32_t* address, uint32_t value) {
    return atomicOr(address, value);
}

// Adds in device memory; whoever reads a later value sees what was written before.
DEVICE uint32_t atomic_add_acq_rel(uint32_t* address, uint32_t value) {
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(address), "r"(value)
                 : "memory");
    return old;
}

// Reads device memory past this multiprocessor's cache, once for every call.
DEVICE uint32_t load_volatile(const uint32_t* address) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

DEVICE float load_volatile(const float* address) {
    float value;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
    return value;
}

// A store that the host sees after all earlier ones.
DEVICE void store_release_system(uint32_t* address, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

#else
#include "prims_cpu.h"
#endif

template <class T>
DEVICE constexpr T minimum(T a, T b) {
    return b < a ? b : a;
}

template <class T>
DEVICE constexpr T maximum(T a, T b) {
    return a < b ? b : a;
}

// Rounded up.
template <class T>
DEVICE constexpr T divide_up(T a, T b) {
    return (a + b - 1) / b;
}

// As float_to_half, but what lies beyond 65504 becomes 65504; NaN stays NaN.
DEVICE uint16_t float_to_half_sat(float value) {
    const float most = 65504.0f;
    return float_to_half(value > most ? most : value < -most ? -most : value);
}

// Every lane gets the sum; the order of additions depends on nothing.
template <class T>
DEVICE T warp_sum(T value) {
    UNROLL
    for (uint32_t mask = 16; mask > 0; mask /= 2) {
        value += shuffle_xor(value, mask);
    }
    return value;
}

template <class T>
DEVICE T warp_max(T value) {
    UNROLL
    for (uint32_t mask = 16; mask > 0; mask /= 2) {
        value = maximum(value, shuffle_xor(value, mask));
    }
    return value;
}
