// See crash.h.
#include "crash.h"

#include <signal.h>
#include <ucontext.h>

#include <iterator>
#include <vector>

#include "machine.h"

namespace emu {

namespace {

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE};
constexpr size_t STACK_BYTES = 64 << 10;

struct sigaction before[std::size(SIGNALS)];
__thread int last_signal = 0;
__thread void* last_address = nullptr;

// Stacks for the handler and for what runs after it: the kernel's own may be what is broken.
struct Stacks {
    std::vector<uint8_t> handler = std::vector<uint8_t>(STACK_BYTES);
    std::vector<uint8_t> after = std::vector<uint8_t>(STACK_BYTES);
};
thread_local Stacks stacks;
__thread uint8_t* after_top = nullptr;

void after_crash() {
    if (last_signal == SIGFPE) {
        fail("a division by zero");
    }
    fail("touches the address %p, which is no memory of the launch", last_address);
}

void handle(int number, siginfo_t* info, void* raw) {
    if (!current) {
        for (size_t i = 0; i < std::size(SIGNALS); i++) {
            if (SIGNALS[i] == number) {
                // The instruction runs again, into the handler that was there before.
                sigaction(number, &before[i], nullptr);
            }
        }
        return;
    }
    last_signal = number;
    last_address = info->si_addr;
    ucontext_t* context = static_cast<ucontext_t*>(raw);
    // As after a call: a return address lies on an aligned stack.
    context->uc_mcontext.gregs[REG_RSP] = reinterpret_cast<greg_t>(after_top) - 8;
    context->uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(after_crash);
}

bool install() {
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (size_t i = 0; i < std::size(SIGNALS); i++) {
        sigaction(SIGNALS[i], &action, &before[i]);
    }
    return true;
}

}  // namespace

void catch_crashes() {
    static const bool installed = install();
    static_cast<void>(installed);
    if (after_top) {
        return;
    }
    const uintptr_t top = reinterpret_cast<uintptr_t>(stacks.after.data()) + STACK_BYTES;
    after_top = reinterpret_cast<uint8_t*>(top / 16 * 16);
    stack_t stack = {};
    sigaltstack(nullptr, &stack);
    if (stack.ss_flags & SS_DISABLE) {
        stack.ss_sp = stacks.handler.data();
        stack.ss_size = STACK_BYTES;
        stack.ss_flags = 0;
        sigaltstack(&stack, nullptr);
    }
}

}  // namespace emu
