/* SPDX-License-Identifier: Apache-2.0 */
#include "crowd.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stack.h"
#include "workload.h"

#define MAX_IN_FLIGHT 256u

static const struct workload tiny = {
    .hidden = 64, .intermediate = 64, .experts = 4, .topk = 2, .ep = 1, .max_tokens = 8, .seed = 5, .forward_only = true
};

struct member {
    const struct crowd *crowd;
    pthread_barrier_t *start;
    unsigned index;
    pthread_t thread;
    double *ms; /* [operations] */
    uint64_t done, failed;
    int first_code;
    bool ready;
};

static void wait_for_oldest(struct member *m, struct workload_rank *rank, mok_ticket ticket, double submitted_ms)
{
    mok_result result;
    int r = mok_wait(rank->session, ticket, -1, &result);

    m->ms[m->done + m->failed] = stack_now_ms() - submitted_ms;
    if (r == 0) {
        m->done++;
        return;
    }
    m->failed++;
    m->first_code = m->first_code ? m->first_code : r;
}

static void submit_all(struct member *m, struct workload_rank *rank)
{
    mok_ticket ticket[MAX_IN_FLIGHT];
    double submitted_ms[MAX_IN_FLIGHT];
    unsigned first = 0, next = 0;

    while (first < m->crowd->operations) {
        if (next < m->crowd->operations && next - first < m->crowd->in_flight) {
            submitted_ms[next % MAX_IN_FLIGHT] = stack_now_ms();
            int r = workload_forward(rank, &ticket[next % MAX_IN_FLIGHT]);
            if (r < 0) {
                m->failed += m->crowd->operations - m->done - m->failed;
                m->first_code = m->first_code ? m->first_code : r;
                return;
            }
            next++;
            continue;
        }
        wait_for_oldest(m, rank, ticket[first % MAX_IN_FLIGHT], submitted_ms[first % MAX_IN_FLIGHT]);
        first++;
    }
}

static void *run_member(void *argument)
{
    struct member *m = argument;
    struct workload_rank rank;
    char group[32];

    snprintf(group, sizeof(group), "crowd-%u", m->index);
    int r = workload_open(&rank, &tiny, 0, tiny.max_tokens, 0, m->crowd->socket, group, m->index % m->crowd->devices);
    if (r < 0)
        fprintf(stderr, "session %u: %s\n", m->index, mok_last_error());
    m->ready = r == 0;
    pthread_barrier_wait(m->start);
    if (r < 0)
        return NULL;
    submit_all(m, &rank);
    workload_close(&rank);
    return NULL;
}

static int compare_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int sum_up(const struct crowd *crowd, const struct member *members, double *ms, struct crowd_result *ret)
{
    size_t count = (size_t)crowd->sessions * crowd->operations;
    bool ready = true;

    for (unsigned i = 0; i < crowd->sessions; i++) {
        ready &= members[i].ready;
        ret->done += members[i].done;
        ret->failed += members[i].failed;
        ret->first_code = ret->first_code ? ret->first_code : members[i].first_code;
    }
    qsort(ms, count, sizeof(*ms), compare_double);
    ret->p50_ms = ms[count / 2];
    ret->p99_ms = ms[count * 99 / 100];
    return ready ? 0 : -1;
}

int crowd_run(const struct crowd *crowd, struct crowd_result *ret)
{
    struct member *members = calloc(crowd->sessions, sizeof(*members));
    double *ms = calloc((size_t)crowd->sessions * crowd->operations, sizeof(*ms));
    pthread_barrier_t start;
    int r = -1;

    *ret = (struct crowd_result){ 0 };
    if (members && ms && crowd->in_flight <= MAX_IN_FLIGHT) {
        pthread_barrier_init(&start, NULL, crowd->sessions + 1);
        for (unsigned i = 0; i < crowd->sessions; i++) {
            members[i] = (struct member){
                .crowd = crowd, .start = &start, .index = i, .ms = ms + (size_t)i * crowd->operations
            };
            if (pthread_create(&members[i].thread, NULL, run_member, &members[i]) != 0)
                abort();
        }
        pthread_barrier_wait(&start);
        double began = stack_now_ms();
        for (unsigned i = 0; i < crowd->sessions; i++)
            pthread_join(members[i].thread, NULL);
        ret->seconds = (stack_now_ms() - began) * 1e-3;
        r = sum_up(crowd, members, ms, ret);
        pthread_barrier_destroy(&start);
    }
    free(ms);
    free(members);
    return r;
}
