/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a worker counts, in memory that mokd maps read-only: one page of counters a device, which outlives workers.
 * One writer, the dispatcher thread; every word is read and written whole, so a reader may be a moment behind but never
 * sees half a number. Nobody waits for anybody. A reader bounds every index, since the writer may have gone wrong.
 */
#ifndef MOK_STATS_H
#define MOK_STATS_H

#include <stdint.h>

#define MOK_STATS_MAGIC 0x31535441544b4f4dull
#define MOK_STATS_VERSION 1u

#define MOK_STATS_KINDS 5u  /* by opcode (ring_abi.h); the last: opcodes that are none */
#define MOK_STATS_CODES 64u /* by error number, 0: done */
#define MOK_STATS_PHASES 5u /* by enum mok_phase, which starts at 1 */
#define MOK_STATS_QUEUES 1024u
#define MOK_STATS_LAYERS 256u
#define MOK_STATS_BINS 128u /* experts of a layer; where it has more, neighbours share one */

/*
 * Nanoseconds, log-linear: bucket 0 is what is below 1,024 ns, then four equal ones for each power of two, the last
 * bucket is all above. A power of two is always a border.
 */
#define MOK_STATS_FIRST_BITS 10u
#define MOK_STATS_OCTAVES 26u /* up to 2^36 ns, 69 s */
#define MOK_STATS_BUCKETS (1u + 4u * MOK_STATS_OCTAVES + 1u)

struct mok_stats_histogram {
    uint64_t count;
    uint64_t sum_ns;
    uint64_t bucket[MOK_STATS_BUCKETS];
};

/* Where an operation's time goes. */
enum mok_latency {
    MOK_LATENCY_QUEUE = 0, /* taken by the worker -> the engine starts on it */
    MOK_LATENCY_READY,     /* this rank is ready -> all ranks are */
    MOK_LATENCY_MAIN,      /* main phase on the device; of a group of one rank all phases, which then run in one */
    MOK_LATENCY_PUSH,      /* this rank has pushed -> all ranks have */
    MOK_LATENCY_REDUCE,    /* reduce phase on the device */
    MOK_LATENCY_TOTAL,     /* taken -> completed */
    MOK_LATENCIES,
};

/*
 * A session on this device. `queue` 0: never used. It is written last when the slot is taken; once the queue is `gone`
 * its last numbers stay to be read until the slot is taken again.
 */
struct mok_stats_queue {
    uint32_t queue;
    uint32_t in_flight;
    uint64_t ops, errors, rows, device_ns;
    uint32_t gone;
    uint32_t reserved0;
    uint64_t reserved[2];
};

/* A layer of this rank: what its experts got. `layer` 0: free. */
struct mok_stats_layer {
    uint32_t layer;
    uint32_t local_experts;
    uint32_t bins; /* experts e share bin e * bins / local_experts */
    uint32_t reserved0;
    uint64_t ops; /* main phases that ran to their end */
    uint64_t rows;
    uint64_t max_rows; /* sum over those of the rows of the expert that had most */
    uint64_t last_rows, last_max_rows;
    uint64_t reserved[1];
    uint64_t expert_rows[MOK_STATS_BINS];
};

struct mok_stats {
    uint64_t magic;
    uint32_t version;
    uint32_t bytes;
    uint32_t generation;  /* workers that have had this page */
    uint32_t queues_used; /* slots from here on have never been taken */
    uint32_t layers_used;
    uint32_t in_flight; /* operations taken and not completed */
    uint64_t reserved0[4];

    uint64_t ops[MOK_STATS_KINDS][MOK_STATS_CODES]; /* completed */
    uint64_t taken[MOK_STATS_KINDS];
    uint64_t rows;         /* that reached experts */
    uint64_t rows_dropped; /* always 0: what it says is that this is so */
    uint64_t tokens;
    uint64_t phases[MOK_STATS_PHASES], phase_ns[MOK_STATS_PHASES]; /* device time */
    uint64_t schedule_ns, transfer_ns, compute_ns;                 /* of main phases, summed over units */
    uint64_t expert_max_rows, expert_mean_rows; /* of main phases: of the expert with most; rows / E_l */
    uint64_t macrobatches, minibatches;
    uint64_t ring_rows, ring_capacity; /* rows in the ring, and rows that would have fitted, over all macrobatches */
    uint64_t wakeups;                  /* times that the dispatcher slept */
    uint64_t sleep_ns;                 /* for how long together */
    uint64_t peer_bells;               /* peers' workers woken */
    uint64_t broken_queues, broken_groups;
    uint64_t rounds; /* of the dispatcher: how mokd sees that it lives; never still for longer than it takes to wake */
    uint64_t reserved1[3];

    struct mok_stats_histogram latency[2][MOK_LATENCIES]; /* forward, backward */
    struct mok_stats_queue queue[MOK_STATS_QUEUES];
    struct mok_stats_layer layer[MOK_STATS_LAYERS];
};

_Static_assert(sizeof(struct mok_stats_queue) == 64, "layout");
_Static_assert(sizeof(struct mok_stats_layer) == 64 + 8 * MOK_STATS_BINS, "layout");
_Static_assert(sizeof(struct mok_stats_histogram) == 16 + 8 * MOK_STATS_BUCKETS, "layout");
_Static_assert(__builtin_offsetof(struct mok_stats, ops) == 64, "layout");
_Static_assert(__builtin_offsetof(struct mok_stats, latency) % 8 == 0, "layout");

static inline uint64_t mok_stats_get(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

/* By the one writer alone. */
static inline void mok_stats_set(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}
static inline void mok_stats_add(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, *word + value, __ATOMIC_RELAXED);
}

/* The bucket that a duration falls in. */
static inline unsigned mok_stats_bucket(uint64_t ns)
{
    if (ns < (uint64_t)1 << MOK_STATS_FIRST_BITS)
        return 0;
    unsigned top = 63u - (unsigned)__builtin_clzll(ns);
    unsigned index = 1u + (top - MOK_STATS_FIRST_BITS) * 4u + (unsigned)(ns >> (top - 2u) & 3u);
    return index < MOK_STATS_BUCKETS ? index : MOK_STATS_BUCKETS - 1u;
}

static inline void mok_stats_record(struct mok_stats_histogram *histogram, uint64_t ns)
{
    mok_stats_add(&histogram->bucket[mok_stats_bucket(ns)], 1);
    mok_stats_add(&histogram->sum_ns, ns);
    mok_stats_add(&histogram->count, 1);
}

/* The first duration that is above the bucket; UINT64_MAX for the last one. */
uint64_t mok_stats_bucket_end(unsigned bucket);
/* Adds what another one holds. */
void mok_stats_histogram_add(struct mok_stats_histogram *sum, const struct mok_stats_histogram *other);
/*
 * Duration below which the share `q` of all lies, interpolated within its bucket; 0 when it is empty. Trusts the
 * buckets, not the count, so that a reader who is a moment behind is not led astray.
 */
uint64_t mok_stats_quantile(const struct mok_stats_histogram *histogram, double q);

/* Names for people and for metrics; NULL beyond the last. */
const char *mok_latency_text(unsigned latency);
const char *mok_stats_kind_text(unsigned kind);
const char *mok_stats_phase_text(unsigned phase);

#endif
