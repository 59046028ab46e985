// A row of what is multiplied as a whole block: f16, or e4m3 with the factor that undoes its scale. A block of threads writes
// a row; between its end and the stride it gets zeros. A library reads row after row, the product of warpgroups units as a
// packed matrix has them.
#pragma once

#include "common/halves.cuh"
#include "common/unit.cuh"

struct Operand {
    uint8_t* values;    // [place][stride], or units
    float* scales;      // [row], of FP8 alone
    uint32_t stride;    // elements, a multiple of 4; in units a multiple of what one has
    uint32_t format;    // FP8 or FP16
    uint32_t first;     // place of the first row
    uint32_t in_units;
};
static_assert(sizeof(Operand) == 32, "as on the host");

constexpr uint32_t THREADS = 256;
constexpr uint32_t WARPS = THREADS / 32;
// What a block needs to reduce.
constexpr uint32_t SHARED_BYTES = WARPS * 4;
// The largest e4m3.
constexpr float E4M3_MOST = 448.0f;
// A row of zeros has to have a scale too.
constexpr float LEAST_SCALE = 1e-12f;

// Every thread gets the result.
DEVICE float block_max(float value) {
    value = warp_max(value);
    float* parts = (float*)shared_memory();
    // Nobody reads an earlier result any more.
    barrier_all();
    if (lane_index() == 0) {
        parts[warp_index()] = value;
    }
    barrier_all();
    float total = parts[0];
    for (uint32_t warp = 1; warp < WARPS; ++warp) {
        total = maximum(total, parts[warp]);
    }
    return total;
}

DEVICE float magnitude(const Float4& v) {
    return maximum(maximum(fabsf(v.x), fabsf(v.y)), maximum(fabsf(v.z), fabsf(v.w)));
}

DEVICE uint32_t four_e4m3(const Float4& v, float factor) {
    return float_to_e4m3(v.x * factor) | uint32_t(float_to_e4m3(v.y * factor)) << 8 |
           uint32_t(float_to_e4m3(v.z * factor)) << 16 | uint32_t(float_to_e4m3(v.w * factor)) << 24;
}

// Four elements of a row, from k on.
DEVICE uint8_t* place_of(const Operand& to, uint32_t row, uint32_t k, uint32_t element_bytes) {
    const uint32_t place = to.first + row;
    const uint32_t byte = k * element_bytes;
    if (!to.in_units) {
        return to.values + uint64_t(place) * to.stride * element_bytes + byte;
    }
    const uint32_t k_units = to.stride * element_bytes / UNIT_ROW_BYTES;
    const uint64_t unit = uint64_t(place / UNIT_OUTPUTS) * k_units + byte / UNIT_ROW_BYTES;
    const uint32_t chunk = byte % UNIT_ROW_BYTES / CHUNK_BYTES;
    return to.values + unit * UNIT_BYTES + chunk_offset(place % UNIT_OUTPUTS, chunk) + byte % CHUNK_BYTES;
}

// Four lanes have 16 bytes of e4m3 in the order of k, each a word of them: the words of a unit's chunk.
DEVICE uint32_t word_of_unit(uint32_t four) {
    const uint32_t own = lane_index() % 4;
    const uint32_t first = lane_index() - own;
    const uint32_t low = shuffle_from(four, first + own / 2);
    const uint32_t high = shuffle_from(four, first + 2 + own / 2);
    const uint32_t shift = own % 2 * 16;
    return (low >> shift & 0xffffu) | high >> shift << 16;
}

// GROUPS of four elements of a thread have their loads under way together.
template <uint32_t GROUPS, class Four>
DEVICE void store_halves(const Operand& to, uint32_t row, uint32_t len, Four four) {
    for (uint32_t first = 4 * thread_index(); first < to.stride; first += 4 * THREADS * GROUPS) {
        Uint2 groups[GROUPS];
        UNROLL
        for (uint32_t i = 0; i < GROUPS; ++i) {
            const uint32_t k = first + 4 * THREADS * i;
            // Those beyond the row repeat its first: a branch would keep the loads apart.
            const Uint2 loaded = four_halves(four(k < len ? k : 0));
            groups[i] = k < len ? loaded : Uint2{};
        }
        UNROLL
        for (uint32_t i = 0; i < GROUPS; ++i) {
            const uint32_t k = first + 4 * THREADS * i;
            if (k < to.stride) {
                *(Uint2*)place_of(to, row, k, 2) = groups[i];
            }
        }
    }
}

// The largest magnitude of a row becomes the largest e4m3.
template <class Four>
DEVICE void store_e4m3(const Operand& to, uint32_t row, uint32_t len, Four four) {
    float most = 0.0f;
    for (uint32_t k = 4 * thread_index(); k < len; k += 4 * THREADS) {
        most = maximum(most, magnitude(four(k)));
    }
    most = maximum(block_max(most), LEAST_SCALE);
    if (thread_index() == 0) {
        to.scales[row] = most / E4M3_MOST;
    }
    const float factor = E4M3_MOST / most;
    for (uint32_t k = 4 * thread_index(); k < to.stride; k += 4 * THREADS) {
        // In units whole warps are here: a unit has 128 elements of a row.
        const uint32_t bytes = k < len ? four_e4m3(four(k), factor) : 0;
        *(uint32_t*)place_of(to, row, k, 1) = to.in_units ? word_of_unit(bytes) : bytes;
    }
}

// Writes a row of `len` elements, a multiple of 4; `four(k)` is those from k on, and is asked more than once.
template <uint32_t GROUPS, class Four>
DEVICE void store_operand(const Operand& to, uint32_t row, uint32_t len, Four four) {
    if (to.format == FP8) {
        store_e4m3(to, row, len, four);
    } else {
        store_halves<GROUPS>(to, row, len, four);
    }
}
