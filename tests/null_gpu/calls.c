// All entry points by name, and failures that a test asks for.
#include "null_gpu.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct call *calls;
static _Thread_local bool is_counted;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct call *call_of(const char *name) {
    pthread_mutex_lock(&lock);
    struct call *call = calls;
    while (call && strcmp(call->name, name)) call = call->next;
    if (!call) {
        call = calloc(1, sizeof *call);
        call->name = strdup(name);
        call->next = calls;
        calls = call;
    }
    pthread_mutex_unlock(&lock);
    return call;
}

int enter(struct call **call, const char *name) {
    if (!*call) *call = call_of(name);
    if (is_counted) (*call)->count++;
    int left = (*call)->failures_left;
    while (left > 0)
        if (atomic_compare_exchange_weak(&(*call)->failures_left, &left, left - 1))
            return (*call)->error;
    return 0;
}

_Noreturn void unknown(const char *name) {
    fprintf(stderr, "null GPU: %s was called, which tests/null_gpu lacks: add it there\n", name);
    abort();
}

// ---------------------------------------------------------------- for tests, through ctypes
void null_gpu_fail(const char *name, int error, int times) {
    struct call *call = call_of(name);
    call->error = error;
    call->failures_left = times;
}

void null_gpu_count(void) { is_counted = true; }

int null_gpu_counted(const char *name) { return call_of(name)->count; }
