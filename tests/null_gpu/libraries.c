// cuBLAS as PyTorch calls it: products are counted, on the handle's stream, and not computed. None
// of its functions looks at its arguments beyond those that it names here. And cuDNN's version.
#include "null_gpu.h"
#include <stdlib.h>

enum { OK = 0, NOT_INITIALIZED = 1, EXECUTION_FAILED = 13 };

struct handle {
    int device;
    cudaStream_t stream;
};

int cublasCreate_v2(struct handle **handle) {
    ENTER_DRIVER;
    *handle = calloc(1, sizeof **handle);
    (*handle)->device = bound_device();
    return OK;
}

int cublasSetStream_v2(struct handle *handle, cudaStream_t stream) {
    ENTER_DRIVER;
    handle->stream = stream;
    return OK;
}

int cublasGetMathMode(struct handle *handle, int *mode) {
    ENTER_DRIVER;
    *mode = 0;
    return OK;
}

int cublasGetPointerMode_v2(struct handle *handle, int *mode) {
    ENTER_DRIVER;
    *mode = 0;
    return OK;
}

#define DOES_NOTHING(name) int name(void) { ENTER_DRIVER; return OK; }
DOES_NOTHING(cublasDestroy_v2)
DOES_NOTHING(cublasSetWorkspace_v2)
DOES_NOTHING(cublasSetMathMode)
DOES_NOTHING(cublasSetPointerMode_v2)

#define PRODUCT(name) \
    int name(struct handle *handle) { \
        ENTER_DRIVER; \
        return may_launch(handle->stream) ? EXECUTION_FAILED : OK; \
    }
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasGemmStridedBatchedEx)

// ---------------------------------------------------------------- cuBLASLt
DOES_NOTHING(cublasLtMatmulDescDestroy)
DOES_NOTHING(cublasLtMatmulDescSetAttribute)
DOES_NOTHING(cublasLtMatmulPreferenceDestroy)
DOES_NOTHING(cublasLtMatmulPreferenceSetAttribute)
DOES_NOTHING(cublasLtMatrixLayoutDestroy)
DOES_NOTHING(cublasLtMatrixLayoutSetAttribute)

// Descriptions are opaque: an address is enough, and PyTorch frees nothing.
#define MADE(name) \
    int name(void **made) { \
        static char description; \
        ENTER_DRIVER; \
        *made = &description; \
        return OK; \
    }
MADE(cublasLtMatmulDescCreate)
MADE(cublasLtMatmulPreferenceCreate)
MADE(cublasLtMatrixLayoutCreate)

int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted,
    void *results, int *count) {
    ENTER_DRIVER;
    *count = 1;  // PyTorch gave zeros as the result, which is a success
    return OK;
}

int cublasLtMatmul(
    void *handle, void *operation, const void *alpha, const void *a, void *a_is, const void *b,
    void *b_is, const void *beta, const void *c, void *c_is, void *d, void *d_is,
    const void *algorithm, void *workspace, size_t workspace_nbytes, cudaStream_t stream) {
    ENTER_DRIVER;
    return may_launch(stream) ? EXECUTION_FAILED : OK;
}

// ---------------------------------------------------------------- cuDNN
// So old that PyTorch takes its own kernels for attention.
size_t cudnnGetVersion(void) {
    ENTER;
    return 90000;
}
