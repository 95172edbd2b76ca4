/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The Hopper matrix instruction, and the shared-memory descriptors it reads. Other architectures get a file of the
 * same names; nothing else in the kernels knows how a tile is multiplied.
 */
#ifndef MOK_CUDA_WGMMA_CUH
#define MOK_CUDA_WGMMA_CUH

#include <stdint.h>

#include "descriptor.cuh"

namespace mok
{

__device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N> __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/*
 * D[64][256] (+)= A[64][16] B[256][16]^T, FP32 sums; `add` false starts from zero. TransposedA, TransposedB: that tile
 * is MN-major.
 * Thread t holds, for n8 = 0..31, D[row][8 n8 + 2 (t % 4) + {0, 1}] in d[4 n8 + {0, 1}] with row = 16 (t / 32) + t % 32
 * / 4, and row + 8 in d[4 n8 + {2, 3}].
 */
#define MOK_SUMS_8(c, i)                                                                                               \
    c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define MOK_SUMS_32(c, i) MOK_SUMS_8(c, i), MOK_SUMS_8(c, i + 8), MOK_SUMS_8(c, i + 16), MOK_SUMS_8(c, i + 24)
#define MOK_SUMS(c) MOK_SUMS_32(c, 0), MOK_SUMS_32(c, 32), MOK_SUMS_32(c, 64), MOK_SUMS_32(c, 96)
#define MOK_SUMS_PTX \
    "%0, %1, %2, %3, %4, %5, %6, %7, " \
    "%8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, " \
    "%40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, " \
    "%56, %57, %58, %59, %60, %61, %62, %63, " \
    "%64, %65, %66, %67, %68, %69, %70, %71, " \
    "%72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, " \
    "%88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, " \
    "%104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, " \
    "%120, %121, %122, %123, %124, %125, %126, %127"

template <bool TransposedA = false, bool TransposedB = false>
__device__ __forceinline__ void wgmma_m64n256k16(float (&d)[128], uint64_t a, uint64_t b, bool add)
{
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %130, 0;\n"
                 " wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" MOK_SUMS_PTX
                 "}, %128, %129, p, 1, 1, %131, %132;\n}"
                 : MOK_SUMS("+f")
                 : "l"(a), "l"(b), "r"(static_cast<uint32_t>(add)), "n"(TransposedA ? 1 : 0), "n"(TransposedB ? 1 : 0));
}

/* The first product of a sum, which starts from zero: nothing is read that was not written. */
template <bool TransposedA = false, bool TransposedB = false>
__device__ __forceinline__ void wgmma_m64n256k16_first(float (&d)[128], uint64_t a, uint64_t b)
{
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, 0, 0;\n"
                 " wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" MOK_SUMS_PTX
                 "}, %128, %129, p, 1, 1, %130, %131;\n}"
                 : MOK_SUMS("=f")
                 : "l"(a), "l"(b), "n"(TransposedA ? 1 : 0), "n"(TransposedB ? 1 : 0));
}

/* D[64][128] (+)= A[64][32] B[128][32]^T of E4M3, both K-major, FP32 sums of some 14 bits; d as above, n8 = 0..15. */
#define MOK_SUMS_64(c) MOK_SUMS_32(c, 0), MOK_SUMS_32(c, 32)
#define MOK_SUMS_64_PTX \
    "%0, %1, %2, %3, %4, %5, %6, %7, " \
    "%8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, " \
    "%40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, " \
    "%56, %57, %58, %59, %60, %61, %62, %63"

__device__ __forceinline__ void wgmma_m64n128k32_e4m3(float (&d)[64], uint64_t a, uint64_t b)
{
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, 1, 0;\n"
                 " wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MOK_SUMS_64_PTX "}, %64, %65, p, 1, 1;\n}"
                 : MOK_SUMS_64("+f")
                 : "l"(a), "l"(b));
}

/* The first product of a sum. */
__device__ __forceinline__ void wgmma_m64n128k32_e4m3_first(float (&d)[64], uint64_t a, uint64_t b)
{
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, 0, 0;\n"
                 " wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MOK_SUMS_64_PTX "}, %64, %65, p, 1, 1;\n}"
                 : MOK_SUMS_64("=f")
                 : "l"(a), "l"(b));
}

/*
 * The first product of a sum, as an instruction that seems to read what the registers hold. So a compiler gives all sums of a
 * loop the same ones; where it takes others it moves what lies in its way, or spills it.
 */
__device__ __forceinline__ void wgmma_m64n128k32_e4m3_again(float (&d)[64], uint64_t a, uint64_t b)
{
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, 0, 0;\n"
                 " wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MOK_SUMS_64_PTX "}, %64, %65, p, 1, 1;\n}"
                 : MOK_SUMS_64("+f")
                 : "l"(a), "l"(b));
}

#undef MOK_SUMS_8
#undef MOK_SUMS_32
#undef MOK_SUMS_64
#undef MOK_SUMS
#undef MOK_SUMS_64_PTX
#undef MOK_SUMS_PTX

} // namespace mok
#endif
