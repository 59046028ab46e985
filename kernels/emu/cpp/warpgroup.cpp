// Products of warpgroups. Each warp has its own share: what the four have in common is that all of them issue the same. A
// product is under way from where it is issued to the wait for its group; in between it reads shared memory and its sums
// when it likes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <immintrin.h>
#include <memory>

#include "block.h"
#include "collective.h"
#include "prims_cpu.h"
#include "race.h"
#include "schedule.h"
#include "warpgroup_cpu.h"

namespace emu {

namespace {

// Bytes of k of a product: 16 halves or 32 bytes of e4m3, which are widened.
constexpr uint32_t DEPTH_BYTES = 32;
constexpr uint32_t HALVES_DEPTH = 16;
constexpr uint32_t E4M3_DEPTH = 32;
constexpr uint32_t MOST_COLUMNS = 256;
constexpr uint32_t ATOM_ROWS = 8;
constexpr uint32_t ROW_BYTES = 128;

// Fields of a descriptor, in units of 16 bytes.
constexpr uint32_t ADDRESS_BITS = 14;
constexpr uint32_t STRIDE_SHIFT = 32;
constexpr uint32_t SWIZZLE_SHIFT = 62;
constexpr uint64_t SWIZZLE_128 = 1;

// An operand in shared memory by its descriptor.
struct Operand {
    uint32_t first;
    uint32_t atom_stride;
};

Operand operand_of(uint64_t descriptor) {
    const uint64_t mask = (1u << ADDRESS_BITS) - 1;
    if (descriptor >> SWIZZLE_SHIFT != SWIZZLE_128) {
        fail("a descriptor %#llx that does not say rows of 128 swizzled bytes",
             static_cast<unsigned long long>(descriptor));
    }
    return {static_cast<uint32_t>(descriptor & mask) * 16,
            static_cast<uint32_t>(descriptor >> STRIDE_SHIFT & mask) * 16};
}

// The elements of a row as halves, from where the swizzle has put their two chunks.
void load_row(const Operand& operand, uint32_t row, bool is_e4m3, uint16_t (&halves)[E4M3_DEPTH]) {
    const Block& block = *current->block;
    const uint32_t limit = block.grid->launch->shared_bytes;
    uint8_t bytes[DEPTH_BYTES];
    for (uint32_t chunk = 0; chunk < 2; chunk++) {
        uint32_t at = operand.first + row / ATOM_ROWS * operand.atom_stride;
        at += row % ATOM_ROWS * ROW_BYTES + chunk * 16;
        at ^= (at >> 7 & 7) << 4;
        if (at + 16 > limit) {
            fail("a product reads row %u at %u of %u bytes of shared memory", row, at, limit);
        }
        race::reads(block.shared + at, 16);
        memcpy(bytes + chunk * 16, block.shared + at, 16);
    }
    if (!is_e4m3) {
        memcpy(halves, bytes, DEPTH_BYTES);
        return;
    }
    for (uint32_t k = 0; k < DEPTH_BYTES; k++) {
        halves[k] = E4M3.halves[bytes[k]];
    }
}

// All of a warp's share, `b` by columns.
struct Share {
    alignas(32) uint16_t a[16][E4M3_DEPTH];
    alignas(32) uint16_t b[MOST_COLUMNS][E4M3_DEPTH];
    alignas(32) float c[16][MOST_COLUMNS];
};

// What a sum and products of e4m3 come to: Hopper aligns all of them to the largest, and keeps so many bits behind its first one.
constexpr float KEPT = 1 << 13;
// Below it they are added as they are.
constexpr float LEAST_ALIGNED = 1e-18f;

// Products of halves are added one after the other, as by mma_f16.
void multiply_halves(Share& share, uint32_t columns) {
    for (uint32_t row = 0; row < 16; row++) {
        for (uint32_t column = 0; column < columns; column++) {
            float sum = share.c[row][column];
            for (uint32_t k = 0; k < HALVES_DEPTH; k++) {
                sum += half_to_float(share.a[row][k]) * half_to_float(share.b[column][k]);
            }
            share.c[row][column] = sum;
        }
    }
}

void multiply_e4m3(Share& share, uint32_t columns) {
    for (uint32_t row = 0; row < 16; row++) {
        for (uint32_t column = 0; column < columns; column++) {
            float terms[E4M3_DEPTH + 1] = {share.c[row][column]};
            float largest = std::fabs(terms[0]);
            for (uint32_t k = 0; k < E4M3_DEPTH; k++) {
                const float term = half_to_float(share.a[row][k]) * half_to_float(share.b[column][k]);
                largest = std::max(largest, std::fabs(term));
                terms[k + 1] = term;
            }
            int exponent = 0;
            std::frexp(largest, &exponent);
            const float unit = largest < LEAST_ALIGNED ? 1.0f : std::ldexp(1.0f / KEPT, exponent - 1);
            float sum = 0.0f;
            for (const float term : terms) {
                sum += largest < LEAST_ALIGNED ? term : std::trunc(term / unit);
            }
            share.c[row][column] = sum * unit;
        }
    }
}

#define VECTORS __attribute__((target("avx2,f16c,fma")))

VECTORS inline __m256 widened(const uint16_t* halves) {
    return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(halves)));
}

