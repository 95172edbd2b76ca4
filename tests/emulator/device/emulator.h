/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What device code, compiled for the CPU, calls in the place of instructions. Each CUDA thread is a fiber; a kernel's
 * fibers all run on one thread of the process, one at a time, and change places only inside these functions, in an
 * order that a seed decides.
 */
#ifndef MOK_EMULATOR_H
#define MOK_EMULATOR_H

#include <stdint.h>

#include <functional>

#include "cuda_runtime_api.h"

struct uint3 {
    uint32_t x, y, z;
};

struct dim3 {
    uint32_t x, y, z;
    constexpr dim3(uint32_t a = 1, uint32_t b = 1, uint32_t c = 1) : x(a), y(b), z(c)
    {
    }
};

namespace emu
{

struct block;
struct warp;

/* ---- where a fiber is ---- */

struct fiber;
extern thread_local fiber *current;
uint32_t lane_of();
uint32_t cluster_rank();

/* Ends the process with a sentence, and says which thread of which kernel it was. */
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- launching ---- */

/* As cudaLaunchKernelExC. `kernel` is the function's address, by which its cluster and limits are known. */
cudaError_t launch(const void *kernel, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, bool early,
                   std::function<void()> body);
cudaError_t set_shared_limit(const void *kernel, uint32_t bytes);

/* ---- time and turns ---- */

uint64_t now_ns(); /* the device's clock, which stands still while nothing happens */
void sleep_ns(uint32_t ns);
void maybe_yield(); /* other threads may run here, by the seed's choice */

/* ---- warps: the lanes of `mask` meet ---- */

enum meeting_kind : uint32_t {
    MEET_SYNC,
    MEET_SHUFFLE,
    MEET_MATCH,
    MEET_VOTE,
    MEET_REDUCE,
    MEET_STMATRIX,
    MEET_LDMATRIX,
    MEET_WGMMA,
    MEET_WGMMA_GROUP,
    MEET_REGISTERS
};
const char *meeting_name(uint32_t kind);

struct payload {
    uint64_t v[6];
};

/* Values of the lanes that met; `arrived`: which. The last to come runs the function, which may change them. */
struct meeting {
    uint32_t mask, kind, arrived;
    payload lane[32];
};
payload meet(uint32_t mask, meeting_kind kind, const payload &own, void (*complete)(meeting &));

/* ---- blocks and clusters ---- */

enum vote { VOTE_NONE, VOTE_OR, VOTE_AND, VOTE_COUNT };
/* Barrier `id` of the block; `threads` 0: all of the block. */
int block_sync(uint32_t id, uint32_t threads, vote kind, int value);
/* Counts on a barrier without waiting. */
void block_arrive(uint32_t id, uint32_t threads);
void cluster_arrive();
void cluster_wait();

/* ---- shared memory: an address is an offset, or one with a block of the cluster in the bits from 24 on ---- */

uint8_t *shared_base();                 /* of dynamic shared memory */
uint32_t shared_address(const void *p); /* of this block */
uint32_t cluster_address(uint32_t address, uint32_t rank);
/* Any address, checked: `bytes` from it must exist and be aligned to `align`. `own`: must be this block's. */
uint8_t *shared_pointer(uint32_t address, uint32_t bytes, uint32_t align, bool own);

/* ---- mbarriers ---- */

void mbar_init(uint32_t bar, uint32_t count);
void mbar_invalidate(uint32_t bar);
void mbar_arrive(uint32_t bar, uint32_t count, bool own);
void mbar_expect(uint32_t bar, uint32_t bytes, bool arrive, bool own);
bool mbar_try(uint32_t bar, uint32_t parity);
bool mbar_test(uint32_t bar, uint32_t parity); /* does not wait */

/* ---- asynchronous copies ---- */

void tensor_load(uint32_t dst, const CUtensorMap *map, uint32_t bar, uint32_t dimensions, const int32_t *at,
                 uint16_t mask); /* mask 0: this block */
void tensor_store(const CUtensorMap *map, uint32_t src, uint32_t dimensions, const int32_t *at, bool add);
void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar);
void bulk_store(void *dst, uint32_t src, uint32_t bytes, bool add_f32);
void bulk_commit();
void bulk_wait(uint32_t groups);
void cp_async(uint32_t dst, const void *src, uint32_t size, uint32_t bytes); /* size 4, 8 or 16; the rest is zeroed */
void cp_async_commit();
void cp_async_wait(uint32_t groups);
void store_async_16(uint32_t dst, const uint32_t (&v)[4], uint32_t bar);

/* ---- matrices ---- */

/* Four (count) 8x8 matrices of 16-bit elements. */
void stmatrix(uint32_t address, const uint32_t *v, uint32_t count, bool transpose);
void ldmatrix(uint32_t address, uint32_t *v, uint32_t count, bool transpose);

/* D[64][n] (+)= A[64][16] B[n][16]^T. Descriptors; `a_registers` instead of `a` where not NULL. */
void wgmma(float *d, uint32_t n, uint64_t a, const uint32_t *a_registers, uint64_t b, bool add, bool transpose_a,
           bool transpose_b);
/* D[64][n] (+)= A[64][32] B[n][32]^T of E4M3, both K-major. */
void wgmma_e4m3(float *d, uint32_t n, uint64_t a, uint64_t b, bool add);
void wgmma_commit();
void wgmma_wait(uint32_t groups);

/* ---- the rest ---- */

void registers(uint32_t count, bool raise);
void wait_for_previous_kernel();
void let_next_kernel_start();
inline void check_aligned(const void *p, uint32_t bytes)
{
    if (reinterpret_cast<uintptr_t>(p) % bytes)
        fail("address %p is not aligned to %u bytes", p, bytes);
}

} // namespace emu
#endif
