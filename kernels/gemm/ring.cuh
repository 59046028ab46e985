// The ring of weight units in shared memory. One warp fills it as fast as memory delivers, the others empty
// it; a `full` barrier for each stage says that its bytes are there, an `empty` one that all have read them.
// Weights depend on no other kernel, so the ring fills before the previous kernel has ended.
#pragma once

// Multiprocessors that give a CTA up to 227 KB of shared memory; others have 99 KB.
constexpr bool IS_LARGE = ARCH >= 900 && ARCH < 1200;

// With up to 16 rows two CTAs fit in a large multiprocessor, the next kernel's beside this one's, whose ring then
// fills early. With more rows one does, and its ring fills while the activations are staged.
constexpr uint32_t LARGE_STAGES = ROWS == 8 ? 10 : ROWS == 16 ? 8 : ROWS == 32 ? 12 : 6;
constexpr uint32_t STAGES = IS_LARGE ? LARGE_STAGES : ROWS == 64 ? 3 : 6;
constexpr uint32_t CONSUMER_WARPS = 8;

// A bulk copy counts bytes, and one thread arrives; without bulk copies every lane arrives for its own.
constexpr bool HAS_BULK_COPY = ARCH >= 900;
constexpr uint32_t FULL_ARRIVALS = HAS_BULK_COPY ? 1 : 32;

#include "gemm/stages.cuh"

DEVICE void fill_stage(uint8_t* stage, const uint8_t* unit, uint64_t* full) {
#if ARCH >= 900
    mbar_expect(full, UNIT_BYTES);
    bulk_copy(stage, unit, UNIT_BYTES, full);
#else
    for (uint32_t i = lane_index() * CHUNK_BYTES; i < UNIT_BYTES; i += 32 * CHUNK_BYTES) {
        async_copy16(stage + i, unit + i);
    }
    async_arrive(full);
#endif
}

// The units of a piece, which follow each other in the image.
DEVICE void fill_piece(const Ring& ring, const uint8_t* units, uint32_t count, Cursor& at) {
    for (uint32_t i = 0; i < count; ++i) {
        mbar_wait(&ring.empty[at.stage], at.parity ^ 1);
        uint8_t* stage = ring.stages + at.stage * UNIT_BYTES;
        fill_stage(stage, units + uint64_t(i) * UNIT_BYTES, &ring.full[at.stage]);
        advance(at);
    }
}

// The producer warp's whole life: this CTA's units of the image. It must not join a barrier of the CTA any
// more: it may wait for a consumer that waits there. The next kernel may begin when all units are asked for: its
// ring then fills while memory has nothing else to do, at this kernel's end, and not before, when what it took would
// be taken from this one.
DEVICE void produce(const Ring& ring, const uint8_t* image, const Split& split) {
    if (HAS_BULK_COPY && lane_index() != 0) {
        return;
    }
    Cursor at = {0, 0};
    for (uint32_t unit = split.first; unit < split.last;) {
        const Piece piece = piece_at(split, unit);
        const uint32_t count = num_units(piece);
        const uint64_t first = uint64_t(piece.block.tile) * split.k_units + piece.k_first;
        fill_piece(ring, image + first * UNIT_BYTES, count, at);
        unit += count;
    }
    // A few units may all be asked for before the kernel in front has ended.
    grid_wait();
    grid_launch_dependents();
    if constexpr (!HAS_BULK_COPY) {
        async_commit();
        async_wait<0>();
    }
}

// Waits for the unit at the cursor.
DEVICE const uint8_t* acquire(const Ring& ring, const Cursor& at) {
    mbar_wait(&ring.full[at.stage], at.parity);
    // Lanes may leave the wait one by one; what follows takes whole warps.
    warp_sync();
    return ring.stages + at.stage * UNIT_BYTES;
}
