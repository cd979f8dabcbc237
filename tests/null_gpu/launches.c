// Kernels: registered, launched on a stream that may have them, and never run.
#include "null_gpu.h"
#include <string.h>

// ---------------------------------------------------------------- what compiled programs register
void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {}

void __cudaUnregisterFatBinary(void **handle) {}

void __cudaRegisterFunction(
    void **handle, const char *function, char *device_function, const char *name, int thread_limit,
    uint3 *thread, uint3 *block, dim3 *block_shape, dim3 *grid_shape, int *warp_size) {}

void __cudaRegisterVar(
    void **handle, char *variable, char *address, const char *name, int external, size_t nbytes,
    int constant, int global) {}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

// ---------------------------------------------------------------- launches
static __thread struct {
    dim3 grid, block;
    size_t shared_nbytes;
    struct CUstream_st *stream;
} pushed;

unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared_nbytes, struct CUstream_st *stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared_nbytes = shared_nbytes;
    pushed.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(
    dim3 *grid, dim3 *block, size_t *shared_nbytes, void *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared_nbytes = pushed.shared_nbytes;
    *(struct CUstream_st **)stream = pushed.stream;
    return cudaSuccess;
}

static cudaError_t launch(cudaStream_t stream) {
    cudaError_t error = may_launch(stream);
    return error ? fail(error) : cudaSuccess;
}

cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared_nbytes,
    cudaStream_t stream) {
    ENTER;
    return launch(stream);
}

cudaError_t cudaLaunchKernelExC(
    const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    ENTER;
    return launch(config->stream);
}

// ---------------------------------------------------------------- questions about kernels
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *are, const void *function) {
    ENTER;
    *are = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90, .binaryVersion = 90};
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(
    const void *function, enum cudaFuncAttribute attribute, int value) {
    ENTER;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int block_size, size_t shared_nbytes, unsigned flags) {
    ENTER;
    *blocks = 2;
    return cudaSuccess;
}
