/* SPDX-License-Identifier: Apache-2.0 */
#include "stack.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "mok/mok.h"

#ifndef MOK_TEST_BUILD_DIR
#define MOK_TEST_BUILD_DIR "."
#endif

enum { START_MS = 20000, STOP_MS = 10000 };

double stack_now_ms(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec * 1e3 + (double)ts.tv_nsec * 1e-6;
}

static void sleep_ms(long ms)
{
    struct timespec ts = { ms / 1000, ms % 1000 * 1000000 };
    nanosleep(&ts, NULL);
}

const char *stack_program(const char *relative)
{
    static char path[512];
    const char *build = getenv("MOK_BUILD_DIR");
    snprintf(path, sizeof(path), "%s/%s", build ? build : MOK_TEST_BUILD_DIR, relative);
    return path;
}

static int write_config(const struct stack *stack, const struct stack_options *options)
{
    FILE *file = fopen(stack->config, "we");
    if (!file)
        return -1;
    fprintf(file, "[daemon]\nsocket = %s\npoll_us = %u\n", stack->socket, options->poll_us);
    if (options->daemon)
        fprintf(file, "%s\n", options->daemon);
    for (unsigned i = 0; i < options->gpus; i++) {
        fprintf(file, "[device gpu%u]\nkind = cuda\ncuda = %u\nmemory = %uG\n", i,
                options->gpu_first + (options->gpu_spread ? i % options->gpu_spread : 0),
                options->gpu_gib ? options->gpu_gib : 16);
        if (options->gpu_blocks)
            fprintf(file, "threads = %u\n", options->gpu_blocks);
        fprintf(file, "yield_us = %u\nreserve_sms = %u\n", options->gpu_yield_us, options->gpu_reserve);
    }
    for (unsigned i = 0; i < options->devices; i++) {
        fprintf(file, "[device host%u]\nkind = host\nthreads = %u\nmemory = 8G\n", i, options->threads);
        if (options->chaos_delay_us)
            fprintf(file, "chaos_delay_us = %u\n", options->chaos_delay_us);
    }
    if (options->extra)
        fprintf(file, "%s\n", options->extra);
    return fclose(file);
}

/* Whether every device of the daemon is up. */
static int devices_up(const struct stack *stack, unsigned expected)
{
    mok_session_options options = { .size = sizeof(options), .socket_path = stack->socket, .job = "probe",
                                    .timeout_ms = 2000 };
    mok_session *session = NULL;
    mok_device_info info[64];
    if (mok_session_open(&options, &session) < 0)
        return 0;
    int n = mok_device_list(session, info, 64);
    unsigned up = 0;
    for (int i = 0; i < n; i++)
        up += info[i].up != 0;
    mok_session_close(session);
    return n > 0 && up == expected;
}

static pid_t spawn_mokd(const struct stack *stack)
{
    const char *program = stack_program("daemon/mokd/mokd");
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    int log = open(stack->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log >= 0) {
        dup2(log, STDOUT_FILENO);
        dup2(log, STDERR_FILENO);
    }
    if (stack->store)
        fdstore_hand_over(stack->store);
    execl(program, "mokd", "--config", stack->config, (char *)NULL);
    fprintf(stderr, "cannot run %s: %s\n", program, strerror(errno));
    _exit(127);
}

int stack_end(struct stack *stack, int number)
{
    pid_t mokd = stack->mokd;
    int status = 0;

    stack->mokd = 0;
    if (kill(mokd, number) < 0 || waitpid(mokd, &status, 0) != mokd)
        return -1;
    /* One that has hardly begun is ended by the signal itself. */
    if (number == SIGTERM && status != 0 && !(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM))
        return -1;
    if (stack->store)
        fdstore_settle(stack->store);
    return 0;
}

int stack_begin(struct stack *stack)
{
    stack->mokd = spawn_mokd(stack);
    return stack->mokd < 0 ? -1 : 0;
}

int stack_restart(struct stack *stack, int number)
{
    return stack_end(stack, number) < 0 ? -1 : stack_begin(stack);
}

int stack_await(const struct stack *stack)
{
    for (int waited = 0; waited < START_MS; waited += 20) {
        if (devices_up(stack, stack->devices))
            return 0;
        sleep_ms(20);
    }
    return -1;
}

static int store_open(struct stack *stack, unsigned bound)
{
    char path[96];

    if (bound == 0)
        return 0;
    stack->store = calloc(1, sizeof(*stack->store));
    snprintf(path, sizeof(path), "%s/notify", stack->dir);
    return stack->store ? fdstore_open(stack->store, path, bound) : -1;
}

static void store_close(struct stack *stack)
{
    if (stack->store)
        fdstore_close(stack->store);
    free(stack->store);
    stack->store = NULL;
}

