// Which units a CTA multiplies. Two tiles go together, one for each warpgroup, which share their activations; the
// units go pair by pair, k fastest, and each CTA takes as many as the others. So most tiles are whole or in few
// parts, however long their rows are. The cut depends on the matrix and the grid alone.
//
// The head's does not even depend on the grid: it has tiles enough for every CTA to have whole ones.
#pragma once

constexpr bool OWNS_TILES = EPILOGUE == HEAD;

constexpr uint32_t PAIR_TILES = 2;

struct Order {
    uint32_t tiles;
    uint32_t k_units;      // of a tile
    uint32_t per_cta;
    uint32_t reciprocal;   // of per_cta, times 2^32 and a little less
    uint32_t first;        // units of this CTA, each of a pair: [first, last)
    uint32_t last;
};

DEVICE Order order_units(uint32_t n, uint32_t k) {
    Order order;
    order.tiles = divide_up(n, UNIT_OUTPUTS);
    order.k_units = divide_up(k, UNIT_K);
    const uint32_t pairs = divide_up(order.tiles, PAIR_TILES);
    if constexpr (OWNS_TILES) {
        order.per_cta = order.reciprocal = 0;
        order.first = block_index() * pairs / num_blocks() * order.k_units;
        order.last = (block_index() + 1) * pairs / num_blocks() * order.k_units;
        return order;
    }
    const uint32_t units = pairs * order.k_units;
    order.per_cta = divide_up(units, num_blocks());
    order.reciprocal = 0xffffffffu / order.per_cta;
    order.first = minimum(block_index() * order.per_cta, units);
    order.last = minimum(order.first + order.per_cta, units);
    return order;
}

// What a CTA multiplies without a break: units of one pair.
struct Piece {
    uint32_t pair;
    uint32_t k_first;   // units of its tiles: [k_first, k_last)
    uint32_t k_last;
};

DEVICE uint32_t num_units(const Piece& piece) {
    return piece.k_last - piece.k_first;
}

// The piece of this CTA that begins at a unit.
DEVICE Piece piece_at(const Order& order, uint32_t unit) {
    const uint32_t pair = unit / order.k_units;
    const uint32_t k_first = unit - pair * order.k_units;
    return {pair, k_first, minimum(order.k_units, k_first + order.last - unit)};
}

// CTAs that have parts of a pair: [first, last], in the order of k.
struct Sharers {
    uint32_t first;
    uint32_t last;
};

// Divided once for all units, not for each: the product is the quotient, or one less.
DEVICE uint32_t cta_of(const Order& order, uint32_t unit) {
    const uint32_t cta = multiply_high(unit, order.reciprocal);
    return unit - cta * order.per_cta >= order.per_cta ? cta + 1 : cta;
}

DEVICE Sharers sharers_of(const Order& order, uint32_t pair) {
    const uint32_t first = pair * order.k_units;
    return {cta_of(order, first), cta_of(order, first + order.k_units - 1)};
}