template <uint32_t DEPTH>
VECTORS inline void widen_rows(const Share& share, float (&a)[16][DEPTH]) {
    for (uint32_t row = 0; row < 16; row++) {
        for (uint32_t k = 0; k < DEPTH; k += 8) {
            _mm256_store_ps(&a[row][k], widened(&share.a[row][k]));
        }
    }
}

// Eight columns from `first` on, one vector for each k.
template <uint32_t DEPTH>
VECTORS inline void widen_columns(const Share& share, uint32_t first, __m256 (&b)[DEPTH]) {
    for (uint32_t k = 0; k < DEPTH; k++) {
        alignas(16) uint16_t column[8];
        for (uint32_t i = 0; i < 8; i++) {
            column[i] = share.b[first + i][k];
        }
        b[k] = widened(column);
    }
}

// Products of e4m3 with vectors of eight columns.
VECTORS void multiply_e4m3_vectors(Share& share, uint32_t columns) {
    alignas(32) float a[16][E4M3_DEPTH];
    widen_rows(share, a);
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const __m256 power = _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000));
    const __m256 least = _mm256_set1_ps(LEAST_ALIGNED);
    for (uint32_t first = 0; first < columns; first += 8) {
        __m256 b[E4M3_DEPTH];
        widen_columns(share, first, b);
        for (uint32_t row = 0; row < 16; row++) {
            __m256 terms[E4M3_DEPTH];
            const __m256 old = _mm256_load_ps(&share.c[row][first]);
            __m256 largest = _mm256_and_ps(old, magnitude);
            for (uint32_t k = 0; k < E4M3_DEPTH; k++) {
                terms[k] = _mm256_mul_ps(_mm256_set1_ps(a[row][k]), b[k]);
                // What is no number may be lost here; the sum has it all the same.
                largest = _mm256_max_ps(largest, _mm256_and_ps(terms[k], magnitude));
            }
            const __m256 is_aligned = _mm256_cmp_ps(largest, least, _CMP_GE_OQ);
            const __m256 first_bit = _mm256_and_ps(largest, power);
            const __m256 one = _mm256_set1_ps(1.0f);
            const __m256 unit =
                _mm256_blendv_ps(one, _mm256_mul_ps(first_bit, _mm256_set1_ps(1.0f / KEPT)), is_aligned);
            const __m256 factor = _mm256_div_ps(one, unit);
            const auto aligned = [&](__m256 term) VECTORS {
                const __m256 units = _mm256_mul_ps(term, factor);
                const __m256 whole = _mm256_round_ps(units, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
                return _mm256_blendv_ps(units, whole, is_aligned);
            };
            __m256 sum = aligned(old);
            for (uint32_t k = 0; k < E4M3_DEPTH; k++) {
                sum = _mm256_add_ps(sum, aligned(terms[k]));
            }
            _mm256_store_ps(&share.c[row][first], _mm256_mul_ps(sum, unit));
        }
    }
}

