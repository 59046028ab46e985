// Heads in image order: a head of HEAD_DIM elements takes HEAD_DIM / 64 tiles of the qkv matrix; tile t of
// a query or key head has elements [32t, 32t + 32) in its rows 0..31 and their rotary partners, HEAD_DIM / 2
// further on, in rows 32..63. Value heads are in natural order.
#pragma once

constexpr uint32_t HALF_TILE = 32;
constexpr uint32_t HEAD_TILES = HEAD_DIM / (2 * HALF_TILE);
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "whole tiles, and a lane for every pair of a tile");

struct Pair {
    float low;    // element `i` of a head
    float high;   // element `i + HEAD_DIM / 2`
};

// Turns pair `i` by the angle of a position; `table` is [position][cos of the pairs | sin of the pairs].
// Fused by hand, so that every compiled variant rounds alike.
DEVICE Pair rotate(const float* table, uint32_t position, uint32_t i, Pair x) {
    const float* angles = table + uint64_t(position) * HEAD_DIM;
    const float cos = angles[i];
    const float sin = angles[HEAD_DIM / 2 + i];
    return {fmaf(x.low, cos, -(x.high * sin)), fmaf(x.high, cos, x.low * sin)};
}
