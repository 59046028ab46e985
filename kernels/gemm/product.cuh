// The product of multiply-adds that single warps make, its flow from units to outputs.
#pragma once

// Shared memory of a CTA. The host launches with SHARED_BYTES.
constexpr uint32_t X_OFFSET = STAGES * UNIT_BYTES;
constexpr uint32_t SUMS_OFFSET = X_OFFSET + ROWS * X_STRIDE * 2;
constexpr uint32_t FACTORS_OFFSET = SUMS_OFFSET + 2 * SUMS_SIZE * 4;
constexpr uint32_t BARRIERS_OFFSET = FACTORS_OFFSET + ROWS * 4;
constexpr uint32_t TOLD_OFFSET = BARRIERS_OFFSET + 2 * (STAGES + 1) * 8;
constexpr uint32_t SHARED_BYTES = TOLD_OFFSET + 16;
static_assert(SHARED_BYTES <= (IS_LARGE ? 227 : 99) * 1024, "all that a CTA may have");

// After the consumers a warp that loads, and one that counts parts.
constexpr uint32_t THREADS = CONSUMERS + 64;
// With few rows two fit in a multiprocessor, the next kernel's beside this one's, whose ring then fills early.
constexpr uint32_t CTAS = ROWS <= 16 ? 2 : 1;

struct Shared {
    Ring ring;
    uint16_t* x;
    float* halves;     // of the sums
    float* factors;
    Handover handover;
};

DEVICE Shared carve(uint8_t* memory) {
    uint64_t* barriers = (uint64_t*)(memory + BARRIERS_OFFSET);
    Shared shared;
    shared.ring = {memory, barriers, barriers + STAGES};
    shared.x = (uint16_t*)(memory + X_OFFSET);
    shared.halves = (float*)(memory + SUMS_OFFSET);
    shared.factors = (float*)(memory + FACTORS_OFFSET);
    uint64_t* handover = barriers + 2 * STAGES;
    shared.handover = {handover, handover + 1, (uint32_t*)(memory + TOLD_OFFSET)};
    return shared;
}

// Each warp finishes its rows of a tile, some at a time.
DEVICE void finish_tile(const GemmParams& p, uint32_t tile, const float* halves) {
    constexpr uint32_t AT_ONCE = minimum(ROWS / CONSUMER_WARPS, 4u);
    const uint32_t lane = lane_index();
    const Outputs outputs = outputs_of(p, tile);
    for (uint32_t row = warp_index(); row < p.num_rows; row += AT_ONCE * CONSUMER_WARPS) {
        finish_rows<AT_ONCE>(
            p, matrix_n(p), tile, outputs, row, CONSUMER_WARPS, p.num_rows, [&](uint32_t row) {
                return Pair{tile_sum(halves, row, lane), tile_sum(halves, row, lane + 32)};
            });
    }
}

// If a part was written: finishes its tile, if that was the last part. A warp reads and writes no rows of `halves`
// but its own.
DEVICE void settle(
    const GemmParams& p, const Split& split, const Shared& shared, Pending& pending) {
    if (!pending.is_open || !was_last(shared.handover, pending)) {
        return;
    }
    for (uint32_t row = warp_index(); row < p.num_rows; row += SUM_ROWS * CONSUMER_WARPS) {
        sum_parts(p, split, pending.counter, row, shared.halves);
    }
    finish_tile(p, pending.counter, shared.halves);
    if (thread_index() == 0) {
        p.arrivals[pending.counter] = 0;
    }
}

// Adds a segment of a tile of this CTA's own to those before it; the last one becomes output.
DEVICE void finish_segment(
    const GemmParams& p, const Split& split, const Piece& piece, const Carried& carried,
    float* halves) {
    if (piece.block.segment > 0) {
        add_carried(carried, halves);
    }
    if (piece.k_last == split.k_units) {
        finish_tile(p, piece.block.tile, halves);
    } else {
        carry(p, matrix_n(p), piece.block.tile, halves);
    }
}

