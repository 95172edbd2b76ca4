/* SPDX-License-Identifier: Apache-2.0 */
/* See cuda.h. The declarations are those parts of the driver's binary interface that are used here. */
#include "cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "image.h"
#include "mok/mok.h"

/* ------------------------------------------------------------------ the driver's interface */

typedef int result;
typedef int device_number;
typedef uint64_t address;
typedef void *context;
typedef uint64_t handle;

struct location {
    int type, id;
};

struct allocation {
    int type, handle_types;
    struct location location;
    void *win32;
    uint8_t flags[8];
};
_Static_assert(sizeof(struct allocation) == 32, "CUmemAllocationProp");

struct access {
    struct location location;
    int flags;
};
_Static_assert(sizeof(struct access) == 12, "CUmemAccessDesc");

union memory_operation {
    struct {
        int operation;
        address at;
        uint64_t value;
        unsigned flags;
        address alias;
    };
    uint64_t pad[6];
};
_Static_assert(sizeof(union memory_operation) == 48, "CUstreamBatchMemOpParams");

enum {
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    OUT_OF_MEMORY = 2,
    NO_BINARY = 209,
    DEVICE_MEMORY = 1,      /* CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ALLOCATION_TYPE_PINNED,
                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, granularity: recommended is 1, minimum 0 */
    READ_WRITE = 3,         /* CU_MEM_ACCESS_FLAGS_PROT_READWRITE */
    ATTRIBUTE_MPS = 133,    /* CU_DEVICE_ATTRIBUTE_MPS_ENABLED */
    REGISTER_FLAGS = 1 | 2, /* CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP */
    OPERATION_WAIT = 1,     /* CU_STREAM_MEM_OP_WAIT_VALUE_32, with CU_STREAM_WAIT_VALUE_GEQ = 0 */
    OPERATION_WRITE = 2,    /* CU_STREAM_MEM_OP_WRITE_VALUE_32 */
};

/* clang-format off */
#define CALLS(X)                                                                                                       \
    X(init, "cuInit", (unsigned))                                                                                      \
    X(count, "cuDeviceGetCount", (int *))                                                                              \
    X(get, "cuDeviceGet", (device_number *, int))                                                                      \
    X(uuid, "cuDeviceGetUuid_v2", (uint8_t *, device_number))                                                          \
    X(attribute, "cuDeviceGetAttribute", (int *, int, device_number))                                                  \
    X(retain, "cuDevicePrimaryCtxRetain", (context *, device_number))                                                  \
    X(release, "cuDevicePrimaryCtxRelease_v2", (device_number))                                                        \
    X(push, "cuCtxPushCurrent_v2", (context))                                                                          \
    X(pop, "cuCtxPopCurrent_v2", (context *))                                                                          \
    X(current, "cuCtxGetCurrent", (context *))                                                                         \
    X(granularity, "cuMemGetAllocationGranularity", (size_t *, const struct allocation *, int))                        \
    X(import, "cuMemImportFromShareableHandle", (handle *, void *, int))                                               \
    X(free_handle, "cuMemRelease", (handle))                                                                           \
    X(reserve, "cuMemAddressReserve", (address *, size_t, size_t, address, unsigned long long))                        \
    X(unreserve, "cuMemAddressFree", (address, size_t))                                                                \
    X(map, "cuMemMap", (address, size_t, size_t, handle, unsigned long long))                                          \
    X(unmap, "cuMemUnmap", (address, size_t))                                                                          \
    X(set_access, "cuMemSetAccess", (address, size_t, const struct access *, size_t))                                  \
    X(host_register, "cuMemHostRegister_v2", (void *, size_t, unsigned))                                               \
    X(host_unregister, "cuMemHostUnregister", (void *))                                                                \
    X(host_address, "cuMemHostGetDevicePointer_v2", (address *, void *, unsigned))                                     \
    X(capturing, "cuStreamIsCapturing", (void *, int *))                                                               \
    X(batch, "cuStreamBatchMemOp_v2", (void *, unsigned, union memory_operation *, unsigned))                          \
    X(error_text, "cuGetErrorString", (result, const char **))
