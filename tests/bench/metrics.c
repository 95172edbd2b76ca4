/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mok-bench metrics: what being watched costs, and being idle. Throughput with and without scrapes alternates within
 * one run, so that what else the machine does falls on both. mok-bench crowd: many sessions with many operations in
 * flight.
 */
#include <dirent.h>
#include <getopt.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "crowd.h"
#include "http.h"
#include "mok/mok.h"
#include "stack.h"
#include "stats.h"
#include "workload.h"

#define SCRAPES_A_SECOND 1u
#define WINDOW_MS 1000.0

static const struct workload layer = { .hidden = 128,
                                       .intermediate = 256,
                                       .experts = 8,
                                       .topk = 2,
                                       .ep = 1,
                                       .max_tokens = 64,
                                       .seed = 9,
                                       .forward_only = true };

static char door[64];

static int start(struct stack *stack, unsigned devices)
{
    char extra[160];
    struct stack_options options = { .devices = devices, .extra = extra };

    snprintf(door, sizeof(door), "/tmp/mok-bench-door-%d", (int)getpid());
    snprintf(extra, sizeof(extra), "[metrics]\nlisten = unix:%s\n[limits]\nsessions = 1000", door);
    return stack_start(stack, &options);
}

static void pause_ms(double ms)
{
    struct timespec time = { (time_t)(ms / 1e3), (long)(fmod(ms, 1e3) * 1e6) };
    nanosleep(&time, NULL);
}

/* Time on a CPU of all threads of a process, in seconds. The scheduler counts nanoseconds, /proc/PID/stat only ticks.
 */
static double cpu_seconds(pid_t pid)
{
    char path[384];
    double sum = 0;

    snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
    DIR *tasks = opendir(path);
    for (struct dirent *task; tasks && (task = readdir(tasks));) {
        unsigned long long ns = 0;
        snprintf(path, sizeof(path), "/proc/%d/task/%s/schedstat", (int)pid, task->d_name);
        FILE *file = fopen(path, "re");
        if (file && fscanf(file, "%llu", &ns) == 1)
            sum += (double)ns * 1e-9;
        if (file)
            fclose(file);
    }
    if (tasks)
        closedir(tasks);
    return sum;
}

/* ---------------------------------------------------------------- scrapes beside a busy job */

struct load {
    struct workload_rank rank[2];
    pthread_t thread[2];
    uint64_t done[2];
    bool stop;
};

struct loader {
    struct load *load;
    int index;
};

static void *keep_busy(void *argument)
{
    struct loader loader = *(struct loader *)argument;
    struct workload_rank *rank = &loader.load->rank[loader.index];
    mok_ticket ticket[4];
    mok_result result;
    unsigned first = 0, next = 0;

    while (!__atomic_load_n(&loader.load->stop, __ATOMIC_RELAXED)) {
        while (next - first < 4 && workload_forward(rank, &ticket[next % 4]) == 0)
            next++;
        if (mok_wait(rank->session, ticket[first++ % 4], -1, &result) < 0)
            break;
        __atomic_fetch_add(&loader.load->done[loader.index], 1, __ATOMIC_RELAXED);
    }
    while (first < next && mok_wait(rank->session, ticket[first++ % 4], -1, &result) == 0)
        ;
    return NULL;
}

static uint64_t done_so_far(struct load *load)
{
    return __atomic_load_n(&load->done[0], __ATOMIC_RELAXED) + __atomic_load_n(&load->done[1], __ATOMIC_RELAXED);
}

/* Operations a second in one window; `scrapes` of them evenly spread over it. */
static double window(struct load *load, unsigned scrapes, size_t *ret_bytes)
{
    uint64_t before = done_so_far(load);
    double start_ms = bench_now_ms();

    for (unsigned i = 0; i < scrapes; i++) {
        char *answer = http_get(door, "/metrics", "");
        *ret_bytes = answer ? strlen(answer) : 0;
        free(answer);
        pause_ms(WINDOW_MS / scrapes - (bench_now_ms() - start_ms - WINDOW_MS / scrapes * i));
    }
    double left = WINDOW_MS - (bench_now_ms() - start_ms);
    if (left > 0)
        pause_ms(left);
    return (double)(done_so_far(load) - before) / (bench_now_ms() - start_ms) * 1e3;
}

