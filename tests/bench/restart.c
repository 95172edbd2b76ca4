/* SPDX-License-Identifier: Apache-2.0 */
/* mok-bench restart: from the end of mokd to the next finished operation of a job of two ranks that was running. */
#include <getopt.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "mok/mok.h"
#include "stack.h"
#include "workload.h"

enum { STORE = 4096, RECOVER_MS = 60000 };

/* How mokd ends. */
enum kind { STOPPED, KILLED, KILLED_WITH_WORKERS, KINDS };
static const char *const kind_names[KINDS] = { "SIGTERM", "SIGKILL", "SIGKILL, workers too" };

struct times {
    double recovered_ms, operation_ms;
};

static int forward(struct workload_rank *r)
{
    mok_ticket ticket;
    mok_result result = { 0 };
    int code = workload_forward(r, &ticket);

    if (code == 0)
        code = mok_wait(r->session, ticket, -1, &result);
    return code < 0 ? code : result.code;
}

/* The other rank: always one operation ahead. */
static int accompany(const struct workload *problem, const char *socket)
{
    struct workload_rank r;
    int code = workload_open(&r, problem, 1, problem->max_tokens, problem->max_tokens, socket, "bench-restart", 1);

    while (code == 0) {
        code = forward(&r);
        if (code == -MOK_EDAEMON)
            code = mok_session_recover(r.session, RECOVER_MS);
    }
    return 1;
}

static int end_mokd(struct stack *stack, enum kind kind)
{
    pid_t worker[8];
    size_t count = stack_workers(stack, worker, 8);

    if (stack_end(stack, kind == STOPPED ? SIGTERM : SIGKILL) < 0)
        return -1;
    for (size_t i = 0; kind == KILLED_WITH_WORKERS && i < count; i++)
        kill(worker[i], SIGKILL);
    return 0;
}

/* An operation is in flight when mokd ends. */
static int one_round(struct stack *stack, struct workload_rank *r, enum kind kind, unsigned delay_ms, struct times *ret)
{
    mok_ticket ticket;
    mok_result result = { 0 };
    int code = workload_forward(r, &ticket);

    if (code < 0)
        return code;
    double start = bench_now_ms();
    if (end_mokd(stack, kind) < 0)
        return -1;
    usleep(delay_ms * 1000);
    if (stack_begin(stack) < 0)
        return -1;
    mok_wait(r->session, ticket, -1, &result);
    code = mok_session_recover(r->session, RECOVER_MS);
    ret->recovered_ms = bench_now_ms() - start;
    for (; code == 0 || code == -MOK_EDAEMON; code = mok_session_recover(r->session, RECOVER_MS)) {
        code = forward(r);
        if (code == 0)
            break;
    }
    ret->operation_ms = bench_now_ms() - start;
    return code;
}

static int measure(struct stack *stack, const struct workload *problem, enum kind kind, int rounds, unsigned delay_ms,
                   struct times *times)
{
    struct workload_rank r;
    int code = workload_open(&r, problem, 0, problem->max_tokens, 0, stack->socket, "bench-restart", 0);

    for (int i = -1; i < rounds && code == 0; i++) {
        struct times one = { 0 };
        code = forward(&r);
        if (code == 0)
            code = one_round(stack, &r, kind, delay_ms, &one);
        if (i >= 0)
            times[i] = one;
    }
    if (code < 0)
        fprintf(stderr, "mok-bench: %s: %s\n", mok_error_name(code), mok_last_error());
    workload_close(&r);
    return code;
}

static void report(const char *shape, const struct workload *problem, enum kind kind, int rounds, struct times *times)
{
    double recovered[1000], operation[1000];
    char extra[256];

    for (int i = 0; i < rounds; i++) {
        recovered[i] = times[i].recovered_ms;
        operation[i] = times[i].operation_ms;
    }
    double p50 = bench_quantile(operation, (size_t)rounds, 0.5), worst = operation[rounds - 1];
    double recovered_p50 = bench_quantile(recovered, (size_t)rounds, 0.5);
    snprintf(extra, sizeof(extra), "\"end\":\"%s\",\"rounds\":%d,\"recovered_ms\":%.2f,\"max_ms\":%.2f", kind_names[kind],
             rounds, recovered_p50, worst);
    struct bench_record record = { .engine = "host", .op = "forward", .precision = "bf16", .shape = shape, .ep = 2,
                                   .tokens = problem->max_tokens, .routing = "uniform", .ms = p50,
                                   .gflop = (double)NAN, .dense_tflops = (double)NAN, .peer_ms = (double)NAN,
                                   .extra = extra };
    bench_emit(&record);
    if (!bench.json)
        printf("%-22s %-14s %12.1f %12.1f %12.1f\n", kind_names[kind], shape, recovered_p50, p50, worst);
}

static int run_case(const char *shape, const struct workload *problem, enum kind kind, int rounds, unsigned delay_ms)
{
    struct stack stack;
    struct times times[1000];

    if (stack_start(&stack, &(struct stack_options){ .store = STORE }) < 0)
        return -1;
    fflush(NULL);
    pid_t peer = fork();
    if (peer == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        _exit(accompany(problem, stack.socket));
    }
    int code = peer < 0 ? -1 : measure(&stack, problem, kind, rounds, delay_ms, times);
    if (peer > 0) {
        kill(peer, SIGKILL);
        waitpid(peer, NULL, 0);
    }
    if (stack_stop(&stack) != 0)
        code = -1;
    if (code == 0)
        report(shape, problem, kind, rounds, times);
    return code;
}

int bench_restart(int argc, char **argv)
{
    static const struct option options[] = { { "json", no_argument, NULL, 'j' },
                                             { "rounds", required_argument, NULL, 'n' },
                                             { "delay-ms", required_argument, NULL, 'd' },
                                             { "help", no_argument, NULL, 'h' },
                                             { 0 } };
    static const struct workload problems[] = {
        { .hidden = 256, .intermediate = 512, .experts = 16, .topk = 2, .ep = 2, .max_tokens = 64, .seed = 1,
          .context_mode = MOK_CONTEXT_FULL },
        { .hidden = 1024, .intermediate = 2048, .experts = 16, .topk = 2, .ep = 2, .max_tokens = 256, .seed = 1,
          .context_mode = MOK_CONTEXT_FULL },
    };
    static const char *const shapes[] = { "h256-i512", "h1024-i2048" };
    uint32_t rounds = 20, delay = 100;
    int c, code = 0;

    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (c == 'j')
            bench.json = true;
        else if (c == 'n')
            rounds = bench_number("--rounds", optarg, 1, 1000);
        else if (c == 'd')
            delay = bench_number("--delay-ms", optarg, 0, 60000);
        else {
            fprintf(c == 'h' ? stdout : stderr,
                    "Usage: mok-bench restart [--rounds N] [--delay-ms MS] [--json]\n"
                    "Milliseconds from the end of mokd to the next finished forward of a job of two ranks. --delay-ms:\n"
                    "what the service manager waits before it starts the next mokd (100, as in our unit).\n");
            return c == 'h' ? 0 : 2;
        }
    }
    if (!bench.json)
        printf("end of mokd            shape             recovered   next op p50          max\n");
    for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]) && code == 0; s++)
        for (enum kind kind = STOPPED; kind < KINDS && code == 0; kind++)
            code = run_case(shapes[s], &problems[s], kind, (int)rounds, delay);
    return code == 0 ? 0 : 1;
}
