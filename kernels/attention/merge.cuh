// Sums of parts of a softmax, and how they are added: row by row, by the warp whose turn the row is,
// always in the order of the tree. A part that saw nothing changes nothing, to the bit, so a row
// does not notice splits that only other rows of its tile reach.
#pragma once

constexpr uint32_t LANE_DIM = HEAD_DIM / 32;  // outputs of a lane of a row's warp

// A row of sums: outputs, its largest score (scaled, base 2) and its sum of weights. What is left
// of it in a partial aligns rows, in shared memory it spreads them over the banks.
constexpr uint32_t ROW_FLOATS = HEAD_DIM + 4;
constexpr uint32_t PARTIAL_FLOATS = TILE_ROWS * ROW_FLOATS;
constexpr uint32_t SUMS_STRIDE = HEAD_DIM + 8;

// Rows of a warp whose sums are fetched together, as far as registers allow: of a narrow tile all that it has.
constexpr uint32_t ROWS_AT_ONCE = 4;
static_assert(IS_WIDE || ROWS_AT_ONCE * NUM_WARPS == TILE_ROWS, "then a node's sums stay with its warps");

// A row as its warp has it.
struct RowSum {
    float largest;
    float sum;
    float out[LANE_DIM];
};

// What sums of two parts are multiplied with when they are added.
struct Factors {
    float own;
    float other;
};

// Of a row with this largest score so far, which changes, and of a part that follows. A part that
// saw nothing has 0 and changes nothing; the first that saw something comes out as it is.
DEVICE Factors merge_factors(float& largest, float other) {
    const float before = largest;
    largest = fmaxf(before, other);
    const float own = before == largest ? 1.0f : ex2(before - largest);
    return {own, other == largest ? 1.0f : ex2(other - largest)};
}

DEVICE float merge(const Factors& factors, float own, float other) {
    return fmaf(factors.other, other, factors.own * own);
}

DEVICE void add_row(RowSum& total, const RowSum& part) {
    const Factors factors = merge_factors(total.largest, part.largest);
    total.sum = merge(factors, total.sum, part.sum);
    UNROLL
    for (uint32_t i = 0; i < LANE_DIM; ++i) {
        total.out[i] = merge(factors, total.out[i], part.out[i]);
    }
}

// Four or two floats at once.
DEVICE void load_floats(const float* from, float (&to)[4]) {
    const Float4 four = *reinterpret_cast<const Float4*>(from);
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
}

DEVICE void load_floats(const float* from, float (&to)[2]) {
    const Float2 two = *reinterpret_cast<const Float2*>(from);
    to[0] = two.x;
    to[1] = two.y;
}

// Two words in one: the compiler stores the members of a struct one by one.
DEVICE uint64_t pair(uint32_t low, uint32_t high) {
    return uint64_t{high} << 32 | low;
}

template <uint32_t N>
DEVICE void store_floats(float* to, const float (&from)[N]) {
    UNROLL
    for (uint32_t i = 0; i < N; i += 2) {
        const uint64_t two = pair(float_bits(from[i]), float_bits(from[i + 1]));
        *reinterpret_cast<uint64_t*>(to + i) = two;
    }
}

DEVICE RowSum load_row(const float* row) {
    RowSum sum;
    const Float2 scores = *reinterpret_cast<const Float2*>(row + HEAD_DIM);
    sum.largest = scores.x;
    sum.sum = scores.y;
    load_floats(row + lane_index() * LANE_DIM, sum.out);
    return sum;
}

// Other lanes may still have to read what stood there: its caller synchronises the warp.
DEVICE void store_row(float* row, const RowSum& sum) {
    if (lane_index() == 0) {
        *reinterpret_cast<Float2*>(row + HEAD_DIM) = {sum.largest, sum.sum};
    }
    store_floats(row + lane_index() * LANE_DIM, sum.out);
}

// A row of several parts, `stride` floats apart, in their order; AT_ONCE of them are fetched
// together.
template <uint32_t AT_ONCE>
DEVICE RowSum sum_parts(const float* first, uint32_t count, uint32_t stride) {
    RowSum total = {minus_infinity(), 0.0f, {}};
    for (uint32_t begin = 0; begin < count; begin += AT_ONCE) {
        RowSum fetched[AT_ONCE];
        UNROLL
        for (uint32_t i = 0; i < AT_ONCE; ++i) {
            const uint64_t part = minimum(begin + i, count - 1);
            fetched[i] = load_row(first + part * stride);
        }
        UNROLL
        for (uint32_t i = 0; i < AT_ONCE; ++i) {
            if (begin + i < count) {
                add_row(total, fetched[i]);
            }
        }
    }
    return total;
}

