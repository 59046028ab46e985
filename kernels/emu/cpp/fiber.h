// Stacks, and the switch from one to another. A warp's stacks lie in one mapping with a guard page
// below; they start at different offsets of a page, or all lanes' frames would share the same lines
// of the cache.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef __x86_64__
#error "the emulator switches stacks with x86-64 instructions: build it on x86-64"
#endif

namespace emu {

constexpr size_t STACK_BYTES = 64 << 10;
constexpr size_t GUARD_BYTES = 4 << 10;

// Maps stacks for the lanes of a warp. Throws std::bad_alloc.
uint8_t* map_stacks();
void unmap_stacks(uint8_t* stacks);

// A stack pointer for `lane` that starts in `entry`, which must not return.
void* fresh_stack(uint8_t* stacks, uint32_t lane, void (*entry)());

// Whether a frame at `frame` still lies in the stack of `lane`.
inline bool inside_stack(const uint8_t* stacks, uint32_t lane, const void* frame) {
    const uint8_t* lowest = stacks + GUARD_BYTES + lane * STACK_BYTES;
    return frame >= lowest && frame < lowest + STACK_BYTES;
}

// Saves the registers that calls preserve, goes to `load`, which a switch or fresh_stack has made.
extern "C" void emu_switch(void** save, void* load);

}  // namespace emu
