// The clock of a multiprocessor, and which one this is.
#pragma once

DEVICE uint64_t clocks() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
    return now;
}

DEVICE uint32_t multiprocessor() {
    uint32_t idx;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(idx));
    return idx;
}
