// Who makes outputs of the parts of a pair. The CTA whose part is the last takes the first share of its rows. The others go
// to whoever claims them: to that CTA, and to those that have parts too and nothing else left to do, which look for a moment
// whether all parts are there. None of them waits for long: a CTA that has not begun yet may need the multiprocessor of one
// that waits.
//
// A counter of each pair has the units that have been multiplied, the claims, and the CTAs that have left it.
#pragma once

constexpr uint32_t ONE_CLAIM = 1u << 16;
constexpr uint32_t ONE_LEFT = 1u << 24;
constexpr uint32_t NO_SHARE = 0xffffffffu;

// Looks at a counter, half a microsecond each.
constexpr uint32_t MOST_LOOKS = 10;

// How the rows of a pair are shared out: `each` batches to a share.
struct Shares {
    uint32_t sharers;
    uint32_t num;
    uint32_t each;
};

// A batch each, or all of them where the other sharer has another pair to go on with.
DEVICE Shares shares_of(const GemmParams& p, const Order& order, uint32_t pair) {
    const uint32_t batches = divide_up(p.num_rows, FINISH_ROWS);
    const Sharers sharers = sharers_of(order, pair);
    const uint32_t num = sharers.last - sharers.first + 1;
    return num > 2 ? Shares{num, batches, 1} : Shares{num, 1, batches};
}

DEVICE bool is_complete(const Order& order, uint32_t counter) {
    return counter % ONE_CLAIM == order.k_units;
}

DEVICE bool becomes_complete(const Order& order, uint32_t* counter) {
    for (uint32_t i = 0; i < MOST_LOOKS; ++i) {
        if (is_complete(order, load_volatile(counter))) {
            return true;
        }
    }
    return false;
}

// The next share that nobody has; there may be none. Who has looked at the counter reads others' parts behind this.
DEVICE uint32_t claim(uint32_t* counter) {
    return 1 + atomic_add_acq_rel(counter, ONE_CLAIM) / ONE_CLAIM % (ONE_LEFT / ONE_CLAIM);
}

// The last CTA to leave a pair clears its counter: where there is one share the one that had the last part, else the last
// of all.
DEVICE void leave(const Shares& shares, uint32_t* counter, bool was_last) {
    const bool is_last =
        shares.num == 1 ? was_last : atomic_add_acq_rel(counter, ONE_LEFT) / ONE_LEFT + 1 == shares.sharers;
    if (is_last) {
        *counter = 0;
    }
}

// Counts a part that is written, and has the consumers make outputs of shares of its pair. The barrier puts all threads'
// stores before the counter, and the counter of the last CTA comes after all others': no thread needs a fence of its own.
DEVICE void share_out(
    const GemmParams& p, const Order& order, const Piece& piece, bool is_final, const Handover& handover,
    uint32_t& parity) {
    const auto wait_until_done = [&]() {
        mbar_wait(handover.written, parity);
        parity ^= 1;
    };
    const Shares shares = shares_of(p, order, piece.pair);
    uint32_t* counter = &p.arrivals[piece.pair];
    const uint32_t own = num_units(piece);
    wait_until_done();
    const bool was_last = is_complete(order, atomic_add_acq_rel(counter, own) + own);
    uint32_t share = was_last ? 0 : NO_SHARE;
    if (!was_last && is_final && shares.num > 1 && becomes_complete(order, counter)) {
        share = claim(counter);
    }
    while (share < shares.num) {
        tell(handover, share);
        // While that is worked at.
        share = shares.num > 1 ? claim(counter) : NO_SHARE;
        wait_until_done();
    }
    tell(handover, NO_SHARE);
    leave(shares, counter, was_last);
}

// The counting thread's whole life: every part of this CTA, in order.
DEVICE void count_parts(const GemmParams& p, const Order& order, const Handover& handover) {
    uint32_t parity = 0;
    for (uint32_t unit = order.first; unit < order.last;) {
        const Piece piece = piece_at(order, unit);
        unit += num_units(piece);
        if (num_units(piece) < order.k_units) {
            share_out(p, order, piece, unit == order.last, handover, parity);
        }
    }
}
