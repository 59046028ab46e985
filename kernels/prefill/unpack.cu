// A packed matrix row by row, as a library multiplies it: [outputs up to whole tiles][k up to whole units], in
// image order; what the image pads with zeros stays zero. Any grid: a CTA takes every num_blocks-th unit.
#include "common/prims.cuh"
#include "common/types.cuh"

#include "common/image.cuh"

struct UnpackParams {
    const uint8_t* weights;   // units of image.cuh
    uint8_t* output;
    uint32_t num_units;
    uint32_t k_units;
    uint32_t format;          // of the output: FP16, or FP8 as the weights are
    uint32_t unused;
};
static_assert(sizeof(UnpackParams) == 32, "as on the host");

constexpr uint32_t THREADS = 256;
constexpr uint32_t ROW_CHUNKS = UNIT_ROW_BYTES / CHUNK_BYTES;

// 16 bytes, those of FP8 in the order of k.
DEVICE void store_chunk(uint8_t* output, uint64_t element, const uint32_t (&chunk)[4]) {
    Uint4 ordered = {chunk[0], chunk[1], chunk[2], chunk[3]};
    if constexpr (WEIGHT == FP8) {
        ordered = {
            e4m3_pair(chunk, 0) | e4m3_pair(chunk, 1) << 16,
            e4m3_pair(chunk, 2) | e4m3_pair(chunk, 3) << 16,
            e4m3_pair(chunk, 4) | e4m3_pair(chunk, 5) << 16,
            e4m3_pair(chunk, 6) | e4m3_pair(chunk, 7) << 16,
        };
    }
    *(Uint4*)(output + element * WEIGHT_BYTES) = ordered;
}

// 16 e4m3 as halves, without their scale.
DEVICE void widen_chunk(uint8_t* output, uint64_t element, const uint32_t (&chunk)[4]) {
    Uint4* to = (Uint4*)(output + element * 2);
    UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        to[i] = {
            e4m3_to_half2(e4m3_pair(chunk, 4 * i)),
            e4m3_to_half2(e4m3_pair(chunk, 4 * i + 1)),
            e4m3_to_half2(e4m3_pair(chunk, 4 * i + 2)),
            e4m3_to_half2(e4m3_pair(chunk, 4 * i + 3)),
        };
    }
}

DEVICE void unpack_unit(const UnpackParams& p, uint32_t unit) {
    const uint8_t* from = p.weights + uint64_t(unit) * UNIT_BYTES;
    const uint64_t first_row = uint64_t(unit / p.k_units) * UNIT_OUTPUTS;
    const uint64_t first_k = uint64_t(unit % p.k_units) * UNIT_K;
    const uint64_t stride = uint64_t(p.k_units) * UNIT_K;
    for (uint32_t i = thread_index(); i < UNIT_OUTPUTS * ROW_CHUNKS; i += THREADS) {
        const uint32_t row = i / ROW_CHUNKS;
        const uint32_t column = i % ROW_CHUNKS;
        const Uint4 loaded = *(const Uint4*)(from + chunk_offset(row, column));
        const uint32_t chunk[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        const uint64_t k = first_k + column * (CHUNK_BYTES / WEIGHT_BYTES);
        const uint64_t element = (first_row + row) * stride + k;
        if (WEIGHT == FP8 && p.format == FP16) {
            widen_chunk(p.output, element, chunk);
        } else {
            store_chunk(p.output, element, chunk);
        }
    }
}

KERNEL(unpack, UnpackParams, THREADS, 4) {
    grid_wait();
    grid_launch_dependents();
    for (uint32_t unit = block_index(); unit < p.num_units; unit += num_blocks()) {
        unpack_unit(p, unit);
    }
}