static int open_load(struct load *load, const struct stack *stack)
{
    static struct loader loaders[2];

    for (int i = 0; i < 2; i++) {
        char group[32];
        snprintf(group, sizeof(group), "load-%d", i);
        if (workload_open(&load->rank[i], &layer, 0, layer.max_tokens, 0, stack->socket, group, (uint32_t)i) < 0) {
            fprintf(stderr, "mok-bench: %s\n", mok_last_error());
            return -1;
        }
    }
    for (int i = 0; i < 2; i++) {
        loaders[i] = (struct loader){ load, i };
        pthread_create(&load->thread[i], NULL, keep_busy, &loaders[i]);
    }
    return 0;
}

static void close_load(struct load *load)
{
    __atomic_store_n(&load->stop, true, __ATOMIC_RELAXED);
    for (int i = 0; i < 2; i++) {
        pthread_join(load->thread[i], NULL);
        workload_close(&load->rank[i]);
    }
}

/* What an operation's counting costs the dispatcher: as many additions and records as it makes. */
static double counting_ns(void)
{
    enum { ROUNDS = 200000, ADDITIONS = 40 };
    static struct mok_stats stats;
    double start_ms = bench_now_ms();

    for (int i = 0; i < ROUNDS; i++) {
        for (int k = 0; k < MOK_LATENCIES; k++)
            mok_stats_record(&stats.latency[0][k], (uint64_t)i * 977u);
        for (int k = 0; k < ADDITIONS; k++)
            mok_stats_add(&stats.layer[k & 3].expert_rows[k], 1);
    }
    return (bench_now_ms() - start_ms) * 1e6 / ROUNDS;
}

static int measure_scrapes(unsigned pairs)
{
    static struct load load;
    struct stack stack;
    size_t bytes = 0;
    double *ratio = calloc(pairs, sizeof(*ratio)), rate = 0;

    if (!ratio || start(&stack, 2) < 0)
        return -1;
    int code = open_load(&load, &stack);
    double cpu = 0;
    if (code == 0)
        window(&load, 0, &bytes);
    for (unsigned i = 0; code == 0 && i < pairs; i++) {
        /* which comes first takes turns, so that a drift falls on both */
        double rates[2] = { 0 };
        for (unsigned k = 0; k < 2; k++) {
            unsigned with = (i + k) % 2;
            double before = cpu_seconds(stack.mokd);
            rates[with] = window(&load, with ? SCRAPES_A_SECOND : 0, &bytes);
            cpu += with ? cpu_seconds(stack.mokd) - before : 0;
        }
        ratio[i] = rates[1] / rates[0];
        rate += rates[0] / pairs;
    }
    if (code == 0)
        close_load(&load);
    stack_stop(&stack);
    double cost = 100 * (1 - bench_quantile(ratio, pairs, 0.5)), low = 100 * (1 - bench_quantile(ratio, pairs, 0.75)),
           high = 100 * (1 - bench_quantile(ratio, pairs, 0.25));
    double count = counting_ns();
    char extra[320];
    snprintf(extra, sizeof(extra),
             "\"cost_percent\":%.3f,\"cost_quartiles\":[%.3f,%.3f],\"pairs\":%u,\"scrapes_per_second\":%u,\"scrape_"
             "bytes\":%zu,"
             "\"mokd_cpu_percent\":%.3f,\"ops_per_second\":%.1f,\"counting_ns\":%.1f,\"counting_percent\":%.4f",
             cost, low, high, pairs, SCRAPES_A_SECOND, bytes, 100 * cpu / (pairs * WINDOW_MS * 1e-3), rate, count,
             count * rate * 1e-9 / 2 * 100);
    struct bench_record record = { .engine = "host",
                                   .op = "scrape",
                                   .shape = "128x256x8x2",
                                   .tokens = 64,
                                   .ms = 2e3 / rate,
                                   .gflop = (double)NAN,
                                   .dense_tflops = (double)NAN,
                                   .peer_ms = (double)NAN,
                                   .extra = extra };
    bench_emit(&record);
    if (!bench.json)
        printf(
            "scraped once a second (%zu bytes): throughput %+.2f %% (quartiles %.2f .. %.2f), mokd %.2f %% of a core; "
            "counting %.0f ns an operation of %.0f us (%.3f %%)\n",
            bytes, -cost, -high, -low, 100 * cpu / (pairs * WINDOW_MS * 1e-3), count, 2e6 / rate,
            count * rate * 1e-9 / 2 * 100);
    free(ratio);
    return code;
}

