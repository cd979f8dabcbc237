// The driver as Triton and PyTorch call it. A kernel belongs to the device that it was loaded on.
#include "null_gpu.h"
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

struct function {
    int device;
};

static int contexts[MOST_DEVICES];  // a context's handle is its address here

static int device_of(CUcontext context) { return (int *)context - contexts; }

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- devices and contexts
CUresult cuDeviceGet(CUdevice *device, int index) {
    ENTER_DRIVER;
    *device = index;
    return index < device_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    ENTER_DRIVER;
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER_DRIVER;
    *context = (CUcontext)&contexts[device];
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER_DRIVER;
    *context = context_device() < 0 ? NULL : (CUcontext)&contexts[context_device()];
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER_DRIVER;
    bind_context(device_of(context));
    return CUDA_SUCCESS;
}

CUresult cuLogsRegisterCallback(
    CUlogsCallback callback, void *data, CUlogsCallbackHandle *registered) {
    ENTER_DRIVER;
    if (registered) *registered = NULL;
    return CUDA_SUCCESS;
}

CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle registered) {
    ENTER_DRIVER;
    return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- kernels
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    ENTER_DRIVER;
    if (context_device() < 0) return CUDA_ERROR_INVALID_CONTEXT;
    *module = (CUmodule)&contexts[context_device()];
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
    ENTER_DRIVER;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    ENTER_DRIVER;
    struct function *made = malloc(sizeof *made);
    made->device = device_of((CUcontext)module);
    *function = (CUfunction)made;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
    ENTER_DRIVER;
    *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32
        : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
    ENTER_DRIVER;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) {
    ENTER_DRIVER;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(
    const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    ENTER_DRIVER;
    if (context_device() < 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (((struct function *)function)->device != context_device()) return CUDA_ERROR_INVALID_HANDLE;
    return may_launch(config->hStream) ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

// ---------------------------------------------------------------- how the runtime hands it out
// PyTorch asks for functions that it may never call: what is lacking here fails when it is called.
#define TEN(X, n) X(n##0) X(n##1) X(n##2) X(n##3) X(n##4) X(n##5) X(n##6) X(n##7) X(n##8) X(n##9)
#define EIGHTY(X) TEN(X, 1) TEN(X, 2) TEN(X, 3) TEN(X, 4) TEN(X, 5) TEN(X, 6) TEN(X, 7) TEN(X, 8)
#define DEFINE(n) static void lacking_##n(void) { unknown(lacking[n - 10]); }
#define NAME(n) lacking_##n,
static const char *lacking[80];
EIGHTY(DEFINE)
static void (*const lacking_functions[80])(void) = {EIGHTY(NAME)};
static pthread_mutex_t lacking_lock = PTHREAD_MUTEX_INITIALIZER;

static void *lacking_function(const char *name) {
    pthread_mutex_lock(&lacking_lock);
    int index = 0;
    while (index < 80 && lacking[index] && strcmp(lacking[index], name)) index++;
    if (index == 80) unknown(name);
    if (!lacking[index]) lacking[index] = strdup(name);
    pthread_mutex_unlock(&lacking_lock);
    return (void *)lacking_functions[index];
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result) {
    ENTER;
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = lacking_function(name);
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
