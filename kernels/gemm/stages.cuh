// The stages of a ring in shared memory: a `full` barrier for each says that its bytes are there, an `empty` one
// that all consumers have read them.
#pragma once

struct Ring {
    uint8_t* stages;
    uint64_t* full;
    uint64_t* empty;
};

// A place in the ring, and the parity of the round in which it is used.
struct Cursor {
    uint32_t stage;
    uint32_t parity;
};

DEVICE void advance(Cursor& at) {
    if (++at.stage == STAGES) {
        at.stage = 0;
        at.parity ^= 1;
    }
}

// By one thread, before a barrier of all others that use the ring.
DEVICE void ring_init(const Ring& ring, uint32_t releasing_warps = CONSUMER_WARPS) {
    for (uint32_t stage = 0; stage < STAGES; ++stage) {
        mbar_init(&ring.full[stage], FULL_ARRIVALS);
        mbar_init(&ring.empty[stage], releasing_warps);
    }
    mbar_init_fence();
}

// By every consumer warp, when all of its lanes have read the unit at the cursor.
DEVICE void release(const Ring& ring, Cursor& at) {
    warp_sync();
    if (lane_index() == 0) {
        mbar_arrive(&ring.empty[at.stage]);
    }
    advance(at);
}
