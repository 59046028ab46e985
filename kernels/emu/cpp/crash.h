// Turns the signals of a kernel's thread into an end of the launch with a message.
#pragma once

namespace emu {

// For the calling thread of the host: from now on a kernel that touches what it must not ends its
// launch. Signals outside kernels go where they went before.
void catch_crashes();

}  // namespace emu
