// Between the consumers and the thread that counts their parts: that takes it a microsecond, in which they go on.
// What is counted - a tile, or tiles that go together - has a counter of the units that have been multiplied;
// `counter_of` a piece says which.
#pragma once

struct Handover {
    uint64_t* written;    // all warps have written their share of a part
    uint64_t* counted;    // it is known whether it was the last one
    uint32_t* is_last;
};

// By one thread, before a barrier of the whole CTA.
DEVICE void handover_init(const Handover& handover) {
    mbar_init(handover.written, CONSUMER_WARPS);
    mbar_init(handover.counted, 1);
}

// The counting thread's whole life: every part of this CTA, in order. The barrier puts all threads' stores before the
// counter, and the counter of the last CTA comes after all others': no thread needs a fence of its own.
template <class Cut>
DEVICE void count_parts(const GemmParams& p, const Cut& cut, const Handover& handover) {
    uint32_t parity = 0;
    for (uint32_t unit = cut.first; unit < cut.last;) {
        const Piece piece = piece_at(cut, unit);
        const uint32_t own = num_units(piece);
        if (own < cut.k_units) {
            mbar_wait(handover.written, parity);
            const uint32_t before = atomic_add_acq_rel(&p.arrivals[counter_of(piece)], own);
            *handover.is_last = before + own == cut.k_units;
            mbar_arrive(handover.counted);
            parity ^= 1;
        }
        unit += own;
    }
}

// What a part was written of last, until it is settled whether that was its last one.
struct Pending {
    bool is_open;
    uint32_t counter;
    uint32_t parity;
};

// By every consumer warp, when it has written its share.
DEVICE void hand_over(const Handover& handover, uint32_t counter, Pending& pending) {
    warp_sync();
    if (lane_index() == 0) {
        mbar_arrive(handover.written);
    }
    pending.is_open = true;
    pending.counter = counter;
}

// Whether the pending part was the last one; settles it.
DEVICE bool was_last(const Handover& handover, Pending& pending) {
    mbar_wait(handover.counted, pending.parity);
    // Lanes may leave the wait one by one; what follows takes whole warps.
    warp_sync();
    pending.is_open = false;
    pending.parity ^= 1;
    return *handover.is_last;
}
