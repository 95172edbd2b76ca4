/* SPDX-License-Identifier: Apache-2.0 */
/* The language that device code is written in, on the CPU: words, built-in variables and functions that MoK's kernels
 * use. */
#ifndef MOK_EMULATED_CUDA_RUNTIME_H
#define MOK_EMULATED_CUDA_RUNTIME_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <tuple>
#include <type_traits>

#include "cuda_runtime_api.h"
#include "emulator.h"

#define __host__
#define __device__
#define __global__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) alignas(n)
#define __restrict__ __restrict
#define __launch_bounds__(...)
/* Kept as a number of no-operations before the function, where the launch finds it. */
#define __cluster_dims__(x, ...)                                                                                       \
    __attribute__((patchable_function_entry(EMULATED_CLUSTER_BASE + (x), EMULATED_CLUSTER_BASE + (x))))
#define EMULATED_CLUSTER_BASE 64

/* Of the fiber that runs; its turn begins by setting them. */
extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim;
#define warpSize 32

/* ---- vectors ---- */

#define EMULATED_VECTOR(type, name)                                                                                    \
    struct alignas(2 * sizeof(type)) name##2                                                                           \
    {                                                                                                                  \
        type x, y;                                                                                                     \
    };                                                                                                                 \
    struct alignas(4 * sizeof(type) > 16 ? 16 : 4 * sizeof(type)) name##4                                              \
    {                                                                                                                  \
        type x, y, z, w;                                                                                               \
    };                                                                                                                 \
    inline name##2 make_##name##2(type x, type y)                                                                      \
    {                                                                                                                  \
        return { x, y };                                                                                               \
    }                                                                                                                  \
    inline name##4 make_##name##4(type x, type y, type z, type w)                                                      \
    {                                                                                                                  \
        return { x, y, z, w };                                                                                         \
    }
EMULATED_VECTOR(uint32_t, uint)
EMULATED_VECTOR(int32_t, int)
EMULATED_VECTOR(float, float)
EMULATED_VECTOR(uint16_t, ushort)
EMULATED_VECTOR(unsigned long long, ulonglong)
#undef EMULATED_VECTOR

/* ---- numbers ---- */

template <class A, class B> constexpr typename std::common_type<A, B>::type min(A a, B b)
{
    using T = typename std::common_type<A, B>::type;
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}

template <class A, class B> constexpr typename std::common_type<A, B>::type max(A a, B b)
{
    using T = typename std::common_type<A, B>::type;
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

inline float __uint_as_float(uint32_t v)
{
    float f;
    memcpy(&f, &v, sizeof(f));
    return f;
}

inline uint32_t __float_as_uint(float v)
{
    uint32_t u;
    memcpy(&u, &v, sizeof(u));
    return u;
}

inline float __int_as_float(int32_t v)
{
    return __uint_as_float(static_cast<uint32_t>(v));
}

inline int32_t __float_as_int(float v)
{
    return static_cast<int32_t>(__float_as_uint(v));
}

/* Compiled without contraction, so a plain operation is a rounded one. */
inline float __fmul_rn(float a, float b)
{
    return a * b;
}
inline float __fadd_rn(float a, float b)
{
    return a + b;
}
inline float __fsub_rn(float a, float b)
{
    return a - b;
}
inline float __fdiv_rn(float a, float b)
{
    return a / b;
}
inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}
inline float __fdividef(float a, float b)
{
    return a / b;
}
inline float __frcp_rn(float a)
{
    return 1.0f / a;
}
inline float __expf(float a)
{
    return expf(a);
}
inline float __saturatef(float a)
{
    return a > 1.0f ? 1.0f : a > 0.0f ? a : 0.0f;
}

inline int __popc(uint32_t v)
{
    return __builtin_popcount(v);
}
inline int __clz(int32_t v)
{
    return v ? __builtin_clz(static_cast<uint32_t>(v)) : 32;
}
inline int __ffs(int32_t v)
{
    return __builtin_ffs(v);
}
inline uint32_t __brev(uint32_t v)
{
    uint32_t r = 0;
    for (int i = 0; i < 32; i++)
        r |= (v >> i & 1u) << (31 - i);
    return r;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t s)
{
    uint64_t v = static_cast<uint64_t>(b) << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++)
        r |= static_cast<uint32_t>(v >> ((s >> 4 * i & 7u) * 8) & 0xffu) << 8 * i;
    return r;
}

/* The larger of each half. */
inline uint32_t __vmaxu2(uint32_t a, uint32_t b)
{
    return max(a & 0xffffu, b & 0xffffu) | max(a >> 16, b >> 16) << 16;
}

