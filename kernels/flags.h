/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loads and stores of the words that ranks watch, visible across processes and devices: acquire and release at
 * system scope. The only place of kernels/ that knows how either compiler spells them.
 */
#ifndef MOK_KERNELS_FLAGS_H
#define MOK_KERNELS_FLAGS_H

#include "hd.h"

MOK_HD uint64_t mok_flag_load(const uint64_t *flag)
{
#if defined(__CUDA_ARCH__)
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
#else
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
#endif
}

/* Store, fence, load here against store, fence, load elsewhere: at least one side sees the other's store. */
MOK_HD void mok_flag_fence(void)
{
#if defined(__CUDA_ARCH__)
    asm volatile("fence.sc.sys;" : : : "memory");
#elif defined(__SANITIZE_THREAD__)
    /* The thread sanitizer has no model of fences; nothing relies on this one for the visibility of plain data. */
    uint64_t word = 0;
    __atomic_fetch_add(&word, 1, __ATOMIC_SEQ_CST);
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

MOK_HD void mok_flag_store(uint64_t *flag, uint64_t value)
{
#if defined(__CUDA_ARCH__)
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(flag), "l"(value) : "memory");
#else
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
#endif
}

#endif
