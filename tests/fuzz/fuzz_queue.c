/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client that does anything to its own memory, interleaved with a worker that takes and completes. The worker must
 * keep its own account right whatever it reads. The input is a list of steps.
 */
#include <string.h>

#include "mok/types.h"
#include "queue.h"
#include "util.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define ENTRIES 4u
#define SLOTS (2 * ENTRIES)

struct run {
    const uint8_t *data;
    size_t left;
    struct mok_queue mokd;
    struct mok_queue_worker worker;
    struct mok_queue_client client;
    uint32_t held[SLOTS]; /* slots that owe a completion */
    uint32_t held_count;
};

static void must(bool condition)
{
    if (!condition)
        abort();
}

static void draw(struct run *run, void *to, size_t size)
{
    size_t take = size < run->left ? size : run->left;

    memset(to, 0, size);
    if (take > 0)
        memcpy(to, run->data, take);
    run->data += take;
    run->left -= take;
}

static uint32_t draw_u32(struct run *run)
{
    uint32_t value;
    draw(run, &value, sizeof(value));
    return value;
}

static void take(struct run *run)
{
    struct mok_sqe sqe;
    uint32_t slot, before = run->worker.sq_head;
    bool ready = mok_queue_worker_ready(&run->worker);

    int r = mok_queue_worker_take(&run->worker, &sqe, &slot);
    must(ready == (r != 0));
    if (r != 1) {
        must(r == 0 || (r == -MOK_ESESSION && run->worker.fault.argument != MOK_ARG_NONE));
        must(run->worker.sq_head == before);
        return;
    }
    must(slot < SLOTS && run->held_count < SLOTS);
    for (uint32_t i = 0; i < run->held_count; i++)
        must(run->held[i] != slot);
    run->held[run->held_count++] = slot;
    must(run->worker.sq_head == before + 1);
    must(run->worker.inflight[slot].state == MOK_INFLIGHT_TAKEN);
    must(run->worker.inflight[slot].user_data == sqe.user_data);
}

static void complete(struct run *run, uint32_t which)
{
    const struct mok_cqe cqe = { .result = -MOK_ECANCELED };

    if (run->held_count == 0)
        return;
    which %= run->held_count;
    mok_queue_worker_complete(&run->worker, run->held[which], &cqe);
    run->held[which] = run->held[--run->held_count];
}

static void step(struct run *run)
{
    uint8_t choice;
    draw(run, &choice, 1);

    switch (choice % 8) {
    case 0: { /* anything anywhere */
        uint32_t at = draw_u32(run) % (uint32_t)(run->client.layout.submit_bytes / sizeof(uint32_t));
        ((uint32_t *)(void *)run->client.submit)[at] = draw_u32(run);
        break;
    }
    case 1: /* a counter close to what is right */
        run->client.submit->sq_tail = run->worker.sq_head + choice / 8 % (ENTRIES + 2);
        break;
    case 2:
        run->client.submit->cq_head = run->worker.cq_tail - choice / 8 % (SLOTS + 2);
        break;
    case 3:
        run->client.submit->cq_sleepers = choice / 8;
        break;
    case 4:
        complete(run, choice / 8);
        break;
    case 5: /* a proper entry */
        draw(run, &run->client.sqe[choice / 8 % ENTRIES], sizeof(struct mok_sqe));
        break;
    default:
        take(run);
        break;
    }
    must(run->mokd.header->sq_head == run->worker.sq_head);
    must(run->mokd.header->cq_tail == run->worker.cq_tail);
    must(run->worker.sq_head - run->worker.cq_tail == run->held_count);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct run run = { .data = data, .left = size, .mokd = MOK_QUEUE_INIT };

    must(mok_queue_create(ENTRIES, draw_u32(&run), &run.mokd) == 0);
    must(mok_queue_worker_open(run.mokd.control_fd, run.mokd.submit_fd, run.mokd.inflight_fd, &run.worker) == 0);
    must(mok_queue_client_open(run.mokd.control_fd, run.mokd.submit_fd, run.mokd.doorbell_fd, &run.client) == 0);
    while (run.left > 0)
        step(&run);

    must(mok_queue_recover(&run.mokd, -MOK_EWORKER) == (int)run.held_count);
    must(mok_queue_recover(&run.mokd, -MOK_EWORKER) == 0);
    mok_queue_client_release(&run.client);
    mok_queue_worker_release(&run.worker);
    mok_queue_destroy(&run.mokd);
    return 0;
}
