// What the 32 lanes of a warp do together, but for products of warpgroups.
#include "collective.h"

#include <cstring>
#include <immintrin.h>

#include "prims_cpu.h"
#include "race.h"

namespace emu {

const char* name(Collective kind) {
    switch (kind) {
        case Collective::None:
            return "nothing";
        case Collective::Sync:
            return "warp_sync";
        case Collective::Mma:
            return "mma_f16";
        case Collective::LoadMatrix:
            return "load_matrix_x4";
        case Collective::ShuffleXor:
            return "shuffle_xor";
        case Collective::ShuffleFrom:
            return "shuffle_from";
        case Collective::ShuffleUp:
            return "shuffle_up";
        case Collective::Ballot:
            return "ballot";
        case Collective::Wgmma:
            return "wgmma_f16";
        case Collective::WarpgroupFence:
            return "warpgroup_fence";
        case Collective::WarpgroupCommit:
            return "warpgroup_commit";
        case Collective::WarpgroupWait:
            return "warpgroup_wait";
    }
    return "";
}

namespace {

struct MmaArgument {
    float* c;
    const uint32_t* a;
    uint32_t b[2];
};

// The operands of a product, put together from the lanes' parts; `b` by columns.
struct Operands {
    alignas(32) uint16_t a[16][16];
    alignas(32) uint16_t b[8][16];
    alignas(32) float c[16][8];
};

inline void collect(MmaArgument** lanes, Operands& all) {
    for (uint32_t lane = 0; lane < LANES; lane++) {
        const MmaArgument& part = *lanes[lane];
        const uint32_t group = lane / 4;
        const uint32_t column = lane % 4 * 2;
        memcpy(&all.a[group][column], &part.a[0], 4);
        memcpy(&all.a[group + 8][column], &part.a[1], 4);
        memcpy(&all.a[group][column + 8], &part.a[2], 4);
        memcpy(&all.a[group + 8][column + 8], &part.a[3], 4);
        memcpy(&all.b[group][column], &part.b[0], 4);
        memcpy(&all.b[group][column + 8], &part.b[1], 4);
        memcpy(&all.c[group][column], part.c, 8);
        memcpy(&all.c[group + 8][column], part.c + 2, 8);
    }
}

inline void distribute(MmaArgument** lanes, const Operands& all) {
    for (uint32_t lane = 0; lane < LANES; lane++) {
        memcpy(lanes[lane]->c, &all.c[lane / 4][lane % 4 * 2], 8);
        memcpy(lanes[lane]->c + 2, &all.c[lane / 4 + 8][lane % 4 * 2], 8);
    }
}

// Every element's products are added one after the other. A product of two halves is exact in a
// float, so that processors which fuse product and sum agree with those that do not.
void multiply(Operands& all) {
    for (uint32_t row = 0; row < 16; row++) {
        for (uint32_t column = 0; column < 8; column++) {
            float sum = all.c[row][column];
            for (uint32_t k = 0; k < 16; k++) {
                sum += half_to_float(all.a[row][k]) * half_to_float(all.b[column][k]);
            }
            all.c[row][column] = sum;
        }
    }
}

// The same with vectors of eight columns.
__attribute__((target("avx2,f16c,fma"))) void multiply_vectors(Operands& all) {
    alignas(32) float a[16][16];
    alignas(32) uint16_t transposed[16][8];
    for (uint32_t column = 0; column < 8; column++) {
        for (uint32_t k = 0; k < 16; k++) {
            transposed[k][column] = all.b[column][k];
        }
    }
    __m256 b[16];
    for (uint32_t k = 0; k < 16; k++) {
        b[k] = _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(transposed[k])));
    }
    for (uint32_t part = 0; part < 32; part++) {
        const __m128i* halves = reinterpret_cast<const __m128i*>(all.a[part / 2]) + part % 2;
        _mm256_store_ps(&a[part / 2][part % 2 * 8], _mm256_cvtph_ps(_mm_load_si128(halves)));
    }
    // Four rows at a time, as each sum waits for the one before it; unrolled, they stay in
    // registers.
    for (uint32_t row = 0; row < 16; row += 4) {
        __m256 sums[4];
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; i++) {
            sums[i] = _mm256_load_ps(all.c[row + i]);
        }
        for (uint32_t k = 0; k < 16; k++) {
#pragma GCC unroll 4
            for (uint32_t i = 0; i < 4; i++) {
                sums[i] = _mm256_fmadd_ps(_mm256_set1_ps(a[row + i][k]), b[k], sums[i]);
            }
        }
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; i++) {
            _mm256_store_ps(all.c[row + i], sums[i]);
        }
    }
}

