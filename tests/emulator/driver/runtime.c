/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The emulated CUDA runtime: devices, memory, streams and events over ordinary memory and threads. Fresh device memory
 * is filled with NaN; an allocation ends where an unmapped page begins.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "device.h"
#include "stream.h"

static _Thread_local int current_device;

/* ------------------------------------------------------------------ devices */

EXPORT cudaError_t cudaGetDeviceCount(int *count)
{
    *count = emulated_devices();
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *ret, int device)
{
    struct cudaDeviceProp prop = { .totalGlobalMem = 1ull << 30, .major = 9, .multiProcessorCount = emulated_sms() };

    if (device < 0 || device >= emulated_devices())
        return cudaErrorInvalidDevice;
    snprintf(prop.name, sizeof(prop.name), "emulated GPU %d", device);
    emulated_uuid(device, prop.uuid.bytes);
    *ret = prop;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    if (device < 0 || device >= emulated_devices())
        return cudaErrorInvalidDevice;
    if (attribute == cudaDevAttrMultiProcessorCount)
        *value = emulated_sms();
    else if (attribute == cudaDevAttrMpsEnabled)
        *value = emulated_mps();
    else
        return cudaErrorInvalidValue;
    return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= emulated_devices())
        return cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGetDevice(int *device)
{
    *device = current_device;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize(void)
{
    streams_wait_all();
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    return peer < 0 || peer >= emulated_devices() || flags ? cudaErrorInvalidValue : cudaSuccess;
}

EXPORT cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

EXPORT const char *cudaGetErrorString(cudaError_t code)
{
    switch (code) {
    case cudaSuccess:
        return "no error";
    case cudaErrorInvalidValue:
        return "invalid value";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidConfiguration:
        return "invalid launch";
    case cudaErrorInvalidDevice:
        return "invalid device";
    case cudaErrorInvalidResourceHandle:
        return "invalid handle";
    case cudaErrorNotReady:
        return "not ready";
    case cudaErrorPeerAccessAlreadyEnabled:
        return "peer access is enabled";
    }
    return "unknown error";
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **ret, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *result)
{
    void *found = dlsym(RTLD_DEFAULT, symbol);

    (void)version;
    (void)flags;
    *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    if (found)
        *ret = found;
    return cudaSuccess;
}

/* ------------------------------------------------------------------ memory */

/* Before an allocation's first byte; the page before the allocation holds it. */
struct allocation {
    uint64_t magic, mapped;
    void *start;
};
#define ALLOCATION_MAGIC 0x6d656d206f6d6575ull
#define PAGE 4096u
#define ALIGNMENT 256u

static cudaError_t take(void **ret, size_t bytes, int fill)
{
    uint64_t size = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    uint64_t pages = (size + PAGE - 1) / PAGE * PAGE, mapped = pages + 2 * PAGE;
    uint8_t *start = mmap(NULL, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *at;
    struct allocation *head = (void *)start;

    if (start == MAP_FAILED)
        return cudaErrorMemoryAllocation;
    if (mprotect(start, mapped - PAGE, PROT_READ | PROT_WRITE) < 0) {
        munmap(start, mapped);
        return cudaErrorMemoryAllocation;
    }
    at = start + PAGE + (pages - size);
    *head = (struct allocation){ ALLOCATION_MAGIC, mapped, at };
    memset(at, fill, size);
    *ret = at;
    return cudaSuccess;
}

static cudaError_t give(void *memory)
{
    struct allocation *head;

    if (!memory)
        return cudaSuccess;
    head = (struct allocation *)((uintptr_t)memory / PAGE * PAGE - PAGE);
    if (head->magic != ALLOCATION_MAGIC || head->start != memory)
        return cudaErrorInvalidValue;
    munmap(head, head->mapped);
    return cudaSuccess;
}

/* Memory does not say whose it is: what this thread uses will do, since all devices can reach it. */
EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *ret, const void *memory)
{
    (void)memory;
    *ret = (struct cudaPointerAttributes){ .device = current_device };
    return cudaSuccess;
}

EXPORT cudaError_t cudaMalloc(void **ret, size_t bytes)
{
    return take(ret, bytes, 0xff);
}

EXPORT cudaError_t cudaFree(void *memory)
{
    if (memory)
        streams_wait_all();
    return give(memory);
}

EXPORT cudaError_t cudaMallocHost(void **ret, size_t bytes)
{
    return take(ret, bytes, 0);
}

EXPORT cudaError_t cudaHostAlloc(void **ret, size_t bytes, unsigned flags)
{
    (void)flags;
    return take(ret, bytes, 0);
}

EXPORT cudaError_t cudaFreeHost(void *memory)
{
    return give(memory);
}

EXPORT cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned flags)
{
    bool well = memory && bytes && flags == (cudaHostRegisterPortable | cudaHostRegisterMapped);
    return well ? cudaSuccess : cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaHostUnregister(void *memory)
{
    return memory ? cudaSuccess : cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaHostGetDevicePointer(void **ret, void *memory, unsigned flags)
{
    *ret = memory;
    return flags ? cudaErrorInvalidValue : cudaSuccess;
}

EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    return stream_push(stream, (struct step){ .kind = STEP_SET, .to = to, .value = (uint8_t)value, .bytes = bytes });
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                                   cudaStream_t stream)
{
    (void)kind;
    return stream_push(stream, (struct step){ .kind = STEP_COPY, .to = to, .from = from, .bytes = bytes });
}

EXPORT cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    cudaError_t e = cudaMemsetAsync(to, value, bytes, NULL);

    stream_wait(NULL, -1);
    return e;
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    cudaError_t e = cudaMemcpyAsync(to, from, bytes, kind, NULL);

    stream_wait(NULL, -1);
    return e;
}

