/* SPDX-License-Identifier: Apache-2.0 */
/* mok-bench queue: what one trip through the shared-memory queue costs, with the worker asleep and polling. */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "bench.h"
#include "mok/mok.h"
#include "stack.h"

struct trip {
    double p50_us, p99_us;
};

/* pause_us: idle time before each submission, so that a sleeping worker really sleeps. */
static int measure(const struct stack *stack, int rounds, long pause_us, bool spin, struct trip *ret)
{
    mok_session_options options = { .size = sizeof(options), .socket_path = stack->socket, .job = "bench-queue" };
    mok_session *session;
    double *us = calloc((size_t)rounds, sizeof(*us));
    int code = mok_session_open(&options, &session);
    if (!us || code < 0) {
        fprintf(stderr, "mok-bench: %s\n", us ? mok_last_error() : "out of memory");
        free(us);
        return -1;
    }
    struct timespec pause = { 0, pause_us * 1000 };
    for (int i = -50; i < rounds && code == 0; i++) {
        mok_ticket ticket;
        mok_result result;
        if (pause_us)
            nanosleep(&pause, NULL);
        double start = bench_now_ms();
        code = mok_nop(session, 0, &ticket);
        if (code == 0 && spin)
            while ((code = mok_poll(session, ticket, &result)) == 0)
                ;
        else if (code == 0)
            code = mok_wait(session, ticket, -1, &result);
        code = code > 0 ? 0 : code;
        if (i >= 0)
            us[i] = (bench_now_ms() - start) * 1e3;
    }
    if (code < 0)
        fprintf(stderr, "mok-bench: %s\n", mok_last_error());
    ret->p50_us = bench_quantile(us, (size_t)rounds, 0.5);
    ret->p99_us = bench_quantile(us, (size_t)rounds, 0.99);
    mok_session_close(session);
    free(us);
    return code;
}

static int run_case(const char *name, unsigned poll_us, long pause_us, bool spin, int rounds)
{
    struct stack stack;
    struct stack_options options = { .devices = 1, .poll_us = poll_us };
    struct trip trip;
    char extra[96];
    if (stack_start(&stack, &options) < 0)
        return -1;
    int code = measure(&stack, rounds, pause_us, spin, &trip);
    if (stack_stop(&stack) != 0)
        code = -1;
    if (code < 0)
        return code;
    snprintf(extra, sizeof(extra), "\"p50_us\":%.2f,\"p99_us\":%.2f", trip.p50_us, trip.p99_us);
    struct bench_record record = { .engine = "host", .op = "nop", .shape = name, .tokens = -1, .ms = trip.p50_us * 1e-3,
                                   .gflop = (double)NAN, .dense_tflops = (double)NAN, .peer_ms = (double)NAN, .extra = extra };
    bench_emit(&record);
    if (!bench.json)
        printf("%-34s %10.2f %10.2f\n", name, trip.p50_us, trip.p99_us);
    return 0;
}

int bench_queue(int argc, char **argv)
{
    static const struct option options[] = { { "json", no_argument, NULL, 'j' }, { "rounds", required_argument, NULL, 'n' },
                                             { "help", no_argument, NULL, 'h' }, { 0 } };
    int rounds = 5000, c;
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (c == 'j')
            bench.json = true;
        else if (c == 'n')
            rounds = atoi(optarg);
        else {
            fprintf(c == 'h' ? stdout : stderr, "Usage: mok-bench queue [--rounds N] [--json]\n");
            return c == 'h' ? 0 : 2;
        }
    }
    if (rounds < 100 || rounds > 10000000) {
        fprintf(stderr, "mok-bench: --rounds is %d, must be 100..10000000\n", rounds);
        return 2;
    }
    if (!bench.json)
        printf("no-op round trip, us                      p50        p99\n");
    int code = run_case("worker asleep, client sleeps", 0, 300, false, rounds / 5);
    if (code == 0)
        code = run_case("worker awake, client sleeps", 1000, 0, false, rounds);
    if (code == 0)
        code = run_case("worker polls, client polls", 1000000, 0, true, rounds);
    return code == 0 ? 0 : 1;
}
