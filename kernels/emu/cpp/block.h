// Blocks: their shared memory, warps and stacks, made ready for a launch and kept for the next.
#pragma once

#include "machine.h"

namespace emu {

// The next block of `grid`, with all its threads at the kernel's beginning.
Block& take_block(Grid& grid);

// Takes back a block whose threads have ended.
void give_block(Block& block);

// Fails where the block leaves something behind that it must not: called by its last thread.
void check_ended(const Block& block);

// Fails where products of its warpgroups are under way, or not all warps have issued them.
void check_warpgroups(const Block& block);

// Drops the blocks of a machine that stops; their memory serves the next one.
void release_blocks();

// Ends the running thread. Does not return.
[[noreturn]] void end_thread();

}  // namespace emu
