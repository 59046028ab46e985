// What there is to attend to: tiles of query rows, key heads and splits of the positions, found on
// the device from the rows themselves, so that a step needs no plan of the host. Which positions a
// split has, which of them a warp takes, and in which tree splits are added, follows from positions
// alone: a row's result does not depend on how far the other rows of its tile reach. Items are
// nodes of that tree; which level they are of follows from how much there is to do.
#pragma once

struct AttentionParams {
    const uint16_t* queries;  // f16 [row][query head][HEAD_DIM]
    const uint8_t* cache;     // [page][key head]: keys [16][HEAD_DIM], values [HEAD_DIM][16]
    const Row* rows;
    const Tile* tiles;        // at most TILE_ROWS / GROUP rows each
    const uint32_t* pages;    // [sequence][max_pages]
    uint8_t* output;          // f16 [row][query head][HEAD_DIM], or units
    float* partials;          // [max_items + LEVELS * grid][PARTIAL_FLOATS]
    uint32_t* arrivals;       // [max_items], all 0 before and after
    const float* kv_scales;   // of an FP8 cache: of each head's keys, then of each one's values; powers of two
    float scale;              // of the scores
    uint32_t num_tiles;
    uint32_t num_kv_heads;
    uint32_t max_pages;
    uint32_t split_tokens;    // a multiple of 16, at most 16 * NUM_THREADS
    uint32_t max_items;       // with a partial each
    uint32_t output_units;    // of 64 rows of the output; 0: row after row
    uint32_t unused;
};
static_assert(sizeof(AttentionParams) == 104, "as on the host");

constexpr uint32_t NUM_WARPS = 4;
constexpr uint32_t NUM_THREADS = 32 * NUM_WARPS;

// A split's pages are summed up in four parts, page by page in turn. In narrow tiles each warp has
// a part and all rows; in wide tiles each warp has 16 rows and all parts, one after the other.
constexpr uint32_t NUM_PARTS = NUM_WARPS;
constexpr bool IS_WIDE = TILE_ROWS == 64;
static_assert(IS_WIDE || TILE_ROWS == 16, "what the warps of a block have room for");

// Splits are the leaves of a tree, level 0. A node of the next level adds RADIX of them in order,
// and so on; the root, of level LEVELS, adds all that is left.
constexpr uint32_t RADIX_BITS = 3;
constexpr uint32_t RADIX = 1 << RADIX_BITS;
constexpr uint32_t LEVELS = 3;

// What the rows of a tile see.
struct Reach {
    uint32_t length;    // positions of which some row sees the last
    uint32_t unmasked;  // below it every active row sees everything
    uint32_t sequence;
};

// A node of the tree of a tile and a key head.
struct Item {
    uint32_t number;  // among all items
    Tile rows;
    Reach reach;
    uint32_t kv_head;
    uint32_t level;
    uint32_t index;      // among those of its tile and head
    uint32_t num_items;  // that there are of these
    uint32_t partial;    // of the first of these; they are num_kv_heads apart
    uint32_t first_split;
    uint32_t end_split;
};

// What a block attends to at a time: a split of an item.
struct Unit {
    Item item;
    uint32_t split;               // NO_SPLIT: there is no such unit
    uint32_t pages[NUM_THREADS];  // of the split
    float scales[2];              // of the item's keys and values, of an FP8 cache
};
constexpr uint32_t NO_SPLIT = 0xffffffffu;

// What a block knows of all tiles, of NUM_THREADS of them, and of the unit that it works at and the next one.
struct Plan {
    uint32_t level_items[LEVELS][NUM_WARPS];
    uint32_t level;       // of all items
    uint32_t first_tile;  // of those that are planned
    uint32_t begin;       // items of a key head in the tiles before these
    uint32_t ends[NUM_THREADS];  // and in those up to this one
    Reach reaches[NUM_THREADS];
    uint32_t warp_items[NUM_WARPS];
    Unit units[2];
    uint32_t arrived_last;
};
static_assert(sizeof(Plan) == 3288, "as on the host");

// The pages of a split that this warp visits, part by part, counted from the split's first.
struct Walk {
    uint32_t page;
    uint32_t part;
    uint32_t end_page;
};

// One more than the index of the highest set bit.
DEVICE uint32_t bit_width(uint64_t bits) {
    const uint32_t high = static_cast<uint32_t>(bits >> 32);
    const uint32_t low = static_cast<uint32_t>(bits);
    return high != 0 ? 64 - leading_zeros(high) : 32 - leading_zeros(low);
}

// Sums over the threads up to this one; `warp_sums` has room for one number a warp.
DEVICE uint32_t running_sum(uint32_t value, uint32_t* warp_sums) {
    for (uint32_t step = 1; step < 32; step *= 2) {
        const uint32_t before = shuffle_up(value, step);
        value += lane_index() >= step ? before : 0;
    }
    if (lane_index() == 31) {
        warp_sums[warp_index()] = value;
    }
    barrier_all();
    for (uint32_t warp = 0; warp < warp_index(); ++warp) {
        value += warp_sums[warp];
    }
    return value;
}

