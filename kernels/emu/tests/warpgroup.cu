// c[128][N] += a[128][K] * b[N][K] by two warpgroups of 64 rows each, in every way that there is: b
// and, by form, a are read in shared memory, through two stages of 128 bytes of each row.
#include "common/prims.cuh"
#include "common/warpgroup.cuh"

constexpr uint32_t NUM_THREADS = 256;
constexpr uint32_t NUM_GROUPS = NUM_THREADS / 32 / WARPGROUP_WARPS;
constexpr uint32_t GROUP_ROWS = 64;
constexpr uint32_t MAX_COLUMNS = 256;
constexpr uint32_t ROW_BYTES = 128;
constexpr uint32_t ATOM_BYTES = 8 * ROW_BYTES;
constexpr uint32_t STEP_BYTES = 32;
constexpr uint32_t A_BYTES = NUM_GROUPS * GROUP_ROWS * ROW_BYTES;
constexpr uint32_t STAGE_BYTES = A_BYTES + MAX_COLUMNS * ROW_BYTES;

enum Form : uint32_t {
    // One warp after the other, with the instructions that there have always been.
    WARPS,
    FRAGMENTS,
    SHARED,
    SHARED_E4M3,
};

struct WarpgroupParams {
    const uint8_t* a;
    const uint8_t* b;
    float* c;
    uint32_t row_bytes;
    uint32_t columns;
    uint32_t form;
    uint32_t unused;
};

// The groups' atoms of a take turns.
DEVICE uint32_t a_offset(uint32_t row) {
    const uint32_t atom = row % GROUP_ROWS / 8 * NUM_GROUPS + row / GROUP_ROWS;
    return atom * ATOM_BYTES + row % 8 * ROW_BYTES;
}

DEVICE uint32_t swizzle(uint32_t offset) {
    return offset ^ (offset >> 3 & 0x70u);
}

DEVICE void load_stage(const WarpgroupParams& p, uint8_t* stage, uint32_t chunk) {
    const uint32_t num_rows = NUM_GROUPS * GROUP_ROWS + p.columns;
    for (uint32_t i = thread_index(); i < num_rows * 8; i += NUM_THREADS) {
        const uint32_t row = i / 8;
        const bool is_a = row < NUM_GROUPS * GROUP_ROWS;
        const uint32_t own_row = is_a ? row : row - NUM_GROUPS * GROUP_ROWS;
        const uint32_t offset = is_a ? a_offset(row) : A_BYTES + own_row * ROW_BYTES;
        const uint8_t* from = (is_a ? p.a : p.b) + uint64_t{own_row} * p.row_bytes;
        async_copy16(stage + swizzle(offset + i % 8 * 16), from + chunk * ROW_BYTES + i % 8 * 16);
    }
    async_commit();
    async_wait<0>();
}

DEVICE uint32_t load_pair(const uint8_t* stage, uint32_t offset) {
    return *reinterpret_cast<const uint32_t*>(stage + swizzle(offset));
}

DEVICE void load_fragment(uint32_t (&a)[4], const uint8_t* stage, uint32_t step) {
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t row = warp_index() * 16 + lane_index() / 4 + i % 2 * 8;
        a[i] = load_pair(stage, a_offset(row) + step * STEP_BYTES + lane_index() % 4 * 4 + i / 2 * 16);
    }
}

// By mma_f16, eight columns at a time.
template <uint32_t N>
DEVICE void multiply_warps(float (&c)[N / 2], const uint8_t* stage) {
    for (uint32_t step = 0; step < ROW_BYTES / STEP_BYTES; step++) {
        uint32_t a[4];
        load_fragment(a, stage, step);
        UNROLL
        for (uint32_t tile = 0; tile < N / 8; tile++) {
            float (&sums)[4] = *reinterpret_cast<float (*)[4]>(&c[tile * 4]);
            const uint32_t row = A_BYTES + (tile * 8 + lane_index() / 4) * ROW_BYTES;
            const uint32_t offset = row + step * STEP_BYTES + lane_index() % 4 * 4;
            mma_f16(sums, a, load_pair(stage, offset), load_pair(stage, offset + 16));
        }
    }
}

