// Softmax attention of 16 packed rows of a warp over one page of 16 positions, in registers.
//
// Which element stands where inside a product is free as long as both operands agree, and so is the
// order of positions. Both are chosen so that every lane reads whole pieces of memory and that
// scores, as the product leaves them, are the weights that the next product takes.
#pragma once

constexpr uint32_t ELEMENT_BYTES = KV == FP8 ? 1 : 2;
constexpr uint32_t KEY_BYTES = HEAD_DIM * ELEMENT_BYTES;  // one key
constexpr uint32_t KEY_CHUNKS = KEY_BYTES / 16;
constexpr uint32_t CHUNK_STEPS = 4 / ELEMENT_BYTES;       // products that four lanes' chunks feed
constexpr uint32_t NUM_STEPS = HEAD_DIM / 16;
constexpr uint32_t OUT_TILES = HEAD_DIM / 8;

// Weights are at most 2^8: halves then keep at full precision those that are 2^-22 of the largest.
constexpr float WEIGHT_BITS = 8.0f;

// Rows see no positions before their `first`: those of heads on hidden states.
#ifdef WINDOW
constexpr bool IS_WINDOWED = true;
#else
constexpr bool IS_WINDOWED = false;
#endif

// What the two rows of a lane see.
struct View {
    uint32_t base[2];
    uint64_t ancestors[2];
    uint32_t first[2];     // where rows are windowed, as what follows
    uint32_t all_after;    // from there on no row of the warp is kept from seeing by its first
};

// A lane's part of the softmax of its two rows. Scores in it are not scaled yet.
struct Softmax {
    float largest[2];
    float sum[2];
    float out[OUT_TILES][4];
};

DEVICE float minus_infinity() {
    return bits_float(0xff800000u);
}

DEVICE Softmax empty_softmax() {
    return {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}, {}};
}

// The packed row of a lane: the warp's row lane / 4, or 8 more.
DEVICE uint32_t lane_row(uint32_t half) {
    return (IS_WIDE ? 16 * warp_index() : 0) + lane_index() / 4 + 8 * half;
}

// Lane t of a quad feeds chunk 4i + t of a key to CHUNK_STEPS products, four elements to each.
DEVICE void load_queries(const AttentionParams& p, const Item& item,
                         uint32_t (&query)[NUM_STEPS][4]) {
    UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t packed = lane_row(half);
        const bool exists = packed < num_packed(item);
        const uint16_t* from = p.queries + (exists ? row_offset(p, item, packed) : 0);
        UNROLL
        for (uint32_t step = 0; step < NUM_STEPS; ++step) {
            const uint32_t chunk = 4 * (step / CHUNK_STEPS) + lane_index() % 4;
            const uint32_t element = 4 * (chunk * CHUNK_STEPS + step % CHUNK_STEPS);
            // As pairs they would be put into fours again for every product, but that is what there are registers for where
            // rows are windowed.
            if constexpr (IS_WINDOWED) {
                Uint2 pair = {0, 0};
                if (exists) {
                    pair = *reinterpret_cast<const Uint2*>(from + element);
                }
                query[step][half] = pair.x;
                query[step][half + 2] = pair.y;
            } else {
                const uint32_t* pair = reinterpret_cast<const uint32_t*>(from + element);
                query[step][half] = exists ? pair[0] : 0;
                query[step][half + 2] = exists ? pair[1] : 0;
            }
        }
    }
}

DEVICE View load_view(const AttentionParams& p, const Item& item) {
    View view = {{0, 0}, {0, 0}, {0, 0}, 0};
    UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t packed = lane_row(half);
        if (packed < num_packed(item)) {
            const Row row = p.rows[packed_row(item, packed) / GROUP];
            if (row.sequence != NO_SEQUENCE) {
                view.base[half] = row.base;
                view.ancestors[half] = row.ancestors;
                if constexpr (IS_WINDOWED) {
                    view.first[half] = row.first;
                }
            }
        }
    }
    if constexpr (IS_WINDOWED) {
        view.all_after = warp_max(maximum(view.first[0], view.first[1]));
    }
    return view;
}

// Where a chunk of a key stands in shared memory. A quarter of a warp reads four chunks of an even
// and of an odd key at once, which must not share banks; keys of 64 bytes lie side by side as they
// are.
DEVICE uint32_t key_chunk_offset(uint32_t token, uint32_t chunk) {
    const uint32_t stands = KEY_CHUNKS > 4 ? chunk ^ (token % 2 * 4) : chunk;
    return token * KEY_BYTES + stands * 16;
}

DEVICE void score_e4m3(uint32_t key, const uint32_t (&query)[4], float (&score)[4]) {
    mma_f16(score, query, e4m3_to_half2(key & 0xffffu), e4m3_to_half2(key >> 16));
}

