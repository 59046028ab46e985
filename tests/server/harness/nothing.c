// The least that is a backend: it answers every request with nothing. What a server does with a model of it as well, is
// the server's doing.
#include <stdint.h>

enum { FINAL = 1, RELEASE_ALL = 1 };

// Triton's; what fails is no better for being reported here.
void* TRITONBACKEND_ResponseFactoryNew(void** factory, void* request);
void* TRITONBACKEND_ResponseFactorySendFlags(void* factory, uint32_t flags);
void* TRITONBACKEND_ResponseFactoryDelete(void* factory);
void* TRITONBACKEND_RequestRelease(void* request, uint32_t flags);

void* TRITONBACKEND_ModelInstanceExecute(void* instance, void** requests, uint32_t count) {
    (void)instance;
    for (uint32_t i = 0; i < count; ++i) {
        void* factory;
        TRITONBACKEND_ResponseFactoryNew(&factory, requests[i]);
        TRITONBACKEND_ResponseFactorySendFlags(factory, FINAL);
        TRITONBACKEND_RequestRelease(requests[i], RELEASE_ALL);
        TRITONBACKEND_ResponseFactoryDelete(factory);
    }
    return 0;
}