const bool HAS_VECTORS = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
                         __builtin_cpu_supports("fma");

void multiply_lanes(MmaArgument** lanes) {
    Operands all;
    collect(lanes, all);
    if (HAS_VECTORS) {
        multiply_vectors(all);
    } else {
        multiply(all);
    }
    distribute(lanes, all);
}

struct MatrixArgument {
    uint32_t* r;
    const uint8_t* row;
};

void gather_rows(MatrixArgument** lanes) {
    for (uint32_t lane = 0; lane < LANES; lane++) {
        for (uint32_t matrix = 0; matrix < 4; matrix++) {
            const uint8_t* row = lanes[matrix * 8 + lane / 4]->row;
            memcpy(&lanes[lane]->r[matrix], row + lane % 4 * 4, 4);
        }
    }
}

struct ShuffleArgument {
    uint64_t value;
    uint64_t result;
    uint32_t from;
};

uint64_t shuffle(Collective kind, uint64_t value, uint32_t from) {
    ShuffleArgument argument{value, 0, from};
    join(kind, argument, [](ShuffleArgument** lanes) {
        for (uint32_t lane = 0; lane < LANES; lane++) {
            lanes[lane]->result = lanes[lanes[lane]->from]->value;
        }
    });
    return argument.result;
}

struct BallotArgument {
    bool predicate;
    uint32_t result;
};

}  // namespace

void warp_sync() {
    Warp& warp = *current->warp;
    const char* sync = &warp.race_sync[warp.num_collectives % 2];
    race::release(sync);
    char nothing = 0;
    join(Collective::Sync, nothing, [](char**) {});
    race::acquire(sync);
}

void mma_f16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
    MmaArgument argument{c, a, {b0, b1}};
    join(Collective::Mma, argument, multiply_lanes);
}

void load_matrix_x4(uint32_t* r, const void* shared) {
    race::called_from(__builtin_return_address(0));
    const uint8_t* row = static_cast<const uint8_t*>(shared);
    const uint64_t offset = static_cast<uint64_t>(row - current->block->shared);
    const uint32_t bytes = current->block->grid->launch->shared_bytes;
    if (offset % 16 != 0 || offset + 16 > bytes) {
        fail("load_matrix_x4 at %lld of %u bytes of shared memory", static_cast<long long>(offset),
             bytes);
    }
    race::reads(shared, 16);
    MatrixArgument argument{r, row};
    join(Collective::LoadMatrix, argument, gather_rows);
}

uint64_t shuffle_xor(uint64_t value, uint32_t mask) {
    return shuffle(Collective::ShuffleXor, value, (current->lane ^ mask) % LANES);
}

uint64_t shuffle_from(uint64_t value, uint32_t lane) {
    return shuffle(Collective::ShuffleFrom, value, lane % LANES);
}

uint64_t shuffle_up(uint64_t value, uint32_t distance) {
    const uint32_t lane = current->lane;
    return shuffle(Collective::ShuffleUp, value, lane < distance ? lane : lane - distance);
}

uint32_t ballot(bool predicate) {
    BallotArgument argument{predicate, 0};
    join(Collective::Ballot, argument, [](BallotArgument** lanes) {
        uint32_t all = 0;
        for (uint32_t lane = 0; lane < LANES; lane++) {
            all |= static_cast<uint32_t>(lanes[lane]->predicate) << lane;
        }
        for (uint32_t lane = 0; lane < LANES; lane++) {
            lanes[lane]->result = all;
        }
    });
    return argument.result;
}

}  // namespace emu
