/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_cuda.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define GRANULE 4096u

EXPORT bool fake_cuda_mps, fake_cuda_capturing;
EXPORT int fake_cuda_batch_code;

/* ------------------------------------------------------------------ streams */

struct step {
    struct step *next;
    int operation; /* 1: wait, 2: write, 0: call */
    uint32_t *word, value;
    void (*function)(void *);
    void *cookie;
};

struct CUstream_st {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    struct step *first, **end;
    bool running, stop;
};

static void nap(void)
{
    const struct timespec t = { .tv_nsec = 100000 };
    nanosleep(&t, NULL);
}

static void run_step(const struct step *step)
{
    switch (step->operation) {
    case 0:
        step->function(step->cookie);
        return;
    case 1:
        while ((int32_t)(__atomic_load_n(step->word, __ATOMIC_ACQUIRE) - step->value) < 0)
            nap();
        return;
    default:
        __atomic_store_n(step->word, step->value, __ATOMIC_RELEASE);
    }
}

static void *run(void *cookie)
{
    struct CUstream_st *s = cookie;

    pthread_mutex_lock(&s->lock);
    while (!s->stop) {
        struct step *step = s->first;
        if (!step) {
            pthread_cond_wait(&s->moved, &s->lock);
            continue;
        }
        s->first = step->next;
        s->end = s->first ? s->end : &s->first;
        s->running = true;
        pthread_mutex_unlock(&s->lock);
        run_step(step);
        free(step);
        pthread_mutex_lock(&s->lock);
        s->running = false;
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

EXPORT struct CUstream_st *fake_stream_new(void)
{
    struct CUstream_st *s = calloc(1, sizeof(*s));
    if (!s)
        abort();
    s->end = &s->first;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->moved, NULL);
    pthread_create(&s->thread, NULL, run, s);
    return s;
}

static void push(struct CUstream_st *s, struct step step)
{
    struct step *own = malloc(sizeof(*own));
    if (!own)
        abort();
    *own = step;
    own->next = NULL;
    pthread_mutex_lock(&s->lock);
    *s->end = own;
    s->end = &own->next;
    pthread_cond_signal(&s->moved);
    pthread_mutex_unlock(&s->lock);
}

EXPORT void fake_stream_call(struct CUstream_st *s, void (*function)(void *), void *cookie)
{
    push(s, (struct step){ .function = function, .cookie = cookie });
}

EXPORT bool fake_stream_drain(struct CUstream_st *s, int timeout_ms)
{
    bool busy = true;
    for (int i = 0; busy && i < timeout_ms * 10; i++) {
        nap();
        pthread_mutex_lock(&s->lock);
        busy = s->running || s->first;
        pthread_mutex_unlock(&s->lock);
    }
    return !busy;
}

EXPORT void fake_stream_free(struct CUstream_st *s)
{
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_signal(&s->moved);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->moved);
    free(s);
}

/* ------------------------------------------------------------------ the driver */

struct operation {
    int operation;
    uint64_t at, value;
    uint64_t rest[3];
};

EXPORT int cuInit(unsigned flags);
EXPORT int cuDeviceGetCount(int *count);
EXPORT int cuDeviceGet(int *device, int ordinal);
EXPORT int cuDeviceGetUuid_v2(uint8_t *uuid, int device);
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device);
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device);
EXPORT int cuDevicePrimaryCtxRelease_v2(int device);
EXPORT int cuCtxPushCurrent_v2(void *context);
EXPORT int cuCtxPopCurrent_v2(void **context);
EXPORT int cuCtxGetCurrent(void **context);
EXPORT int cuMemGetAllocationGranularity(size_t *granule, const void *about, int option);
EXPORT int cuMemImportFromShareableHandle(uint64_t *handle, void *fd, int type);
EXPORT int cuMemRelease(uint64_t handle);
EXPORT int cuMemAddressReserve(uint64_t *at, size_t size, size_t alignment, uint64_t fixed, unsigned long long flags);
EXPORT int cuMemAddressFree(uint64_t at, size_t size);
EXPORT int cuMemMap(uint64_t at, size_t size, size_t offset, uint64_t handle, unsigned long long flags);
EXPORT int cuMemUnmap(uint64_t at, size_t size);
EXPORT int cuMemSetAccess(uint64_t at, size_t size, const void *access, size_t count);
EXPORT int cuMemHostRegister_v2(void *memory, size_t size, unsigned flags);
EXPORT int cuMemHostUnregister(void *memory);
EXPORT int cuMemHostGetDevicePointer_v2(uint64_t *at, void *memory, unsigned flags);
EXPORT int cuStreamIsCapturing(void *stream, int *status);
EXPORT int cuStreamBatchMemOp_v2(struct CUstream_st *stream, unsigned count, const struct operation *op,
                                 unsigned flags);
