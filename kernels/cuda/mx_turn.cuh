/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A tile of 128 x 128 codes that is turned: rounded anew for a larger scale, taken through shared memory, and left where
 * its columns are rows. Whose tiles these are, and which scale they get, the kernels say.
 */
#ifndef MOK_CUDA_MX_TURN_CUH
#define MOK_CUDA_MX_TURN_CUH

#include "mx.h"
#include "ptx.cuh"

namespace mok
{
namespace
{

constexpr uint32_t turn_threads = 256, turn_tile = 128;

/*
 * Codes that have a scale of their own, for a larger one: their exponents fall by as much as the scales differ. Where all
 * of 16 codes stay normal numbers that is a subtraction; others are rounded anew.
 */
struct rescale {
    uint32_t own, down, least, watched;

    __device__ rescale(uint32_t from, uint32_t to) : own(from), down(to - from)
    {
        least = min(down + 1, 16u) * 0x08080808u; /* of exponents; 16: there is none */
        watched = own == MOK_E8M0_NAN ? ~0u : down == 0 ? 0 : 0x80808080u;
    }
    /* Not 0: of these four codes one is NaN, or would not be normal. A borrow ends at the byte's highest bit. */
    __device__ __forceinline__ uint32_t odd(uint32_t codes) const
    {
        const uint32_t normal = ((codes & 0x78787878u) | 0x80808080u) - least;
        const uint32_t nan = (codes & 0x7f7f7f7fu) + 0x01010101u;
        return (~normal | nan) & watched;
    }
    __device__ __forceinline__ uint32_t round(uint32_t codes) const
    {
        if (down == 0)
            return codes;
        if (own == MOK_E8M0_NAN)
            return 0x7f7f7f7fu;
        const float factor = down < 127 ? __uint_as_float((127 - down) << 23) : 0.0f;
        float a, b, c, d;
        unpack_e4m3(codes, a, b);
        unpack_e4m3(codes >> 16, c, d);
        return pack_e4m3(__fmul_rn(a, factor), __fmul_rn(b, factor)) |
               pack_e4m3(__fmul_rn(c, factor), __fmul_rn(d, factor)) << 16;
    }
    __device__ __forceinline__ uint4 turn(uint4 v) const
    {
        if ((odd(v.x) | odd(v.y) | odd(v.z) | odd(v.w)) != 0)
            return make_uint4(round(v.x), round(v.y), round(v.z), round(v.w));
        const uint32_t less = down * 0x08080808u;
        return make_uint4(v.x - less, v.y - less, v.z - less, v.w - less);
    }
};

/* Four rows of four columns become four columns of four rows. */
__device__ __forceinline__ void turn_4(uint32_t (&v)[4])
{
    const uint32_t ab = __byte_perm(v[0], v[1], 0x5140), ab2 = __byte_perm(v[0], v[1], 0x7362);
    const uint32_t cd = __byte_perm(v[2], v[3], 0x5140), cd2 = __byte_perm(v[2], v[3], 0x7362);
    v[0] = __byte_perm(ab, cd, 0x5410);
    v[1] = __byte_perm(ab, cd, 0x7632);
    v[2] = __byte_perm(ab2, cd2, 0x5410);
    v[3] = __byte_perm(ab2, cd2, 0x7632);
}

/* All threads of a block: four rows of 16 columns each. */
struct turned_tile {
    uint32_t smem, chunk, quad;

    __device__ explicit turned_tile(const uint8_t *memory)
        : smem(smem_address(memory)), chunk(threadIdx.x % 8), quad(threadIdx.x / 8)
    {
    }

    __device__ __forceinline__ void put(const uint4 (&v)[4]) const
    {
        put_4(0, v[0].x, v[1].x, v[2].x, v[3].x);
        put_4(4, v[0].y, v[1].y, v[2].y, v[3].y);
        put_4(8, v[0].z, v[1].z, v[2].z, v[3].z);
        put_4(12, v[0].w, v[1].w, v[2].w, v[3].w);
        __syncthreads();
    }
    __device__ __forceinline__ void put_4(uint32_t first, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) const
    {
        uint32_t word[4] = { r0, r1, r2, r3 };
        turn_4(word);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            store_shared_4(smem + (16 * chunk + first + i) * turn_tile + (quad ^ (4 * chunk)) * 4, word[i]);
    }

    /* Column n, if there are so many, begins at to + n * stride; of rows only those before `rows` leave. */
    __device__ __forceinline__ void leave(uint8_t *to, uint64_t stride, uint32_t columns, uint32_t rows) const
    {
#pragma unroll
        for (uint32_t i = 0; i < turn_tile; i += turn_threads / 8) {
            const uint32_t n = i + quad;
            if (n < columns && 16 * chunk < rows)
                *reinterpret_cast<uint4 *>(to + n * stride + 16 * chunk) =
                    load_shared_16(smem + n * turn_tile + (chunk ^ (n / 16)) * 16);
        }
    }
};

} // namespace
} // namespace mok
#endif
