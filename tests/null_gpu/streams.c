// Streams, events and copies. A stream does its work in order: at once, or, with `late`, when the
// stream or an event behind the work is waited for. A read of a copy's result that comes too early,
// or a write to its source, then shows as wrong bytes.
#include "null_gpu.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct event {
    int device;
    bool times;
    struct stream *stream;  // NULL until it is recorded
    long ticket;            // of the stream
    double at_s;
    atomic_int users;       // the program, and items that will write its time
};

enum kind { COPY, SET, RECORD, WAIT };
struct item {
    enum kind kind;
    long ticket;
    void *to, *from;  // COPY, of zeros where `from` is NULL; the item frees `from` where `owned`
    bool owned;
    size_t width, height, to_pitch, from_pitch;
    int value;               // SET
    struct event *event;     // RECORD
    struct stream *awaited;  // WAIT, up to
    long until;
    struct item *next;
};

static struct stream defaults[MOST_DEVICES];
static struct stream *made[4096];  // never freed: PyTorch keeps its streams, too
static int made_count;
static pthread_mutex_t gpu = PTHREAD_MUTEX_INITIALIZER;  // of all queues, and of `made`

__attribute__((constructor)) static void number_defaults(void) {
    for (int device = 0; device < MOST_DEVICES; device++) defaults[device].device = device;
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

// ---------------------------------------------------------------- doing work in order
static void copy_rows(const struct item *item) {
    for (size_t row = 0; row < item->height; row++) {
        char *to = (char *)item->to + row * item->to_pitch;
        if (item->from)
            memcpy(to, (char *)item->from + row * item->from_pitch, item->width);
        else
            memset(to, 0, item->width);
    }
}

static void run_to(struct stream *stream, long ticket);

static void perform(struct item *item) {
    switch (item->kind) {
    case COPY: copy_rows(item); break;
    case SET: memset(item->to, item->value, item->width); break;
    case WAIT: run_to(item->awaited, item->until); break;
    case RECORD:
        if (item->event->ticket == item->ticket) item->event->at_s = now_s();
        if (--item->event->users == 0) free(item->event);
    }
    if (item->owned) free(item->from);
}

// `gpu` is held. A stream waits only for work that was queued before its wait: this ends.
static void run_to(struct stream *stream, long ticket) {
    while (stream->done < ticket) {
        struct item *item = stream->first;
        perform(item);
        stream->first = item->next;
        if (!stream->first) stream->last = NULL;
        stream->done = item->ticket;
        free(item);
    }
}

static void drain_to(struct stream *stream, long ticket) {
    if (stream->done >= ticket) return;
    pthread_mutex_lock(&gpu);
    run_to(stream, ticket);
    pthread_mutex_unlock(&gpu);
}

void drain(struct stream *stream) { drain_to(stream, stream->queued); }

void drain_device(int device) {
    drain(&defaults[device]);
    for (int each = 0; each < made_count; each++)
        if (made[each]->device == device) drain(made[each]);
}

// Its ticket. Without `late` it is done at once, by the thread that asks for it, and every ticket
// is 0: large copies of several threads run side by side.
static long queue(struct stream *stream, struct item item) {
    if (item.event) item.event->stream = stream;
    if (!late) {
        perform(&item);
        return 0;
    }
    struct item *added = malloc(sizeof item);
    *added = item;
    pthread_mutex_lock(&gpu);
    long ticket = added->ticket = stream->queued + 1;
    if (item.event) item.event->ticket = ticket;
    *(stream->last ? &stream->last->next : &stream->first) = added;
    stream->last = added;
    stream->queued = ticket;
    pthread_mutex_unlock(&gpu);
    return ticket;
}

// ---------------------------------------------------------------- streams
struct stream *stream_of(cudaStream_t handle) {
    bool own = handle == 0 || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
    return own ? &defaults[bound_device()] : (struct stream *)handle;
}

cudaError_t may_launch(cudaStream_t handle) {
    bool here = stream_of(handle)->device == bound_device();
    return here ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    ENTER;
    if (flags != cudaStreamNonBlocking) unknown("cudaStreamCreateWithPriority without flags");
    struct stream *created = calloc(1, sizeof *created);
    created->device = bound_device();
    pthread_mutex_lock(&gpu);
    if (made_count == sizeof made / sizeof *made) abort();
    made[made_count++] = created;
    pthread_mutex_unlock(&gpu);
    *stream = (cudaStream_t)created;
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    ENTER;
    *priority = 0;
    return cudaSuccess;
}

// A wait for a slow GPU leaves other threads time to go on too early.
static void wait_for(struct stream *stream, long ticket) {
    if (late && stream->done < ticket) usleep(1000);
    drain_to(stream, ticket);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ENTER;
    struct stream *awaited = stream_of(stream);
    wait_for(awaited, awaited->queued);
    return cudaSuccess;
}

// Each question that finds work left lets the GPU do one piece of it.
static cudaError_t ask(struct stream *stream, long ticket) {
    if (stream->done >= ticket) return cudaSuccess;
    drain_to(stream, stream->done + 1);
    return fail(cudaErrorNotReady);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ENTER;
    struct stream *asked = stream_of(stream);
    return ask(asked, asked->queued);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    ENTER;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
    cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
    size_t *count) {
    ENTER;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    ENTER;
    return cudaSuccess;
}

// ---------------------------------------------------------------- events
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    ENTER;
    struct event *created = calloc(1, sizeof *created);
    *created = (struct event){
        .device = bound_device(), .times = !(flags & cudaEventDisableTiming), .users = 1};
    *event = (cudaEvent_t)created;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    ENTER;
    if (--((struct event *)event)->users == 0) free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
    ENTER;
    struct event *event = (struct event *)handle;
    struct stream *on = stream_of(stream);
    if (event->device != on->device) return fail(cudaErrorInvalidResourceHandle);
    event->users++;
    queue(on, (struct item){.kind = RECORD, .event = event});
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned flags) {
    ENTER;
    struct event *event = (struct event *)handle;
    if (!event->stream) return cudaSuccess;  // there is nothing to wait for
    struct item item = {.kind = WAIT, .awaited = event->stream, .until = event->ticket};
    queue(stream_of(stream), item);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    ENTER;
    struct event *event = (struct event *)handle;
    return event->stream ? ask(event->stream, event->ticket) : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    ENTER;
    struct event *event = (struct event *)handle;
    if (event->stream) wait_for(event->stream, event->ticket);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    ENTER;
    struct event *from = (struct event *)start, *to = (struct event *)end;
    if (!from->times || !to->times || !from->stream || !to->stream)
        return fail(cudaErrorInvalidResourceHandle);
    if (from->stream->done < from->ticket || to->stream->done < to->ticket)
        return fail(cudaErrorNotReady);
    *milliseconds = (to->at_s - from->at_s) * 1e3;
    return cudaSuccess;
}

