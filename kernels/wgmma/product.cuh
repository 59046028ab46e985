// The product of warpgroups: its flow from units to outputs.
#pragma once

// Shared memory of a CTA: sums, barriers, and behind them the ring, in which units begin at multiples of an atom of the
// swizzle. The host launches with SHARED_BYTES, or, if CTAs have fewer units than stages, with those of the stages that
// are used: a small product then has room beside the kernel in front, and its weights are there when that has ended.
constexpr uint32_t BARRIERS_OFFSET = PAIR_TILES * SUMS_SIZE * 4;
constexpr uint32_t NUM_BARRIERS = 3 * MOST_STAGES + 2;
constexpr uint32_t TOLD_OFFSET = BARRIERS_OFFSET + NUM_BARRIERS * 8;
constexpr uint32_t RING_OFFSET = divide_up(TOLD_OFFSET + 4, ATOM_BYTES) * ATOM_BYTES;
constexpr uint32_t SHARED_BYTES = RING_OFFSET + RING_BYTES;
static_assert(SHARED_BYTES <= 227 * 1024, "all that a CTA may have");

// After the consumers a warp that asks for weights, one that counts parts, and those that bring rows.
constexpr uint32_t WEIGHTS_WARP = CONSUMER_WARPS;
constexpr uint32_t COUNTING_WARP = CONSUMER_WARPS + 1;
constexpr uint32_t FIRST_COPY_WARP = COUNTING_WARP + 1;
constexpr uint32_t LAST_WARP = FIRST_COPY_WARP + COPY_WARPS - 1;
static_assert(FIRST_COPY_WARP % COPY_WARPS == 0, "lanes that copy count from a multiple of them all");
constexpr bool MOVES_REGISTERS = ROWS > 192;
constexpr uint32_t WARPS = MOVES_REGISTERS ? CONSUMER_WARPS + WARPGROUP_WARPS : LAST_WARP + 1;
constexpr uint32_t THREADS = WARPS * 32;
static_assert(LAST_WARP < WARPS, "all have one");
// With few rows as many as leave room for a block of the attention in front: a product does not wait for its end.
constexpr uint32_t REGISTERS = ROWS == 8 ? 120 : 168;
static_assert(REGISTERS * THREADS <= 65536, "all that a multiprocessor has");
// Sums of most rows take registers that others leave: warps of a whole warpgroup, of which one has nothing else to do. More than
// the block has would be waited for without end.
constexpr uint32_t MULTIPLYING_REGISTERS = 240;
constexpr uint32_t OTHER_REGISTERS = 24;
static_assert(PAIR_TILES * MULTIPLYING_REGISTERS + OTHER_REGISTERS <= (PAIR_TILES + 1) * REGISTERS || !MOVES_REGISTERS, "those of the block");

struct Shared {
    Stream stream;
    float* sums;   // of this warpgroup
    Handover handover;
};

DEVICE Shared carve(uint8_t* memory) {
    uint64_t* barriers = (uint64_t*)(memory + BARRIERS_OFFSET);
    Shared shared;
    shared.stream = {{memory + RING_OFFSET, barriers, barriers + MOST_STAGES}, barriers + 2 * MOST_STAGES};
    shared.sums = (float*)memory + warpgroup_index() % PAIR_TILES * SUMS_SIZE;
    uint64_t* handover = barriers + 3 * MOST_STAGES;
    shared.handover = {handover, handover + 1, (uint32_t*)(memory + TOLD_OFFSET)};
    return shared;
}

// The other warpgroup is elsewhere.
DEVICE void warpgroup_barrier() {
    barrier_named(2 + warpgroup_index(), WARPGROUP_THREADS);
}

// A batch of rows of a tile.
struct Batch {
    uint32_t tile;
    uint32_t first_row;
    uint32_t end_row;
};

DEVICE Batch batch_of(const GemmParams& p, uint32_t tile, uint32_t batch) {
    const uint32_t first = batch * FINISH_ROWS;
    return {tile, first, minimum(first + FINISH_ROWS, p.num_rows)};
}

// Rows of a batch that a warp finishes, and those of them that it makes together: as many as there are registers for, where
// heads are turned and beside the sums of many rows.
constexpr uint32_t WARP_ROWS = FINISH_ROWS / WARPGROUP_WARPS;
constexpr bool MAKES_FEW = !MOVES_REGISTERS && (EPILOGUE == QKV || (EPILOGUE == SWIGLU && PRODUCTS > 1));
constexpr uint32_t ROWS_AT_ONCE = minimum(WARP_ROWS, MAKES_FEW ? 4u : 8u);
// The same while a whole tile's sums are held.
constexpr uint32_t ROWS_BESIDE_SUMS = MOVES_REGISTERS ? (EPILOGUE == QKV ? 2 : 4) : ROWS_AT_ONCE;

DEVICE uint32_t first_of_warp(const Batch& batch) {
    return batch.first_row + warp_index() % WARPGROUP_WARPS;
}

