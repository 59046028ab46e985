// `sample` in a few small blocks: what it decides depends on their number and their threads only by rounding.
#define SAMPLE_THREADS 64
#define SAMPLE_SLICES 2
// So few that now and then more are listed than fit, and the winner is another one.
#define SAMPLE_PROMISING 3
#define SAMPLE_LISTED 100
#include "sample/sample.cu"
