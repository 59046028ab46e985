// `sample` in small blocks: what it decides depends on the number of threads only by rounding.
#define SAMPLE_THREADS 64
#include "sample.cu"