EXPORT int cuGetErrorString(int code, const char **text);

static bool started;
static char context_word;
static _Thread_local int depth;

int cuInit(unsigned flags)
{
    started = true;
    return (int)flags;
}

int cuDeviceGetCount(int *count)
{
    *count = 1;
    return started ? 0 : 3;
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return 0;
}

int cuDeviceGetUuid_v2(uint8_t *uuid, int device)
{
    memset(uuid, FAKE_CUDA_UUID, 16);
    return device;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = attribute == 133 && fake_cuda_mps;
    return device;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = &context_word;
    return device;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    return device;
}

int cuCtxPushCurrent_v2(void *context)
{
    depth++;
    return context == &context_word ? 0 : 201;
}

int cuCtxPopCurrent_v2(void **context)
{
    *context = &context_word;
    return depth-- > 0 ? 0 : 201;
}

int cuCtxGetCurrent(void **context)
{
    *context = &context_word;
    return 0;
}

int cuMemGetAllocationGranularity(size_t *granule, const void *about, int option)
{
    *granule = GRANULE;
    return about ? option : 1;
}

int cuMemImportFromShareableHandle(uint64_t *handle, void *fd, int type)
{
    *handle = (uint64_t)dup((int)(intptr_t)fd);
    return type == 1 ? 0 : 1;
}

int cuMemRelease(uint64_t handle)
{
    return close((int)handle);
}

int cuMemAddressReserve(uint64_t *at, size_t size, size_t alignment, uint64_t fixed, unsigned long long flags)
{
    void *p = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *at = (uint64_t)(uintptr_t)p;
    return p == MAP_FAILED || alignment || fixed || flags ? 2 : 0;
}

int cuMemAddressFree(uint64_t at, size_t size)
{
    return munmap((void *)(uintptr_t)at, size);
}

int cuMemMap(uint64_t at, size_t size, size_t offset, uint64_t handle, unsigned long long flags)
{
    void *p = mmap((void *)(uintptr_t)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, (off_t)offset);
    return p == MAP_FAILED || flags ? 1 : 0;
}

int cuMemUnmap(uint64_t at, size_t size)
{
    void *p = mmap((void *)(uintptr_t)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return p == MAP_FAILED;
}

int cuMemSetAccess(uint64_t at, size_t size, const void *access, size_t count)
{
    return mprotect((void *)(uintptr_t)at, size, PROT_READ | PROT_WRITE) || !access || count != 1;
}

int cuMemHostRegister_v2(void *memory, size_t size, unsigned flags)
{
    return memory && size && flags == 3 ? 0 : 1;
}

int cuMemHostUnregister(void *memory)
{
    return memory ? 0 : 1;
}

int cuMemHostGetDevicePointer_v2(uint64_t *at, void *memory, unsigned flags)
{
    *at = (uint64_t)(uintptr_t)memory;
    return (int)flags;
}

int cuStreamIsCapturing(void *stream, int *status)
{
    *status = fake_cuda_capturing;
    return stream ? 0 : 1;
}

int cuStreamBatchMemOp_v2(struct CUstream_st *stream, unsigned count, const struct operation *op, unsigned flags)
{
    if (fake_cuda_batch_code)
        return fake_cuda_batch_code;
    for (unsigned i = 0; i < count; i++)
        push(stream, (struct step){ .operation = op[i].operation,
                                    .word = (uint32_t *)(uintptr_t)op[i].at,
                                    .value = (uint32_t)op[i].value });
    return (int)flags;
}

int cuGetErrorString(int code, const char **text)
{
    *text = code == 2 ? "out of memory" : "some error";
    return 0;
}