/* Of newer drivers, and not needed for layers. */
#define MORE_CALLS(X)                                                                                                  \
    X(load_library, "cuLibraryLoadData",                                                                               \
      (void **, const void *, int *, void **, unsigned, int *, void **, unsigned))                                     \
    X(get_kernel, "cuLibraryGetKernel", (void **, void *, const char *))                                               \
    X(launch, "cuLaunchKernel",                                                                                        \
      (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))
/* clang-format on */

static struct {
#define CALL(name, symbol, arguments) result(*name) arguments;
    CALLS(CALL)
    MORE_CALLS(CALL)
#undef CALL
    char missing[256]; /* why it cannot be used; "": it can */
    const char *missing_more;
} cu;

struct cuda_device {
    device_number number;
    context context;
    bool held; /* the primary context, by us */
};

static void load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

    if (!library) {
        snprintf(cu.missing, sizeof(cu.missing), "%s", dlerror());
        return;
    }
#define CALL(name, symbol, arguments)                                                                                  \
    *(void **)(void *)&cu.name = dlsym(library, symbol);                                                               \
    if (!cu.name && !cu.missing[0])                                                                                    \
        snprintf(cu.missing, sizeof(cu.missing), "libcuda.so.1 has no %s: the driver is too old", symbol);
    CALLS(CALL)
#undef CALL
#define CALL(name, symbol, arguments)                                                                                  \
    *(void **)(void *)&cu.name = dlsym(library, symbol);                                                               \
    if (!cu.name && !cu.missing_more)                                                                                  \
        cu.missing_more = symbol;
    MORE_CALLS(CALL)
#undef CALL
}

static int loaded(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, load);
    return cu.missing[0] ? client_fail(MOK_ENOTSUP, "CUDA cannot be used in this process: %s", cu.missing) : 0;
}

static int fail(result r, const char *what)
{
    const char *text = NULL;

    if (cu.error_text(r, &text) != 0 || !text)
        text = "unknown error";
    return client_fail(r == OUT_OF_MEMORY ? MOK_ENOMEM : MOK_EDEVICE, "%s: CUDA says %d, %s", what, r, text);
}

/* ------------------------------------------------------------------ devices */

/* Where nobody in this process has started CUDA yet, it can still be told to join the MPS. */
static int start(const char *mps_pipe)
{
    int count;

    if (cu.count(&count) == NOT_INITIALIZED && mps_pipe[0])
        setenv("CUDA_MPS_PIPE_DIRECTORY", mps_pipe, 1);
    result r = cu.init(0);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (r == NO_DEVICE && mps_pipe[0] && visible) /* a control daemon of one GPU numbers it 0 */
        return client_fail(MOK_ENODEV,
                           "CUDA sees no GPU under the MPS in %s with CUDA_VISIBLE_DEVICES=%s; leave that unset, or "
                           "name GPUs by their UUIDs",
                           mps_pipe, visible);
    return r == 0 ? 0 : fail(r, "starting CUDA");
}

static int find(const uint8_t uuid[16], device_number *ret)
{
    int count = 0;
    uint8_t its[16];

    result r = cu.count(&count);
    if (r != 0)
        return fail(r, "counting GPUs");
    for (int i = 0; i < count; i++) {
        device_number number;
        if (cu.get(&number, i) == 0 && cu.uuid(its, number) == 0 && memcmp(its, uuid, sizeof(its)) == 0) {
            *ret = number;
            return 0;
        }
    }
    return client_fail(MOK_ENODEV,
                       "this process sees %d GPUs, and mokd's with UUID %02x%02x%02x%02x-... is not among them; see "
                       "CUDA_VISIBLE_DEVICES",
                       count, uuid[0], uuid[1], uuid[2], uuid[3]);
}

/* A silent mismatch would cost milliseconds an operation. */
static int check_sharing(device_number number, const char *mps_pipe)
{
    int enabled = 0;

    if (!mps_pipe[0] || (cu.attribute(&enabled, ATTRIBUTE_MPS, number) == 0 && enabled))
        return 0;
    return client_fail(MOK_ESHARING,
                       "CUDA runs in this process without MPS, and mokd's workers with it; set "
                       "CUDA_MPS_PIPE_DIRECTORY=%s before the process starts CUDA, or open the MoK device first",
                       mps_pipe);
}

