// Builds the tables of one forward pass of a step: its rows, the tiles in which they attend, and which of
// them get logits. Every place of the tables is written, inactive ones too, and where a sequence's rows
// stand depends on its place in the batch alone.
#include "common/prims.cuh"
#include "step/step.cuh"

constexpr uint32_t ROWS_THREADS = 128;

// The places that a sequence has in this pass, and which of them are taken: `count` from `first` on.
struct Places {
    uint32_t num;
    uint32_t first;
    uint32_t count;
};

DEVICE Places places_of(const RowsParams& params, uint32_t sequence) {
    const StepSequence& s = params.sequences[sequence];
    if (params.pass == VERIFY) {
        const uint32_t drafted = num_drafted(params.drafting, sequence, params.max_drafts);
        return {params.max_drafts + 1, 0, s.len == 0 || s.has_run ? 0 : drafted + 1};
    }
    if (params.pass == 0) {
        // The last known token always stands in the same place, which gets logits, as the masks behind it do.
        const uint32_t fed = s.len == 0 ? 0 : s.num_fed;
        const uint32_t drafts = minimum(s.draft_len, params.num_masks + 1);
        const uint32_t masks = fed == 0 || drafts == 0 ? 0 : drafts - 1;
        return {params.most_fed + params.num_masks, params.most_fed - fed, fed + masks};
    }
    const bool is_going = s.len > 0 && params.drafting[sequence].is_going != 0;
    return {1, 0, is_going ? 1u : 0u};
}

// Rows of a head on hidden states see no position before this, and none sees position 0.
DEVICE uint32_t first_seen(const RowsParams& params, uint32_t position) {
    if (params.window == 0) {
        return 0;
    }
    return position >= params.window ? maximum(position + 1 - params.window, 1u) : 1;
}

// The token at a position, which so many drafts precede.
DEVICE uint32_t token_at(const RowsParams& params, uint32_t sequence, uint32_t position, uint32_t draft) {
    const uint32_t len = params.sequences[sequence].len;
    if (position < len) {
        return params.last_tokens[(sequence + 1) * params.last_len - (len - position)];
    }
    return params.pass == 0 ? params.mask_token : params.drafts[sequence * params.max_drafts + draft - 1];
}

// The token at a place, and its position.
DEVICE Row row_at(const RowsParams& params, uint32_t sequence, uint32_t place) {
    const StepSequence& s = params.sequences[sequence];
    // Drafts follow the known tokens.
    uint32_t draft = place;
    if (params.pass == 0) {
        draft = place + 1 - params.most_fed;
    } else if (params.pass != VERIFY) {
        draft = params.pass;
    }
    // Here `draft` counts from the last known token, which is 0; the one before it wraps to -1.
    const uint32_t position = s.len - 1 + draft;
    const uint32_t token = token_at(params, sequence, position, draft);
    const uint32_t first = first_seen(params, position);
    return {token < params.vocab ? token : 0, position, position, position + 1, 0, sequence, first};
}

DEVICE void write_row(const RowsParams& params, const Places& places, uint32_t sequence,
                      uint32_t place) {
    const bool is_taken = place - places.first < places.count;
    const Row nothing = {0, 0, 0, 0, 0, NO_SEQUENCE, 0};
    const Row row = is_taken ? row_at(params, sequence, place) : nothing;
    params.rows[sequence * places.num + place] = row;
}

// A tile holds the taken ones of its share of the places.
DEVICE void write_tile(const RowsParams& params, const Places& places, uint32_t sequence,
                       uint32_t tile) {
    const uint32_t share = tile * params.tile_rows;
    const uint32_t first = maximum(share, places.first);
    const uint32_t end = minimum(share + params.tile_rows, places.first + places.count);
    const uint32_t num_tiles = divide_up(places.num, params.tile_rows);
    const uint32_t num_old = places.count > 0 ? row_at(params, sequence, places.first).slot : 0;
    params.tiles[sequence * num_tiles + tile] = {
        sequence * places.num + first, first < end ? end - first : 0, num_old};
}

// Any grid, any number of threads.
KERNEL(rows, RowsParams, ROWS_THREADS, 1) {
    grid_wait();
    grid_launch_dependents();
    const uint32_t thread = block_index() * num_threads() + thread_index();
    for (uint32_t sequence = thread; sequence < p.num_sequences;
         sequence += num_blocks() * num_threads()) {
        const Places places = places_of(p, sequence);
        for (uint32_t place = 0; place < places.num; place++) {
            write_row(p, places, sequence, place);
        }
        for (uint32_t tile = 0; tile * p.tile_rows < places.num; tile++) {
            write_tile(p, places, sequence, tile);
        }
        // When drafting the last ones: that of the last known token, and masks.
        const uint32_t num_heads = p.pass == VERIFY ? places.num : p.pass == 0 ? p.num_masks + 1 : 1;
        for (uint32_t head = 0; head < num_heads; head++) {
            p.head_rows[sequence * num_heads + head] = (sequence + 1) * places.num - num_heads + head;
        }
    }
}
