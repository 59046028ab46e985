// One compiled kernel. EMU_FILE is its source, EMU_NAME the variant's name, EMU_ENTRY the symbol of
// its entry. The unnamed namespace keeps what variants call alike apart.
#include "prims_cpu.h"

namespace {
#include EMU_FILE
}

extern const emu::Entry EMU_ENTRY;
const emu::Entry EMU_ENTRY = {EMU_NAME, emu_invoke, EMU_PARAMS_BYTES, EMU_NUM_THREADS, EMU_CLUSTER};