void stack_print_log(const struct stack *stack)
{
    FILE *file = fopen(stack->log, "re");
    char line[1024];
    while (file && fgets(line, sizeof(line), file))
        fprintf(stderr, "  mokd| %s", line);
    if (file)
        fclose(file);
}

static void remove_dir(const struct stack *stack)
{
    char path[400];
    DIR *dir = opendir(stack->dir);
    struct dirent *entry;
    while (dir && (entry = readdir(dir))) {
        snprintf(path, sizeof(path), "%s/%s", stack->dir, entry->d_name);
        unlink(path);
    }
    if (dir)
        closedir(dir);
    rmdir(stack->dir);
}

int stack_start(struct stack *stack, const struct stack_options *options)
{
    struct stack_options o = options ? *options : (struct stack_options){ 0 };
    o.devices = o.devices || o.gpus ? o.devices : 2;
    o.threads = o.threads ? o.threads : 1;
    *stack = (struct stack){ .dir = "/tmp/mok-stack-XXXXXX" };
    if (!mkdtemp(stack->dir)) {
        perror("mkdtemp");
        return -1;
    }
    snprintf(stack->socket, sizeof(stack->socket), "%s/s", stack->dir);
    snprintf(stack->config, sizeof(stack->config), "%s/mokd.conf", stack->dir);
    snprintf(stack->log, sizeof(stack->log), "%s/log", stack->dir);
    if (store_open(stack, o.store) < 0 || write_config(stack, &o) < 0) {
        perror(stack->config);
        return -1;
    }
    stack->devices = o.devices + o.gpus;
    stack->mokd = spawn_mokd(stack);
    for (int waited = 0; waited < START_MS; waited += 20) {
        if (devices_up(stack, stack->devices))
            return 0;
        if (waitpid(stack->mokd, NULL, WNOHANG) == stack->mokd) {
            stack->mokd = 0;
            break;
        }
        sleep_ms(20);
    }
    fprintf(stderr, "mokd did not come up: %s\n", mok_last_error());
    stack_print_log(stack);
    stack_stop(stack);
    return -1;
}

int stack_stop(struct stack *stack)
{
    int code = 0, status;
    if (stack->mokd > 0) {
        kill(stack->mokd, SIGTERM);
        code = -1;
        for (int waited = 0; waited < STOP_MS; waited += 10) {
            if (waitpid(stack->mokd, &status, WNOHANG) == stack->mokd) {
                code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
                stack->mokd = 0;
                break;
            }
            sleep_ms(10);
        }
        if (stack->mokd > 0) {
            kill(stack->mokd, SIGKILL);
            waitpid(stack->mokd, NULL, 0);
            stack->mokd = 0;
        }
    }
    store_close(stack);
    if (getenv("MOK_TEST_KEEP"))
        fprintf(stderr, "kept: %s\n", stack->dir);
    else
        remove_dir(stack);
    return code;
}

static pid_t parent_of(pid_t pid)
{
    char path[64], line[512];
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return -1;
    size_t n = fread(line, 1, sizeof(line) - 1, file);
    fclose(file);
    line[n] = 0;
    int parent = -1;
    char *end = strrchr(line, ')');
    if (!end || sscanf(end + 1, " %*c %d", &parent) != 1)
        return -1;
    return parent;
}

static size_t children_of(pid_t parent, pid_t *ret, size_t capacity)
{
    size_t count = 0;
    DIR *proc = opendir("/proc");
    struct dirent *entry;
    while (proc && (entry = readdir(proc))) {
        pid_t pid = (pid_t)atoi(entry->d_name);
        if (pid <= 0 || parent_of(pid) != parent)
            continue;
        if (count < capacity)
            ret[count] = pid;
        count++;
    }
    if (proc)
        closedir(proc);
    return count;
}

static int compare_pid(const void *a, const void *b)
{
    return *(const pid_t *)a - *(const pid_t *)b;
}

size_t stack_workers(const struct stack *stack, pid_t *ret, size_t capacity)
{
    size_t n = children_of(stack->mokd, ret, capacity);
    qsort(ret, n < capacity ? n : capacity, sizeof(*ret), compare_pid);
    return n;
}

size_t stack_children(pid_t pid)
{
    return children_of(pid, NULL, 0);
}

int stack_descriptors(pid_t pid)
{
    char path[64];
    int n = 0;
    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    if (!dir)
        return -1;
    while (readdir(dir))
        n++;
    closedir(dir);
    return n - 2;
}

long stack_resident_kb(pid_t pid)
{
    char path[64];
    long size, resident = -1;
    snprintf(path, sizeof(path), "/proc/%d/statm", (int)pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return -1;
    if (fscanf(file, "%ld %ld", &size, &resident) != 2)
        resident = -1;
    fclose(file);
    return resident < 0 ? -1 : resident * (sysconf(_SC_PAGESIZE) / 1024);
}
