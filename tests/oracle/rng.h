/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small seeded generator, so that every test repeats exactly on every machine.
 */
#ifndef MOK_TESTS_RNG_H
#define MOK_TESTS_RNG_H

#include <math.h>
#include <stdint.h>

struct rng {
    uint64_t state;
};

static inline uint64_t rng_u64(struct rng *r)
{
    uint64_t z = (r->state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* 0 .. bound - 1; bound > 0. */
static inline uint32_t rng_below(struct rng *r, uint32_t bound)
{
    return (uint32_t)(((rng_u64(r) >> 32) * bound) >> 32);
}

/* In [0, 1). */
static inline double rng_unit(struct rng *r)
{
    return (double)(rng_u64(r) >> 11) * 0x1p-53;
}

static inline double rng_normal(struct rng *r)
{
    double u = 1.0 - rng_unit(r), v = rng_unit(r);
    return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

#endif