// Binary logarithm of the splits of a node. The root has more than there are.
DEVICE constexpr uint32_t level_bits(uint32_t level) {
    return level < LEVELS ? level * RADIX_BITS : 31;
}

DEVICE Reach find_reach(const AttentionParams& p, uint32_t index) {
    const Tile tile = p.tiles[index];
    Reach reach = {0, 0xffffffffu, 0};
    for (uint32_t i = 0; i < tile.num_rows; ++i) {
        const Row row = p.rows[tile.first_row + i];
        if (row.sequence != NO_SEQUENCE) {
            reach.length = maximum(reach.length, row.base + bit_width(row.ancestors));
            reach.unmasked = minimum(reach.unmasked, row.base);
            reach.sequence = row.sequence;
        }
    }
    return reach;
}

// Nodes of a level that cover so many positions.
DEVICE uint32_t num_nodes(const AttentionParams& p, uint32_t length, uint32_t level) {
    return divide_up(divide_up(length, p.split_tokens), 1u << level_bits(level));
}

// The lowest level whose nodes have room for their partials: much to do is done in large items. The
// root needs no room.
DEVICE uint32_t lowest_level(const AttentionParams& p, const Plan& plan) {
    for (uint32_t level = 0; level < LEVELS; ++level) {
        uint32_t num_items = 0;
        for (uint32_t warp = 0; warp < NUM_WARPS; ++warp) {
            num_items += plan.level_items[level][warp];
        }
        if (num_items * p.num_kv_heads <= p.max_items) {
            return level;
        }
    }
    return LEVELS;
}

// Looks at all tiles to choose the level; what threads find of the first ones stays in the plan.
DEVICE void plan_level(const AttentionParams& p, Plan& plan) {
    uint32_t counts[LEVELS] = {};
    for (uint32_t tile = thread_index(); tile < p.num_tiles; tile += NUM_THREADS) {
        const Reach reach = find_reach(p, tile);
        UNROLL
        for (uint32_t level = 0; level < LEVELS; ++level) {
            counts[level] += num_nodes(p, reach.length, level);
        }
        if (tile < NUM_THREADS) {
            plan.reaches[tile] = reach;
        }
    }
    UNROLL
    for (uint32_t level = 0; level < LEVELS; ++level) {
        const uint32_t num_items = warp_sum(counts[level]);
        if (lane_index() == 0) {
            plan.level_items[level][warp_index()] = num_items;
        }
    }
    barrier_all();
    if (thread_index() == 0) {
        plan.level = lowest_level(p, plan);
    }
    barrier_all();
}

// Plans the tiles from `first` on. Other threads may still read the `ends` of those before: they are
// written behind the barrier in running_sum.
DEVICE void plan_tiles(const AttentionParams& p, uint32_t first, Plan& plan) {
    const uint32_t thread = thread_index();
    const uint32_t tile = first + thread;
    if (first > 0 && tile < p.num_tiles) {
        plan.reaches[thread] = find_reach(p, tile);
    }
    const uint32_t length = tile < p.num_tiles ? plan.reaches[thread].length : 0;
    const uint32_t begin = first > 0 ? plan.ends[NUM_THREADS - 1] : 0;
    const uint32_t end = running_sum(num_nodes(p, length, plan.level), plan.warp_items);
    plan.ends[thread] = begin + end;
    if (thread == 0) {
        plan.first_tile = first;
        plan.begin = begin;
    }
    barrier_all();
}

// An item of the planned tiles: heads lie side by side, then nodes, then tiles.
DEVICE Item find_item(const AttentionParams& p, const Plan& plan, uint32_t number) {
    const uint32_t node = number / p.num_kv_heads;
    uint32_t place = 0;
    for (uint32_t step = NUM_THREADS / 2; step > 0; step /= 2) {
        place += plan.ends[place + step - 1] <= node ? step : 0;
    }
    const uint32_t begin = place == 0 ? plan.begin : plan.ends[place - 1];
    Item item;
    item.number = number;
    item.rows = p.tiles[plan.first_tile + place];
    item.reach = plan.reaches[place];
    item.kv_head = number % p.num_kv_heads;
    item.level = plan.level;
    item.index = node - begin;
    item.num_items = plan.ends[place] - begin;
    item.partial = begin * p.num_kv_heads + item.kv_head;
    item.first_split = item.index << level_bits(item.level);
    const uint32_t end = (item.index + 1) << level_bits(item.level);
    item.end_split = minimum(end, divide_up(item.reach.length, p.split_tokens));
    return item;
}

DEVICE uint32_t first_token(const AttentionParams& p, uint32_t split) {
    return split * p.split_tokens;
}

