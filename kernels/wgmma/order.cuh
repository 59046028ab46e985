// Which units a CTA multiplies. Two tiles go together, one for each warpgroup, which share their activations; the
// units go pair by pair, k fastest, and each CTA takes as many as the others. So most tiles are whole or in few
// parts, however long their rows are. The cut depends on the matrix and the grid alone.
//
// The head's does not even depend on the grid: it has tiles enough for every CTA to have whole ones.
#pragma once

constexpr bool OWNS_TILES = EPILOGUE == HEAD;

constexpr uint32_t PAIR_TILES = 2;

// With many rows the L2 cache binds: two CTAs that multiply the same units of k at the same time are a cluster, and each asks
// for half of the rows, for both.
constexpr uint32_t CLUSTER = ROWS > 64 ? 2 : 1;

// What a CTA multiplies: units, each of a pair, [first, last).
struct Span {
    uint32_t first;
    uint32_t last;
};

struct Order {
    uint32_t tiles;
    uint32_t k_units;      // of a tile
    uint32_t per_cta;
    uint32_t reciprocal;   // of per_cta, times 2^32 and a little less
    uint32_t cta;          // this one, in the order of units
    uint32_t first;        // its span
    uint32_t last;
    uint32_t num_shared;   // its first units, whose rows the other CTA of its cluster multiplies too
};

// Which CTAs the blocks of a cluster are.
struct Seats {
    uint32_t own;
    uint32_t other;   // the same where they do not share
};

// In groups of twice the distance a CTA of the first half and one of the second are a cluster. Of the last group, which may
// not be whole, those come last that have no other.
DEVICE Seats seats_of(uint32_t block, uint32_t distance) {
    if (distance == 0) {
        return {block, block};
    }
    const uint32_t group = block / (2 * distance) * (2 * distance);
    const uint32_t len = minimum(2 * distance, num_blocks() - group);
    const uint32_t sharing = len > distance ? len - distance : 0;   // clusters
    const uint32_t place = block - group;
    if (place >= 2 * sharing) {
        const uint32_t alone = block - sharing;
        return {alone, alone};
    }
    const uint32_t low = group + place / 2;
    const uint32_t high = low + distance;
    return place % 2 == 0 ? Seats{low, high} : Seats{high, low};
}

DEVICE Span span_of(const Order& order, uint32_t cta) {
    const uint32_t pairs = divide_up(order.tiles, PAIR_TILES);
    if constexpr (OWNS_TILES) {
        return {cta * pairs / num_blocks() * order.k_units, (cta + 1) * pairs / num_blocks() * order.k_units};
    }
    const uint32_t units = pairs * order.k_units;
    const uint32_t first = minimum(cta * order.per_cta, units);
    return {first, minimum(first + order.per_cta, units)};
}

DEVICE Order order_units(uint32_t n, uint32_t k, uint32_t sharing_distance) {
    Order order = {};
    order.tiles = divide_up(n, UNIT_OUTPUTS);
    order.k_units = divide_up(k, UNIT_K);
    if constexpr (!OWNS_TILES) {
        const uint32_t pairs = divide_up(order.tiles, PAIR_TILES);
        order.per_cta = divide_up(pairs * order.k_units, num_blocks());
        order.reciprocal = 0xffffffffu / order.per_cta;
    }
    const Seats seats = CLUSTER > 1 ? seats_of(block_index(), sharing_distance) : Seats{block_index(), block_index()};
    const Span own = span_of(order, seats.own);
    order.cta = seats.own;
    order.first = own.first;
    order.last = own.last;
    if (seats.other != seats.own) {
        const Span other = span_of(order, seats.other);
        order.num_shared = minimum(own.last - own.first, other.last - other.first);
    }
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
