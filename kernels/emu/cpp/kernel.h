// All that a compiled kernel knows of the machine. Kernels include nothing else of it: hundreds of them are compiled.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emu {

// Blocks of a cluster, at most: as many as every GPU with clusters takes.
constexpr uint32_t MAX_CLUSTER = 8;

// What unit.cpp knows about one compiled kernel.
struct Entry {
    const char* name;
    void (*invoke)(const void* params);
    size_t params_bytes;
    uint32_t num_threads;
    // Blocks of a cluster.
    uint32_t cluster;
};

// What a kernel sees of the thread that runs it.
struct KernelView {
    uint32_t index = 0;
    uint32_t lane = 0;
    uint32_t num_threads = 0;
    uint32_t block_index = 0;
    uint32_t num_blocks = 0;
    uint8_t* shared = nullptr;
};

// Of the thread that is running; null between launches.
extern __thread const KernelView* view __attribute__((tls_model("initial-exec")));

}  // namespace emu
