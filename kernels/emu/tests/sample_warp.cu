// `sample` in blocks of one warp, for statistics.
#define SAMPLE_THREADS 32
#define SAMPLE_SLICES 1
#include "sample/sample.cu"
