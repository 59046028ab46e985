// The product of warpgroups: its flow from units to outputs.
#pragma once

// Shared memory of a CTA. The host launches with SHARED_BYTES.
constexpr uint32_t SUMS_OFFSET = RING_BYTES;
constexpr uint32_t BARRIERS_OFFSET = SUMS_OFFSET + PAIR_TILES * SUMS_SIZE * 4;
constexpr uint32_t NUM_BARRIERS = 3 * MOST_STAGES + 2;
constexpr uint32_t IS_LAST_OFFSET = BARRIERS_OFFSET + NUM_BARRIERS * 8;
constexpr uint32_t SHARED_BYTES = IS_LAST_OFFSET + 16;
static_assert(SHARED_BYTES <= 227 * 1024, "all that a CTA may have");

// After the consumers a warp that asks for weights, one that counts parts, and those that copy rows.
constexpr uint32_t WEIGHTS_WARP = CONSUMER_WARPS;
constexpr uint32_t COUNTING_WARP = CONSUMER_WARPS + 1;
constexpr uint32_t THREADS = (CONSUMER_WARPS + 2 + COPY_WARPS) * 32;
static_assert((COUNTING_WARP + 1) % COPY_WARPS == 0, "lanes that copy count from a multiple of them all");
constexpr uint32_t CTAS = 1;

struct Shared {
    Stream stream;
    float* sums;   // of this warpgroup
    Handover handover;
};

DEVICE Shared carve(uint8_t* memory) {
    uint64_t* barriers = (uint64_t*)(memory + BARRIERS_OFFSET);
    Shared shared;
    shared.stream = {{memory, barriers, barriers + MOST_STAGES}, barriers + 2 * MOST_STAGES};
    shared.sums = (float*)(memory + SUMS_OFFSET) + warpgroup_index() % PAIR_TILES * SUMS_SIZE;
    uint64_t* handover = barriers + 3 * MOST_STAGES;
    shared.handover = {handover, handover + 1, (uint32_t*)(memory + IS_LAST_OFFSET)};
    return shared;
}

// The other warpgroup is elsewhere.
DEVICE void warpgroup_barrier() {
    barrier_named(2 + warpgroup_index(), WARPGROUP_THREADS);
}

// Makes outputs of a batch of rows of a tile.
DEVICE void finish_batch(
    const GemmParams& p, uint32_t tile, uint32_t batch, const Four (&four)[FINISH_ROWS / 8], float* sums) {
    leave_sums(four, sums);
    warpgroup_barrier();
    constexpr uint32_t AT_ONCE = minimum(FINISH_ROWS / WARPGROUP_WARPS, 4u);
    const Outputs outputs = outputs_of(p, tile);
    const uint32_t first = batch * FINISH_ROWS;
    const uint32_t end = minimum(first + FINISH_ROWS, p.num_rows);
    for (uint32_t row = first + warp_index() % WARPGROUP_WARPS; row < end; row += AT_ONCE * WARPGROUP_WARPS) {
        finish_rows<AT_ONCE>(p, matrix_n(p), tile, outputs, row, WARPGROUP_WARPS, end, [&](uint32_t row) {
            const float* from = sums + (row - first) * SUMS_STRIDE + lane_index();
            return Pair{from[0], from[32]};
        });
    }
    // The next batch goes there.
    warpgroup_barrier();
}

DEVICE uint32_t tile_of(uint32_t pair) {
    return pair * PAIR_TILES + warpgroup_index();
}

// Makes outputs of the sums of a whole tile.
DEVICE void finish_tile(const GemmParams& p, uint32_t pair, const Sums& sums, float* shared) {
    UNROLL
    for (uint32_t batch = 0; batch < ROWS / FINISH_ROWS; ++batch) {
        Four four[FINISH_ROWS / 8];
        UNROLL
        for (uint32_t j = 0; j < FINISH_ROWS / 8; ++j) {
            UNROLL
            for (uint32_t e = 0; e < 4; ++e) {
                const uint32_t at = batch * FINISH_ROWS / 2 + j * 4 + e;
                four[j].of[e] = sums.of[at / (PRODUCT_ROWS / 2)][at % (PRODUCT_ROWS / 2)];
            }
        }
        if (batch * FINISH_ROWS < p.num_rows) {
            finish_batch(p, tile_of(pair), batch, four, shared);
        }
    }
}

// If a part was written: finishes its tile, if that was the last part.
DEVICE void settle(const GemmParams& p, const Order& order, const Shared& shared, Pending& pending) {
    if (!pending.is_open || !was_last(shared.handover, pending)) {
        return;
    }
    if (tile_of(pending.counter) < order.tiles) {
        for (uint32_t batch = 0; batch * FINISH_ROWS < p.num_rows; ++batch) {
            Four four[FINISH_ROWS / 8];
            sum_parts(p, order, pending.counter, batch, four);
            finish_batch(p, tile_of(pending.counter), batch, four, shared.sums);
        }
    }
    if (thread_index() == 0) {
        p.arrivals[pending.counter] = 0;
    }
}

// Turns the sums of a piece into output, or into a part of it.
DEVICE void finish_piece(
    const GemmParams& p, const Order& order, const Piece& piece, const Sums& sums, const Shared& shared,
    Pending& pending) {
    settle(p, order, shared, pending);
    if (num_units(piece) < order.k_units) {
        write_part(p, piece.pair, sums);
        hand_over(shared.handover, piece.pair, pending);
    } else if (tile_of(piece.pair) < order.tiles) {
        finish_tile(p, piece.pair, sums, shared.sums);
    }
}

// All units of this CTA, piece by piece.
DEVICE void consume(const GemmParams& p, const Order& order, const Shared& shared) {
    Cursor at = {0, 0};
    Pending pending = {false, 0, 0};
    // Rows come behind the same wait of who copies them, so no test can tell that this one is here: outputs rest on it, not
    // on what a wait means for other threads.
    grid_wait();
    for (uint32_t unit = order.first; unit < order.last;) {
        const Piece piece = piece_at(order, unit);
        const bool has_tile = tile_of(piece.pair) < order.tiles;
        Sums sums = {};
        for (uint32_t k_unit = piece.k_first; k_unit < piece.k_last; ++k_unit, ++unit) {
            uint8_t* stage = acquire(shared.stream, at);
            if (has_tile) {
                multiply_unit(sums, stage + warpgroup_index() * UNIT_BYTES, x_of(stage));
            }
            release(shared.stream.ring, at);
        }
        finish_piece(p, order, piece, sums, shared, pending);
    }
    settle(p, order, shared, pending);
}

DEVICE void run(const GemmParams& p) {
    const Shared shared = carve(shared_memory());
    const Order order = order_units(matrix_n(p), matrix_k(p));
    if (thread_index() == 0) {
        stream_init(shared.stream);
        handover_init(shared.handover);
    }
    barrier_all();
    const uint32_t warp = warp_index();
    if (warp < CONSUMER_WARPS) {
        if (order.first < order.last) {
            consume(p, order, shared);
        }
    } else if (warp == WEIGHTS_WARP) {
        if (lane_index() == 0) {
            produce_weights(p, shared.stream.ring, order);
        }
    } else if (warp == COUNTING_WARP) {
        grid_wait();
        if (!OWNS_TILES && lane_index() == 0) {
            count_parts(p, order, shared.handover);
        }
    } else {
        produce_rows(p, matrix_k(p), shared.stream, order);
    }
}
