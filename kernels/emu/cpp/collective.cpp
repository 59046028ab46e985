// What the 32 lanes of a warp do together: the last lane to arrive does it for all.
#include <cstring>

#include "machine.h"
#include "prims_cpu.h"
#include "race.h"

namespace emu {

namespace {

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
    }
    return "";
}

// Joins the warp's collective with an argument. Calls `all` once, when everybody's argument is there.
template <class Argument, class All>
inline void join(Collective kind, Argument& argument, All all) {
    Thread* self = current;
    Warp& warp = *self->warp;
    if (warp.arrived == 0) {
        warp.collective = kind;
    } else if (warp.collective != kind) {
        fail("%s while other lanes of the warp are in %s", name(kind), name(warp.collective));
    }
    warp.arguments[self->lane] = &argument;
    warp.arrived |= 1u << self->lane;
    if (warp.arrived == ~0u) {
        all(reinterpret_cast<Argument**>(warp.arguments));
        warp.arrived = 0;
        warp.num_collectives++;
        warp.ready = ~0u & ~(1u << self->lane);
        machine->idle_polls = 0;
    } else {
        self->call = name(kind);
        self->detail[0] = warp.arrived;
        self->detail[1] = warp.alive;
        switch_away();
    }
}

typedef float Float8 __attribute__((vector_size(32)));

struct MmaArgument {
    float* c;
    const uint32_t* a;
    uint32_t b[2];
};

// Products of halves are exact in a float, so a fused and a separate addition agree.
__attribute__((always_inline)) inline void multiply(MmaArgument** lanes) {
    alignas(32) float a[16][16];
    alignas(32) float b[16][8];
    alignas(32) float c[16][8];
    for (uint32_t lane = 0; lane < LANES; lane++) {
        const uint32_t group = lane / 4;
        const uint32_t column = lane % 4 * 2;
        for (uint32_t half = 0; half < 2; half++) {
            for (uint32_t i = 0; i < 4; i++) {
                const uint16_t bits = static_cast<uint16_t>(lanes[lane]->a[i] >> (16 * half));
                a[group + i % 2 * 8][column + half + i / 2 * 8] = half_to_float(bits);
            }
            for (uint32_t i = 0; i < 2; i++) {
                const uint16_t bits = static_cast<uint16_t>(lanes[lane]->b[i] >> (16 * half));
                b[column + half + i * 8][group] = half_to_float(bits);
            }
        }
        memcpy(&c[group][column], lanes[lane]->c, 8);
        memcpy(&c[group + 8][column], lanes[lane]->c + 2, 8);
    }
    for (uint32_t row = 0; row < 16; row++) {
        Float8 sum;
        memcpy(&sum, c[row], sizeof sum);
        for (uint32_t k = 0; k < 16; k++) {
            Float8 line;
            memcpy(&line, b[k], sizeof line);
            sum += a[row][k] * line;
        }
        memcpy(c[row], &sum, sizeof sum);
    }
    for (uint32_t lane = 0; lane < LANES; lane++) {
        memcpy(lanes[lane]->c, &c[lane / 4][lane % 4 * 2], 8);
        memcpy(lanes[lane]->c + 2, &c[lane / 4 + 8][lane % 4 * 2], 8);
    }
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
    join(Collective::Mma, argument, multiply);
}

void load_matrix_x4(uint32_t* r, const void* shared) {
    const uint64_t offset = static_cast<uint64_t>(static_cast<const uint8_t*>(shared) - current->block->shared);
    const uint32_t bytes = current->block->grid->launch->shared_bytes;
    if (offset % 16 != 0 || offset + 16 > bytes) {
        fail("load_matrix_x4 at %lld of %u bytes of shared memory", static_cast<long long>(offset),
             bytes);
    }
    race::reads(shared, 16);
    MatrixArgument argument{r, static_cast<const uint8_t*>(shared)};
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
