// What there is to attend to: tiles of query rows, key heads and splits of the positions, found on
// the device from the rows themselves, so that a step needs no plan of the host. Which positions a
// split has, and which of them a warp takes, follows from positions alone: a row's result does not
// depend on how far the other rows of its tile reach.
#pragma once

struct AttentionParams {
    const uint16_t* queries;  // f16 [row][query head][HEAD_DIM]
    const uint8_t* cache;     // [page][key head]: keys [16][HEAD_DIM], values [HEAD_DIM][16]
    const Row* rows;
    const Tile* tiles;        // at most TILE_ROWS / GROUP rows each
    const uint32_t* pages;    // [sequence][max_pages]
    uint16_t* output;         // f16 [row][query head][HEAD_DIM]
    float* partials;          // [tile][key head][max_splits][TILE_ROWS * (HEAD_DIM + 2)]
    uint32_t* arrivals;       // [tile][key head], all 0 before and after
    float scale;              // of the scores: that of the softmax times that of stored keys
    float v_scale;            // of stored values
    uint32_t num_tiles;
    uint32_t num_kv_heads;
    uint32_t max_pages;
    uint32_t split_tokens;    // a multiple of 16
    uint32_t max_splits;      // the last one takes what is left
};
static_assert(sizeof(AttentionParams) == 96, "as on the host");

constexpr uint32_t NUM_WARPS = 4;
constexpr uint32_t NUM_THREADS = 32 * NUM_WARPS;

// A split's pages are summed up in four parts, page by page in turn. In narrow tiles each warp has
// a part and all rows; in wide tiles each warp has 16 rows and all parts, one after the other.
constexpr uint32_t NUM_PARTS = NUM_WARPS;
constexpr bool IS_WIDE = TILE_ROWS == 64;
static_assert(IS_WIDE || TILE_ROWS == 16, "what the warps of a block have room for");

// What a block knows of NUM_THREADS tiles.
struct Plan {
    uint32_t ends[NUM_THREADS];      // splits of this tile and of those before it
    uint32_t lengths[NUM_THREADS];   // positions of which some row sees the last
    uint32_t unmasked[NUM_THREADS];  // below it every active row sees everything
    uint32_t sequences[NUM_THREADS];
    uint32_t warp_splits[NUM_WARPS];
    uint32_t arrived_last;
};

struct Item {
    Tile rows;
    uint32_t tile;
    uint32_t kv_head;
    uint32_t split;
    uint32_t num_splits;
    uint32_t length;
    uint32_t unmasked;
    uint32_t sequence;
};

// The pages of a split that this warp visits, part by part. Past the last one `part` is `end_part`.
struct Walk {
    uint32_t page;
    uint32_t part;
    uint32_t end_part;
    uint32_t first_page;
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

// Each thread looks at one tile from `first` on. What other threads may still read of the plan
// before is written behind the barrier in running_sum.
DEVICE void plan_tiles(const AttentionParams& p, uint32_t first, Plan& plan) {
    const uint32_t thread = thread_index();
    const Tile tile = first + thread < p.num_tiles ? p.tiles[first + thread] : Tile{0, 0};
    uint32_t length = 0;
    uint32_t unmasked = 0xffffffffu;
    uint32_t sequence = 0;
    for (uint32_t i = 0; i < tile.num_rows; ++i) {
        const Row row = p.rows[tile.first_row + i];
        if (row.sequence != NO_SEQUENCE) {
            length = maximum(length, row.base + bit_width(row.ancestors));
            unmasked = minimum(unmasked, row.base);
            sequence = row.sequence;
        }
    }
    plan.lengths[thread] = length;
    plan.unmasked[thread] = unmasked;
    plan.sequences[thread] = sequence;
    const uint32_t num_splits = minimum(divide_up(length, p.split_tokens), p.max_splits);
    plan.ends[thread] = running_sum(num_splits, plan.warp_splits);
    barrier_all();
}

// Item `index` of the planned tiles, which begin at `first`: heads lie side by side, then splits,
// then tiles.
DEVICE Item find_item(const AttentionParams& p, const Plan& plan, uint32_t first, uint32_t index) {
    const uint32_t split = index / p.num_kv_heads;
    uint32_t place = 0;
    for (uint32_t step = NUM_THREADS / 2; step > 0; step /= 2) {
        place += plan.ends[place + step - 1] <= split ? step : 0;
    }
    const uint32_t begin = place == 0 ? 0 : plan.ends[place - 1];
    Item item;
    item.tile = first + place;
    item.rows = p.tiles[item.tile];
    item.kv_head = index % p.num_kv_heads;
    item.split = split - begin;
    item.num_splits = plan.ends[place] - begin;
    item.length = plan.lengths[place];
    item.unmasked = plan.unmasked[place];
    item.sequence = plan.sequences[place];
    return item;
}

// Goes on to a part that has pages.
DEVICE void skip_empty_parts(Walk& walk) {
    while (walk.page >= walk.end_page && walk.part < walk.end_part) {
        walk.part += 1;
        walk.page = walk.first_page + walk.part;
    }
}

DEVICE Walk begin_walk(const AttentionParams& p, const Item& item) {
    const uint32_t split_end = (item.split + 1) * p.split_tokens;
    const bool is_open = item.split + 1 == p.max_splits;
    const uint32_t end = is_open ? item.length : minimum(item.length, split_end);
    Walk walk;
    walk.first_page = item.split * (p.split_tokens / PAGE_TOKENS);
    walk.end_page = divide_up(end, PAGE_TOKENS);
    walk.part = IS_WIDE ? 0 : warp_index();
    walk.end_part = IS_WIDE ? NUM_PARTS : walk.part + 1;
    walk.page = walk.first_page + walk.part;
    skip_empty_parts(walk);
    return walk;
}

DEVICE bool has_page(const Walk& walk) {
    return walk.part < walk.end_part;
}

DEVICE void advance(Walk& walk) {
    walk.page += NUM_PARTS;
    skip_empty_parts(walk);
}

// Of the packed rows, query row by query row and inside it head by head, those that exist.
DEVICE uint32_t num_packed(const Item& item) {
    return item.rows.num_rows * GROUP;
}

// Where a packed row's query and output begin.
DEVICE uint64_t row_offset(const AttentionParams& p, const Item& item, uint32_t packed) {
    const uint64_t row = item.rows.first_row + packed / GROUP;
    const uint64_t head = item.kv_head * GROUP + packed % GROUP;
    return (row * p.num_kv_heads * GROUP + head) * HEAD_DIM;
}