/* ---- memory ---- */

namespace emu
{

template <class T> T load(const T *p)
{
    check_aligned(p, sizeof(T));
    return *p;
}

template <class T> void store(T *p, T v)
{
    check_aligned(p, sizeof(T));
    *p = v;
}

} // namespace emu

#define EMULATED_LOAD(name)                                                                                            \
    template <class T> T name(const T *p)                                                                              \
    {                                                                                                                  \
        return ::emu::load(p);                                                                                         \
    }
EMULATED_LOAD(__ldg)
EMULATED_LOAD(__ldca)
EMULATED_LOAD(__ldcg)
EMULATED_LOAD(__ldcs)
EMULATED_LOAD(__ldcv)
EMULATED_LOAD(__ldlu)
#undef EMULATED_LOAD
#define EMULATED_STORE(name)                                                                                           \
    template <class T> void name(T *p, T v)                                                                            \
    {                                                                                                                  \
        ::emu::store(p, v);                                                                                            \
    }
EMULATED_STORE(__stwb)
EMULATED_STORE(__stcg)
EMULATED_STORE(__stcs)
EMULATED_STORE(__stwt)
#undef EMULATED_STORE

inline size_t __cvta_generic_to_shared(const void *p)
{
    return ::emu::shared_address(p);
}

inline void __threadfence()
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence_block()
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence_system()
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