// ---------------------------------------------------------------- copies
// As in CUDA, a copy is done with pageable memory when it returns: it has read its source into a
// buffer, or written its destination.
static cudaError_t copy(
    void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
    struct stream *stream) {
    if (!width || !height) return cudaSuccess;
    size_t to_nbytes = to_pitch * (height - 1) + width;
    size_t from_nbytes = from_pitch * (height - 1) + width;
    struct item item = {
        .kind = COPY, .to = bytes_at(to, to_nbytes), .from = bytes_at(from, from_nbytes),
        .width = width, .height = height, .to_pitch = to_pitch, .from_pitch = from_pitch};
    if (!item.to || !item.from) return fail(cudaErrorInvalidValue);
    enum place source = range_of(from).place, target = range_of(to).place;
    if (zeros_back && source == DEVICE && target != DEVICE) item.from = NULL;
    if (late && source == PAGEABLE) {
        item.from = memcpy(malloc(from_nbytes), from, from_nbytes);
        item.owned = true;
    }
    bool nan = late && source == DEVICE && target == PINNED && height == 1;
    if (nan) memset(item.to, 0xff, width);  // until it has come
    long ticket = queue(stream, item);
    if (target == PAGEABLE) drain_to(stream, ticket);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(
    void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    ENTER;
    return copy(to, nbytes, from, nbytes, nbytes, 1, stream_of(stream));
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind) {
    ENTER;
    cudaError_t error = copy(to, nbytes, from, nbytes, nbytes, 1, stream_of(0));
    drain(stream_of(0));
    return error;
}

cudaError_t cudaMemcpy2DAsync(
    void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
    enum cudaMemcpyKind kind, cudaStream_t stream) {
    ENTER;
    return copy(to, to_pitch, from, from_pitch, width, height, stream_of(stream));
}

cudaError_t cudaMemcpyPeerAsync(
    void *to, int to_device, const void *from, int from_device, size_t nbytes,
    cudaStream_t stream) {
    ENTER;
    return copy(to, nbytes, from, nbytes, nbytes, 1, stream_of(stream));
}

static cudaError_t set(void *to, int value, size_t nbytes, struct stream *stream) {
    if (!nbytes) return cudaSuccess;
    struct item item = {.kind = SET, .to = bytes_at(to, nbytes), .value = value, .width = nbytes};
    if (!item.to) return fail(cudaErrorInvalidValue);
    queue(stream, item);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t nbytes, cudaStream_t stream) {
    ENTER;
    return set(to, value, nbytes, stream_of(stream));
}

cudaError_t cudaMemset(void *to, int value, size_t nbytes) {
    ENTER;
    return set(to, value, nbytes, stream_of(0));
}
