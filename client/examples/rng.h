/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counter-based random numbers: value = f(seed, stream, counter), without state. Whoever asks, in whatever order,
 * on whatever rank, gets the same number; nothing needs to be saved in a checkpoint.
 */
#ifndef EXAMPLE_RNG_H
#define EXAMPLE_RNG_H

#include <math.h>
#include <stdint.h>

/* GPUs draw the same numbers. */
#ifdef __CUDACC__
#define RNG_FUNCTION static __host__ __device__ inline
#else
#define RNG_FUNCTION static inline
#endif

/* Finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection whose output bits all depend on all input bits. */
RNG_FUNCTION uint64_t rng_mix(uint64_t value)
{
    value += 0x9e3779b97f4a7c15ull;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

RNG_FUNCTION uint64_t rng_u64(uint64_t seed, uint64_t stream, uint64_t counter)
{
    return rng_mix(rng_mix(rng_mix(seed) ^ stream) ^ counter);
}

/* Uniform in [0, bound); the bias of the multiplication is below bound / 2^64. */
RNG_FUNCTION uint64_t rng_below(uint64_t seed, uint64_t stream, uint64_t counter, uint64_t bound)
{
    return (uint64_t)(((unsigned __int128)rng_u64(seed, stream, counter) * bound) >> 64);
}

/* Uniform in (0, 1]. */
RNG_FUNCTION double rng_unit(uint64_t seed, uint64_t stream, uint64_t counter)
{
    return (double)((rng_u64(seed, stream, counter) >> 11) + 1) * 0x1p-53;
}

/* Standard normal by Box and Muller, one of the pair. */
RNG_FUNCTION float rng_normal(uint64_t seed, uint64_t stream, uint64_t counter)
{
    double radius = sqrt(-2.0 * log(rng_unit(seed, stream, 2 * counter)));
    double angle = 6.283185307179586476925 * rng_unit(seed, stream, 2 * counter + 1);

    return (float)(radius * cos(angle));
}

#endif
