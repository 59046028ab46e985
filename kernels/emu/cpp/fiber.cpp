// See fiber.h.
#include "fiber.h"

#include <new>
#include <sys/mman.h>

namespace emu {

namespace {

constexpr size_t LANES = 32;
constexpr size_t MAPPING_BYTES = GUARD_BYTES + LANES * STACK_BYTES;
// Three lines of the cache; not a divisor of a page, so that 32 lanes take different sets.
constexpr size_t STAGGER_BYTES = 192;

}  // namespace

asm(R"(
.text
.globl emu_switch
.type emu_switch, @function
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emu_switch, .-emu_switch
)");

uint8_t* map_stacks() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* mapping = mmap(nullptr, MAPPING_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (mapping == MAP_FAILED) {
        throw std::bad_alloc();
    }
    if (mprotect(mapping, GUARD_BYTES, PROT_NONE) != 0) {
        munmap(mapping, MAPPING_BYTES);
        throw std::bad_alloc();
    }
    return static_cast<uint8_t*>(mapping);
}

void unmap_stacks(uint8_t* stacks) {
    munmap(stacks, MAPPING_BYTES);
}

void* fresh_stack(uint8_t* stacks, uint32_t lane, void (*entry)()) {
    uint8_t* top = stacks + GUARD_BYTES + (lane + 1) * STACK_BYTES - lane * STAGGER_BYTES;
    void** slots = reinterpret_cast<void**>(top);
    // The address that `entry` would return to, then where the switch returns to, then six
    // registers.
    *--slots = nullptr;
    *--slots = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) {
        *--slots = nullptr;
    }
    return slots;
}

}  // namespace emu