/* ---------------------------------------------------------------- idle */

static int measure_idle(unsigned seconds)
{
    struct stack stack;
    pid_t workers[2];

    if (start(&stack, 2) < 0)
        return -1;
    pause_ms(500);
    stack_workers(&stack, workers, 2);
    double before = cpu_seconds(stack.mokd), worker_before = cpu_seconds(workers[0]), start_ms = bench_now_ms();
    pause_ms(seconds * 1e3);
    double elapsed = (bench_now_ms() - start_ms) * 1e-3;
    double mokd = 100 * (cpu_seconds(stack.mokd) - before) / elapsed;
    double worker = 100 * (cpu_seconds(workers[0]) - worker_before) / elapsed;
    double mokd_mb = (double)stack_resident_kb(stack.mokd) / 1024,
           worker_mb = (double)stack_resident_kb(workers[0]) / 1024;
    stack_stop(&stack);
    char extra[256];
    snprintf(
        extra, sizeof(extra),
        "\"mokd_cpu_percent\":%.3f,\"worker_cpu_percent\":%.3f,\"mokd_resident_mb\":%.1f,\"worker_resident_mb\":%.1f,"
        "\"seconds\":%u",
        mokd, worker, mokd_mb, worker_mb, seconds);
    struct bench_record record = { .engine = "host",
                                   .op = "idle",
                                   .tokens = -1,
                                   .ms = (double)NAN,
                                   .gflop = (double)NAN,
                                   .dense_tflops = (double)NAN,
                                   .peer_ms = (double)NAN,
                                   .extra = extra };
    bench_emit(&record);
    if (!bench.json)
        printf("idle for %u s: mokd %.3f %% of a core, %.1f MB resident; a worker %.3f %%, %.1f MB\n", seconds, mokd,
               mokd_mb, worker, worker_mb);
    return 0;
}

int bench_metrics(int argc, char **argv)
{
    static const struct option options[] = { { "json", no_argument, NULL, 'j' },
                                             { "pairs", required_argument, NULL, 'p' },
                                             { "idle-seconds", required_argument, NULL, 'i' },
                                             { "help", no_argument, NULL, 'h' },
                                             { 0 } };
    unsigned pairs = 30, idle = 20;
    int c;

    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (c == 'j')
            bench.json = true;
        else if (c == 'p')
            pairs = bench_number("pairs", optarg, 1, 10000);
        else if (c == 'i')
            idle = bench_number("idle-seconds", optarg, 1, 3600);
        else {
            fprintf(c == 'h' ? stdout : stderr, "Usage: mok-bench metrics [--pairs N] [--idle-seconds S] [--json]\n");
            return c == 'h' ? 0 : 2;
        }
    }
    return measure_idle(idle) == 0 && measure_scrapes(pairs) == 0 ? 0 : 1;
}

/* ---------------------------------------------------------------- a crowd */

