// Device memory, pinned memory, and what a pointer points at.
//
// Device memory is a file in RAM, mapped twice: for copies, and at its device address without any
// right of access, so that a CPU that reads a GPU's pointer crashes here as it would there.
#include "null_gpu.h"
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static struct range *ranges;
static size_t used[MOST_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add(struct range range) {
    struct range *added = malloc(sizeof *added);
    *added = range;
    added->next = ranges;
    ranges = added;
}

static struct range *find(const char *pointer) {
    struct range *range = ranges;
    while (range && !(range->start <= pointer && pointer < range->start + range->nbytes))
        range = range->next;
    return range;
}

// Take out the range that begins at `start`, if there is one of that place.
static struct range take(const char *start, enum place place, bool registered) {
    struct range taken = {.place = PAGEABLE};
    pthread_mutex_lock(&lock);
    for (struct range **at = &ranges; *at; at = &(*at)->next) {
        struct range *range = *at;
        if (range->start != start || range->place != place || range->registered != registered)
            continue;
        taken = *range;
        *at = range->next;
        free(range);
        break;
    }
    pthread_mutex_unlock(&lock);
    return taken;
}

struct range range_of(const void *pointer) {
    pthread_mutex_lock(&lock);
    struct range *range = find(pointer);
    struct range found = range ? *range : (struct range){.place = PAGEABLE};
    pthread_mutex_unlock(&lock);
    return found;
}

void *bytes_at(const void *pointer, size_t nbytes) {
    pthread_mutex_lock(&lock);
    const char *first = pointer;
    struct range *range = find(first);
    bool whole = range == find(first + nbytes - 1);
    char *bytes = range ? range->bytes + (first - range->start) : (char *)pointer;
    pthread_mutex_unlock(&lock);
    return whole ? bytes : NULL;
}

// ---------------------------------------------------------------- device memory
cudaError_t cudaMalloc(void **pointer, size_t nbytes) {
    ENTER;
    int device = bound_device();
    nbytes = (nbytes + 4095) / 4096 * 4096;
    pthread_mutex_lock(&lock);
    bool fits = used[device] + nbytes <= device_nbytes;
    if (fits) used[device] += nbytes;
    pthread_mutex_unlock(&lock);
    if (!fits) return fail(cudaErrorMemoryAllocation);
    int file = memfd_create("null GPU", 0);
    if (file < 0 || ftruncate(file, nbytes)) abort();
    *pointer = mmap(NULL, nbytes, PROT_NONE, MAP_SHARED, file, 0);
    char *bytes = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (*pointer == MAP_FAILED || bytes == MAP_FAILED) abort();
    pthread_mutex_lock(&lock);
    add((struct range){
        .start = *pointer, .nbytes = nbytes, .place = DEVICE, .device = device, .bytes = bytes});
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
    ENTER;
    drain_device(bound_device());
    if (!pointer) return cudaSuccess;
    struct range range = take(pointer, DEVICE, false);
    if (range.place != DEVICE) return fail(cudaErrorInvalidValue);
    drain_device(range.device);
    munmap(range.start, range.nbytes);
    munmap(range.bytes, range.nbytes);
    pthread_mutex_lock(&lock);
    used[range.device] -= range.nbytes;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_nbytes, size_t *total) {
    ENTER;
    *total = device_nbytes;
    *free_nbytes = device_nbytes - used[bound_device()];
    return cudaSuccess;
}

// ---------------------------------------------------------------- pinned memory
static void pin(void *start, size_t nbytes, bool registered) {
    pthread_mutex_lock(&lock);
    add((struct range){
        .start = start, .nbytes = nbytes, .place = PINNED, .registered = registered,
        .device = bound_device(), .bytes = start});
    pthread_mutex_unlock(&lock);
}

cudaError_t cudaHostAlloc(void **pointer, size_t nbytes, unsigned flags) {
    ENTER;
    *pointer = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*pointer == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
    pin(*pointer, nbytes, false);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *pointer) {
    ENTER;
    drain_device(bound_device());
    struct range range = take(pointer, PINNED, false);
    if (range.place != PINNED) return fail(cudaErrorInvalidValue);
    munmap(range.start, range.nbytes);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *pointer, size_t nbytes, unsigned flags) {
    ENTER;
    const char *last = (const char *)pointer + nbytes - 1;
    if (range_of(pointer).place != PAGEABLE || range_of(last).place != PAGEABLE)
        return fail(cudaErrorHostMemoryAlreadyRegistered);
    pin(pointer, nbytes, true);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) {
    ENTER;
    if (take(pointer, PINNED, true).place != PINNED) return fail(cudaErrorHostMemoryNotRegistered);
    return cudaSuccess;
}

// ---------------------------------------------------------------- questions
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *is, const void *pointer) {
    ENTER;
    struct range range = range_of(pointer);
    *is = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2};
    if (range.place == PAGEABLE) return cudaSuccess;
    is->type = range.place == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    is->device = range.device;
    is->devicePointer = (void *)pointer;
    is->hostPointer = range.place == DEVICE ? NULL : (void *)pointer;
    return cudaSuccess;
}

// Triton asks this of each pointer that a kernel gets, in the context that it is launched in. No
// GPU here may read another's memory.
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr pointer) {
    ENTER_DRIVER;
    if (which != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        unknown("cuPointerGetAttribute of another attribute");
    struct range range = range_of((void *)pointer);
    if (range.place == PAGEABLE) return CUDA_ERROR_INVALID_VALUE;
    if (range.place == DEVICE && range.device != context_device())
        return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    *(CUdeviceptr *)value = pointer;
    return CUDA_SUCCESS;
}
