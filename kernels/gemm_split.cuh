// Which units a CTA multiplies, and how the parts of a tile that several CTAs share become one sum. The cut
// depends on the matrix and the grid alone. Each CTA writes its part to a slot of its own; the last one to
// arrive adds the parts in the order of the CTAs, so the result does not depend on who was last.
#pragma once

struct Split {
    uint32_t k_units;    // of a tile
    uint32_t per_cta;
    uint32_t first;      // units of this CTA: [first, last)
    uint32_t last;
};

DEVICE Split split_units(uint32_t n, uint32_t k) {
    Split split;
    split.k_units = divide_up(k, UNIT_K);
    const uint32_t units = divide_up(n, UNIT_OUTPUTS) * split.k_units;
    split.per_cta = divide_up(units, num_blocks());
    split.first = minimum(block_index() * split.per_cta, units);
    split.last = minimum(split.first + split.per_cta, units);
    return split;
}

DEVICE uint32_t first_cta(const Split& split, uint32_t tile) {
    return tile * split.k_units / split.per_cta;
}

// How many CTAs have units of a tile.
DEVICE uint32_t num_parts(const Split& split, uint32_t tile) {
    return ((tile + 1) * split.k_units - 1) / split.per_cta - first_cta(split, tile) + 1;
}

// A CTA has at most two parts of tiles: slot 0 takes the end of a tile that another CTA began, slot 1 the
// beginning of one. Layout: [CTA][slot][ROWS][64].
DEVICE float* part_slot(const GemmParams& p, uint32_t cta, bool begins_tile) {
    const uint64_t slot = cta * 2 + (begins_tile ? 1 : 0);
    return p.partials + slot * (ROWS * UNIT_OUTPUTS);
}

DEVICE float sum_parts(
    const GemmParams& p, const Split& split, uint32_t tile, uint32_t row, uint32_t output) {
    const uint32_t cta = first_cta(split, tile);
    const uint32_t parts = num_parts(split, tile);
    const uint32_t place = row * UNIT_OUTPUTS + output;
    float sum = part_slot(p, cta, true)[place];
    for (uint32_t i = 1; i < parts; ++i) {
        sum += part_slot(p, cta + i, false)[place];
    }
    return sum;
}

// Publishes this CTA's part of a tile and tells all its threads whether it was the last one.
DEVICE bool publish_part(
    const GemmParams& p, const Split& split, uint32_t tile, const float* halves, uint32_t* is_last) {
    const bool begins_tile = tile * split.k_units >= split.first;
    float* slot = part_slot(p, block_index(), begins_tile);
    for (uint32_t row = warp_index(); row < p.num_rows; row += CONSUMER_WARPS) {
        for (uint32_t output = lane_index(); output < UNIT_OUTPUTS; output += 32) {
            slot[row * UNIT_OUTPUTS + output] = tile_sum(halves, row, output);
        }
    }
    // The barrier puts all threads' stores before the counter that one of them moves, and the counter of
    // the last CTA after all others': no thread needs a fence of its own.
    consumer_barrier();
    if (thread_index() == 0) {
        *is_last = atomic_add_acq_rel(&p.arrivals[tile], 1) == num_parts(split, tile) - 1;
    }
    consumer_barrier();
    return *is_last;
}
