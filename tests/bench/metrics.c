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

/* What a window saw. CPU in seconds. */
struct seen {
    double rate;      /* operations a second */
    double done, cpu; /* operations, and what mokd and its workers spent on them and on all else */
    double mokd;
    size_t bytes; /* of a scrape */
};

static double cpu_of_all(const struct stack *stack)
{
    pid_t workers[2];
    double sum = cpu_seconds(stack->mokd);

    for (size_t i = 0, n = stack_workers(stack, workers, 2); i < n; i++)
        sum += cpu_seconds(workers[i]);
    return sum;
}

/* One window with so many scrapes, evenly spread over it. */
static struct seen window(struct load *load, const struct stack *stack, unsigned scrapes)
{
    struct seen seen = { .bytes = 0 };
    double cpu = cpu_of_all(stack), mokd = cpu_seconds(stack->mokd), start_ms = bench_now_ms();
    uint64_t before = done_so_far(load);

    for (unsigned i = 0; i < scrapes; i++) {
        char *answer = http_get(door, "/metrics", "");
        seen.bytes = answer ? strlen(answer) : 0;
        free(answer);
        double left = WINDOW_MS / scrapes * (i + 1) - (bench_now_ms() - start_ms);
        if (left > 0)
            pause_ms(left);
    }
    double left = WINDOW_MS - (bench_now_ms() - start_ms);
    if (left > 0)
        pause_ms(left);
    seen.done = (double)(done_so_far(load) - before);
    seen.rate = seen.done / (bench_now_ms() - start_ms) * 1e3;
    seen.cpu = cpu_of_all(stack) - cpu;
    seen.mokd = cpu_seconds(stack->mokd) - mokd;
    return seen;
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

/* A median, and how far from it that of all such rounds may be. */
struct estimate {
    double median, error;
};

static struct estimate estimate(double *values, unsigned count)
{
    struct estimate e = { .median = bench_quantile(values, count, 0.5) };
    double spread = bench_quantile(values, count, 0.75) - bench_quantile(values, count, 0.25);

