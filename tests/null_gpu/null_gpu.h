// A GPU whose kernels do nothing: what its C files share. test_null_gpu.py says what it is for.
//
// Its functions have the names and signatures of CUDA's, whose headers check them; CUDA's manuals
// say what they do. Of these rules it keeps those that a program without a GPU can break unseen.
#pragma once
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#define MOST_DEVICES 8

// calls.c: every entry point is known by its name, and fails when a test asked for that.
struct call {
    const char *name;
    atomic_int failures_left;
    atomic_int count;  // by threads that are counted
    int error;  // that those failures return
    struct call *next;
};
int enter(struct call **call, const char *name);  // 0, or the error that this call shall return
_Noreturn void unknown(const char *name);
#define ENTERED ({ static struct call *call; enter(&call, __func__); })
#define ENTER do { int wanted = ENTERED; if (wanted) return fail(wanted); } while (0)
#define ENTER_DRIVER do { int wanted = ENTERED; if (wanted) return wanted; } while (0)

// devices.c: devices, each thread's current one, and its last error.
extern int device_count;
extern size_t device_nbytes;
extern bool late;        // copies are done when they are waited for
extern bool zeros_back;  // the host gets zeros, as if kernels had computed them, not old bytes
cudaError_t fail(cudaError_t error);  // kept as the thread's last error
int bound_device(void);      // the current device, its context bound to this thread
int context_device(void);    // -1 where no context is bound to this thread
void bind_context(int device);

// memory.c: device memory, pinned memory, and which pointer is which.
enum place { PAGEABLE, PINNED, DEVICE };
struct range {
    char *start;
    size_t nbytes;
    enum place place;
    bool registered;  // pinned by cudaHostRegister
    int device;
    char *bytes;      // where they are: `start`, but for device memory
    struct range *next;
};
struct range range_of(const void *pointer);  // PAGEABLE where nothing is known of it
void *bytes_at(const void *pointer, size_t nbytes);  // NULL where they are not in one range
void drain_device(int device);

// streams.c: work in order, done at once or, with `late`, when it is waited for.
struct stream {
    int device;
    struct item *first, *last;
    atomic_long queued;
    atomic_long done;
};
struct stream *stream_of(cudaStream_t handle);  // 0, 1 and 2 are the current device's own
cudaError_t may_launch(cudaStream_t handle);    // an error for a stream of another device
void drain(struct stream *stream);
