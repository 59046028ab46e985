// The CPU twins of warpgroup.cuh.
#pragma once

namespace emu {

void warpgroup_fence();
void warpgroup_commit();
void warpgroup_wait(uint32_t pending);
uint64_t matrix_descriptor(const void* first, uint32_t atom_stride);
// `fragment` or, where there is none, `a`; of halves, or without fragments of e4m3.
void wgmma(bool is_e4m3, uint32_t columns, float* c, const uint32_t* fragment, uint64_t a, uint64_t b);

}  // namespace emu

// Registers are not counted here.
template <uint32_t N>
DEVICE void take_registers() {}
template <uint32_t N>
DEVICE void leave_registers() {}

DEVICE void warpgroup_fence() {
    emu::warpgroup_fence();
}

DEVICE void warpgroup_commit() {
    emu::warpgroup_commit();
}

template <int PENDING>
DEVICE void warpgroup_wait() {
    emu::warpgroup_wait(PENDING);
}

// Stores to shared memory are seen by everything here.
DEVICE void fence_async_proxy() {}

DEVICE uint64_t matrix_descriptor(const void* first, uint32_t atom_stride) {
    return emu::matrix_descriptor(first, atom_stride);
}

template <uint32_t N>
DEVICE void wgmma_f16(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b) {
    emu::wgmma(false, N, c, a, 0, b);
}

template <uint32_t N>
DEVICE void wgmma_f16(float (&c)[N / 2], uint64_t a, uint64_t b) {
    emu::wgmma(false, N, c, nullptr, a, b);
}

template <uint32_t N>
DEVICE void wgmma_e4m3(float (&c)[N / 2], uint64_t a, uint64_t b) {
    emu::wgmma(true, N, c, nullptr, a, b);
}
