// One primitive at a time, for each thread of a warp: what goes in and what comes out are words.
#include "common/prims.cuh"

struct ProbeParams {
    const uint32_t* input;
    uint32_t* output;
    uint32_t probe;
    uint32_t argument;
};

constexpr uint32_t NUM_THREADS = 64;

DEVICE void write_double(uint32_t* output, double value) {
    output[0] = static_cast<uint32_t>(double_bits(value));
    output[1] = static_cast<uint32_t>(double_bits(value) >> 32);
}

DEVICE double read_double(const uint32_t* input) {
    return bits_double(input[0] | uint64_t{input[1]} << 32);
}

// Values of one word each.
DEVICE uint32_t convert(uint32_t probe, uint32_t word) {
    switch (probe) {
        case 0:
            return float_bits(half_to_float(static_cast<uint16_t>(word)));
        case 1:
            return float_to_half(bits_float(word));
        case 2:
            return float_to_half_sat(bits_float(word));
        case 3:
            return e4m3_to_half2(word);
        case 4:
            return float_to_e4m3(bits_float(word));
        case 5:
            return float_bits(ex2(bits_float(word)));
        case 6:
            return leading_zeros(word) | count_ones(word) << 8 |
                   count_ones(uint64_t{word} << 20) << 16;
        case 7:
            return multiply_high(word, 0xd2511f53u);
        case 8:
            return float_bits(reciprocal(bits_float(word)));
    }
    return 0;
}

DEVICE uint32_t cooperate(uint32_t probe, uint32_t argument, uint32_t word) {
    switch (probe) {
        case 10:
            return shuffle_xor(word, argument);
        case 11:
            return shuffle_from(word, (lane_index() * 7 + argument) % 32);
        case 12:
            return shuffle_up(word, argument);
        case 13:
            return ballot((word >> argument & 1) != 0);
        case 14:
            return warp_sum(word);
        case 15:
            return float_bits(warp_max(bits_float(word)));
        case 16:
            return float_bits(warp_sum(bits_float(word)));
    }
    return 0;
}

// Four words a lane of a, two of b, four of c in; c out.
DEVICE void product(const ProbeParams& p, uint32_t thread) {
    const uint32_t* in = p.input + thread * 10;
    const uint32_t a[4] = {in[0], in[1], in[2], in[3]};
    float c[4] = {bits_float(in[6]), bits_float(in[7]), bits_float(in[8]), bits_float(in[9])};
    mma_f16(c, a, in[4], in[5]);
    for (uint32_t i = 0; i < 4; i++) {
        p.output[thread * 4 + i] = float_bits(c[i]);
    }
}

// A warp's 32 rows of 16 bytes, row i of matrix j at 8j + i, stored in another order.
DEVICE void matrix(const ProbeParams& p, uint32_t thread) {
    uint32_t* rows = reinterpret_cast<uint32_t*>(shared_memory()) + warp_index() * 128;
    const uint32_t place = (lane_index() * 5 + p.argument) % 32;
    for (uint32_t i = 0; i < 4; i++) {
        rows[place * 4 + i] = p.input[thread * 4 + i];
    }
    warp_sync();
    uint32_t r[4];
    load_matrix_x4(r, rows + place * 4);
    for (uint32_t i = 0; i < 4; i++) {
        p.output[thread * 4 + i] = r[i];
    }
}

// Four groups, the last two still allowed to be under way: the first two can be read.
DEVICE void copies(const ProbeParams& p, uint32_t thread) {
    Uint4* places = reinterpret_cast<Uint4*>(shared_memory()) + thread * 4;
    const Uint4* from = reinterpret_cast<const Uint4*>(p.input) + thread * 4;
    for (uint32_t group = 0; group < 4; group++) {
        async_copy16(places + group, from + group);
        async_commit();
    }
    async_wait<2>();
    p.output[thread * 4] = places[0].y;
    p.output[thread * 4 + 1] = places[1].z;
    // Under way or not: poison or the word.
    p.output[thread * 4 + 2] = places[3].x;
    async_wait<0>();
    p.output[thread * 4 + 3] = places[3].x;
}

KERNEL(probe, ProbeParams, NUM_THREADS, 1) {
    const uint32_t thread = block_index() * NUM_THREADS + thread_index();
    if (p.probe < 10) {
        p.output[thread] = convert(p.probe, p.input[thread]);
    } else if (p.probe < 20) {
        p.output[thread] = cooperate(p.probe, p.argument, p.input[thread]);
    } else if (p.probe == 20) {
        product(p, thread);
    } else if (p.probe == 21) {
        matrix(p, thread);
    } else if (p.probe == 22) {
        copies(p, thread);
    } else if (p.probe == 23) {
        write_double(p.output + thread * 2, warp_sum(read_double(p.input + thread * 2)));
    } else if (p.probe == 24) {
        const uint32_t word = p.input[thread];
        atomic_add(p.output, word);
        atomic_max(p.output + 1, word);
        atomic_or(p.output + 2, word & 1u << lane_index());
        atomic_add_acq_rel(p.output + 3, 1);
    }
}
