/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The instructions the kernels need, each wrapped once. No policy here: what is waited for, and for how long,
 * is decided by the callers.
 */
#ifndef MOK_CUDA_PTX_CUH
#define MOK_CUDA_PTX_CUH

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace mok
{

/* The shared memory that a launch asks for, aligned as swizzled tiles need it. */
__device__ __forceinline__ uint8_t *dynamic_shared()
{
    extern __shared__ __align__(1024) uint8_t mok_dynamic_shared[];
    return mok_dynamic_shared;
}

__device__ __forceinline__ uint32_t smem_address(const void *p)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ bool elect_one()
{
    uint32_t yes;
    asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}" : "=r"(yes));
    return yes != 0;
}

/* ---- clusters ---- */

__device__ __forceinline__ uint32_t cluster_rank()
{
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

__device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The same shared-memory address in block `rank` of the cluster. */
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank)
{
    uint32_t r;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
    return r;
}

/* Shared memory of a block of the cluster. */
__device__ __forceinline__ uint32_t load_cluster(uint32_t address)
{
    uint32_t v;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

/* ---- barriers of some of a block's threads: who only arrives does not wait ---- */

__device__ __forceinline__ void block_sync(uint32_t id, uint32_t threads)
{
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void block_arrive(uint32_t id, uint32_t threads)
{
    asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* ---- mbarriers ---- */

__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void mbar_init_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbar_arrive(uint32_t bar, uint32_t count = 1)
{
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

/*
 * `bar` is a cluster address. Relaxed: a release of cluster scope costs a full memory barrier a k-block. What the other
 * side may overwrite after this was read by finished wgmma or by loads whose values are in registers.
 */
__device__ __forceinline__ void mbar_arrive_cluster(uint32_t bar)
{
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void mbar_expect(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

/* `bar` is a cluster address. */
__device__ __forceinline__ void mbar_expect_cluster(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ bool mbar_try(uint32_t bar, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n .reg .pred p;\n"
                 " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 " selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done != 0;
}

/* The same, but never waits itself. */
__device__ __forceinline__ bool mbar_test(uint32_t bar, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n .reg .pred p;\n"
                 " mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 " selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done != 0;
}

/* ---- asynchronous copies ---- */

__device__ __forceinline__ void tensormap_prefetch(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load_2d(uint32_t dst, const CUtensorMap *map, uint32_t bar, int32_t x, int32_t y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];" ::"r"(dst),
                 "l"(map), "r"(bar), "r"(x), "r"(y)
                 : "memory");
}

__device__ __forceinline__ void tma_load_3d(uint32_t dst, const CUtensorMap *map, uint32_t bar, int32_t x, int32_t y,
                                            int32_t z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
                 "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* To the same place in every block of `mask`; each gets the bytes on its own barrier. */
__device__ __forceinline__ void tma_load_3d_multicast(uint32_t dst, const CUtensorMap *map, uint32_t bar, int32_t x,
                                                      int32_t y, int32_t z, uint16_t mask)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
                 "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "h"(mask)
                 : "memory");
}

/* More bytes are expected in this phase; whoever arrives says when that is all. */
__device__ __forceinline__ void mbar_expect_bytes(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

/* A box from shared memory; what lies outside of the tensor is left out. Waited for as bulk stores are. */
__device__ __forceinline__ void tma_store_3d(const CUtensorMap *map, uint32_t src, int32_t x, int32_t y, int32_t z)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(src),
                 "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* Any number of 16 bytes, to shared memory and from there. A thread's stores are waited for together. */
__device__ __forceinline__ void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}
__device__ __forceinline__ void bulk_store(void *dst, uint32_t src, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Their source may be overwritten, but for the last N groups'. */
template <int N = 0> __device__ __forceinline__ void bulk_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
/* They have landed. */
__device__ __forceinline__ void bulk_wait()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* 16 bytes, or 16 zeros when `bytes` is 0. */
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void *src, uint32_t bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

/* 4 bytes by way of L1: of what nobody writes while the kernel runs. */
__device__ __forceinline__ void cp_async_4(uint32_t dst, const void *src)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}

/* The line of 128 bytes comes into L2. */
__device__ __forceinline__ void prefetch_l2(uint64_t address)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

/* One or two neighbours from L2. The load stays where it stands: it is wanted a k-block later. */
__device__ __forceinline__ uint64_t load_l2_8(const uint64_t *p)
{
    uint64_t v;
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void load_l2_16(uint64_t &lo, uint64_t &hi, const uint64_t *p)
{
    asm volatile("ld.global.cg.v2.u64 {%0, %1}, [%2];" : "=l"(lo), "=l"(hi) : "l"(p) : "memory");
}

__device__ __forceinline__ void cp_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> __device__ __forceinline__ void cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Writes 16 bytes into a block of the cluster and counts them on that block's barrier (both are cluster addresses). */
__device__ __forceinline__ void store_async_16(uint32_t dst, uint4 v, uint32_t bar)
{
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(dst),
        "r"(bar), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t address)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t address)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t address)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void store_shared_2(uint32_t address, uint32_t v)
{
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(v)) : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t v)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void store_shared_8(uint32_t address, float lo, float hi)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(lo), "f"(hi) : "memory");
}

/* ---- ordering ---- */

/* Between ordinary and asynchronous (TMA, wgmma) accesses to shared memory. */
__device__ __forceinline__ void fence_async_shared()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* The same for every memory. */
__device__ __forceinline__ void fence_async()
{
    asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void add_release(uint32_t *p, uint32_t v)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ uint64_t timer_ns()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

/* About so many cycles of this SM's clock. */
__device__ __forceinline__ void let_cycles_pass(uint32_t count)
{
    uint32_t from, now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(from));
    do
        asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
    while (now - from < count);
}

/* ---- kernels that follow each other ---- */

/* Waits for the kernels before this one in the stream; every block of every kernel does, so that order is transitive.
 */
__device__ __forceinline__ void wait_for_previous_kernel()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* The next kernel may be launched once every block has said so or ended. */
__device__ __forceinline__ void let_next_kernel_start()
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* ---- registers and tiles ---- */

template <int N> __device__ __forceinline__ void registers_raise()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> __device__ __forceinline__ void registers_lower()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* An asynchronous product's sum is read below this line only. */
__device__ __forceinline__ void settle(float &sum)
{
    asm volatile("" : "+f"(sum)::"memory");
}

/* What is worked out from v above this line is worked out again below it, rather than kept. */
__device__ __forceinline__ void forget(uint4 &v)
{
    asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory");
}
__device__ __forceinline__ void forget(uint32_t &v)
{
    asm volatile("" : "+r"(v)::"memory");
}
__device__ __forceinline__ void forget(uint64_t &v)
{
    asm volatile("" : "+l"(v)::"memory");
}

/* 2^x to about two units in the last place; denormals are zero. */
__device__ __forceinline__ float exp2_approximate(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

/* Four 8x8 BF16 matrices; lanes 8i..8i+7 give the row addresses of matrix i. */
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

/* The same, each matrix transposed. */
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

/* lo in the low half; round to nearest even. */
__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

/* The same, computed anew: a compiler that keeps packed values for later runs out of registers. */
__device__ __forceinline__ uint32_t pack_bf16_anew(float lo, float hi)
{
    uint32_t r;
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

/* Two E4M3 codes, lo in the low byte; to nearest even, saturated. NaN gives a NaN of any sign, Inf the largest number. */
__device__ __forceinline__ uint32_t pack_e4m3(float lo, float hi)
{
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    return r;
}

/* The values of two E4M3 codes, exactly. */
__device__ __forceinline__ void unpack_e4m3(uint32_t codes, float &lo, float &hi)
{
    asm("{\n .reg .b32 pair;\n .reg .b16 l, h;\n cvt.rn.f16x2.e4m3x2 pair, %2;\n mov.b32 {l, h}, pair;\n"
        " cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}"
        : "=f"(lo), "=f"(hi)
        : "h"(static_cast<uint16_t>(codes)));
}

} // namespace mok
#endif