// An output as the bits of a half. The sign of a zero may tell in how many steps it was added up:
// none is left.
DEVICE uint32_t output_half(float sum, float scale) {
    return float_to_half_sat(fmaf(sum, scale, 0.0f));
}

DEVICE void store_output(const AttentionParams& p, const Unit& unit, uint32_t packed,
                         const RowSum& row) {
    const float scale = row.sum > 0.0f ? value_scale(unit) / row.sum : 0.0f;
    uint32_t halves[LANE_DIM / 2];
    UNROLL
    for (uint32_t i = 0; i < LANE_DIM / 2; ++i) {
        const uint32_t low = output_half(row.out[2 * i], scale);
        halves[i] = output_half(row.out[2 * i + 1], scale) << 16 | low;
    }
    uint8_t* to = output_at(p, unit.item, packed, lane_index() * LANE_DIM);
    if constexpr (LANE_DIM == 4) {
        *reinterpret_cast<uint64_t*>(to) = pair(halves[0], halves[1]);
    } else {
        *reinterpret_cast<uint32_t*>(to) = halves[0];
    }
}

DEVICE float* partial_at(const AttentionParams& p, uint32_t index) {
    return p.partials + uint64_t{index} * PARTIAL_FLOATS;
}

// Several rows of a warp, NUM_WARPS apart, the first of them `packed`.
struct RowSums {
    uint32_t packed;
    RowSum at[ROWS_AT_ONCE];
};

DEVICE bool has_row(const Item& item, const RowSums& rows, uint32_t i) {
    return rows.packed + i * NUM_WARPS < num_packed(item);
}

DEVICE void store_rows(const Item& item, const RowSums& rows, float* partial) {
    float* first = partial + rows.packed * ROW_FLOATS;
    UNROLL
    for (uint32_t i = 0; i < ROWS_AT_ONCE; ++i) {
        if (has_row(item, rows, i)) {
            store_row(first + i * NUM_WARPS * ROW_FLOATS, rows.at[i]);
        }
    }
}

// Puts what comes before the rows before them.
DEVICE void add_before(const Item& item, RowSums before, RowSums& rows) {
    UNROLL
    for (uint32_t i = 0; i < ROWS_AT_ONCE; ++i) {
        if (has_row(item, rows, i)) {
            add_row(before.at[i], rows.at[i]);
            rows.at[i] = before.at[i];
        }
    }
}

DEVICE RowSums load_rows(const Item& item, const RowSums& rows, const float* partial) {
    const float* first = partial + rows.packed * ROW_FLOATS;
    RowSums loaded = {};
    UNROLL
    for (uint32_t i = 0; i < ROWS_AT_ONCE; ++i) {
        if (has_row(item, rows, i)) {
            loaded.at[i] = load_row(first + i * NUM_WARPS * ROW_FLOATS);
        }
    }
    return loaded;
}

DEVICE bool is_multiple(uint32_t split, uint32_t bits) {
    return (split & ((1u << bits) - 1)) == 0;
}

// Adds a split to the nodes that it is in, from the lowest up to the item; each but the last split of a node leaves it: of
// a narrow tile the lowest one in registers, others in a place of this block. Returns whether the item is complete; it then
// is what the rows are.
DEVICE bool add_to_nodes(const AttentionParams& p, const Item& item, uint32_t split, RowSums& lowest, RowSums& rows) {
    const uint32_t block_places = p.max_items + block_index() * LEVELS;
    uint32_t begin = split;  // of what the rows are so far
    for (uint32_t level = 1; level <= item.level; ++level) {
        const bool is_kept = !IS_WIDE && level == 1;
        const uint32_t bits = level_bits(level);
        float* node = partial_at(p, block_places + level - 1);
        if (!is_multiple(begin, bits)) {
            add_before(item, is_kept ? lowest : load_rows(item, rows, node), rows);
        }
        if (split + 1 != item.end_split && !is_multiple(split + 1, bits)) {
            if (is_kept) {
                lowest = rows;
            } else {
                warp_sync();  // all lanes have read the node
                store_rows(item, rows, node);
            }
            return false;
        }
        begin = begin >> bits << bits;
    }
    return true;
}
