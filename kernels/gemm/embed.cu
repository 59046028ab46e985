// residual[row] = the embedding of the row's token, as f32, out of the packed matrix, and its squares. Any grid: a
// CTA takes every num_blocks-th row. Rows without a sequence get token 0, whatever they name.
#include "common/prims.cuh"
#include "common/types.cuh"

#include "common/image.cuh"
#include "common/squares.cuh"

struct EmbedParams {
    const uint8_t* weights;   // units of image.cuh: an output is a token
    const float* scales;      // [tokens], of FP8 weights
    const Row* rows;
    float* residual;          // [row][k]
    float* squares;           // of squares.cuh
    uint32_t num_rows;
    uint32_t k;               // a multiple of 4
};
static_assert(sizeof(EmbedParams) == 48, "as on the host");

constexpr uint32_t THREADS = 256;
constexpr uint32_t ROW_CHUNKS = UNIT_ROW_BYTES / CHUNK_BYTES;
constexpr uint32_t CHUNK_K = CHUNK_BYTES / WEIGHT_BYTES;
constexpr uint32_t SQUARES_CHUNKS = SQUARES_LEN / CHUNK_K;

// Elements 2i and 2i + 1 of a chunk, as halves.
DEVICE uint32_t half_pair(const uint32_t (&chunk)[4], uint32_t i) {
    if constexpr (WEIGHT == FP8) {
        return e4m3_to_half2(e4m3_pair(chunk, i));
    } else {
        return chunk[i];
    }
}

// Four elements of a chunk, from one on.
DEVICE Float4 four_elements(const uint32_t (&chunk)[4], uint32_t first, float scale) {
    const uint32_t low = half_pair(chunk, first / 2);
    const uint32_t high = half_pair(chunk, first / 2 + 1);
    return {
        half_to_float(uint16_t(low)) * scale,
        half_to_float(uint16_t(low >> 16)) * scale,
        half_to_float(uint16_t(high)) * scale,
        half_to_float(uint16_t(high >> 16)) * scale,
    };
}

// The 16 bytes of a token's row that begin at element `chunk * CHUNK_K`.
DEVICE Uint4 load_chunk(const EmbedParams& p, uint32_t token, uint32_t chunk) {
    const uint64_t first_unit = uint64_t(token / UNIT_OUTPUTS) * divide_up(p.k, UNIT_K);
    const uint8_t* unit = p.weights + (first_unit + chunk / ROW_CHUNKS) * UNIT_BYTES;
    return *(const Uint4*)(unit + chunk_offset(token % UNIT_OUTPUTS, chunk % ROW_CHUNKS));
}

// Writes a chunk; the sum of its squares.
DEVICE float embed_chunk(
    const EmbedParams& p, uint32_t token, float scale, uint32_t chunk, float* to) {
    const Uint4 loaded = load_chunk(p, token, chunk);
    const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    float squares = 0.0f;
    const uint32_t len = minimum(p.k - chunk * CHUNK_K, CHUNK_K);
    UNROLL
    for (uint32_t i = 0; i < CHUNK_K; i += 4) {
        const uint32_t k = chunk * CHUNK_K + i;
        if (i < len) {
            const Float4 four = four_elements(words, i, scale);
            *(Float4*)(to + k) = four;
            squares = add_squares(four, squares);
        }
    }
    return squares;
}

DEVICE void embed_row(const EmbedParams& p, uint32_t row) {
    const uint32_t token = p.rows[row].sequence == NO_SEQUENCE ? 0 : p.rows[row].token;
    const float scale = WEIGHT == FP8 ? p.scales[token] : 1.0f;
    float* to = p.residual + uint64_t(row) * p.k;
    float* squares = p.squares + uint64_t(row) * divide_up(p.k, SQUARES_LEN);
    // Whole warps go round, for their sums.
    for (uint32_t first = warp_index() * 32; first * CHUNK_K < p.k; first += THREADS) {
        const uint32_t chunk = first + lane_index();
        const bool is_inside = chunk * CHUNK_K < p.k;
        const float own = is_inside ? embed_chunk(p, token, scale, chunk, to) : 0.0f;
        const float sum = sum_of_lanes<SQUARES_CHUNKS>(own);
        if (is_inside && chunk % SQUARES_CHUNKS == 0) {
            squares[chunk / SQUARES_CHUNKS] = sum;
        }
    }
}

KERNEL(embed, EmbedParams, THREADS, 4) {
    grid_wait();
    grid_launch_dependents();
    for (uint32_t row = block_index(); row < p.num_rows; row += num_blocks()) {
        embed_row(p, row);
    }
}
