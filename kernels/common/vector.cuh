// Vectors that are loaded and stored by one instruction. Included by the primitives only, of both compilers.
#pragma once

struct alignas(8) Uint2 {
    uint32_t x, y;
};
struct alignas(16) Uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) Float2 {
    float x, y;
};
struct alignas(16) Float4 {
    float x, y, z, w;
};

// Two that go together.
struct Pair {
    float low;
    float high;
};
