// Few rows of activations in shared memory: a range of k that several units are multiplied with.
#pragma once

constexpr uint32_t CHUNK_K = 1024;
constexpr uint32_t STAGED_BYTES = IS_STREAMED ? 0 : CHUNK_K / X_ROW_K * X_BLOCK_BYTES;

DEVICE void consumer_barrier() {
    barrier_named(1, CONSUMER_WARPS * 32);
}

// By who has staged something, before products read it.
DEVICE void publish_staged() {
    fence_async_proxy();
    consumer_barrier();
}

DEVICE void store_group(uint16_t* x, uint32_t row, uint32_t k, const Uint2& halves) {
    *(Uint2*)((uint8_t*)x + x_offset(row, k) + k % 8 * 2) = halves;
}

#if ROWS <= FEW_ROWS
#include "gemm/input.cuh"

// What to stage for a unit of the order, which is `k_unit` of its tiles: all of a short row, or what follows of a
// long one, but not beyond the CTA's units.
DEVICE Range range_of(const Order& order, uint32_t unit, uint32_t k_unit) {
    const uint32_t first = order.k_units <= CHUNK_UNITS ? 0 : k_unit;
    const Range range = {first, minimum(first + CHUNK_UNITS, order.k_units)};
    const uint32_t end = k_unit + order.last - unit;
    return end <= range.last ? Range{k_unit, end} : range;
}
#endif