// What the rows that this warp finishes first need besides their sums.
template <uint32_t AT_ONCE>
DEVICE void load_first(
    const GemmParams& p, const Batch& batch, const Outputs& outputs, Before (&before)[AT_ONCE]) {
    const uint32_t first = minimum(first_of_warp(batch), batch.end_row - 1);
    load_rows(p, matrix_n(p), batch.tile, outputs, first, WARPGROUP_WARPS, batch.end_row, before);
}

// Makes outputs of a batch, whose sums the warps have just left in shared memory.
template <uint32_t AT_ONCE>
DEVICE void finish_batch(
    const GemmParams& p, const Batch& batch, const Outputs& outputs, const Before (&before)[AT_ONCE],
    float* sums) {
    warpgroup_barrier();
    const auto sums_of = [&](uint32_t row) {
        const float* from = sums + (row - batch.first_row) * SUMS_STRIDE + lane_index();
        return Pair{from[0], from[32]};
    };
    const auto [tile, _, end] = batch;
    const uint32_t first = first_of_warp(batch);
    finish_loaded(p, matrix_n(p), tile, outputs, first, WARPGROUP_WARPS, end, before, sums_of);
    for (uint32_t done = AT_ONCE; done < WARP_ROWS; done += AT_ONCE) {
        const uint32_t row = first + done * WARPGROUP_WARPS;
        if (row < end) {
            finish_rows<AT_ONCE>(p, matrix_n(p), tile, outputs, row, WARPGROUP_WARPS, end, sums_of);
        }
    }
    // The next batch goes there.
    warpgroup_barrier();
}

DEVICE uint32_t tile_of(uint32_t pair) {
    return pair * PAIR_TILES + warpgroup_index();
}

constexpr uint32_t BATCHES = ROWS / FINISH_ROWS;
// Batches that are finished in line. Where heads are turned beside the sums of most rows a loop takes one register too many.
constexpr uint32_t BATCHES_IN_LINE = MOVES_REGISTERS && EPILOGUE == QKV ? BATCHES : 1;

struct Fours {
    Four of[FINISH_ROWS / 8];
};

// A batch's sums among those of a tile.
DEVICE Fours batch_sums(const Sums& sums, uint32_t batch) {
    Fours fours;
    UNROLL
    for (uint32_t j = 0; j < FINISH_ROWS / 8; ++j) {
        UNROLL
        for (uint32_t e = 0; e < 4; ++e) {
            const uint32_t at = batch * FINISH_ROWS / 2 + j * 4 + e;
            fours.of[j].of[e] = sums.of[at / (PRODUCT_ROWS / 2)][at % (PRODUCT_ROWS / 2)];
        }
    }
    return fours;
}

// Makes outputs of the sums of a whole tile. What takes most of the code is there once: batches differ in the registers that
// their sums are in.
DEVICE void finish_tile(const GemmParams& p, uint32_t pair, const Sums& sums, float* shared) {
    const Outputs outputs = outputs_of(p, tile_of(pair));
#pragma unroll BATCHES_IN_LINE
    for (uint32_t batch = 0; batch < BATCHES && batch * FINISH_ROWS < p.num_rows; ++batch) {
        const Batch rows = batch_of(p, tile_of(pair), batch);
        Before before[ROWS_BESIDE_SUMS];
        load_first(p, rows, outputs, before);
        UNROLL
        for (uint32_t i = 0; i < BATCHES; ++i) {
            if (i == batch) {
                leave_sums(batch_sums(sums, i).of, shared);
            }
        }
        finish_batch(p, rows, outputs, before, shared);
    }
}

// If a part was written: makes outputs of those shares of its pair that fall to this CTA.
DEVICE void settle(const GemmParams& p, const Order& order, const Shared& shared, Pending& pending) {
    if (!pending.is_open) {
        return;
    }
    const uint32_t pair = pending.counter;
    const bool has_tile = tile_of(pair) < order.tiles;
    const Outputs outputs = outputs_of(p, has_tile ? tile_of(pair) : 0);
    const uint32_t each = shares_of(p, order, pair).each;
    for (;;) {
        const uint32_t share = wait_until_told(shared.handover, pending);
        if (share == NO_SHARE) {
            break;
        }
        const uint32_t end = has_tile ? minimum((share + 1) * each * FINISH_ROWS, p.num_rows) : 0;
        for (uint32_t batch = share * each; batch * FINISH_ROWS < end; ++batch) {
            const Batch rows = batch_of(p, tile_of(pair), batch);
            Before before[ROWS_AT_ONCE];
            load_first(p, rows, outputs, before);
            Four four[FINISH_ROWS / 8];
            sum_parts(p, order, pair, batch, four);
            leave_sums(four, shared.sums);
            finish_batch(p, rows, outputs, before, shared.sums);
        }
        say_done(shared.handover);
    }
    pending.is_open = false;
}

// Makes outputs of a piece's sums, or leaves them to the CTA that is last to have a part. The part before is settled only
// when these sums need no registers any more.
DEVICE void finish_piece(
    const GemmParams& p, const Order& order, const Piece& piece, const Sums& sums, const Shared& shared,
    Pending& pending) {
    const bool is_part = num_units(piece) < order.k_units;
    if (is_part) {
        write_part(p, order.cta, piece.pair, sums);
    } else if (tile_of(piece.pair) < order.tiles) {
        finish_tile(p, piece.pair, sums, shared.sums);
    }
    settle(p, order, shared, pending);
    if (is_part) {
        hand_over(shared.handover, piece.pair, pending);
    }
}