/* The p99 that mokd itself tells of a stage, in ms, from its buckets. */
static double told_ms(const char *answer, const char *stage, double q)
{
    double all = 0;
    char name[160];

    snprintf(name, sizeof(name), "mok_op_latency_seconds_count{device=\"host0\",op=\"forward\",stage=\"%s\"}", stage);
    all = http_sample(answer, name);
    for (unsigned i = 0; i < MOK_STATS_BUCKETS - 1; i += 4) {
        double border = (double)mok_stats_bucket_end(i) * 1e-9;
        snprintf(name, sizeof(name),
                 "mok_op_latency_seconds_bucket{device=\"host0\",op=\"forward\",stage=\"%s\",le=\"%.9g\"}", stage,
                 border);
        if (http_sample(answer, name) >= q * all)
            return border * 1e3;
    }
    return (double)NAN;
}

int bench_crowd(int argc, char **argv)
{
    static const struct option options[] = {
        { "json", no_argument, NULL, 'j' },           { "sessions", required_argument, NULL, 's' },
        { "inflight", required_argument, NULL, 'i' }, { "operations", required_argument, NULL, 'o' },
        { "help", no_argument, NULL, 'h' },           { 0 }
    };
    struct crowd crowd = { .sessions = 64, .in_flight = 32, .operations = 500, .devices = 1 };
    struct crowd_result result = { 0 };
    struct stack stack;
    int c;

    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (c == 'j')
            bench.json = true;
        else if (c == 's')
            crowd.sessions = bench_number("sessions", optarg, 1, 900);
        else if (c == 'i')
            crowd.in_flight = bench_number("inflight", optarg, 1, 256);
        else if (c == 'o')
            crowd.operations = bench_number("operations", optarg, 1, 1000000);
        else {
            fprintf(c == 'h' ? stdout : stderr,
                    "Usage: mok-bench crowd [--sessions N] [--inflight M] [--operations K] [--json]\n");
            return c == 'h' ? 0 : 2;
        }
    }
    if (start(&stack, 1) < 0)
        return 1;
    crowd.socket = stack.socket;
    int code = crowd_run(&crowd, &result);
    char *answer = http_get(door, "/metrics", "");
    double queue_p50 = told_ms(answer, "queue", 0.5), queue_p99 = told_ms(answer, "queue", 0.99);
    free(answer);
    stack_stop(&stack);
    char extra[320], shape[64];
    snprintf(shape, sizeof(shape), "%u sessions x %u", crowd.sessions, crowd.in_flight);
    snprintf(extra, sizeof(extra),
             "\"sessions\":%u,\"inflight\":%u,\"done\":%llu,\"failed\":%llu,\"ops_per_second\":%.1f,\"p50_ms\":%.3f,"
             "\"p99_ms\":%.3f,\"queue_p50_below_ms\":%.3f,\"queue_p99_below_ms\":%.3f",
             crowd.sessions, crowd.in_flight, (unsigned long long)result.done, (unsigned long long)result.failed,
             (double)result.done / result.seconds, result.p50_ms, result.p99_ms, queue_p50, queue_p99);
    struct bench_record record = { .engine = "host",
                                   .op = "crowd",
                                   .shape = shape,
                                   .tokens = 8,
                                   .ms = result.p50_ms,
                                   .gflop = (double)NAN,
                                   .dense_tflops = (double)NAN,
                                   .peer_ms = (double)NAN,
                                   .extra = extra };
    bench_emit(&record);
    if (!bench.json)
        printf("%s in flight: %llu done, %llu failed, %.0f a second; from submission p50 %.2f ms, p99 %.2f ms; waits "
               "for the "
               "device: p50 below %.2f ms, p99 below %.2f ms\n",
               shape, (unsigned long long)result.done, (unsigned long long)result.failed,
               (double)result.done / result.seconds, result.p50_ms, result.p99_ms, queue_p50, queue_p99);
    return code == 0 && result.failed == 0 ? 0 : 1;
}
