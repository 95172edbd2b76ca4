/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of proto/ share: cmocka's preamble, descriptor counting, random numbers, one queue with all sides. */
#ifndef MOK_TEST_PROTO_SUPPORT_H
#define MOK_TEST_PROTO_SUPPORT_H

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "mok/types.h"
#include "queue.h"
#include "util.h"

static inline size_t count_fds(void)
{
    DIR *directory = opendir("/proc/self/fd");
    assert_non_null(directory);
    size_t count = 0;
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

static inline uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* One queue, with the three parties in this process; each maps for itself, as processes would. */
struct parties {
    struct mok_queue mokd;
    struct mok_queue_worker worker;
    struct mok_queue_client client;
};

static inline void parties_open(struct parties *p, uint32_t entries, uint32_t counter)
{
    memset(p, 0, sizeof(*p));
    assert_int_equal(mok_queue_create(entries, counter, &p->mokd), 0);
    assert_int_equal(mok_queue_worker_open(p->mokd.control_fd, p->mokd.submit_fd, p->mokd.inflight_fd, &p->worker), 0);
    assert_int_equal(mok_queue_seal(&p->mokd), 0);
    assert_int_equal(mok_queue_client_open(p->mokd.control_fd, p->mokd.submit_fd, p->mokd.doorbell_fd, &p->client), 0);
}

static inline void parties_close(struct parties *p)
{
    mok_queue_client_release(&p->client);
    mok_queue_worker_release(&p->worker);
    mok_queue_destroy(&p->mokd);
}

static inline int submit(struct mok_queue_client *client, uint64_t user_data)
{
    struct mok_sqe *sqe;
    int r = mok_queue_client_reserve(client, &sqe);
    if (r < 0)
        return r;
    sqe->user_data = user_data;
    mok_queue_client_publish(client);
    return 0;
}

/* Takes one submission; its user_data must be `expected`. Returns the slot. */
static inline uint32_t take(struct mok_queue_worker *worker, uint64_t expected)
{
    struct mok_sqe sqe;
    uint32_t slot = UINT32_MAX;
    assert_int_equal(mok_queue_worker_take(worker, &sqe, &slot), 1);
    assert_int_equal(sqe.user_data, expected);
    return slot;
}

static inline void complete(struct mok_queue_worker *worker, uint32_t slot, int result)
{
    const struct mok_cqe cqe = { .result = result };
    mok_queue_worker_complete(worker, slot, &cqe);
}

/* Reaps one completion, which must be this. */
static inline void reap(struct mok_queue_client *client, uint64_t user_data, int result)
{
    struct mok_cqe cqe;
    assert_int_equal(mok_queue_client_reap(client, &cqe), 1);
    assert_int_equal(cqe.user_data, user_data);
    assert_int_equal(cqe.result, result);
}

#endif