template <uint32_t N, uint32_t FORM>
DEVICE void multiply_stage(float (&c)[N / 2], const uint8_t* stage) {
    if constexpr (FORM == WARPS) {
        multiply_warps<N>(c, stage);
        return;
    }
    uint32_t a[ROW_BYTES / STEP_BYTES][4];
    if constexpr (FORM == FRAGMENTS) {
        UNROLL
        for (uint32_t step = 0; step < ROW_BYTES / STEP_BYTES; step++) {
            load_fragment(a[step], stage, step);
        }
    }
    warpgroup_fence();
    UNROLL
    for (uint32_t step = 0; step < ROW_BYTES / STEP_BYTES; step++) {
        const uint8_t* first = stage + step * STEP_BYTES;
        const uint64_t b = matrix_descriptor(first + A_BYTES, ATOM_BYTES);
        const uint32_t group = warp_index() / WARPGROUP_WARPS;
        const uint64_t whole = matrix_descriptor(first + group * ATOM_BYTES, NUM_GROUPS * ATOM_BYTES);
        if constexpr (FORM == FRAGMENTS) {
            wgmma_f16<N>(c, a[step], b);
        } else if constexpr (FORM == SHARED) {
            wgmma_f16<N>(c, whole, b);
        } else {
            wgmma_e4m3<N>(c, whole, b);
        }
    }
    warpgroup_commit();
    warpgroup_wait<1>();
}

DEVICE uint64_t place_of(uint32_t columns, uint32_t i) {
    const uint32_t row = warp_index() * 16 + lane_index() / 4 + i % 4 / 2 * 8;
    return uint64_t{row} * columns + i / 4 * 8 + lane_index() % 4 * 2 + i % 2;
}

template <uint32_t N, uint32_t FORM>
DEVICE void run(const WarpgroupParams& p) {
    float c[N / 2];
    UNROLL
    for (uint32_t i = 0; i < N / 2; i++) {
        c[i] = p.c[place_of(N, i)];
    }
    for (uint32_t chunk = 0; chunk < p.row_bytes / ROW_BYTES; chunk++) {
        uint8_t* stage = shared_memory() + chunk % 2 * STAGE_BYTES;
        load_stage(p, stage, chunk);
        fence_async_proxy();
        barrier_all();
        multiply_stage<N, FORM>(c, stage);
        // The next stage is the one of the products that all have waited for.
        barrier_all();
    }
    warpgroup_wait<0>();
    UNROLL
    for (uint32_t i = 0; i < N / 2; i++) {
        p.c[place_of(N, i)] = c[i];
    }
}

// Of so many columns in shared memory alone.
template <uint32_t N>
DEVICE void choose_element(const WarpgroupParams& p) {
    if (p.form == SHARED) {
        run<N, SHARED>(p);
    } else {
        run<N, SHARED_E4M3>(p);
    }
}

template <uint32_t N>
DEVICE void choose_form(const WarpgroupParams& p) {
    if (p.form == WARPS) {
        run<N, WARPS>(p);
    } else if (p.form == FRAGMENTS) {
        run<N, FRAGMENTS>(p);
    } else {
        run<N, SHARED>(p);
    }
}

KERNEL(warpgroup, WarpgroupParams, NUM_THREADS, 1) {
    if (p.columns == 8) {
        choose_form<8>(p);
    } else if (p.columns == 16) {
        choose_form<16>(p);
    } else if (p.columns == 32) {
        choose_form<32>(p);
    } else if (p.columns == 64) {
        choose_form<64>(p);
    } else if (p.columns == 128) {
        choose_element<128>(p);
    } else {
        choose_element<256>(p);
    }
}
