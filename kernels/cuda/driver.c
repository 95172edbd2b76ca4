/* SPDX-License-Identifier: Apache-2.0 */
/* See driver.h. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"

static int say(struct mok_message *message, int code, const char *what, int reason)
{
    if (message)
        snprintf(message->text, sizeof(message->text), "%s: CUDA driver code %d", what, reason);
    return code;
}

static int find(const char *name, void *ret)
{
    enum cudaDriverEntryPointQueryResult found;
    cudaError_t e = cudaGetDriverEntryPointByVersion(name, ret, 12000, cudaEnableDefault, &found);
    return e == cudaSuccess && found == cudaDriverEntryPointSuccess ? 0 : -1;
}

int mok_cuda_driver_load(struct mok_cuda_driver *ret, struct mok_message *message)
{
    struct mok_cuda_driver d = { 0 };
    const struct {
        const char *name;
        void *at;
    } calls[] = {
        { "cuTensorMapEncodeTiled", &d.tensor_map_encode },
        { "cuMemGetAllocationGranularity", &d.granularity },
        { "cuMemCreate", &d.create },
        { "cuMemRelease", &d.release },
        { "cuMemExportToShareableHandle", &d.export_handle },
        { "cuMemImportFromShareableHandle", &d.import_handle },
        { "cuMemAddressReserve", &d.reserve },
        { "cuMemAddressFree", &d.unreserve },
        { "cuMemMap", &d.map },
        { "cuMemUnmap", &d.unmap },
        { "cuMemSetAccess", &d.set_access },
        { "cuStreamWriteValue32", &d.write_value },
        { "cuStreamWaitValue32", &d.wait_value },
    };
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++)
        if (find(calls[i].name, calls[i].at) < 0) {
            if (message)
                snprintf(message->text, sizeof(message->text), "the CUDA driver has no %s", calls[i].name);
            return -MOK_EDEVICE;
        }
    *ret = d;
    return 0;
}

/* By descriptor, and by fabric handle if that is wanted too. */
static CUmemAllocationProp properties(int device, bool fabric)
{
    const int types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | (fabric ? CU_MEM_HANDLE_TYPE_FABRIC : 0);

    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = (CUmemAllocationHandleType)types,
        .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device },
    };
}

