/* SPDX-License-Identifier: Apache-2.0 */
/* Reading histograms, and the names of what is counted: see stats.h. */
#include "stats.h"

#include <stddef.h>

#include "util.h"

uint64_t mok_stats_bucket_end(unsigned bucket)
{
    if (bucket == 0)
        return (uint64_t)1 << MOK_STATS_FIRST_BITS;
    if (bucket >= MOK_STATS_BUCKETS - 1u)
        return UINT64_MAX;
    unsigned octave = (bucket - 1u) / 4u, quarter = (bucket - 1u) % 4u;
    return (uint64_t)(5u + quarter) << (MOK_STATS_FIRST_BITS + octave - 2u);
}

void mok_stats_histogram_add(struct mok_stats_histogram *sum, const struct mok_stats_histogram *other)
{
    for (unsigned i = 0; i < MOK_STATS_BUCKETS; i++)
        sum->bucket[i] += mok_stats_get(&other->bucket[i]);
    sum->sum_ns += mok_stats_get(&other->sum_ns);
    sum->count += mok_stats_get(&other->count);
}

uint64_t mok_stats_quantile(const struct mok_stats_histogram *histogram, double q)
{
    uint64_t all = 0, below = 0;

    for (unsigned i = 0; i < MOK_STATS_BUCKETS; i++)
        all += histogram->bucket[i];
    if (all == 0)
        return 0;
    double wanted = q * (double)all;
    for (unsigned i = 0; i < MOK_STATS_BUCKETS; i++) {
        uint64_t here = histogram->bucket[i];
        if (here == 0 || (double)(below + here) < wanted) {
            below += here;
            continue;
        }
        uint64_t start = i ? mok_stats_bucket_end(i - 1) : 0, end = mok_stats_bucket_end(i);
        if (end == UINT64_MAX)
            return start;
        return start + (uint64_t)((wanted - (double)below) / (double)here * (double)(end - start));
    }
    return mok_stats_bucket_end(MOK_STATS_BUCKETS - 2u);
}

static const char *pick(const char *const *names, size_t count, unsigned index)
{
    return index < count ? names[index] : NULL;
}

const char *mok_latency_text(unsigned latency)
{
    static const char *const names[] = { "queue", "ready_wait", "main", "push_wait", "reduce", "total" };
    _Static_assert(ARRAY_SIZE(names) == MOK_LATENCIES, "one name a latency");
    return pick(names, ARRAY_SIZE(names), latency);
}

const char *mok_stats_kind_text(unsigned kind)
{
    static const char *const names[] = { "nop", "forward", "backward", "cancel", "unknown" };
    _Static_assert(ARRAY_SIZE(names) == MOK_STATS_KINDS, "one name a kind");
    return pick(names, ARRAY_SIZE(names), kind);
}

const char *mok_stats_phase_text(unsigned phase)
{
    static const char *const names[] = { NULL, "prepare", "main", "reduce", "whole" };
    _Static_assert(ARRAY_SIZE(names) == MOK_STATS_PHASES, "one name a phase");
    return pick(names, ARRAY_SIZE(names), phase);
}