// Notes the pages of a unit.
DEVICE void note_pages(const AttentionParams& p, const Item& item, uint32_t split, Unit& unit) {
    const uint32_t split_pages = p.split_tokens / PAGE_TOKENS;
    const uint32_t page = first_token(p, split) / PAGE_TOKENS + thread_index();
    if (thread_index() < split_pages && page < divide_up(item.reach.length, PAGE_TOKENS)) {
        unit.pages[thread_index()] = p.pages[uint64_t{item.reach.sequence} * p.max_pages + page];
    }
}

// Notes the scales of an item's keys and values. A warp that has no pages to look up fetches them meanwhile.
DEVICE void note_scales(const AttentionParams& p, const Item& item, Unit& unit) {
    const uint32_t which = NUM_THREADS - 1 - thread_index();
    if (KV == FP8 && which < 2) {
        unit.scales[which] = p.kv_scales[which * p.num_kv_heads + item.kv_head];
    }
}

DEVICE float key_scale(const Unit& unit) {
    return KV == FP8 ? unit.scales[0] : 1.0f;
}

DEVICE float value_scale(const Unit& unit) {
    return KV == FP8 ? unit.scales[1] : 1.0f;
}

// Notes a split of an item for all threads, which see it behind the next barrier.
DEVICE void note_unit(const AttentionParams& p, const Item& item, uint32_t split, Unit& unit) {
    if (thread_index() == 0) {
        unit.item = item;
        unit.split = split;
    }
    note_pages(p, item, split, unit);
    note_scales(p, item, unit);
}

// Plans the first split of the item of this number, if there is one: its tile, and those beside it, before.
DEVICE void plan_item(const AttentionParams& p, uint32_t number, Plan& plan, Unit& unit) {
    bool exists = true;
    while (number >= plan.ends[NUM_THREADS - 1] * p.num_kv_heads) {
        const uint32_t next = plan.first_tile + NUM_THREADS;
        exists = next < p.num_tiles;
        if (!exists) {
            break;
        }
        plan_tiles(p, next, plan);
    }
    if (exists) {
        const Item item = find_item(p, plan, number);
        note_unit(p, item, item.first_split, unit);
    } else if (thread_index() == 0) {
        unit.split = NO_SPLIT;
    }
    barrier_all();
}

// Plans what this block attends to behind a unit: the item's next split, or its next item.
DEVICE void plan_next(const AttentionParams& p, const Unit& now, Plan& plan, Unit& next) {
    if (now.split + 1 < now.item.end_split) {
        note_unit(p, now.item, now.split + 1, next);
        barrier_all();
        return;
    }
    plan_item(p, now.item.number + num_blocks(), plan, next);
}

DEVICE Walk begin_walk(const AttentionParams& p, const Item& item, uint32_t split) {
    const uint32_t num_tokens = item.reach.length - first_token(p, split);
    const uint32_t part = IS_WIDE ? 0 : warp_index();
    return {part, part, divide_up(minimum(num_tokens, p.split_tokens), PAGE_TOKENS)};
}

DEVICE bool has_page(const Walk& walk) {
    return walk.page < walk.end_page;
}

// A part that has no page has none after it either.
DEVICE void advance(Walk& walk) {
    walk.page += NUM_PARTS;
    if (IS_WIDE && !has_page(walk) && walk.part < NUM_PARTS - 1) {
        walk.part += 1;
        walk.page = walk.part;
    }
}

// Of the packed rows, query row by query row and inside it head by head, those that exist.
DEVICE uint32_t num_packed(const Item& item) {
    return item.rows.num_rows * GROUP;
}

// A packed row among those of all tiles. Divided only when the item is known: the compiler would
// keep quotients of the lane in registers from the start.
DEVICE uint32_t packed_row(const Item& item, uint32_t packed) {
    return item.rows.first_row * GROUP + packed;
}

// Where a packed row's query begins.
DEVICE uint64_t row_offset(const AttentionParams& p, const Item& item, uint32_t packed) {
    const uint64_t row = packed_row(item, packed) / GROUP;
    const uint64_t head = item.kv_head * GROUP + packed_row(item, packed) % GROUP;
    return (row * p.num_kv_heads * GROUP + head) * HEAD_DIM;
}

// Where its output has an element.
DEVICE uint8_t* output_at(const AttentionParams& p, const Item& item, uint32_t packed, uint32_t element) {
    const uint32_t row = packed_row(item, packed) / GROUP;
    const uint32_t k = (item.kv_head * GROUP + packed_row(item, packed) % GROUP) * HEAD_DIM + element;
    const uint64_t row_after_row = uint64_t(row) * p.num_kv_heads * GROUP * HEAD_DIM + k;
    return p.output + (p.output_units != 0 ? half_offset(row, k, p.output_units) : row_after_row * 2);
}