// Products of halves with vectors of eight columns.
VECTORS void multiply_halves_vectors(Share& share, uint32_t columns) {
    constexpr uint32_t DEPTH = HALVES_DEPTH;
    alignas(32) float a[16][DEPTH];
    widen_rows(share, a);
    for (uint32_t first = 0; first < columns; first += 8) {
        __m256 b[DEPTH];
        widen_columns(share, first, b);
        for (uint32_t row = 0; row < 16; row += 4) {
            __m256 sums[4];
#pragma GCC unroll 4
            for (uint32_t i = 0; i < 4; i++) {
                sums[i] = _mm256_load_ps(&share.c[row + i][first]);
            }
            for (uint32_t k = 0; k < DEPTH; k++) {
#pragma GCC unroll 4
                for (uint32_t i = 0; i < 4; i++) {
                    sums[i] = _mm256_fmadd_ps(_mm256_set1_ps(a[row + i][k]), b[k], sums[i]);
                }
            }
#pragma GCC unroll 4
            for (uint32_t i = 0; i < 4; i++) {
                _mm256_store_ps(&share.c[row + i][first], sums[i]);
            }
        }
    }
}

const bool HAS_VECTORS = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
                         __builtin_cpu_supports("fma");

// Calls `each(element of a lane, row, column)` for a lane's sums.
template <class Each>
inline void for_sums(uint32_t columns, uint32_t lane, Each each) {
    for (uint32_t i = 0; i < columns / 2; i++) {
        each(i, lane / 4 + i % 4 / 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2);
    }
}

// One for each thread of the host, neither on a fiber's stack nor in the little room that a library has for its threads.
Share& workspace() {
    thread_local std::unique_ptr<Share> own;
    if (!own) {
        own = std::make_unique<Share>();
    }
    return *own;
}

void perform(const WarpProduct& product) {
    Share& share = workspace();
    if (product.has_fragments) {
        for (uint32_t row = 0; row < 16; row++) {
            memcpy(share.a[row], product.fragments[row], DEPTH_BYTES);
        }
    } else {
        const Operand a = operand_of(product.a);
        const uint32_t first = current->warp->index % 4 * 16;
        for (uint32_t row = 0; row < 16; row++) {
            load_row(a, first + row, product.is_e4m3, share.a[row]);
        }
    }
    const Operand b = operand_of(product.b);
    for (uint32_t column = 0; column < product.columns; column++) {
        load_row(b, column, product.is_e4m3, share.b[column]);
    }
    for (uint32_t lane = 0; lane < LANES; lane++) {
        for_sums(product.columns, lane, [&](uint32_t i, uint32_t row, uint32_t column) {
            share.c[row][column] = product.sums[lane][i];
        });
    }
    if (product.is_e4m3) {
        (HAS_VECTORS ? multiply_e4m3_vectors : multiply_e4m3)(share, product.columns);
    } else {
        (HAS_VECTORS ? multiply_halves_vectors : multiply_halves)(share, product.columns);
    }
    for (uint32_t lane = 0; lane < LANES; lane++) {
        for_sums(product.columns, lane, [&](uint32_t i, uint32_t row, uint32_t column) {
            product.sums[lane][i] = share.c[row][column];
        });
    }
}

// Performs so many of the oldest products: they follow each other.
void perform_oldest(WarpgroupShare& share, size_t count) {
    for (size_t i = 0; i < count; i++) {
        perform(share.products[i]);
    }
    share.products.erase(share.products.begin(), share.products.begin() + static_cast<long>(count));
}

// Some products may be done at any time.
void progress(WarpgroupShare& share) {
    const uint32_t count = static_cast<uint32_t>(share.products.size());
    if (machine->schedule->landing == Landing::AtOnce) {
        perform_oldest(share, count);
    } else if (machine->schedule->landing == Landing::AnyTime) {
        perform_oldest(share, random_below(count + 1));
    }
}

struct WgmmaArgument {
    bool is_e4m3;
    uint32_t columns;
    float* c;
    const uint32_t* fragment;
    uint64_t a;
    uint64_t b;
};

