// Between the consumers and the thread that counts their parts: that takes it a microsecond, in which they go on.
#pragma once

struct Handover {
    uint64_t* written;    // all warps have written their share of a part, or are done with what they were told
    uint64_t* counted;    // what is to be done is told
    uint32_t* told;
};

// By one thread, before a barrier of the whole CTA.
DEVICE void handover_init(const Handover& handover) {
    mbar_init(handover.written, CONSUMER_WARPS);
    mbar_init(handover.counted, 1);
}

// What a part was written of last, until it is settled what becomes of it.
struct Pending {
    bool is_open;
    uint32_t counter;
    uint32_t parity;
};

// By every consumer warp, when it has written its share or is done.
DEVICE void say_done(const Handover& handover) {
    warp_sync();
    if (lane_index() == 0) {
        mbar_arrive(handover.written);
    }
}

DEVICE void hand_over(const Handover& handover, uint32_t counter, Pending& pending) {
    say_done(handover);
    pending.is_open = true;
    pending.counter = counter;
}

// By the counting thread.
DEVICE void tell(const Handover& handover, uint32_t what) {
    *handover.told = what;
    mbar_arrive(handover.counted);
}

// What it tells next of the pending part.
DEVICE uint32_t wait_until_told(const Handover& handover, Pending& pending) {
    mbar_wait(handover.counted, pending.parity);
    // Lanes may leave the wait one by one; what follows takes whole warps.
    warp_sync();
    pending.parity ^= 1;
    return *handover.told;
}
