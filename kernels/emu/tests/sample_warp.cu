// `sample` in blocks of one warp, for statistics.
#define SAMPLE_THREADS 32
#include "sample.cu"
