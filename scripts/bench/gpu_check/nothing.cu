// Does nothing but what every kernel of a pass does: the least that one more kernel costs in a graph.
#include "common/prims.cuh"

struct NothingParams {
    uint32_t* never;   // 0
};

KERNEL(nothing, NothingParams, 32, 1) {
    grid_wait();
    grid_launch_dependents();
    if (p.never != 0) {
        *p.never = 1;
    }
}