#define EMULATED_ATOMIC(name, now)                                                                                     \
    template <class T> T name(T *p, typename std::common_type<T>::type v)                                              \
    {                                                                                                                  \
        ::emu::maybe_yield();                                                                                          \
        ::emu::check_aligned(p, sizeof(T));                                                                            \
        T old = __atomic_load_n(p, __ATOMIC_RELAXED);                                                                  \
        while (                                                                                                        \
            !__atomic_compare_exchange_n(p, &old, static_cast<T>(now), false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {   \
        }                                                                                                              \
        return old;                                                                                                    \
    }
#define EMULATED_ATOMICS(name, now)                                                                                    \
    EMULATED_ATOMIC(name, now)                                                                                         \
    EMULATED_ATOMIC(name##_block, now)                                                                                 \
    EMULATED_ATOMIC(name##_system, now)
EMULATED_ATOMICS(atomicAdd, old + v)
EMULATED_ATOMICS(atomicSub, old - v)
EMULATED_ATOMICS(atomicExch, v)
EMULATED_ATOMICS(atomicMin, v < old ? v : old)
EMULATED_ATOMICS(atomicMax, old < v ? v : old)
EMULATED_ATOMICS(atomicAnd, old &v)
EMULATED_ATOMICS(atomicOr, old | v)
EMULATED_ATOMICS(atomicXor, old ^ v)
#undef EMULATED_ATOMICS
#undef EMULATED_ATOMIC

template <class T> T atomicCAS(T *p, T compare, T v)
{
    ::emu::maybe_yield();
    __atomic_compare_exchange_n(p, &compare, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return compare;
}

/* ---- turns and time ---- */

inline void __syncthreads()
{
    ::emu::block_sync(0, 0, ::emu::VOTE_NONE, 0);
}
inline int __syncthreads_or(int v)
{
    return ::emu::block_sync(0, 0, ::emu::VOTE_OR, v);
}
inline int __syncthreads_and(int v)
{
    return ::emu::block_sync(0, 0, ::emu::VOTE_AND, v);
}
inline int __syncthreads_count(int v)
{
    return ::emu::block_sync(0, 0, ::emu::VOTE_COUNT, v);
}
inline void __nanosleep(uint32_t ns)
{
    ::emu::sleep_ns(ns);
}
inline long long clock64()
{
    return static_cast<long long>(::emu::now_ns());
}
[[noreturn]] inline void __trap()
{
    ::emu::fail("__trap()");
}

/* ---- warps ---- */

inline void __syncwarp(uint32_t mask = ~0u)
{
    ::emu::meet(mask, ::emu::MEET_SYNC, {}, nullptr);
}

namespace emu
{

template <class T> payload pack(T v)
{
    static_assert(sizeof(T) <= 8, "a register or two");
    payload p = {};
    memcpy(p.v, &v, sizeof(v));
    return p;
}

template <class T> T unpack(const payload &p)
{
    T v;
    memcpy(&v, p.v, sizeof(v));
    return v;
}

/* Every lane gets the value of lane v[1], or keeps its own where that is no lane of the meeting. */
void complete_shuffle(meeting &m);
void complete_match(meeting &m);
void complete_vote(meeting &m);

template <class T> T shuffle(uint32_t mask, T v, uint32_t from)
{
    payload p = pack(v);
    p.v[1] = from;
    return unpack<T>(meet(mask, MEET_SHUFFLE, p, complete_shuffle));
}

template <class T> void complete_reduce(meeting &m, T (*both)(T, T))
{
    bool first = true;
    T sum = T();
    for (uint32_t i = 0; i < 32; i++)
        if (m.arrived >> i & 1u) {
            T v = unpack<T>(m.lane[i]);
            sum = first ? v : both(sum, v);
            first = false;
        }
    for (uint32_t i = 0; i < 32; i++)
        m.lane[i] = pack(sum);
}

} // namespace emu

template <class T> T __shfl_sync(uint32_t mask, T v, int from, int width = 32)
{
    uint32_t lane = ::emu::lane_of(), w = static_cast<uint32_t>(width);
    return ::emu::shuffle(mask, v, (lane & ~(w - 1)) | (static_cast<uint32_t>(from) & (w - 1)));
}
template <class T> T __shfl_up_sync(uint32_t mask, T v, uint32_t by, int width = 32)
{
    uint32_t lane = ::emu::lane_of(), in = lane & (static_cast<uint32_t>(width) - 1);
    return ::emu::shuffle(mask, v, in >= by ? lane - by : lane);
}
template <class T> T __shfl_down_sync(uint32_t mask, T v, uint32_t by, int width = 32)
{
    uint32_t lane = ::emu::lane_of(), w = static_cast<uint32_t>(width), in = lane & (w - 1);
    return ::emu::shuffle(mask, v, in + by < w ? lane + by : lane);
}
template <class T> T __shfl_xor_sync(uint32_t mask, T v, int with, int width = 32)
{
    uint32_t lane = ::emu::lane_of(), w = static_cast<uint32_t>(width), to = lane ^ static_cast<uint32_t>(with);
    return ::emu::shuffle(mask, v, (to & ~(w - 1)) == (lane & ~(w - 1)) ? to : lane);
}
template <class T> uint32_t __match_any_sync(uint32_t mask, T v)
{
    return ::emu::unpack<uint32_t>(::emu::meet(mask, ::emu::MEET_MATCH, ::emu::pack(v), ::emu::complete_match));
}
inline uint32_t __ballot_sync(uint32_t mask, int v)
{
    return ::emu::unpack<uint32_t>(::emu::meet(mask, ::emu::MEET_VOTE, ::emu::pack(v), ::emu::complete_vote));
}
inline int __any_sync(uint32_t mask, int v)
{
    return __ballot_sync(mask, v) != 0;
}
inline int __all_sync(uint32_t mask, int v)
{
    return __ballot_sync(mask, !v) == 0;
}

#define EMULATED_REDUCE(name, expression)                                                                              \
    template <class T> T name(uint32_t mask, T v)                                                                      \
    {                                                                                                                  \
        auto complete = [](::emu::meeting &m) {                                                                        \
            ::emu::complete_reduce<T>(m, [](T a, T b) -> T { return expression; });                                    \
        };                                                                                                             \
        return ::emu::unpack<T>(::emu::meet(mask, ::emu::MEET_REDUCE, ::emu::pack(v), complete));                      \
    }
EMULATED_REDUCE(__reduce_add_sync, a + b)
EMULATED_REDUCE(__reduce_min_sync, b < a ? b : a)
EMULATED_REDUCE(__reduce_max_sync, a < b ? b : a)
EMULATED_REDUCE(__reduce_or_sync, a | b)
EMULATED_REDUCE(__reduce_and_sync, a &b)
#undef EMULATED_REDUCE

/* ---- launching ---- */

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    union {
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               Arguments &&...arguments)
{
    std::tuple<typename std::decay<Parameters>::type...> copies(static_cast<Arguments &&>(arguments)...);
    bool early = false;
    for (unsigned i = 0; i < config->numAttrs; i++)
        early |= config->attrs[i].val.programmaticStreamSerializationAllowed != 0;
    return ::emu::launch(reinterpret_cast<const void *>(kernel), config->gridDim, config->blockDim,
                         config->dynamicSmemBytes, config->stream, early,
                         [kernel, copies] { std::apply(kernel, copies); });
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
template <class Kernel> cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute attribute, int value)
{
    (void)attribute;
    return ::emu::set_shared_limit(reinterpret_cast<const void *>(kernel), static_cast<uint32_t>(value));
}

#endif