// Column 2t + e of score tile j is token 4t + 2j + e of the page: so a lane's four tokens lie side
// by side in the values.
DEVICE void score_page(const uint8_t* keys, const uint32_t (&query)[NUM_STEPS][4],
                       float (&score)[2][4]) {
    const uint32_t column = lane_index() / 4;
    const uint32_t token = 4 * (column / 2) + column % 2;
    const uint8_t* even = keys + key_chunk_offset(token, lane_index() % 4);
    const uint8_t* odd = keys + key_chunk_offset(token, lane_index() % 4 + 4);
    UNROLL
    for (uint32_t tile = 0; tile < 2; ++tile) {
        UNROLL
        for (uint32_t i = 0; i < KEY_CHUNKS / 4; ++i) {
            const uint8_t* from = (i % 2 == 0 ? even : odd) + 2 * tile * KEY_BYTES + i / 2 * 128;
            const Uint4 key = *reinterpret_cast<const Uint4*>(from);
            const uint32_t step = i * CHUNK_STEPS;
            if constexpr (KV == FP8) {
                score_e4m3(key.x, query[step], score[tile]);
                score_e4m3(key.y, query[step + 1], score[tile]);
                score_e4m3(key.z, query[step + 2], score[tile]);
                score_e4m3(key.w, query[step + 3], score[tile]);
            } else {
                mma_f16(score[tile], query[step], key.x, key.y);
                mma_f16(score[tile], query[step + 1], key.z, key.w);
            }
        }
    }
}

DEVICE bool sees(uint32_t base, uint64_t ancestors, uint32_t token) {
    const uint32_t ahead = token - base;
    return token < base || (ahead < 64 && (ancestors >> ahead & 1) != 0);
}

// Hides the scores of what a row does not see. Returns masks for the lane's four tokens of the
// values: what no row sees may never have been written, and a weight of 0 does not stop a NaN.
DEVICE Uint2 hide_page(const View& view, uint32_t first_token, float (&score)[2][4]) {
    uint32_t seen[2] = {0, 0};
    UNROLL
    for (uint32_t tile = 0; tile < 2; ++tile) {
        UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t token = first_token + 4 * (lane_index() % 4) + 2 * tile + i % 2;
            bool is_seen = sees(view.base[i / 2], view.ancestors[i / 2], token);
            if constexpr (IS_WINDOWED) {
                is_seen = is_seen && token >= view.first[i / 2];
            }
            score[tile][i] = is_seen ? score[tile][i] : minus_infinity();
            seen[tile] |= is_seen ? 0xffffu << (16 * (i % 2)) : 0;
        }
        for (uint32_t lanes = 4; lanes < 32; lanes *= 2) {
            seen[tile] |= shuffle_xor(seen[tile], lanes);
        }
    }
    return {seen[0], seen[1]};
}

// The largest score of a row's page, or before it.
DEVICE float largest_score(const float (&score)[2][4], uint32_t half, float before) {
    const float first = fmaxf(score[0][2 * half], score[0][2 * half + 1]);
    const float second = fmaxf(score[1][2 * half], score[1][2 * half + 1]);
    float largest = fmaxf(before, fmaxf(first, second));
    largest = fmaxf(largest, shuffle_xor(largest, 1));
    return fmaxf(largest, shuffle_xor(largest, 2));
}

// Turns scores into weights, as operand of the product with the values. A row that sees nothing of
// the page keeps its state to the bit: its largest score stays, the factor is 1, and what is added
// is 0.
DEVICE void weigh_page(const float (&score)[2][4], float scale, Softmax& softmax,
                       uint32_t (&weight)[4]) {
    float factor[2];
    UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        const float before = softmax.largest[half];
        const float largest = largest_score(score, half, before);
        const bool sees_nothing = largest == minus_infinity();
        const float shift = sees_nothing ? 0.0f : fmaf(-largest, scale, WEIGHT_BITS);
        float sum = 0.0f;
        UNROLL
        for (uint32_t tile = 0; tile < 2; ++tile) {
            const float low = ex2(fmaf(score[tile][2 * half], scale, shift));
            const float high = ex2(fmaf(score[tile][2 * half + 1], scale, shift));
            const uint32_t upper = float_to_half(high);
            weight[2 * tile + half] = upper << 16 | float_to_half(low);
            sum += low + high;
        }
        factor[half] = largest == before ? 1.0f : ex2((before - largest) * scale);
        softmax.largest[half] = largest;
        softmax.sum[half] = fmaf(softmax.sum[half], factor[half], sum);
    }
    if (ballot(factor[0] != 1.0f || factor[1] != 1.0f) == 0) {
        return;
    }
    UNROLL
    for (uint32_t tile = 0; tile < OUT_TILES; ++tile) {
        UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            softmax.out[tile][i] *= factor[i / 2];
        }
    }
}

// A lane's four values as halves.
DEVICE Uint2 load_values(const uint8_t* from) {
    if constexpr (KV == FP8) {
        const uint32_t four = *reinterpret_cast<const uint32_t*>(from);
        return {e4m3_to_half2(four & 0xffffu), e4m3_to_half2(four >> 16)};
    } else {
        return *reinterpret_cast<const Uint2*>(from);
    }
}

// Most pages hide nothing.
template <bool IS_MASKED>
DEVICE void add_values(const uint8_t* values, const uint32_t (&weight)[4], const Uint2& seen,
                       Softmax& softmax) {
    const uint8_t* from = values + lane_index() * 4 * ELEMENT_BYTES;
    UNROLL
    for (uint32_t tile = 0; tile < OUT_TILES; ++tile) {
        Uint2 four = load_values(from + tile * 8 * PAGE_TOKENS * ELEMENT_BYTES);
        if constexpr (IS_MASKED) {
            four = {four.x & seen.x, four.y & seen.y};
        }
        mma_f16(softmax.out[tile], weight, four.x, four.y);
    }
}