int cuda_open(const uint8_t uuid[16], const char *mps_pipe, struct cuda_device **ret)
{
    device_number number = 0;

    int r = loaded();
    if (r < 0 || (r = start(mps_pipe)) < 0 || (r = find(uuid, &number)) < 0 ||
        (r = check_sharing(number, mps_pipe)) < 0)
        return r;
    struct cuda_device *device = calloc(1, sizeof(*device));
    if (!device)
        return client_fail(MOK_ENOMEM, "no memory for a GPU's handle");
    device->number = number;
    result error = cu.retain(&device->context, number);
    if (error != 0) {
        free(device);
        return fail(error, "opening the GPU's primary context");
    }
    device->held = true;
    *ret = device;
    return 0;
}

int cuda_open_current(struct cuda_device **ret)
{
    context current = NULL;

    int r = loaded();
    if (r < 0)
        return r;
    if (cu.current(&current) != 0 || !current)
        return client_fail(MOK_ESTATE, "stream: this thread has no current CUDA context");
    struct cuda_device *device = calloc(1, sizeof(*device));
    if (!device)
        return client_fail(MOK_ENOMEM, "no memory for a GPU's handle");
    device->context = current;
    *ret = device;
    return 0;
}

void cuda_close(struct cuda_device *device)
{
    if (!device)
        return;
    if (device->held)
        cu.release(device->number);
    free(device);
}

static int enter(struct cuda_device *device)
{
    result r = cu.push(device->context);
    return r == 0 ? 0 : fail(r, "using the GPU's context");
}

static void leave(void)
{
    context ours;
    cu.pop(&ours);
}

/* ------------------------------------------------------------------ memory */

static int whole_granules(struct cuda_device *device, uint64_t bytes, size_t *ret)
{
    struct allocation about = { .type = DEVICE_MEMORY,
                                .handle_types = DEVICE_MEMORY,
                                .location = { .type = DEVICE_MEMORY, .id = device->number } };
    size_t granule = 0;

    result r = cu.granularity(&granule, &about, 0);
    if (r != 0 || granule == 0)
        return fail(r, "asking for the granularity of the GPU's memory");
    *ret = (bytes + granule - 1) / granule * granule;
    return 0;
}

static result map_at(struct cuda_device *device, handle memory, address at, size_t size)
{
    struct access access = { .location = { .type = DEVICE_MEMORY, .id = device->number }, .flags = READ_WRITE };

    result r = cu.map(at, size, 0, memory, 0);
    if (r != 0)
        return r;
    r = cu.set_access(at, size, &access, 1);
    if (r != 0)
        cu.unmap(at, size);
    return r;
}

static int map(struct cuda_device *device, int fd, uint64_t bytes, void **ret_address)
{
    address at = 0;
    handle memory;
    size_t size;

    int code = whole_granules(device, bytes, &size);
    if (code < 0)
        return code;
    result r = cu.import(&memory, (void *)(intptr_t)fd, DEVICE_MEMORY);
    if (r != 0)
        return fail(r, "importing a buffer's memory");
    r = cu.reserve(&at, size, 0, 0, 0);
    if (r == 0) {
        r = map_at(device, memory, at, size);
        if (r != 0)
            cu.unreserve(at, size);
    }
    cu.free_handle(memory); /* a mapping holds it */
    if (r != 0)
        return fail(r, "mapping a buffer's memory");
    *ret_address = (void *)(uintptr_t)at;
    return 0;
}

int cuda_map(struct cuda_device *device, int fd, uint64_t bytes, void **ret_address)
{
    int r = enter(device);
    if (r < 0)
        return r;
    r = map(device, fd, bytes, ret_address);
    leave();
    return r;
}

void cuda_unmap(struct cuda_device *device, void *at, uint64_t bytes)
{
    size_t size;

    if (!at || enter(device) < 0)
        return;
    if (whole_granules(device, bytes, &size) == 0) {
        cu.unmap((address)(uintptr_t)at, size);
        cu.unreserve((address)(uintptr_t)at, size);
    }
    leave();
}

