// Heads in image order: a head of HEAD_DIM elements takes HEAD_DIM / 64 tiles of the qkv matrix; tile t of
// a query or key head has elements [32t, 32t + 32) in its rows 0..31 and their rotary partners, HEAD_DIM / 2
// further on, in rows 32..63. Value heads are in natural order.
#pragma once

constexpr uint32_t HALF_TILE = 32;
constexpr uint32_t HEAD_TILES = HEAD_DIM / (2 * HALF_TILE);
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "whole tiles, and a lane for every pair of a tile");

struct Angle {
    float cos;
    float sin;
};

// By which elements `i` and `i + HEAD_DIM / 2` of a head turn at a position; `table` is [position][cosines | sines].
DEVICE Angle angle_of(const float* table, uint32_t position, uint32_t i) {
    const float* angles = table + uint64_t(position) * HEAD_DIM;
    return {angles[i], angles[HEAD_DIM / 2 + i]};
}

// Turns these two elements. Fused by hand, so that every compiled variant rounds alike.
DEVICE Pair rotate(const Angle& by, const Pair& x) {
    return {fmaf(x.low, by.cos, -(x.high * by.sin)), fmaf(x.high, by.cos, x.low * by.sin)};
}
