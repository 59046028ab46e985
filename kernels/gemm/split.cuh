// Which units a CTA multiplies. The inputs are cut into segments; the units go segment by segment, in it tile by
// tile, and each CTA takes as many as the others. So most CTAs need the activations of one segment alone, which
// stay in shared memory while the tiles go by. The cut depends on the matrix and the grid alone.
//
// Not so the head: it has tiles enough for every CTA to have whole ones, all segments of them, which it adds up
// itself. Parts of them, for others to add up, would take the memory of the logits once for each segment. It costs
// up to a tile more in some CTAs, one in 16 of 128k outputs on 132 multiprocessors, and activations that are staged
// once a segment.
#pragma once

constexpr bool OWNS_TILES = EPILOGUE == HEAD;

// Inputs of a segment at most: shared memory holds as many of 64 rows. Fewer would be more parts to add up.
constexpr uint32_t SEGMENT_K = 1024;
constexpr uint32_t SEGMENT_UNITS = SEGMENT_K / UNIT_K;

struct Split {
    uint32_t first_tile;      // tiles whose units are in order: all, or this CTA's own
    uint32_t tiles;
    uint32_t k_units;         // of a tile
    uint32_t segment_units;   // of a tile in a segment; the last segment may have fewer
    uint32_t per_cta;
    uint32_t reciprocal;      // of per_cta, times 2^32 and a little less
    uint32_t first;           // units of this CTA, in their order: [first, last)
    uint32_t last;
};

DEVICE Split split_units(uint32_t n, uint32_t k) {
    Split split;
    split.first_tile = 0;
    split.tiles = divide_up(n, UNIT_OUTPUTS);
    split.k_units = divide_up(k, UNIT_K);
    split.segment_units = divide_up(split.k_units, divide_up(split.k_units, SEGMENT_UNITS));
    if constexpr (OWNS_TILES) {
        const uint32_t all = split.tiles;
        split.first_tile = block_index() * all / num_blocks();
        split.tiles = (block_index() + 1) * all / num_blocks() - split.first_tile;
        split.per_cta = split.tiles * split.k_units;
        split.reciprocal = 0;
        split.first = 0;
        split.last = split.per_cta;
        return split;
    }
    const uint32_t units = split.tiles * split.k_units;
    split.per_cta = divide_up(units, num_blocks());
    split.reciprocal = 0xffffffffu / split.per_cta;
    split.first = minimum(block_index() * split.per_cta, units);
    split.last = minimum(split.first + split.per_cta, units);
    return split;
}

// A unit among those of the CTA that has it.
struct Position {
    uint32_t cta;
    uint32_t before;   // units that the CTA has before it
};

// So many units further on, fewer than a CTA has.
DEVICE Position later(const Split& split, const Position& from, uint32_t units) {
    const uint32_t before = from.before + units;
    const bool is_next = before >= split.per_cta;
    return {is_next ? from.cta + 1 : from.cta, is_next ? before - split.per_cta : before};
}

// Divided once for all units, not for each: the product is the quotient, or one less.
DEVICE Position position_of(const Split& split, uint32_t unit) {
    const uint32_t cta = multiply_high(unit, split.reciprocal);
    return later(split, {cta, unit - cta * split.per_cta}, 0);
}

// A tile in a segment.
struct Block {
    uint32_t segment;
    uint32_t tile;
};

DEVICE uint32_t last_segment(const Split& split) {
    return (split.k_units - 1) / split.segment_units;
}

// Units of each block of a segment. Where all segments are alike the compiler sees it, and divides by a constant.
DEVICE uint32_t block_units(const Split& split, uint32_t segment) {
    const uint32_t last = last_segment(split);
    return segment < last ? split.segment_units : split.k_units - last * split.segment_units;
}

// Where a block begins, in the order of units.
DEVICE uint32_t block_first(const Split& split, const Block& block) {
    const uint32_t before = split.tiles * split.segment_units * block.segment;
    return before + (block.tile - split.first_tile) * block_units(split, block.segment);
}

// What a CTA multiplies without a break: units of one block.
struct Piece {
    Block block;
    uint32_t k_first;   // units of the tile: [k_first, k_last)
    uint32_t k_last;
};

DEVICE uint32_t num_units(const Piece& piece) {
    return piece.k_last - piece.k_first;
}

// Of its sums.
DEVICE uint32_t counter_of(const Piece& piece) {
    return piece.block.tile;
}

// The piece of this CTA that begins at a unit.
DEVICE Piece piece_at(const Split& split, uint32_t unit) {
    Piece piece;
    piece.block.segment = unit / (split.tiles * split.segment_units);
    const uint32_t units = block_units(split, piece.block.segment);
    const Block first = {piece.block.segment, split.first_tile};
    piece.block.tile = split.first_tile + (unit - block_first(split, first)) / units;
    const uint32_t skipped = unit - block_first(split, piece.block);
    piece.k_first = piece.block.segment * split.segment_units + skipped;
    piece.k_last = piece.k_first + minimum(units - skipped, split.last - unit);
    return piece;
}