static int round_up(const struct mok_cuda_driver *d, int device, uint64_t bytes, uint64_t *ret)
{
    CUmemAllocationProp prop = properties(device, false);
    size_t g = 0;
    CUresult r = d->granularity(&g, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (r != CUDA_SUCCESS || g == 0)
        return -MOK_EDEVICE;
    *ret = (bytes + g - 1) / g * g;
    return 0;
}

static int map_handle(const struct mok_cuda_driver *d, int device, CUmemGenericAllocationHandle handle, uint64_t bytes,
                      CUdeviceptr *ret)
{
    CUmemAccessDesc access = { .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device },
                               .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    CUdeviceptr p = 0;
    CUresult r = d->reserve(&p, bytes, 0, 0, 0);
    if (r != CUDA_SUCCESS)
        return (int)r;
    r = d->map(p, bytes, 0, handle, 0);
    if (r == CUDA_SUCCESS) {
        r = d->set_access(p, bytes, &access, 1);
        if (r == CUDA_SUCCESS) {
            *ret = p;
            return 0;
        }
        d->unmap(p, bytes);
    }
    d->unreserve(p, bytes);
    return (int)r;
}

static int zero_memory(const struct mok_cuda_driver *d, int device, CUmemGenericAllocationHandle handle, uint64_t bytes)
{
    CUdeviceptr p = 0;
    int r = map_handle(d, device, handle, bytes, &p);
    if (r != 0)
        return r;
    r = (int)cudaMemset((void *)(uintptr_t)p, 0, bytes);
    if (r == 0)
        r = (int)cudaDeviceSynchronize();
    d->unmap(p, bytes);
    d->unreserve(p, bytes);
    return r;
}

int mok_cuda_memory_alloc(const struct mok_cuda_driver *d, int device, uint64_t bytes, int *ret_fd, uint8_t *ret_fabric,
                          struct mok_message *message)
{
    CUmemAllocationProp prop = properties(device, ret_fabric);
    CUmemGenericAllocationHandle handle;
    CUmemFabricHandle fabric;
    uint64_t size;
    int r, fd = -1;

    if (round_up(d, device, bytes, &size) < 0)
        return say(message, -MOK_EDEVICE, "reading the allocation granularity", 0);
    r = (int)d->create(&handle, size, &prop, 0);
    if (r != CUDA_SUCCESS)
        return say(message, r == CUDA_ERROR_OUT_OF_MEMORY ? -MOK_ENOMEM : -MOK_EDEVICE, "allocating device memory", r);
    r = zero_memory(d, device, handle, size);
    if (r == 0 && ret_fabric)
        r = (int)d->export_handle(&fabric, handle, CU_MEM_HANDLE_TYPE_FABRIC, 0);
    if (r == 0)
        r = (int)d->export_handle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    d->release(handle); /* the descriptor keeps the memory */
    if (r != 0)
        return say(message, -MOK_EDEVICE, "zeroing or exporting device memory", r);
    if (ret_fabric)
        memcpy(ret_fabric, &fabric, sizeof(fabric));
    *ret_fd = fd;
    return 0;
}

static int import(const struct mok_cuda_driver *d, int device, void *from, CUmemAllocationHandleType type, uint64_t bytes,
                  void **ret, struct mok_message *message)
{
    CUmemGenericAllocationHandle handle;
    CUdeviceptr p = 0;
    uint64_t size;
    int r;

    if (round_up(d, device, bytes, &size) < 0)
        return say(message, -MOK_EDEVICE, "reading the allocation granularity", 0);
    r = (int)d->import_handle(&handle, from, type);
    if (r != CUDA_SUCCESS)
        return say(message, -MOK_EDEVICE,
                   type == CU_MEM_HANDLE_TYPE_FABRIC ? "importing device memory by its fabric handle"
                                                     : "importing device memory",
                   r);
    r = map_handle(d, device, handle, size, &p);
    d->release(handle); /* the mapping keeps the memory */
    if (r != 0)
        return say(message, -MOK_EDEVICE, "mapping device memory", r);
    *ret = (void *)(uintptr_t)p;
    return 0;
}

int mok_cuda_memory_map(const struct mok_cuda_driver *d, int device, int fd, uint64_t bytes, void **ret,
                        struct mok_message *message)
{
    return import(d, device, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, bytes, ret, message);
}

int mok_cuda_fabric_map(const struct mok_cuda_driver *d, int device, const uint8_t *fabric, uint64_t bytes, void **ret,
                        struct mok_message *message)
{
    CUmemFabricHandle handle;

    memcpy(&handle, fabric, sizeof(handle));
    return import(d, device, &handle, CU_MEM_HANDLE_TYPE_FABRIC, bytes, ret, message);
}

void mok_cuda_memory_unmap(const struct mok_cuda_driver *d, void *address, uint64_t bytes)
{
    uint64_t size;
    int device = 0;
    if (!address || cudaGetDevice(&device) != cudaSuccess || round_up(d, device, bytes, &size) < 0)
        return;
    d->unmap((CUdeviceptr)(uintptr_t)address, size);
    d->unreserve((CUdeviceptr)(uintptr_t)address, size);
}

/* ------------------------------------------------------------------ handles for other hosts */

static int no_fabric(struct mok_message *message, const char *what, int reason)
{
    const char *why = reason == CUDA_ERROR_NOT_PERMITTED
                          ? "not permitted: this process has no IMEX channel (/dev/nvidia-caps-imex-channels)"
                      : reason == CUDA_ERROR_NOT_SUPPORTED ? "not supported"
                                                           : "refused";
    if (message)
        snprintf(message->text, sizeof(message->text), "%s a fabric handle: %s, CUDA driver code %d", what, why, reason);
    return -MOK_ENOTSUP;
}

int mok_cuda_fabric_try(const struct mok_cuda_driver *d, int device, struct mok_message *message)
{
    CUmemAllocationProp prop = properties(device, true);
    CUmemGenericAllocationHandle handle, again;
    CUmemFabricHandle fabric;
    uint64_t size;

    if (round_up(d, device, 1, &size) < 0)
        return say(message, -MOK_ENOTSUP, "reading the allocation granularity", 0);
    int r = (int)d->create(&handle, size, &prop, 0);
    if (r != CUDA_SUCCESS)
        return no_fabric(message, "making memory for", r);
    r = (int)d->export_handle(&fabric, handle, CU_MEM_HANDLE_TYPE_FABRIC, 0);
    if (r == CUDA_SUCCESS)
        r = (int)d->import_handle(&again, &fabric, CU_MEM_HANDLE_TYPE_FABRIC);
    if (r == CUDA_SUCCESS)
        d->release(again);
    d->release(handle);
    return r == CUDA_SUCCESS ? 0 : no_fabric(message, "exporting and importing", r);
}