// Turns the sums of a piece into output, or into a part of it.
DEVICE void finish_piece(
    const GemmParams& p, const Split& split, const Piece& piece, const Sums& sums,
    const Carried& carried, const Shared& shared, Pending& pending) {
    settle(p, split, shared, pending);
    // No warp reads the sums of the piece before any more.
    consumer_barrier();
    reduce_slices(sums, shared.halves);
    if constexpr (OWNS_TILES) {
        finish_segment(p, split, piece, carried, shared.halves);
    } else if (num_units(piece) == split.k_units) {
        finish_tile(p, piece.block.tile, shared.halves);
    } else {
        write_part(p, split, piece, shared.halves);
        hand_over(shared.handover, piece.block.tile, pending);
    }
}

// What to stage for a unit of the order, which is `k_unit` of its tile: its chunk of the segment, or the rest
// of the CTA's units.
DEVICE Range range_of(const Split& split, uint32_t unit, uint32_t k_unit) {
    const uint32_t segment = k_unit / split.segment_units;
    const uint32_t first = segment * split.segment_units;
    const uint32_t last = first + block_units(split, segment);
    const uint32_t chunk = k_unit - (k_unit - first) % CHUNK_UNITS;
    const Range range = {chunk, minimum(chunk + CHUNK_UNITS, last)};
    const uint32_t end = k_unit + split.last - unit;
    return end <= range.last ? Range{k_unit, end} : range;
}

// Has a unit's inputs staged; returns what then is.
DEVICE Range with_unit(
    const GemmParams& p, const Split& split, Range staged, uint32_t unit, uint32_t k_unit,
    const Shared& shared) {
    if (!has_unit(staged, k_unit)) {
        staged = range_of(split, unit, k_unit);
        const Weight weight = load_weight(p, place_of(staged, matrix_k(p)));
        stage(p, matrix_k(p), staged, weight, false, shared.factors, shared.x);
    }
    return staged;
}

// All units of this CTA, piece by piece; `staged` is what is staged already.
DEVICE void consume(const GemmParams& p, const Split& split, Range staged, const Shared& shared) {
    Cursor at = {0, 0};
    Pending pending = {false, 0, 0};
    for (uint32_t unit = split.first; unit < split.last;) {
        const Piece piece = piece_at(split, unit);
        staged = with_unit(p, split, staged, unit, piece.k_first, shared);
        Carried carried = {};
        if constexpr (OWNS_TILES) {
            carried = load_carried(p, matrix_n(p), piece.block);
        }
        Sums sums = {};
        for (uint32_t k_unit = piece.k_first; k_unit < piece.k_last; ++k_unit, ++unit) {
            if constexpr (CHUNK_K < SEGMENT_K) {
                staged = with_unit(p, split, staged, unit, k_unit, shared);
            }
            const uint8_t* weights = acquire(shared.ring, at);
            multiply_unit(sums, weights, shared.x + (k_unit - staged.first) * UNIT_K);
            release(shared.ring, at);
        }
        finish_piece(p, split, piece, sums, carried, shared, pending);
    }
    settle(p, split, shared, pending);
}

// What can be done before the kernel ahead has ended, then all the rest.
DEVICE void run_consumer(const GemmParams& p, const Split& split, const Shared& shared) {
    if (split.first == split.last) {
        return;
    }
    clear_unused_rows(p, shared.x);
    const Range range = range_of(split, split.first, piece_at(split, split.first).k_first);
    const Weight weight = load_weight(p, place_of(range, matrix_k(p)));
    grid_wait();
    stage(p, matrix_k(p), range, weight, true, shared.factors, shared.x);
    consume(p, split, range, shared);
}

DEVICE void run(const GemmParams& p) {
    const Shared shared = carve(shared_memory());
    const Split split = split_units(matrix_n(p), matrix_k(p));
    if (thread_index() == 0) {
        ring_init(shared.ring);
        handover_init(shared.handover);
    }
    barrier_all();
    if (warp_index() == CONSUMER_WARPS) {
        produce(shared.ring, p.weights, split);
    } else if (warp_index() > CONSUMER_WARPS) {
        grid_wait();
        if (!OWNS_TILES && lane_index() == 0) {
            count_parts(p, split, shared.handover);
        }
    } else {
        run_consumer(p, split, shared);
    }
}
