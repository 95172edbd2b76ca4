/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The emulated CUDA driver: memory that is a memfd, mapped where it is asked for, and the calls by which libmok makes a
 * stream wait. Linked by a test, it is what libmok's dlopen of libcuda.so.1 finds.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device.h"
#include "fake_cuda.h"
#include "stream.h"

#define GRANULE 4096u
#define GUARD 4096u

EXPORT bool fake_cuda_mps, fake_cuda_capturing;
EXPORT int fake_cuda_batch_code;
EXPORT int fake_cuda_register_code;

/* ------------------------------------------------------------------ what tests reach directly */

EXPORT struct CUstream_st *fake_stream_new(void)
{
    struct CUstream_st *s = stream_new();

    if (!s)
        abort();
    return s;
}

EXPORT void fake_stream_call(struct CUstream_st *s, void (*function)(void *), void *cookie)
{
    if (stream_push(s, (struct step){ .kind = STEP_CALL, .function = function, .cookie = cookie }) != cudaSuccess)
        abort();
}

EXPORT bool fake_stream_drain(struct CUstream_st *s, int timeout_ms)
{
    return stream_wait(s, timeout_ms);
}

EXPORT void fake_stream_free(struct CUstream_st *s)
{
    stream_free(s);
}

/* ------------------------------------------------------------------ devices */

static int number(const char *name, int otherwise)
{
    const char *text = getenv(name);
    int value = text ? atoi(text) : 0;

    return value > 0 ? value : otherwise;
}

int emulated_devices(void)
{
    return number("MOK_EMULATOR_DEVICES", 1);
}

int emulated_sms(void)
{
    return number("MOK_EMULATOR_SMS", 4);
}

bool emulated_mps(void)
{
    return fake_cuda_mps || number("MOK_EMULATOR_MPS", 0) != 0;
}

void emulated_uuid(int device, char ret[16])
{
    memset(ret, FAKE_CUDA_UUID + device, 16);
}

static bool started;
static char context_word;
static _Thread_local int depth;

