// How the 32 lanes of a warp do something together: the last lane to arrive does it for all.
#pragma once

#include "machine.h"

namespace emu {

const char* name(Collective kind);

// Joins the warp's collective with an argument. Calls `all` once, when everybody's argument is
// there.
template <class Argument, class All>
inline void join(Collective kind, Argument& argument, All all) {
    Thread* self = current;
    Warp& warp = *self->warp;
    if (warp.arrived == 0) {
        warp.collective = kind;
    } else if (warp.collective != kind) {
        fail("%s while other lanes of the warp are in %s", name(kind), name(warp.collective));
    }
    warp.arguments[self->lane] = &argument;
    warp.arrived |= 1u << self->lane;
    if (warp.arrived == ~0u) {
        all(reinterpret_cast<Argument**>(warp.arguments));
        warp.arrived = 0;
        warp.num_collectives++;
        warp.ready = ~0u & ~(1u << self->lane);
        machine->idle_polls = 0;
    } else {
        switch_away();
    }
}

}  // namespace emu
