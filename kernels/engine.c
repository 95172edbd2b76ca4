/* SPDX-License-Identifier: Apache-2.0 */
/* Which engines this build has. */
#include "engine.h"

#if defined(MOK_HAVE_CUDA)
extern const struct mok_engine_ops mok_cuda_engine;
#endif

const struct mok_engine_ops *mok_engine_find(uint32_t kind)
{
    switch (kind) {
    case MOK_DEVICE_HOST:
        return &mok_host_engine;
#if defined(MOK_HAVE_CUDA)
    case MOK_DEVICE_CUDA:
        return &mok_cuda_engine;
#endif
    default:
        return NULL;
    }
}
