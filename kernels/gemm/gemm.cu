// y[rows][n] = x[rows][k] * W^T for up to ROWS rows, with what precedes and follows it in a layer: an RMS
// norm before, and one of five epilogues. The matrix is streamed once, evenly over the grid, by a warp that
// does nothing else. A row's bits depend on its own data, the matrix and the grid alone (the head's not on the
// grid): not on ROWS, on the number of rows, on the other rows or on the order in which CTAs end.
//
// Who multiplies differs: on Hopper warpgroups (wgmma/), elsewhere single warps. That an instruction rounds a column alike
// however many columns it has is not said by NVIDIA's documents, but taken for granted.
#include "common/prims.cuh"
#include "common/types.cuh"

#define QKV 1        // rotates queries and keys; f16 queries, keys and values to the cache
#define RAW 2        // f32 [row][n]
#define RESIDUAL 3   // adds to f32 [row][n]
#define SWIGLU 4     // f16 [row][n / 2], where warpgroups multiply in units
#define HEAD 5       // f32 [row][n], and the best of each 64

struct GemmParams {
    const uint8_t* weights;      // units of image.cuh
    const float* scales;         // [n up to a whole tile], of FP8 weights
    const float* bias;           // [n up to a whole tile], or null
    const void* input;           // HAS_NORM: f32 residual [.][k]; else f16 [.][k], where warpgroups multiply in units
    const float* norm;           // HAS_NORM: [k]
    float* squares;              // of squares.cuh: of the input; RESIDUAL: of the output
    const Row* rows;             // QKV: of each row
    const uint32_t* row_index;   // input row of each row, or null: its own; null where warpgroups multiply
    float* partials;             // as split.cuh or parts.cuh say; HEAD: unused
    uint32_t* arrivals;          // [tiles of n, or pairs of them], zero before and after; HEAD: unused
    void* output;
    uint8_t* cache;              // QKV: keys and values of this layer
    const float* rope;           // QKV: [position][cos | sin]
    const uint32_t* pages;       // QKV: [sequence][max_pages]
    const float* kv_scales;      // QKV, of an FP8 cache: of each head's keys, then of each one's values; powers of two
    Best* best;                  // HEAD: [row][tiles of n]
    float eps;
    uint32_t num_rows;           // 1 ..= ROWS
    uint32_t n;
    uint32_t k;                  // a multiple of 8
    uint32_t num_heads;
    uint32_t num_kv_heads;
    uint32_t max_pages;
    uint32_t kv;                 // FP8 or FP16
    uint32_t sharing_distance;   // CTAs from one to that with which it shares rows, where clusters do; 0: none has one
    uint32_t unused;
};
static_assert(sizeof(GemmParams) == 168, "as on the host");

// A matrix shape may be compiled in.
DEVICE uint32_t matrix_n(const GemmParams& p) {
#ifdef SHAPE_N
    return SHAPE_N;
#else
    return p.n;
#endif
}

DEVICE uint32_t matrix_k(const GemmParams& p) {
#ifdef SHAPE_K
    return SHAPE_K;
#else
    return p.k;
#endif
}

#define HAS_WARPGROUPS (ARCH >= 900 && ARCH < 1000)
// Warpgroups take rows as halves, which a kernel before has normed.
#define HAS_NORM (EPILOGUE != RESIDUAL && !HAS_WARPGROUPS)

#include "common/activation.cuh"
#include "common/best.cuh"
#include "common/image.cuh"
#include "common/squares.cuh"
#include "gemm/epilogue.cuh"

#if HAS_WARPGROUPS
#include "common/cluster.cuh"
#include "common/warpgroup.cuh"
#include "wgmma/order.cuh"
#include "wgmma/tile.cuh"
#include "wgmma/stream.cuh"
#include "wgmma/parts.cuh"
#include "gemm/handover.cuh"
#include "wgmma/share.cuh"
#include "wgmma/product.cuh"
#else
#include "gemm/split.cuh"
#include "gemm/ring.cuh"
#include "gemm/tile.cuh"
#include "gemm/input.cuh"
#include "gemm/parts.cuh"
#include "gemm/handover.cuh"
#include "gemm/count.cuh"
#include "gemm/carry.cuh"
#include "gemm/product.cuh"
#endif

#if HAS_WARPGROUPS && ROWS > 64
KERNEL_OF_CLUSTERS(gemm, GemmParams, THREADS, REGISTERS, CLUSTER)
#elif HAS_WARPGROUPS
KERNEL_OF_REGISTERS(gemm, GemmParams, THREADS, REGISTERS)
#else
KERNEL(gemm, GemmParams, THREADS, CTAS)
#endif
{
    run(p);
}
