// What Rust calls: launches by name. Errors are exceptions here and results there.
#pragma once

#include "rust/cxx.h"

namespace emu {

struct RawLaunch;
struct RawSchedule;

// Runs launches one after the other; throws what went wrong.
void run_launches(rust::Slice<const RawLaunch> launches, const RawSchedule& schedule);

// Whether a variant has been compiled.
bool has_variant(rust::Str name);

}  // namespace emu