EXPORT CUresult cuInit(unsigned flags)
{
    started = true;
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    *count = emulated_devices();
    return started ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

static CUresult check_device(int device)
{
    return device >= 0 && device < emulated_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return check_device(ordinal);
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    emulated_uuid(device, uuid->bytes);
    return check_device(device);
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    *value = attribute == CU_DEVICE_ATTRIBUTE_MPS_ENABLED && emulated_mps();
    return check_device(device);
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    *context = (CUcontext)(void *)&context_word;
    return check_device(device);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    return check_device(device);
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    depth++;
    return (void *)context == (void *)&context_word ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    *context = (CUcontext)(void *)&context_word;
    return depth-- > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = (CUcontext)(void *)&context_word;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult code, const char **text)
{
    *text = code == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "some error";
    return CUDA_SUCCESS;
}

/* ------------------------------------------------------------------ memory; a handle is a descriptor */

EXPORT CUresult cuMemGetAllocationGranularity(size_t *granule, const CUmemAllocationProp *about,
                                              CUmemAllocationGranularity_flags option)
{
    *granule = GRANULE;
    return about && option == CU_MEM_ALLOC_GRANULARITY_MINIMUM ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult poison(int fd, size_t size)
{
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (p == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(p, 0xff, size);
    munmap(p, size);
    return CUDA_SUCCESS;
}

/* The fabric is a folder that all its hosts see; without one there is none, as where there is no IMEX channel. */
static const char *fabric(void)
{
    const char *folder = getenv("MOK_EMULATED_FABRIC");

    return folder && folder[0] == '/' ? folder : NULL;
}

/* A name of 64 bits in it; what is in it stays until somebody removes the folder. */
static int create_in_fabric(void)
{
    char path[512];
    uint64_t name;

    if (getrandom(&name, sizeof(name), 0) != sizeof(name))
        return -1;
    snprintf(path, sizeof(path), "%s/%016llx", fabric(), (unsigned long long)name);
    return open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
}

static CUresult export_to_fabric(int fd, CUmemFabricHandle *ret)
{
    char link[64], path[512];

    memset(ret, 0, sizeof(*ret));
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof(path) - 1);
    if (length < 0)
        return CUDA_ERROR_INVALID_VALUE;
    path[length] = '\0';
    if (!fabric() || strncmp(path, fabric(), strlen(fabric())) != 0)
        return CUDA_ERROR_NOT_SUPPORTED; /* it was not made for that */
    snprintf((char *)ret->data, sizeof(ret->data), "%.16s", strrchr(path, '/') + 1);
    return CUDA_SUCCESS;
}

static int import_from_fabric(const CUmemFabricHandle *handle)
{
    char path[512];

    if (!fabric() || strspn((const char *)handle->data, "0123456789abcdef") != 16)
        return -1;
    snprintf(path, sizeof(path), "%s/%.16s", fabric(), (const char *)handle->data);
    return open(path, O_RDWR | O_CLOEXEC);
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *about,
                            unsigned long long flags)
{
    int fd;

    if (!about || flags || size == 0 || size % GRANULE || check_device(about->location.id) != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_VALUE;
    bool wanted = about->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC;
    if (wanted && !fabric())
        return CUDA_ERROR_NOT_PERMITTED;
    fd = wanted ? create_in_fabric() : memfd_create("emulated-gpu", MFD_CLOEXEC);
    if (fd < 0 || posix_fallocate(fd, 0, (off_t)size) != 0 || poison(fd, size) != CUDA_SUCCESS) {
        if (fd >= 0)
            close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = (CUmemGenericAllocationHandle)fd;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    return close((int)handle) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static int again(int fd)
{
    return fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

EXPORT CUresult cuMemExportToShareableHandle(void *ret, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type, unsigned long long flags)
{
    if (type == CU_MEM_HANDLE_TYPE_FABRIC)
        return flags ? CUDA_ERROR_INVALID_VALUE : export_to_fabric((int)handle, ret);
    int fd = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && flags == 0 ? again((int)handle) : -1;

    if (fd < 0)
        return CUDA_ERROR_INVALID_VALUE;
    *(int *)ret = fd;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *fd,
                                               CUmemAllocationHandleType type)
{
    int own = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? again((int)(intptr_t)fd)
              : type == CU_MEM_HANDLE_TYPE_FABRIC              ? import_from_fabric(fd)
                                                               : -1;

    if (own < 0)
        return CUDA_ERROR_INVALID_VALUE;
    *handle = (CUmemGenericAllocationHandle)own;
    return CUDA_SUCCESS;
}

/* With a page on either side that nobody may touch. */
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *at, size_t size, size_t alignment, CUdeviceptr fixed,
                                    unsigned long long flags)
{
    uint8_t *p;

    if (alignment || fixed || flags || size == 0 || size % GRANULE)
        return CUDA_ERROR_INVALID_VALUE;
    p = mmap(NULL, size + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *at = (CUdeviceptr)(uintptr_t)(p + GUARD);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr at, size_t size)
{
    return munmap((uint8_t *)(uintptr_t)at - GUARD, size + 2 * GUARD) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags)
{
    struct stat about;

    if (fstat((int)handle, &about) < 0 || (uint64_t)about.st_size < offset + size)
        return CUDA_ERROR_INVALID_VALUE;
    void *p = mmap((void *)(uintptr_t)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle, (off_t)offset);

    return p == MAP_FAILED || flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t size)
{
    void *p = mmap((void *)(uintptr_t)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);

    return p == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *access, size_t count)
{
    if (!access || count != 1 || mprotect((void *)(uintptr_t)at, size, PROT_READ | PROT_WRITE) < 0)
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostRegister_v2(void *memory, size_t size, unsigned flags)
{
    if (fake_cuda_register_code)
        return (CUresult)fake_cuda_register_code;
    return memory && size && flags == 3 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemHostUnregister(void *memory)
{
    return memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *at, void *memory, unsigned flags)
{
    *at = (CUdeviceptr)(uintptr_t)memory;
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* ------------------------------------------------------------------ streams */

EXPORT CUresult cuStreamIsCapturing(CUstream stream, int *status)
{
    *status = fake_cuda_capturing;
    return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult push_word(CUstream stream, enum step_kind kind, CUdeviceptr at, uint32_t value, unsigned flags)
{
    struct step step = { .kind = kind, .word = (uint32_t *)(uintptr_t)at, .value = value };

    if (flags || at % sizeof(uint32_t))
        return CUDA_ERROR_INVALID_VALUE;
    return stream_push(stream, step) == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags)
{
    return push_word(stream, STEP_WRITE_VALUE, at, value, flags);
}

EXPORT CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags)
{
    return push_word(stream, STEP_WAIT_VALUE, at, value, flags);
}

EXPORT CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned count, CUstreamBatchMemOpParams *op, unsigned flags)
{
    if (fake_cuda_batch_code || flags)
        return fake_cuda_batch_code ? (CUresult)fake_cuda_batch_code : CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        bool wait = op[i].operation == CU_STREAM_MEM_OP_WAIT_VALUE_32;
        CUresult r =
            push_word(stream, wait ? STEP_WAIT_VALUE : STEP_WRITE_VALUE, op[i].address, (uint32_t)op[i].value, 0);
        if (r != CUDA_SUCCESS)
            return r;
    }
    return CUDA_SUCCESS;
}

/* ------------------------------------------------------------------ kernels by name */

#define MOST_KERNELS 16u

static struct {
    const char *name;
    emulated_launch *run;
} kernels[MOST_KERNELS];
static unsigned kernel_count;

EXPORT void emulated_kernel(const char *name, emulated_launch *run)
{
    if (kernel_count == MOST_KERNELS)
        abort();
    kernels[kernel_count].name = name;
    kernels[kernel_count++].run = run;
}

EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *code, int *jit_options, void **jit_values,
                                  unsigned jit_count, int *options, void **values, unsigned count)
{
    (void)jit_options, (void)jit_values, (void)options, (void)values;
    *library = (CUlibrary)(void *)kernels;
    return code && jit_count == 0 && count == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    for (unsigned i = 0; i < kernel_count; i++)
        if ((void *)library == (void *)kernels && strcmp(kernels[i].name, name) == 0) {
            *kernel = (CUkernel)(void *)&kernels[i];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuLaunchKernel(CUfunction kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream,
                               void **parameters, void **extra)
{
    const uint32_t grid[3] = { grid_x, grid_y, grid_z }, block[3] = { block_x, block_y, block_z };

    for (unsigned i = 0; i < kernel_count; i++)
        if ((void *)kernel == (void *)&kernels[i] && !extra)
            return kernels[i].run(grid, block, shared_bytes, stream, parameters) == 0 ? CUDA_SUCCESS
                                                                                      : CUDA_ERROR_INVALID_VALUE;
    return CUDA_ERROR_INVALID_VALUE;
}

/* ------------------------------------------------------------------ tensor maps */

static unsigned element_bytes(CUtensorMapDataType type)
{
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
        return 1;
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
        return 2;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
        return 4;
    }
    return 0;
}

static bool map_fits(const struct emulated_tensor_map *m)
{
    static const unsigned span[] = { 256 * 16, 32, 64, 128 };
    unsigned row = m->box[0] * m->element_bytes;
    bool fits = m->element_bytes && m->dimensions >= 1 && m->dimensions <= 5 && m->base % 16 == 0 && m->swizzle <= 3;

    for (unsigned i = 0; fits && i < m->dimensions; i++) {
        fits = m->size[i] >= 1 && m->size[i] <= 1ull << 32 && m->box[i] >= 1 && m->box[i] <= 256;
        if (fits && i > 0)
            fits = m->stride[i - 1] % 16 == 0 && m->stride[i - 1] < 1ull << 40;
    }
    return fits && row % 16 == 0 && row <= span[m->swizzle];
}

EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t dimensions, void *base,
                                       const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                                       const cuuint32_t *step, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                       CUtensorMapFloatOOBfill fill)
{
    struct emulated_tensor_map m = { .magic = EMULATED_TENSOR_MAP_MAGIC,
                                     .base = (uint64_t)(uintptr_t)base,
                                     .dimensions = (uint8_t)dimensions,
                                     .element_bytes = (uint8_t)element_bytes(type),
                                     .swizzle = (uint8_t)swizzle };
    (void)promotion;
    _Static_assert(sizeof(m) <= sizeof(*map), "a tensor map's size is the driver's");
    if ((uintptr_t)map % 64 || dimensions < 1 || dimensions > 5 || interleave || fill)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < dimensions; i++) {
        m.size[i] = size[i];
        m.box[i] = (uint16_t)box[i];
        if (step[i] != 1 || box[i] > 256)
            return CUDA_ERROR_INVALID_VALUE;
        if (i > 0)
            m.stride[i - 1] = stride[i - 1];
    }
    if (!map_fits(&m))
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(map, &m, sizeof(m));
    return CUDA_SUCCESS;
}
