// The choices that a GPU is free to make, from the seed of the schedule.
#pragma once

#include "machine.h"

namespace emu {

// Starts the choices of a run.
void seed_schedule(const Schedule& schedule);

// Lets a warp stand still for a while, so that others run far ahead of it.
void hold_back(Warp& warp);

// Which of the runnable warps runs next. There must be one.
uint32_t choose_warp();

}  // namespace emu
