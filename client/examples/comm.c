/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Barrier on a futex, all-reduce by slices: each rank adds up its slice of the result over all ranks, in rank order.
 * Never sleeps without a bound, and never trusts that a peer will arrive.
 */
#include "comm.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "mok/types.h"
#include "report.h"

#define SLICE_NS 100000000L /* longest sleep before a waiting rank looks whether all are still there */

struct shared {
    _Atomic uint32_t arrived;
    _Atomic uint32_t generation; /* the futex word */
    _Atomic uint32_t gone;       /* rank + 1 */
    _Atomic uint32_t stop;
};

struct comm {
    unsigned ranks;
    size_t floats, bytes;
    struct shared *shared;
    double *doubles; /* [ranks][COMM_MAX_SUM] */
    uint64_t *board;
    float *inputs; /* [ranks][floats] */
    float *result; /* [floats] */
};

static size_t round_up(size_t bytes)
{
    return (bytes + 4095) & ~(size_t)4095;
}

int comm_create(unsigned ranks, size_t floats, size_t words, struct comm **ret)
{
    struct comm *comm = calloc(1, sizeof(*comm));
    size_t doubles_at = round_up(sizeof(struct shared));
    size_t board_at = doubles_at + round_up(ranks * COMM_MAX_SUM * sizeof(double));
    size_t inputs_at = board_at + round_up(words * sizeof(uint64_t));
    size_t result_at = inputs_at + round_up(ranks * floats * sizeof(float));
    void *base;

    if (!comm)
        return fail(-MOK_ENOMEM, "no memory");
    *comm = (struct comm){ .ranks = ranks, .floats = floats };
    comm->bytes = result_at + round_up(floats * sizeof(float));
    base = mmap(NULL, comm->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        free(comm);
        return fail(-MOK_ENOMEM, "no memory that ranks can share: %s", strerror(errno));
    }
    comm->shared = base;
    comm->doubles = (void *)((char *)base + doubles_at);
    comm->board = (void *)((char *)base + board_at);
    comm->inputs = (void *)((char *)base + inputs_at);
    comm->result = (void *)((char *)base + result_at);
    *ret = comm;
    return 0;
}

void comm_destroy(struct comm *comm)
{
    if (!comm)
        return;
    munmap(comm->shared, comm->bytes);
    free(comm);
}

static void wake_all(struct shared *shared)
{
    syscall(SYS_futex, &shared->generation, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static int gone(const struct comm *comm)
{
    return fail(-MOK_EPEER, "rank %d of this job is gone, stopping", comm_aborted(comm));
}

int comm_barrier(struct comm *comm)
{
    struct shared *shared = comm->shared;
    struct timespec slice = { .tv_nsec = SLICE_NS };
    uint32_t generation = atomic_load(&shared->generation);

    if (comm_aborted(comm) >= 0)
        return gone(comm);
    if (atomic_fetch_add(&shared->arrived, 1) + 1 == comm->ranks) {
        atomic_store(&shared->arrived, 0);
        atomic_fetch_add(&shared->generation, 1);
        wake_all(shared);
        return 0;
    }
    while (atomic_load(&shared->generation) == generation) {
        if (comm_aborted(comm) >= 0)
            return gone(comm);
        syscall(SYS_futex, &shared->generation, FUTEX_WAIT, generation, &slice, NULL, 0);
    }
    return 0;
}

int comm_sum(struct comm *comm, unsigned rank, float *data, size_t count)
{
    size_t from = count * rank / comm->ranks, to = count * (rank + 1) / comm->ranks;
    int rc;

    if (comm->ranks == 1)
        return 0;
    memcpy(comm->inputs + rank * comm->floats, data, count * sizeof(*data));
    rc = comm_barrier(comm);
    if (rc < 0)
        return rc;
    memcpy(comm->result + from, comm->inputs + from, (to - from) * sizeof(*data));
    for (unsigned r = 1; r < comm->ranks; r++)
        for (size_t i = from; i < to; i++)
            comm->result[i] += comm->inputs[r * comm->floats + i];
    rc = comm_barrier(comm);
    if (rc < 0)
        return rc;
    memcpy(data, comm->result, count * sizeof(*data));
    /* The next sum's first barrier lies between this read and the next write of the result. */
    return 0;
}

int comm_sum_double(struct comm *comm, unsigned rank, double *values, unsigned count)
{
    int rc;

    memcpy(comm->doubles + rank * COMM_MAX_SUM, values, count * sizeof(*values));
    rc = comm_barrier(comm);
    if (rc < 0)
        return rc;
    for (unsigned i = 0; i < count; i++) {
        values[i] = comm->doubles[i];
        for (unsigned r = 1; r < comm->ranks; r++)
            values[i] += comm->doubles[r * COMM_MAX_SUM + i];
    }
    return comm_barrier(comm);
}

uint64_t *comm_board(struct comm *comm)
{
    return comm->board;
}

void comm_abort(struct comm *comm, unsigned rank)
{
    uint32_t nobody = 0;

    atomic_compare_exchange_strong(&comm->shared->gone, &nobody, rank + 1);
    wake_all(comm->shared);
}

int comm_aborted(const struct comm *comm)
{
    return (int)atomic_load(&comm->shared->gone) - 1;
}

void comm_request_stop(struct comm *comm)
{
    atomic_store(&comm->shared->stop, 1);
}

int comm_stop_requested(const struct comm *comm)
{
    return (int)atomic_load(&comm->shared->stop);
}