#if ROWS <= 64
// Leaves the units of a piece to the other warpgroup.
DEVICE void skip_piece(const Stream& stream, uint32_t count, Cursor& at) {
    for (uint32_t unit = 0; unit < count; ++unit) {
        acquire(stream, at);
        release(stream.ring, at);
    }
}

// Multiplies the units of a piece, of this warpgroup's tile if there is one. While the products of a unit run the next
// one's weights are unpacked.
DEVICE void multiply_piece(const Stream& stream, uint32_t count, bool has_tile, Cursor& at, Sums& sums) {
    if (!has_tile) {
        return skip_piece(stream, count, at);
    }
    const uint32_t tile = warpgroup_index() * UNIT_BYTES;
    Weights weights[2];
    Cursor ahead = at;
    const auto load_next = [&](Weights& weights) {
        load_weights(weights, acquire(stream, ahead) + tile);
        advance(ahead);
    };
    load_next(weights[0]);
    for (uint32_t unit = 0; unit < count; unit += 2) {
        UNROLL
        for (uint32_t i = 0; i < 2 && unit + i < count; ++i) {
            begin_products(sums, weights[i], x_of(stage_at(stream.ring, at)));
            if (unit + i + 1 < count) {
                load_next(weights[1 - i]);
            }
            warpgroup_wait<0>();
            release(stream.ring, at);
        }
    }
}
#else
// The same one by one: products of so many rows take longer than all else, and their sums most registers. So many are left
// whose rows are shared.
DEVICE void multiply_piece(
    const Stream& stream, uint32_t count, bool has_tile, uint32_t& num_shared, Cursor& at, Sums& sums) {
    for (uint32_t unit = 0; unit < count; ++unit) {
        const uint8_t* stage = acquire(stream, at);
        if (has_tile) {
            Weights weights;
            load_weights(weights, stage + warpgroup_index() * UNIT_BYTES);
            begin_products(sums, weights, x_of(stage));
            warpgroup_wait<0>();
        }
        release_to_cluster(stream.ring, num_shared > 0, at);
        num_shared -= num_shared > 0 ? 1 : 0;
    }
}
#endif

// All units of this CTA, piece by piece.
DEVICE void consume(const GemmParams& p, const Order& order, const Shared& shared) {
    Cursor at = {0, 0};
    Pending pending = {false, 0, 0};
    [[maybe_unused]] uint32_t num_shared = order.num_shared;
    // Rows come behind the same wait of who copies them, so no test can tell that this one is here: outputs rest on it, not
    // on what a wait means for other threads.
    grid_wait();
    for (uint32_t unit = order.first; unit < order.last;) {
        const Piece piece = piece_at(order, unit);
        const uint32_t count = num_units(piece);
        const bool has_tile = tile_of(piece.pair) < order.tiles;
        Sums sums = {};
#if ROWS <= 64
        multiply_piece(shared.stream, count, has_tile, at, sums);
#else
        multiply_piece(shared.stream, count, has_tile, num_shared, at, sums);
#endif
        unit += count;
        finish_piece(p, order, piece, sums, shared, pending);
    }
    settle(p, order, shared, pending);
}

DEVICE void run(const GemmParams& p) {
    const Shared shared = carve(shared_memory());
    const auto units_of_cta = [&]() { return order_units(matrix_n(p), matrix_k(p), p.sharing_distance); };
    // Found before the barrier, but where registers move: what is known before that and needed behind it would be kept in memory.
    const Order early = MOVES_REGISTERS ? Order{} : units_of_cta();
    const auto order_of_role = [&]() { return MOVES_REGISTERS ? units_of_cta() : early; };
    if (thread_index() == 0) {
        handover_init(shared.handover);
        stream_init(shared.stream);
    }
    if constexpr (CLUSTER > 1) {
        // Behind this the barriers of both CTAs are there.
        cluster_sync();
    } else {
        barrier_all();
    }
    const uint32_t warp = warp_index();
    if constexpr (MOVES_REGISTERS) {
        if (warp < CONSUMER_WARPS) {
            take_registers<MULTIPLYING_REGISTERS>();
        } else {
            leave_registers<OTHER_REGISTERS>();
        }
    }
    if (warp < CONSUMER_WARPS) {
        const Order order = order_of_role();
        if (order.first < order.last) {
            consume(p, order, shared);
        }
    } else if (warp == WEIGHTS_WARP) {
        if (lane_index() == 0) {
            produce_weights(p, shared.stream.ring, order_of_role());
        }
    } else if (warp == COUNTING_WARP) {
        grid_wait();
        if (!OWNS_TILES && lane_index() == 0) {
            count_parts(p, order_of_role(), shared.handover);
        }
    } else if (warp <= LAST_WARP) {
        produce_rows(p, matrix_k(p), shared.stream, order_of_role());
    }
}
