// Logits of the tokens that a head drafts, over its target's vocabulary: the other tokens have minus infinity. Then the
// best of each 64, as the head of a model leaves them. A warp takes 64 tokens of a row; any grid.
#include "common/prims.cuh"
#include "common/types.cuh"

#include "common/best.cuh"

struct SpreadParams {
    const float* logits;       // [row][drafted]
    const uint32_t* row_of;    // [vocab]: which of the drafted tokens each token is, or NOT_DRAFTED
    float* output;             // [row][vocab]
    Best* best;                // [row][tiles of 64 tokens]
    uint32_t num_rows;
    uint32_t drafted;
    uint32_t vocab;
    uint32_t unused;
};
static_assert(sizeof(SpreadParams) == 48, "as on the host");

constexpr uint32_t NOT_DRAFTED = 0xffffffffu;
constexpr uint32_t THREADS = 256;
constexpr uint32_t TILE = 64;

DEVICE void spread_tile(const SpreadParams& p, uint32_t row, uint32_t tile) {
    Best best = {-bits_float(0x7f800000u), tile * TILE};
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t token = tile * TILE + i * 32 + lane_index();
        if (token < p.vocab) {
            const uint32_t from = p.row_of[token];
            const bool is_drafted = from != NOT_DRAFTED;
            const float logit =
                is_drafted ? p.logits[uint64_t(row) * p.drafted + from] : -bits_float(0x7f800000u);
            p.output[uint64_t(row) * p.vocab + token] = logit;
            best = better(best, logit, token);
        }
    }
    best = warp_best(best);
    if (lane_index() == 0) {
        p.best[uint64_t(row) * divide_up(p.vocab, TILE) + tile] = best;
    }
}

KERNEL(spread, SpreadParams, THREADS, 4) {
    grid_wait();
    grid_launch_dependents();
    const uint32_t tiles = divide_up(p.vocab, TILE);
    const uint32_t warps = num_blocks() * (THREADS / 32);
    for (uint32_t i = block_index() * (THREADS / 32) + warp_index(); i < p.num_rows * tiles; i += warps) {
        spread_tile(p, i / tiles, i % tiles);
    }
}
