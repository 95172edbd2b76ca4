/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stands for kernels/cuda/ptx.cuh and wgmma.cuh, and client/src/instructions.cuh, when the kernels are compiled for the
 * CPU: the same functions, by way of the emulator. Included before anything else of a kernel's source, it takes those
 * files' include guards.
 */
#ifndef MOK_EMULATED_INSTRUCTIONS_H
#define MOK_EMULATED_INSTRUCTIONS_H
#define MOK_CUDA_PTX_CUH
#define MOK_CUDA_WGMMA_CUH
#define MOK_CLIENT_INSTRUCTIONS_CUH

#include "cuda.h"
#include "cuda_bf16.h"
#include "cuda_runtime.h"

#include "cuda/descriptor.cuh"
#include "mx/mx.h"

namespace mok
{

inline uint8_t *dynamic_shared()
{
    return emu::shared_base();
}
inline uint32_t smem_address(const void *p)
{
    return emu::shared_address(p);
}
inline bool elect_one()
{
    emu::meet(~0u, emu::MEET_SYNC, {}, nullptr);
    return emu::lane_of() == 0;
}

/* ---- clusters ---- */

inline uint32_t cluster_rank()
{
    return emu::cluster_rank();
}
inline void cluster_sync()
{
    emu::cluster_arrive();
    emu::cluster_wait();
}
inline uint32_t cluster_address(uint32_t address, uint32_t rank)
{
    return emu::cluster_address(address, rank);
}
inline uint32_t load_cluster(uint32_t address)
{
    return *reinterpret_cast<const uint32_t *>(emu::shared_pointer(address, 4, 4, false));
}

inline void block_sync(uint32_t id, uint32_t threads)
{
    emu::block_sync(id, threads, emu::VOTE_NONE, 0);
}
inline void block_arrive(uint32_t id, uint32_t threads)
{
    emu::block_arrive(id, threads);
}

/* ---- mbarriers ---- */

inline void mbar_init(uint32_t bar, uint32_t count)
{
    emu::mbar_init(bar, count);
}
inline void mbar_init_fence()
{
}
inline void mbar_arrive(uint32_t bar, uint32_t count = 1)
{
    emu::mbar_arrive(bar, count, true);
}
inline void mbar_arrive_cluster(uint32_t bar)
{
    emu::mbar_arrive(bar, 1, false);
}
inline void mbar_expect(uint32_t bar, uint32_t bytes)
{
    emu::mbar_expect(bar, bytes, true, true);
}
inline void mbar_expect_cluster(uint32_t bar, uint32_t bytes)
{
    emu::mbar_expect(bar, bytes, true, false);
}
inline bool mbar_try(uint32_t bar, uint32_t parity)
{
    return emu::mbar_try(bar, parity);
}
inline bool mbar_test(uint32_t bar, uint32_t parity)
{
    return emu::mbar_test(bar, parity);
}

/* ---- asynchronous copies ---- */

inline void tensormap_prefetch(const CUtensorMap *)
{
}
inline void tma_load_2d(uint32_t dst, const CUtensorMap *map, uint32_t bar, int32_t x, int32_t y)
{
    const int32_t at[] = { x, y };
    emu::tensor_load(dst, map, bar, 2, at, 0);
}
inline void tma_load_3d(uint32_t dst, const CUtensorMap *map, uint32_t bar, int32_t x, int32_t y, int32_t z)
{
    const int32_t at[] = { x, y, z };
    emu::tensor_load(dst, map, bar, 3, at, 0);
}
inline void tma_load_2d_multicast(uint32_t dst, const CUtensorMap *map, uint32_t bar, int32_t x, int32_t y,
                                  uint16_t mask)
{
    const int32_t at[] = { x, y };
    emu::tensor_load(dst, map, bar, 2, at, mask);
}
inline void tma_load_3d_multicast(uint32_t dst, const CUtensorMap *map, uint32_t bar, int32_t x, int32_t y, int32_t z,
                                  uint16_t mask)
{
    const int32_t at[] = { x, y, z };
    emu::tensor_load(dst, map, bar, 3, at, mask);
}
inline void tma_store_3d(const CUtensorMap *map, uint32_t src, int32_t x, int32_t y, int32_t z)
{
    const int32_t at[] = { x, y, z };
    emu::tensor_store(map, src, 3, at, false);
}
inline void mbar_expect_bytes(uint32_t bar, uint32_t bytes)
{
    emu::mbar_expect(bar, bytes, false, true);
}
inline void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
    emu::bulk_load(dst, src, bytes, bar);
}
inline void bulk_store(void *dst, uint32_t src, uint32_t bytes)
{
    emu::bulk_store(dst, src, bytes, false);
}
inline void bulk_commit()
{
    emu::bulk_commit();
}
template <int N = 0> inline void bulk_wait_read()
{
    emu::bulk_wait(N);
}
inline void bulk_wait()
{
    emu::bulk_wait(0);
}
inline void cp_async_16(uint32_t dst, const void *src, uint32_t bytes)
{
    emu::cp_async(dst, src, 16, bytes);
}
inline void cp_async_4(uint32_t dst, const void *src)
{
    emu::cp_async(dst, src, 4, 4);
}
inline void prefetch_l2(uint64_t)
{
}
inline uint64_t load_l2_8(const uint64_t *p)
{
    emu::check_aligned(p, 8);
    return *p;
}
inline void load_l2_16(uint64_t &lo, uint64_t &hi, const uint64_t *p)
{
    emu::check_aligned(p, 16);
    lo = p[0];
    hi = p[1];
}
inline void cp_async_commit()
{
    emu::cp_async_commit();
}
template <int N> inline void cp_async_wait()
{
    emu::cp_async_wait(N);
}
inline void store_async_16(uint32_t dst, uint4 v, uint32_t bar)
{
    const uint32_t words[4] = { v.x, v.y, v.z, v.w };
    emu::store_async_16(dst, words, bar);
}
inline uint4 load_shared_16(uint32_t address)
{
    return *reinterpret_cast<const uint4 *>(emu::shared_pointer(address, 16, 16, true));
}

