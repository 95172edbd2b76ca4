/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The driver calls that the runtime does not offer, found at run time so that no program of ours links libcuda:
 * tensor maps, writes in the order of a stream, and memory that can be shared by descriptor. Each allocation is its own, zeroed before it is exported.
 */
#ifndef MOK_CUDA_DRIVER_H
#define MOK_CUDA_DRIVER_H

#include <cuda.h>

#include "../layer.h"

struct mok_cuda_driver {
    __typeof__(cuTensorMapEncodeTiled) *tensor_map_encode;
    __typeof__(cuMemGetAllocationGranularity) *granularity;
    __typeof__(cuMemCreate) *create;
    __typeof__(cuMemRelease) *release;
    __typeof__(cuMemExportToShareableHandle) *export_handle;
    __typeof__(cuMemImportFromShareableHandle) *import_handle;
    __typeof__(cuMemAddressReserve) *reserve;
    __typeof__(cuMemAddressFree) *unreserve;
    __typeof__(cuMemMap) *map;
    __typeof__(cuMemUnmap) *unmap;
    __typeof__(cuMemSetAccess) *set_access;
    __typeof__(cuStreamWriteValue32) *write_value;
    __typeof__(cuStreamWaitValue32) *wait_value;
};

int mok_cuda_driver_load(struct mok_cuda_driver *ret, struct mok_message *message);
/* `ret_fabric`: its fabric handle too, of 64 bytes; NULL: not wanted. */
int mok_cuda_memory_alloc(const struct mok_cuda_driver *d, int device, uint64_t bytes, int *ret_fd, uint8_t *ret_fabric,
                          struct mok_message *message);
int mok_cuda_memory_map(const struct mok_cuda_driver *d, int device, int fd, uint64_t bytes, void **ret,
                        struct mok_message *message);
int mok_cuda_fabric_map(const struct mok_cuda_driver *d, int device, const uint8_t *fabric, uint64_t bytes, void **ret,
                        struct mok_message *message);
/* Makes a little memory, exports it by a fabric handle, and imports that again. 0, or -MOK_ENOTSUP with the reason. */
int mok_cuda_fabric_try(const struct mok_cuda_driver *d, int device, struct mok_message *message);
void mok_cuda_memory_unmap(const struct mok_cuda_driver *d, void *address, uint64_t bytes);

#endif