    /* Of a normal distribution: the quartiles are 1.349 sigma apart, the median's own sigma is 1.2533 / sqrt(n) of it.
     */
    e.error = spread / 1.349 * 1.2533 / sqrt(count);
    return e;
}

/*
 * Once a second is less than anything else that a machine does. So there are many more scrapes, in windows that take
 * turns with windows without, and what they cost is divided by their number: the error is, too. What counts is CPU, of
 * mokd and its workers, beyond what as many operations take without a scrape: whoever else is on the machine takes none
 * of that.
 */
static const unsigned rates[] = { 0, 20, 100 };
enum { RATES = sizeof(rates) / sizeof(rates[0]), DEVICES = 2 };

struct rounds {
    unsigned count;
    double *ms[RATES];        /* of CPU that a scrape cost, of each round */
    double *lost[RATES];      /* of throughput, in percent for one scrape a second */
    double mokd[RATES], rate; /* sums over the rounds */
    size_t bytes;
};

static void one_round(struct load *load, const struct stack *stack, unsigned number, struct rounds *rounds)
{
    struct seen seen[RATES];

    for (unsigned k = 0; k < RATES; k++) { /* which comes first takes turns, so that a drift falls on all */
        unsigned i = (number + k) % RATES;
        seen[i] = window(load, stack, (unsigned)(rates[i] * WINDOW_MS / 1e3));
        rounds->mokd[i] += seen[i].mokd;
    }
    for (unsigned i = 1; i < RATES; i++) {
        rounds->ms[i][number] = (seen[i].cpu - seen[0].cpu / seen[0].done * seen[i].done) / rates[i] * 1e3;
        rounds->lost[i][number] = 100 * (1 - seen[i].rate / seen[0].rate) / rates[i];
    }
    rounds->rate += seen[0].rate;
    rounds->bytes = seen[RATES - 1].bytes;
}

static void report(struct rounds *rounds)
{
    struct estimate cpu[RATES], lost[RATES];
    double seconds = rounds->count * WINDOW_MS * 1e-3, rate = rounds->rate / rounds->count, count = counting_ns();
    char extra[640];

    for (unsigned i = 1; i < RATES; i++) {
        cpu[i] = estimate(rounds->ms[i], rounds->count);
        lost[i] = estimate(rounds->lost[i], rounds->count);
    }
    double mokd_ms = (rounds->mokd[RATES - 1] - rounds->mokd[0]) / seconds / rates[RATES - 1] * 1e3;
    double percent = cpu[2].median * 1e-3 / DEVICES * 100, error = cpu[2].error * 1e-3 / DEVICES * 100;
    snprintf(extra, sizeof(extra),
             "\"rounds\":%u,\"scrape_bytes\":%zu,\"cost_percent\":%.4f,\"cost_error\":%.4f,\"scrape_ms\":%.4f,"
             "\"scrape_ms_error\":%.4f,\"few_scrape_ms\":%.4f,\"few_scrape_ms_error\":%.4f,\"mokd_ms\":%.4f,"
             "\"throughput_percent\":%.4f,\"throughput_error\":%.4f,\"scrapes_per_second\":[%u,%u],"
             "\"ops_per_second\":%.1f,\"counting_ns\":%.1f,\"counting_percent\":%.4f",
             rounds->count, rounds->bytes, percent, error, cpu[2].median, cpu[2].error, cpu[1].median, cpu[1].error,
             mokd_ms, lost[2].median, lost[2].error, rates[1], rates[2], rate, count,
             count * rate * 1e-9 / DEVICES * 100);
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
        printf("a scrape of %zu bytes costs %.3f +- %.3f ms of CPU, %.3f of them mokd's (from %u a second; from %u: "
               "%.3f +- "
               "%.3f): once a second %.4f +- %.4f %% of %u devices' cores; throughput %+.3f +- %.3f %%; counting %.0f "
               "ns an "
               "operation (%.4f %%)\n",
               rounds->bytes, cpu[2].median, cpu[2].error, mokd_ms, rates[2], rates[1], cpu[1].median, cpu[1].error,
               percent, error, DEVICES, -lost[2].median, lost[2].error, count, count * rate * 1e-9 / DEVICES * 100);
}

static int measure_scrapes(unsigned count)
{
    static struct load load;
    struct stack stack;
    struct rounds rounds = { .count = count };
    double *memory = calloc(count, 2 * RATES * sizeof(*memory));

    if (!memory || start(&stack, DEVICES) < 0) {
        free(memory);
        return -1;
    }
    for (unsigned i = 0; i < RATES; i++) {
        rounds.ms[i] = memory + 2 * i * count;
        rounds.lost[i] = memory + (2 * i + 1) * count;
    }
    int code = open_load(&load, &stack);
    if (code == 0) {
        window(&load, &stack, 0);
        for (unsigned i = 0; i < count; i++)
            one_round(&load, &stack, i, &rounds);
        close_load(&load);
        report(&rounds);
    }
    stack_stop(&stack);
    free(memory);
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
                                             { "rounds", required_argument, NULL, 'r' },
                                             { "idle-seconds", required_argument, NULL, 'i' },
                                             { "help", no_argument, NULL, 'h' },
                                             { 0 } };
    unsigned rounds = 60, idle = 20;
    int c;

    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (c == 'j')
            bench.json = true;
        else if (c == 'r')
            rounds = bench_number("rounds", optarg, 1, 10000);
        else if (c == 'i')
            idle = bench_number("idle-seconds", optarg, 1, 3600);
        else {
            fprintf(c == 'h' ? stdout : stderr, "Usage: mok-bench metrics [--rounds N] [--idle-seconds S] [--json]\n");
            return c == 'h' ? 0 : 2;
        }
    }
    return measure_idle(idle) == 0 && measure_scrapes(rounds) == 0 ? 0 : 1;
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