inline uint32_t load_shared_4(uint32_t address)
{
    return *reinterpret_cast<const uint32_t *>(emu::shared_pointer(address, 4, 4, true));
}
inline uint2 load_shared_8(uint32_t address)
{
    return *reinterpret_cast<const uint2 *>(emu::shared_pointer(address, 8, 8, true));
}
inline void store_shared_2(uint32_t address, uint32_t v)
{
    *reinterpret_cast<uint16_t *>(emu::shared_pointer(address, 2, 2, true)) = static_cast<uint16_t>(v);
}
inline void store_shared_4(uint32_t address, uint32_t v)
{
    *reinterpret_cast<uint32_t *>(emu::shared_pointer(address, 4, 4, true)) = v;
}
inline void store_shared_8(uint32_t address, float lo, float hi)
{
    const float2 v = { lo, hi };
    *reinterpret_cast<float2 *>(emu::shared_pointer(address, 8, 8, true)) = v;
}

/* ---- ordering: one thread of the process runs all fibers, so memory is in order as it is ---- */

inline void fence_async_shared()
{
    emu::maybe_yield();
}
inline void fence_async()
{
    emu::maybe_yield();
}
inline uint32_t load_acquire(const uint32_t *p)
{
    emu::maybe_yield();
    emu::check_aligned(p, 4);
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline uint32_t load_acquire_system(const uint32_t *p)
{
    return load_acquire(p);
}
inline void add_release(uint32_t *p, uint32_t v)
{
    emu::check_aligned(p, 4);
    __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
    emu::maybe_yield();
}
inline uint64_t timer_ns()
{
    return emu::now_ns();
}

/* ---- kernels that follow each other ---- */

inline void wait_for_previous_kernel()
{
    emu::wait_for_previous_kernel();
}
inline void let_next_kernel_start()
{
    emu::let_next_kernel_start();
}

/* ---- registers and tiles ---- */

template <int N> inline void registers_raise()
{
    emu::registers(N, true);
}
template <int N> inline void registers_lower()
{
    emu::registers(N, false);
}
inline void settle(float &)
{
}
inline float exp2_approximate(float x)
{
    float y = x < -126.0f ? 0.0f : exp2f(x);
    return y;
}
inline void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    const uint32_t v[] = { a, b, c, d };
    emu::stmatrix(address, v, 4, false);
}
inline void stmatrix_x4_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    const uint32_t v[] = { a, b, c, d };
    emu::stmatrix(address, v, 4, true);
}
inline uint32_t pack_bf16(float lo, float hi)
{
    return __float2bfloat16_rn(lo).bits | static_cast<uint32_t>(__float2bfloat16_rn(hi).bits) << 16;
}
inline uint32_t pack_bf16_anew(float lo, float hi)
{
    return pack_bf16(lo, hi);
}

inline uint32_t e4m3_of(float v)
{
    const uint32_t bits = mok_f32_bits(v);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return MOK_E4M3_NAN; /* the instruction forgets a NaN's sign */
    return (bits & 0x7fffffffu) == 0x7f800000u ? 0x7eu | (bits >> 24 & 0x80u) : mok_e4m3_encode(v);
}
inline uint32_t pack_e4m3(float lo, float hi)
{
    return e4m3_of(lo) | e4m3_of(hi) << 8;
}
inline void unpack_e4m3(uint32_t codes, float &lo, float &hi)
{
    lo = mok_e4m3_to_f32(static_cast<uint8_t>(codes));
    hi = mok_e4m3_to_f32(static_cast<uint8_t>(codes >> 8));
}
inline void forget(uint4 &)
{
}
inline void forget(uint32_t &)
{
}
inline void let_cycles_pass(uint32_t)
{
}
inline void forget(uint64_t &)
{
}

/* ---- the matrix instruction ---- */

inline void wgmma_fence()
{
}
inline void wgmma_commit()
{
    emu::wgmma_commit();
}
template <int N> inline void wgmma_wait()
{
    emu::wgmma_wait(N);
}
template <bool TransposedA = false, bool TransposedB = false>
inline void wgmma_m64n256k16(float (&d)[128], uint64_t a, uint64_t b, bool add)
{
    emu::wgmma(d, 256, a, nullptr, b, add, TransposedA, TransposedB);
}
template <bool TransposedA = false, bool TransposedB = false>
inline void wgmma_m64n256k16_first(float (&d)[128], uint64_t a, uint64_t b)
{
    emu::wgmma(d, 256, a, nullptr, b, false, TransposedA, TransposedB);
}

inline void wgmma_m64n128k32_e4m3(float (&d)[64], uint64_t a, uint64_t b)
{
    emu::wgmma_e4m3(d, 128, a, b, true);
}
inline void wgmma_m64n128k32_e4m3_first(float (&d)[64], uint64_t a, uint64_t b)
{
    emu::wgmma_e4m3(d, 128, a, b, false);
}
inline void wgmma_m64n128k32_e4m3_again(float (&d)[64], uint64_t a, uint64_t b)
{
    emu::wgmma_e4m3(d, 128, a, b, false);
}

} // namespace mok
#endif
