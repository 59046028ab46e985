// How the parts of a tile become one sum. Each CTA writes its part to a slot of its own; the last one to arrive
// adds the parts in the order of k, so the result does not depend on who was last.
#pragma once

// Where a CTA's part of a block goes: [slot][ROWS][64]. From one piece to the next, of this CTA or of the one
// after it, the CTA or the block grows, so no two have one slot.
DEVICE float* part_slot(const GemmParams& p, const Split& split, uint32_t cta, const Block& block) {
    const uint64_t slot = cta + block.segment * split.tiles + block.tile;
    return p.partials + slot * (ROWS * UNIT_OUTPUTS);
}

// The parts of a tile, in the order of k, found without a division or a branch from one to the next: whoever adds them
// waits for it.
struct Parts {
    Block block;
    Position first;     // of the block
    Position now;       // of the next part
    uint32_t left;   // units of the block from there on
    Position step;      // from a block to the one of the next segment
};

DEVICE Parts parts_of(const Split& split, uint32_t tile) {
    const Block block = {0, tile};
    const Position first = position_of(split, block_first(split, block));
    const Position step =
        last_segment(split) == 0 ? first : position_of(split, split.tiles * split.segment_units);
    return {block, first, first, block_units(split, 0), step};
}

DEVICE bool has_next(const Split& split, const Parts& parts) {
    return parts.block.segment <= last_segment(split);
}

// Where the tile's block in the next segment begins. Without one nothing is computed, which would cost registers.
DEVICE Position next_first(const Split& split, const Parts& parts) {
    if (last_segment(split) == 0) {
        return parts.first;
    }
    const Block next = {parts.block.segment + 1, parts.block.tile};
    // Shorter blocks lie closer to each other.
    if (block_units(split, next.segment) != split.segment_units) {
        return position_of(split, block_first(split, next));
    }
    const Position from = later(split, parts.first, parts.step.before);
    return {from.cta + parts.step.cta, from.before};
}

// The slot of the next part, which is then behind.
DEVICE const float* next_part(const GemmParams& p, const Split& split, Parts& parts) {
    const float* slot = part_slot(p, split, parts.now.cta, parts.block);
    const Position first = next_first(split, parts);
    const uint32_t own = split.per_cta - parts.now.before;
    const bool is_cut = parts.left > own;
    parts.first = is_cut ? parts.first : first;
    parts.now = is_cut ? Position{parts.now.cta + 1, 0} : first;
    parts.block.segment = is_cut ? parts.block.segment : parts.block.segment + 1;
    parts.left = is_cut ? parts.left - own : block_units(split, parts.block.segment);
    return slot;
}

// Rows that a warp adds up side by side, and parts of them: all their loads are under way together.
constexpr uint32_t SUM_ROWS = minimum(ROWS / CONSUMER_WARPS, 4u);
// 64 rows leave registers for two.
constexpr uint32_t SUM_PARTS = SUM_ROWS == 1 ? 8 : ROWS == 64 ? 2 : 4;

// Adds the parts of a tile for some rows of a warp, from `first` on, and leaves the sums where `tile_sum` finds
// them. A lane has outputs l and l + 32, here and after.
DEVICE void sum_parts(
    const GemmParams& p, const Split& split, uint32_t tile, uint32_t first, float* halves) {
    float sums[SUM_ROWS][2] = {};
    Parts parts = parts_of(split, tile);
    const float* slot = p.partials;
    while (has_next(split, parts)) {
        float loaded[SUM_PARTS][SUM_ROWS][2];
        bool is_part[SUM_PARTS];
        UNROLL
        for (uint32_t i = 0; i < SUM_PARTS; ++i) {
            // Beyond the last part it is loaded again: a branch would keep the loads apart.
            is_part[i] = has_next(split, parts);
            const float* next = next_part(p, split, parts);
            slot = is_part[i] ? next : slot;
            UNROLL
            for (uint32_t j = 0; j < SUM_ROWS; ++j) {
                const uint32_t row = minimum(first + j * CONSUMER_WARPS, p.num_rows - 1);
                const float* from = slot + row * UNIT_OUTPUTS + lane_index();
                loaded[i][j][0] = from[0];
                loaded[i][j][1] = from[32];
            }
        }
        UNROLL
        for (uint32_t i = 0; i < SUM_PARTS; ++i) {
            UNROLL
            for (uint32_t j = 0; j < SUM_ROWS; ++j) {
                sums[j][0] = is_part[i] ? sums[j][0] + loaded[i][j][0] : sums[j][0];
                sums[j][1] = is_part[i] ? sums[j][1] + loaded[i][j][1] : sums[j][1];
            }
        }
    }
    UNROLL
    for (uint32_t j = 0; j < SUM_ROWS; ++j) {
        set_tile_sum(halves, first + j * CONSUMER_WARPS, lane_index(), sums[j][0]);
        set_tile_sum(halves, first + j * CONSUMER_WARPS, lane_index() + 32, sums[j][1]);
    }
}

// Writes this CTA's part of a tile to its slot. All consumers.
DEVICE void write_part(
    const GemmParams& p, const Split& split, const Piece& piece, const float* halves) {
    float* slot = part_slot(p, split, block_index(), piece.block);
    for (uint32_t row = warp_index(); row < p.num_rows; row += CONSUMER_WARPS) {
        for (uint32_t output = lane_index(); output < UNIT_OUTPUTS; output += 32) {
            slot[row * UNIT_OUTPUTS + output] = tile_sum(halves, row, output);
        }
    }
}
