// What four warps do together on Hopper: products of matrices in shared memory, of which the left one may come from
// registers. They are under way from where they are issued to the wait for their group; their sums and fragments must
// not be touched in between, and shared memory that they read must not be written. The CPU twins are in
// emu/cpp/warpgroup_cpu.h.
#pragma once

constexpr uint32_t WARPGROUP_WARPS = 4;

#ifdef __CUDACC_RTC__

// From here on threads of this warpgroup have N registers each, a multiple of 8: more than before, when others have left them.
template <uint32_t N>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// The same with fewer than before.
template <uint32_t N>
DEVICE void leave_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// Orders what this thread has done to registers before the products behind it; in front of the first of each group.
DEVICE void warpgroup_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes this warp's group of products.
DEVICE void warpgroup_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Returns when all but the newest PENDING groups of this warp are done.
template <int PENDING>
DEVICE void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Lets products, and bulk copies, see what ordinary stores have written to shared memory: those of this thread, and
// those that it knows of.
DEVICE void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// An operand of rows of 128 bytes of k, in atoms of eight rows: 1024 bytes that begin at a multiple of 1024, in which
// chunks of 16 bytes stand at c ^ row. It begins at `first`, in the first row of an atom; the next atom is
// `atom_stride` bytes on.
DEVICE uint64_t matrix_descriptor(const void* first, uint32_t atom_stride) {
    const uint64_t swizzle_of_128 = 1ull << 62;
    // Unused where rows are swizzled.
    const uint64_t leading_stride = 1ull << 16;
    // All lanes have the same one, and the compiler is to know: it then keeps descriptors in uniform registers.
    const uint32_t address = shuffle_from((shared_address(first) & 0x3ffff) >> 4, 0);
    return address | leading_stride | uint64_t(atom_stride >> 4) << 32 | swizzle_of_128;
}

// c[64][N] += a[64][16] * b[N][16]^T, halves into floats; b, and a that lies in shared memory, by descriptors. Warp w
// of the four has rows 16w to 16w + 15 of a and c. Lane 4g + t has of its warp's a what mma_f16 says, and of c for
// each eight columns j: rows g (c[4j], c[4j + 1]) and g + 8 (c[4j + 2], c[4j + 3]), columns 8j + 2t, 8j + 2t + 1.
template <uint32_t N>
DEVICE void wgmma_f16(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b);
template <uint32_t N>
DEVICE void wgmma_f16(float (&c)[N / 2], uint64_t a, uint64_t b);

// c[64][N] += a[64][32] * b[N][32]^T, e4m3 into floats, both operands in shared memory.
template <uint32_t N>
DEVICE void wgmma_e4m3(float (&c)[N / 2], uint64_t a, uint64_t b);

#define SUMS_4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)
#define SUMS_128(i) SUMS_64(i), SUMS_64(i + 64)
#define NAMES_4 "%0, %1, %2, %3"
#define NAMES_8 NAMES_4 ", %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32                                                            \
    NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27" \
             ", %28, %29, %30, %31"
#define NAMES_64                                                            \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43" \
             ", %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55" \
             ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_128                                                                     \
    NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75"           \
             ", %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87"           \
             ", %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99"           \
             ", %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110"     \
             ", %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121"     \
             ", %122, %123, %124, %125, %126, %127"

// The operands behind the sums have the numbers A0 and so on; sums are always added to.
#define WGMMA_OF_FRAGMENTS(N, SUMS, NAMES, A0, A1, A2, A3, B)                         \
    template <>                                                                       \
    DEVICE void wgmma_f16<N>(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b) { \
        asm volatile(                                                                 \
            "{ .reg .pred p; setp.ne.b32 p, 1, 0;"                                    \
            " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NAMES "},"    \
            " {" A0 ", " A1 ", " A2 ", " A3 "}, " B ", p, 1, 1, 0; }"                 \
            : SUMS(0)                                                                 \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                    \
    }

// Of two operands in shared memory. TRANSPOSED is what only halves may be.
#define WGMMA_OF_SHARED(NAME, N, KIND, TRANSPOSED, SUMS, NAMES, A, B)            \
    template <>                                                                  \
    DEVICE void NAME<N>(float (&c)[N / 2], uint64_t a, uint64_t b) {             \
        asm volatile(                                                            \
            "{ .reg .pred p; setp.ne.b32 p, 1, 0;"                               \
            " wgmma.mma_async.sync.aligned.m64n" #N KIND " {" NAMES "},"         \
            " " A ", " B ", p, 1, 1" TRANSPOSED "; }"                            \
            : SUMS(0)                                                            \
            : "l"(a), "l"(b));                                                   \
    }

#define WGMMA_F16(N, SUMS, NAMES, A, B) \
    WGMMA_OF_SHARED(wgmma_f16, N, "k16.f32.f16.f16", ", 0, 0", SUMS, NAMES, A, B)
#define WGMMA_E4M3(N, SUMS, NAMES, A, B) \
    WGMMA_OF_SHARED(wgmma_e4m3, N, "k32.f32.e4m3.e4m3", "", SUMS, NAMES, A, B)

WGMMA_OF_FRAGMENTS(8, SUMS_4, NAMES_4, "%4", "%5", "%6", "%7", "%8")
WGMMA_OF_FRAGMENTS(16, SUMS_8, NAMES_8, "%8", "%9", "%10", "%11", "%12")
WGMMA_OF_FRAGMENTS(32, SUMS_16, NAMES_16, "%16", "%17", "%18", "%19", "%20")
WGMMA_OF_FRAGMENTS(64, SUMS_32, NAMES_32, "%32", "%33", "%34", "%35", "%36")
WGMMA_F16(8, SUMS_4, NAMES_4, "%4", "%5")
WGMMA_F16(16, SUMS_8, NAMES_8, "%8", "%9")
WGMMA_F16(32, SUMS_16, NAMES_16, "%16", "%17")
WGMMA_F16(64, SUMS_32, NAMES_32, "%32", "%33")
WGMMA_F16(128, SUMS_64, NAMES_64, "%64", "%65")
WGMMA_F16(256, SUMS_128, NAMES_128, "%128", "%129")
WGMMA_E4M3(128, SUMS_64, NAMES_64, "%64", "%65")
WGMMA_E4M3(256, SUMS_128, NAMES_128, "%128", "%129")

#endif
