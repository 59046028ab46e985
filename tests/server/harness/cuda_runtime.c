// What tritonserver calls of the CUDA runtime to place a model on a GPU: one GPU, of compute capability 9.0, with which
// it does nothing itself. For LD_PRELOAD.
#include <stddef.h>
#include <string.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101 };

// Of cudaDeviceProp, where CUDA 12 has them.
enum { PROPERTIES_BYTES = 1032, MAJOR_AT = 360, MINOR_AT = 364 };

int cudaGetDeviceCount(int* count) {
    *count = 1;
    return SUCCESS;
}

int cudaSetDevice(int device) {
    return device == 0 ? SUCCESS : INVALID_DEVICE;
}

int cudaGetDevice(int* device) {
    *device = 0;
    return SUCCESS;
}

int cudaGetDeviceProperties_v2(char* properties, int device) {
    const int capability[2] = {9, 0};
    memset(properties, 0, PROPERTIES_BYTES);
    memcpy(properties + MAJOR_AT, &capability[0], sizeof(int));
    memcpy(properties + MINOR_AT, &capability[1], sizeof(int));
    return cudaSetDevice(device);
}

int cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    *can = 0;
    return SUCCESS;
}

int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return SUCCESS;
}

int cudaMalloc(void** memory, size_t bytes) {
    *memory = NULL;
    return OUT_OF_MEMORY;
}

int cudaFree(void* memory) {
    return SUCCESS;
}

int cudaMemGetInfo(size_t* available, size_t* total) {
    *available = *total = (size_t)1 << 31;
    return SUCCESS;
}