/* ------------------------------------------------------------------ streams and events */

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *ret, unsigned flags)
{
    (void)flags;
    *ret = stream_new();
    return *ret ? cudaSuccess : cudaErrorMemoryAllocation;
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *ret)
{
    return cudaStreamCreateWithFlags(ret, 0);
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    stream_free(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    stream_wait(stream, -1);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    return stream_busy(stream) ? cudaErrorNotReady : cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, void (*function)(void *), void *data)
{
    return stream_push(stream, (struct step){ .kind = STEP_CALL, .function = function, .cookie = data });
}

EXPORT cudaError_t emulated_stream_call(cudaStream_t stream, void (*run)(void *), void *cookie, bool early)
{
    return stream_push(stream, (struct step){ .kind = STEP_CALL, .function = run, .cookie = cookie, .early = early });
}

EXPORT void *emulated_stream_next_early(cudaStream_t stream, void (*run)(void *))
{
    return stream_take_early(stream, run);
}

struct CUevent_st {
    pthread_mutex_t lock;
    pthread_cond_t moved;
    uint64_t recorded, reached; /* how often */
    struct timespec when;
    bool freed;
};

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *ret, unsigned flags)
{
    struct CUevent_st *e = calloc(1, sizeof(*e));

    (void)flags;
    if (!e)
        return cudaErrorMemoryAllocation;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->moved, NULL);
    *ret = e;
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *ret)
{
    return cudaEventCreateWithFlags(ret, 0);
}

static void reach(void *cookie)
{
    struct CUevent_st *e = cookie;

    pthread_mutex_lock(&e->lock);
    e->reached++;
    clock_gettime(CLOCK_MONOTONIC, &e->when);
    pthread_cond_broadcast(&e->moved);
    pthread_mutex_unlock(&e->lock);
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t stream)
{
    pthread_mutex_lock(&e->lock);
    e->recorded++;
    pthread_mutex_unlock(&e->lock);
    return cudaLaunchHostFunc(stream, reach, e);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t e)
{
    bool done;

    pthread_mutex_lock(&e->lock);
    done = e->reached == e->recorded;
    pthread_mutex_unlock(&e->lock);
    return done ? cudaSuccess : cudaErrorNotReady;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    pthread_mutex_lock(&e->lock);
    while (e->reached < e->recorded)
        pthread_cond_wait(&e->moved, &e->lock);
    pthread_mutex_unlock(&e->lock);
    return cudaSuccess;
}

static void wait_for_event(void *cookie)
{
    cudaEventSynchronize(cookie);
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    (void)flags;
    return cudaLaunchHostFunc(stream, wait_for_event, event);
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    if (!e)
        return cudaSuccess;
    cudaEventSynchronize(e);
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->moved);
    free(e);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    *ms = (float)(to->when.tv_sec - from->when.tv_sec) * 1e3f + (float)(to->when.tv_nsec - from->when.tv_nsec) * 1e-6f;
    return cudaEventQuery(from) == cudaSuccess && cudaEventQuery(to) == cudaSuccess ? cudaSuccess : cudaErrorNotReady;
}
