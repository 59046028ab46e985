// Which CTA adds up the parts of a tile: the one whose part is the last. A counter of each tile has the units that have been
// multiplied.
#pragma once

// The counting thread's whole life: every part of this CTA, in order. The barrier puts all threads' stores before the
// counter, and the counter of the last CTA comes after all others': no thread needs a fence of its own.
DEVICE void count_parts(const GemmParams& p, const Split& split, const Handover& handover) {
    uint32_t parity = 0;
    for (uint32_t unit = split.first; unit < split.last;) {
        const Piece piece = piece_at(split, unit);
        const uint32_t own = num_units(piece);
        if (own < split.k_units) {
            mbar_wait(handover.written, parity);
            const uint32_t before = atomic_add_acq_rel(&p.arrivals[counter_of(piece)], own);
            tell(handover, before + own == split.k_units);
            parity ^= 1;
        }
        unit += own;
    }
}

// Whether the pending part was the last one; settles it.
DEVICE bool was_last(const Handover& handover, Pending& pending) {
    pending.is_open = false;
    return wait_until_told(handover, pending) != 0;
}
