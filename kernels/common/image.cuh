// The packed form of a weight matrix, as the host's weight image writes it: units of outputs.
#pragma once

#include "common/unit.cuh"

constexpr uint32_t WEIGHT_BYTES = WEIGHT == FP8 ? 1 : 2;
constexpr uint32_t UNIT_K = UNIT_ROW_BYTES / WEIGHT_BYTES;

// Elements 2i and 2i + 1 of a chunk of FP8, in the lower half of a word.
DEVICE uint32_t e4m3_pair(const uint32_t (&chunk)[4], uint32_t i) {
    return chunk[i % 4] >> (i / 4 * 16) & 0xffffu;
}