void collect_fragments(WgmmaArgument** lanes, WarpProduct& product) {
    for (uint32_t lane = 0; lane < LANES; lane++) {
        const uint32_t group = lane / 4;
        const uint32_t column = lane % 4 * 2;
        for (uint32_t i = 0; i < 4; i++) {
            uint16_t* to = &product.fragments[group + i % 2 * 8][column + i / 2 * 8];
            memcpy(to, &lanes[lane]->fragment[i], 4);
        }
    }
}

void issue(WgmmaArgument** lanes) {
    WarpgroupShare& share = current->warp->warpgroup;
    if (!share.is_fenced) {
        fail("a product of a warpgroup without a warpgroup_fence since the last commit");
    }
    const WgmmaArgument& first = *lanes[0];
    WarpProduct product;
    product.columns = first.columns;
    product.is_e4m3 = first.is_e4m3;
    product.has_fragments = first.fragment != nullptr;
    product.a = first.a;
    product.b = first.b;
    product.group = share.open_group;
    for (uint32_t lane = 0; lane < LANES; lane++) {
        const WgmmaArgument& own = *lanes[lane];
        if (own.columns != first.columns || own.is_e4m3 != first.is_e4m3 || own.a != first.a || own.b != first.b) {
            fail("lane %u has another product than lane 0", lane);
        }
        product.sums[lane] = own.c;
    }
    if (product.has_fragments) {
        collect_fragments(lanes, product);
    }
    share.num_issued++;
    share.products.push_back(product);
    progress(share);
}

}  // namespace

void warpgroup_fence() {
    char nothing = 0;
    join(Collective::WarpgroupFence, nothing,
         [](char**) { current->warp->warpgroup.is_fenced = true; });
}

void warpgroup_commit() {
    race::called_from(__builtin_return_address(0));
    char nothing = 0;
    join(Collective::WarpgroupCommit, nothing, [](char**) {
        WarpgroupShare& share = current->warp->warpgroup;
        share.open_group++;
        share.is_fenced = false;
        progress(share);
    });
}

void warpgroup_wait(uint32_t pending) {
    race::called_from(__builtin_return_address(0));
    join(Collective::WarpgroupWait, pending, [](uint32_t** lanes) {
        WarpgroupShare& share = current->warp->warpgroup;
        size_t due = 0;
        while (due < share.products.size() &&
               share.products[due].group + *lanes[0] < share.open_group) {
            due++;
        }
        perform_oldest(share, due);
        progress(share);
    });
    maybe_yield();
}

uint64_t matrix_descriptor(const void* first, uint32_t atom_stride) {
    const uint8_t* pointer = static_cast<const uint8_t*>(first);
    const uint64_t address = static_cast<uint64_t>(pointer - current->block->shared);
    if (address % 16 != 0 || address >> (ADDRESS_BITS + 4) != 0) {
        fail("a matrix at %lld of shared memory", static_cast<long long>(address));
    }
    return address / 16 | 1ull << 16 | static_cast<uint64_t>(atom_stride / 16) << STRIDE_SHIFT |
           SWIZZLE_128 << SWIZZLE_SHIFT;
}

void wgmma(bool is_e4m3, uint32_t columns, float* c, const uint32_t* fragment, uint64_t a, uint64_t b) {
    race::called_from(__builtin_return_address(0));
    WgmmaArgument argument{is_e4m3, columns, c, fragment, a, b};
    join(Collective::Wgmma, argument, issue);
}

void check_warpgroups(const Block& block) {
    for (uint32_t index = 0; index < block.num_warps; index++) {
        const WarpgroupShare& share = block.warps[index].warpgroup;
        const WarpgroupShare& first = block.warps[index / 4 * 4].warpgroup;
        if (!share.products.empty()) {
            fail("warp %u ends before %zu products that nobody has waited for", index,
                 share.products.size());
        }
        if (share.num_issued != first.num_issued) {
            fail("warp %u has issued %llu products, and warp %u of its warpgroup %llu", index,
                 static_cast<unsigned long long>(share.num_issued), index / 4 * 4,
                 static_cast<unsigned long long>(first.num_issued));
        }
    }
}

}  // namespace emu
