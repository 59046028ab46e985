// Counter-based randomness (Philox4x32-10) in the layout that all executors share: counter words are
// [block, lane, position low, position high], key words [key low, key high]; the noise of token `id` is word
// id % 4 of block id / 4.
#pragma once
#include "common/exact.cuh"

constexpr uint32_t TARGET_LANE = 0;
constexpr uint32_t DRAFT_LANE = 1;
constexpr uint32_t COIN_LANE = 2;
// Above these stands the place of a draft in its proposal.
constexpr uint32_t LANE_BITS = 2;

// Set in the lane word for the 32 bits below a token's first 32.
constexpr uint32_t LOW_BITS = 1u << 31;

// The noise of one position in one lane.
struct Noise {
    uint64_t key;
    uint32_t position;
    uint32_t lane;
};

// Four words of noise.
struct Words {
    uint32_t x, y, z, w;

    DEVICE uint32_t at(uint32_t idx) const {
        const uint32_t even = idx & 2u ? z : x;
        const uint32_t odd = idx & 2u ? w : y;
        return idx & 1u ? odd : even;
    }
};

DEVICE Words philox(const Noise& noise, uint32_t block, uint32_t lane) {
    Words c = {block, lane, noise.position, 0};
    uint32_t low = static_cast<uint32_t>(noise.key);
    uint32_t high = static_cast<uint32_t>(noise.key >> 32);
    UNROLL
    for (uint32_t round = 0; round < 10; round++) {
        const uint64_t left = static_cast<uint64_t>(c.x) * 0xD2511F53u;
        const uint64_t right = static_cast<uint64_t>(c.z) * 0xCD9E8D57u;
        c = {static_cast<uint32_t>(right >> 32) ^ c.y ^ low, static_cast<uint32_t>(right),
             static_cast<uint32_t>(left >> 32) ^ c.w ^ high, static_cast<uint32_t>(left)};
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    return c;
}

// The leading 32 bits of the tokens 4 * block .. 4 * block + 4.
DEVICE Words leading_words(const Noise& noise, uint32_t block) {
    return philox(noise, block, noise.lane);
}

// The exponential variate of a token whose leading bits are `word`; at least word / 2^32.
DEVICE double exponential(const Noise& noise, uint32_t id, uint32_t word) {
    const uint32_t below = philox(noise, id / 4, noise.lane | LOW_BITS).at(id % 4);
    const uint64_t bits = static_cast<uint64_t>(word) << 32 | below;
    // Half a step off zero, and not rounded up to one: the logarithm stays finite at both ends.
    const double v = product(sum(static_cast<double>(bits), 0.5), 5.421010862427522e-20);
    return -log1p(-minimum(v, 1.0 - 1.1102230246251565e-16));
}

// A uniform variate strictly between 0 and 1.
DEVICE double uniform(const Noise& noise, uint32_t index) {
    const Words words = leading_words(noise, index);
    const uint64_t bits = (static_cast<uint64_t>(words.x) << 32 | words.y) >> 12;
    return product(sum(static_cast<double>(bits), 0.5), 2.220446049250313e-16);
}