int cuda_register(struct cuda_device *device, void *memory, uint64_t bytes, uint64_t *ret_device_address)
{
    int r = enter(device);
    if (r < 0)
        return r;
    result error = cu.host_register(memory, bytes, REGISTER_FLAGS);
    if (error == 0) {
        error = cu.host_address(ret_device_address, memory, 0);
        if (error != 0)
            cu.host_unregister(memory);
    }
    leave();
    return error == 0 ? 0 : fail(error, "making the stream slots usable by the GPU");
}

void cuda_unregister(struct cuda_device *device, void *memory)
{
    if (enter(device) < 0)
        return;
    cu.host_unregister(memory);
    leave();
}

/* ------------------------------------------------------------------ streams */

int cuda_check_stream(struct cuda_device *device, void *stream)
{
    int capturing = 0;

    int r = enter(device);
    if (r < 0)
        return r;
    if (cu.capturing(stream, &capturing) == 0 && capturing)
        r = client_fail(MOK_ESTATE, "stream: is being captured; an operation's numbers cannot be replayed");
    leave();
    return r;
}

static int hand_over(void *stream, const struct cuda_words *words, uint32_t number)
{
    union memory_operation operation[] = {
        { { .operation = OPERATION_WRITE, .at = words->start, .value = number } },
        { { .operation = OPERATION_WRITE, .at = words->doorbell, .value = number } },
        { { .operation = OPERATION_WAIT, .at = words->done, .value = number } },
        { { .operation = OPERATION_WRITE, .at = words->passed, .value = number } },
    };

    result r = cu.batch(stream, sizeof(operation) / sizeof(operation[0]), operation, 0);
    return r == 0 ? 0 : fail(r, "stream: handing an operation over");
}

int cuda_hand_over(struct cuda_device *device, void *stream, const struct cuda_words *words, uint32_t number)
{
    int r = enter(device);
    if (r < 0)
        return r;
    r = hand_over(stream, words, number);
    leave();
    return r;
}

/* ------------------------------------------------------------------ kernels of our own */

/* Of the process, never unloaded; each context gets it when it first runs a kernel of it. */
static struct {
    pthread_mutex_t lock;
    void *library;
} ours = { .lock = PTHREAD_MUTEX_INITIALIZER };

static int fail_kernel(result r, const char *name, const char *what)
{
    if (r == NO_BINARY)
        return client_fail(MOK_ENOTSUP, "%s: this library has no machine code of it for this GPU", name);
    return fail(r, what);
}

static int find_kernel(const char *name, void **ret)
{
    result r = 0;

    pthread_mutex_lock(&ours.lock);
    if (!ours.library)
        r = cu.load_library(&ours.library, client_image.data, NULL, NULL, 0, NULL, NULL, 0);
    pthread_mutex_unlock(&ours.lock);
    if (r != 0)
        return fail_kernel(r, name, "loading this library's kernels");
    r = cu.get_kernel(ret, ours.library, name);
    return r == 0 ? 0 : fail_kernel(r, name, "finding one of this library's kernels");
}

int cuda_launch(const struct cuda_launch *l, void *stream)
{
    void *kernel = NULL, *parameters[] = { (void *)(uintptr_t)l->argument };
    context current = NULL;

    if (!client_image.data)
        return client_fail(MOK_ENOTSUP, "%s: this library was built without nvcc, so it has no kernels", l->kernel);
    int r = loaded();
    if (r < 0)
        return r;
    if (cu.missing_more)
        return client_fail(MOK_ENOTSUP, "%s: libcuda.so.1 has no %s: the driver is too old", l->kernel,
                           cu.missing_more);
    if (!stream && (cu.current(&current) != 0 || !current))
        return client_fail(MOK_ESTATE, "stream is NULL, and this thread has no current CUDA context");
    r = find_kernel(l->kernel, &kernel);
    if (r < 0)
        return r;
    result error = cu.launch(kernel, l->grid[0], l->grid[1], l->grid[2], l->threads, 1, 1, l->shared_bytes, stream,
                             parameters, NULL);
    return error == 0 ? 0 : fail_kernel(error, l->kernel, "stream: queueing a kernel");
}
