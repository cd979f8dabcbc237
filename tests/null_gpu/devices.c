// Devices, each thread's current one, contexts, errors, and what a device says of itself.
#include "null_gpu.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int device_count = 1;
size_t device_nbytes = 8ull << 30;
bool late, zeros_back;
static __thread int current;
static __thread int context = -1;
static __thread cudaError_t last_error;

__attribute__((constructor)) static void read_environment(void) {
    const char *text;
    if ((text = getenv("NULL_GPU_DEVICES"))) device_count = atoi(text);
    if ((text = getenv("NULL_GPU_NBYTES"))) device_nbytes = strtoull(text, NULL, 10);
    late = (text = getenv("NULL_GPU_LATE")) && *text == '1';
    zeros_back = (text = getenv("NULL_GPU_ZEROS_BACK")) && *text == '1';
    if (device_count > MOST_DEVICES) abort();
}

// ---------------------------------------------------------------- errors
cudaError_t fail(cudaError_t error) { return last_error = error; }

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorString(cudaError_t error) {
    static __thread char text[40];
    if (error == cudaErrorMemoryAllocation) return "out of memory";  // PyTorch's users know it
    snprintf(text, sizeof text, "the null GPU's error %d", error);
    return text;
}

const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// ---------------------------------------------------------------- the current device
int context_device(void) { return context; }

void bind_context(int device) { current = context = device; }

int bound_device(void) { return context = current; }

cudaError_t cudaGetDeviceCount(int *count) {
    ENTER;
    *count = device_count;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    ENTER;
    *device = current;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    ENTER;
    if (device < 0 || device >= device_count) return fail(cudaErrorInvalidDevice);
    bind_context(device);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    ENTER;
    drain_device(bound_device());
    return cudaSuccess;
}

// ---------------------------------------------------------------- what a device is: like an H100
cudaError_t cudaDriverGetVersion(int *version) {
    ENTER;
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    ENTER;
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *is, int device) {
    ENTER;
    if (device < 0 || device >= device_count) return fail(cudaErrorInvalidDevice);
    *is = (struct cudaDeviceProp){
        .name = "Null GPU", .major = 9, .minor = 0, .totalGlobalMem = device_nbytes,
        .multiProcessorCount = 132, .warpSize = 32, .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536, .sharedMemPerBlock = 49152,
        .sharedMemPerBlockOptin = 232448, .sharedMemPerMultiprocessor = 233472,
        .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048,
        .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {2147483647, 65535, 65535},
        .l2CacheSize = 50 << 20, .unifiedAddressing = 1, .concurrentKernels = 1,
        .asyncEngineCount = 3, .canMapHostMemory = 1, .textureAlignment = 512,
    };
    return cudaSuccess;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    ENTER_DRIVER;
    if (device < 0 || device >= device_count) return CUDA_ERROR_INVALID_DEVICE;
    switch ((int)which) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: *value = 2147483647; break;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: *value = 65535; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 1000000; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 5120; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    ENTER;  // the runtime's numbers of attributes are the driver's
    return cuDeviceGetAttribute(value, (CUdevice_attribute)which, device);
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int nbytes, int device) {
    ENTER;
    snprintf(text, nbytes, "0000:%02x:00.0", device);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    ENTER;
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    ENTER;
    *can = 0;
    return cudaSuccess;
}
