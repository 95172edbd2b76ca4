/* SPDX-License-Identifier: Apache-2.0 */
#include "mps.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "device.h"
#include "mps_control.h"
#include "timer.h"

#define PROGRAM "nvidia-cuda-mps-control"
#define TICK_MS 200u
#define START_NS UINT64_C(20000000000) /* to answer for the first time */
#define ASK_EVERY_NS UINT64_C(3000000000)
#define ASK_NS UINT64_C(10000000000) /* for an answer, which may wait for a server that starts */
#define GOOD_LIFE_NS UINT64_C(10000000000)
#define PAUSE_FIRST_MS 250u
#define PAUSE_MAX_MS 8000u
#define MPS_STARTS 6u
#define QUIT_MS 2000u

enum gpu_state { GPU_DOWN, GPU_STARTING, GPU_UP };

struct gpu {
    struct mokd_mps *mps;
    uint32_t cuda;
    enum gpu_state state;
    char pipe[MOKD_PATH_MAX], log[MOKD_PATH_MAX + 8];
    char reason[MOKD_TEXT_MAX];
    uv_process_t control, question;
    bool has_control, asking; /* their handles are open */
    uv_timer_t tick;
    uint64_t started_ns, asked_ns, next_ns; /* next_ns: when it may start again */
    unsigned failures;                      /* in a row */
    bool was_up, hopeless;
};

struct mokd_mps {
    struct mokd_server *server;
    struct mokd_timer *quit;
    bool closing;
    unsigned open_handles;
    size_t count;
    struct gpu gpu[];
};

static void handle_closed(uv_handle_t *handle)
{
    struct gpu *gpu = handle->data;
    struct mokd_mps *mps = gpu->mps;

    mps->open_handles--;
    if (mps->closing && mps->open_handles == 0) {
        mokd_timer_cancel(&mps->quit);
        free(mps);
    }
}

/* ------------------------------------------------------------------ its devices */

static bool is_on(const struct mokd_device *device, const struct gpu *gpu)
{
    return device->config->kind == MOK_DEVICE_CUDA && device->config->cuda == gpu->cuda;
}

static void for_devices(struct gpu *gpu, void (*act)(struct mokd_device *device, const char *reason))
{
    struct mokd_server *server = gpu->mps->server;

    for (size_t i = 0; i < server->n_devices; i++)
        if (server->devices[i] && is_on(server->devices[i], gpu))
            act(server->devices[i], gpu->reason);
}

/* ------------------------------------------------------------------ processes */

static bool is_of(const char *entry, const char *name)
{
    return strncmp(entry, name, strlen(name)) == 0;
}

static bool is_replaced(const char *entry)
{
    return is_of(entry, "CUDA_") || is_of(entry, "NOTIFY_SOCKET=") || is_of(entry, "WATCHDOG_");
}

/* Ours, but for what makes it the control daemon of this GPU. The strings of ours are borrowed, the first four are not.
 */
#define OWN_ENTRIES 4
static char **environment_of(const struct gpu *gpu)
{
    size_t count = 0, kept = OWN_ENTRIES;

    while (environ[count])
        count++;
    char **list = calloc(count + OWN_ENTRIES + 1, sizeof(*list));
    bool made = list && asprintf(&list[0], "CUDA_VISIBLE_DEVICES=%u", gpu->cuda) >= 0 &&
                asprintf(&list[1], "CUDA_MPS_PIPE_DIRECTORY=%s", gpu->pipe) >= 0 &&
                asprintf(&list[2], "CUDA_MPS_LOG_DIRECTORY=%s", gpu->log) >= 0 &&
                asprintf(&list[3], "CUDA_DEVICE_ORDER=PCI_BUS_ID") >= 0;
    for (size_t i = 0; made && i < count; i++)
        if (!is_replaced(environ[i]))
            list[kept++] = environ[i];
    return made ? list : NULL;
}

static void environment_free(char **list)
{
    for (size_t i = 0; list && i < OWN_ENTRIES; i++)
        free(list[i]);
    free(list);
}

/* `input` -1: none. What it says goes to our log. */
static int spawn(struct gpu *gpu, uv_process_t *process, char **arguments, int input, uv_exit_cb exited)
{
    uv_stdio_container_t stdio[3] = {
        { .flags = input >= 0 ? UV_INHERIT_FD : UV_IGNORE, .data.fd = input },
        { .flags = UV_IGNORE },
        { .flags = UV_INHERIT_FD, .data.fd = STDERR_FILENO },
    };
    char **environment = environment_of(gpu);
    uv_process_options_t options = {
        .exit_cb = exited,
        .file = PROGRAM,
        .args = arguments,
        .flags = UV_PROCESS_DETACHED,
        .stdio_count = ARRAY_SIZE(stdio),
        .stdio = stdio,
        .env = environment,
    };

    if (!environment)
        return UV_ENOMEM;
    process->data = gpu;
    gpu->mps->open_handles++;
    int r = uv_spawn(&gpu->mps->server->loop, process, &options);
    environment_free(environment);
    if (r < 0)
        uv_close((uv_handle_t *)process, handle_closed);
    return r;
}

/* ------------------------------------------------------------------ down */

static void give_up(struct gpu *gpu)
{
    gpu->hopeless = true;
    for_devices(gpu, mokd_device_fail);
}

static void go_down(struct gpu *gpu)
{
    uint64_t now = mok_now_ns();
    bool good = gpu->state == GPU_UP && now - gpu->started_ns >= GOOD_LIFE_NS;
    uint64_t pause = PAUSE_FIRST_MS;

    gpu->state = GPU_DOWN;
    if (gpu->mps->closing || gpu->mps->server->workers_stopping)
        return;
    gpu->failures = good ? 0 : gpu->failures + 1;
    for (unsigned i = 1; i < gpu->failures && pause < PAUSE_MAX_MS; i++)
        pause *= 2;
    gpu->next_ns = now + pause * UINT64_C(1000000);
    gpu->mps->server->errors++;
    mok_log(MOK_LOG_ERROR, "mps", "control daemon down", "gpu=%u failures=%u pipe=%s error=\"%s\"", gpu->cuda,
            gpu->failures, gpu->pipe, gpu->reason);
    for_devices(gpu, mokd_device_end_worker);
    if (!gpu->was_up && gpu->failures >= MPS_STARTS)
        give_up(gpu);
}

static void control_exited(uv_process_t *process, int64_t status, int signal)
{
    struct gpu *gpu = process->data;

    gpu->has_control = false;
    uv_close((uv_handle_t *)process, handle_closed);
    if (gpu->state != GPU_DOWN) /* else whoever ended it has said why */
        snprintf(gpu->reason, sizeof(gpu->reason), "the MPS control daemon of GPU %u ended (%s %" PRId64 ")", gpu->cuda,
                 signal ? "signal" : "status", signal ? signal : status);
    go_down(gpu);
}

static void kill_control(struct gpu *gpu, const char *why)
{
    snprintf(gpu->reason, sizeof(gpu->reason), "the MPS control daemon of GPU %u %s", gpu->cuda, why);
    gpu->state = GPU_DOWN;
    if (gpu->has_control)
        uv_process_kill(&gpu->control, SIGKILL);
}

/* ------------------------------------------------------------------ up */

static int make_directories(struct gpu *gpu)
{
    char parent[MOKD_PATH_MAX];

    snprintf(parent, sizeof(parent), "%s", gpu->mps->server->config->mps_pipe);
    if ((mkdir(parent, 0755) < 0 && errno != EEXIST) || (mkdir(gpu->pipe, 0755) < 0 && errno != EEXIST) ||
        (mkdir(gpu->log, 0755) < 0 && errno != EEXIST)) {
        int error = errno;
        snprintf(gpu->reason, sizeof(gpu->reason), "%s cannot be made: %s", gpu->pipe, strerror(error));
        return -error;
    }
    /* For clients of all users, whatever our mask is. */
    return chmod(parent, 0755) < 0 || chmod(gpu->pipe, 0755) < 0 ? -errno : 0;
}

static void answered(uv_process_t *process, int64_t status, int signal)
{
    struct gpu *gpu = process->data;

    gpu->asking = false;
    uv_close((uv_handle_t *)process, handle_closed);
    if ((status != 0 || signal) && gpu->state == GPU_UP)
        kill_control(gpu, "no longer answers");
}

/* A word to the control daemon, by its own client. */
static void ask(struct gpu *gpu, const char *word)
{
    char *arguments[] = { (char *)PROGRAM, NULL };
    int ends[2];

    gpu->asked_ns = mok_now_ns();
    if (pipe2(ends, O_CLOEXEC) < 0)
        return;
    ssize_t n = write(ends[1], word, strlen(word));
    close(ends[1]);
    gpu->asking = n > 0 && spawn(gpu, &gpu->question, arguments, ends[0], answered) == 0;
    close(ends[0]);
}

/* Nobody answers there, and the directory is ours. */
static void clear_stale(const struct gpu *gpu)
{
    char path[MOKD_PATH_MAX + 16];

    snprintf(path, sizeof(path), "%s/control", gpu->pipe);
    if (unlink(path) < 0 && errno != ENOENT)
        mok_log(MOK_LOG_WARNING, "mps", "a killed control daemon's pipe stays", "path=%s error=\"%s\"", path,
                strerror(errno));
}

static void start_control(struct gpu *gpu)
{
    /* One control daemon serves several users only when it is root's. */
    char *arguments[] = { (char *)PROGRAM, (char *)"-f", geteuid() == 0 ? (char *)"-multiuser-server" : NULL, NULL };

    gpu->started_ns = mok_now_ns();
    if (make_directories(gpu) < 0) {
        go_down(gpu);
        return;
    }
    if (mok_mps_answers(gpu->pipe) == 0) {
        /* That of a mokd which was killed. */
        snprintf(gpu->reason, sizeof(gpu->reason), "another MPS control daemon is in %s still", gpu->pipe);
        if (!gpu->asking)
            ask(gpu, "quit\n");
        go_down(gpu);
        return;
    }
    clear_stale(gpu);
    int r = spawn(gpu, &gpu->control, arguments, -1, control_exited);
    if (r < 0) {
        snprintf(gpu->reason, sizeof(gpu->reason), PROGRAM " cannot be started: %s", uv_strerror(r));
        go_down(gpu);
        return;
    }
    gpu->has_control = true;
    gpu->state = GPU_STARTING;
    snprintf(gpu->reason, sizeof(gpu->reason), "the MPS control daemon of GPU %u is starting", gpu->cuda);
}

static void look_whether_up(struct gpu *gpu, uint64_t now)
{
    if (mok_mps_answers(gpu->pipe) != 0) {
        if (now - gpu->started_ns > START_NS)
            kill_control(gpu, "did not answer in time");
        return;
    }
    gpu->state = GPU_UP;
    gpu->was_up = true;
    gpu->asked_ns = now;
    gpu->reason[0] = '\0';
    mok_log(MOK_LOG_NOTICE, "mps", "control daemon up", "gpu=%u pid=%d pipe=%s", gpu->cuda, gpu->control.pid,
            gpu->pipe);
    for_devices(gpu, mokd_device_wake);
}

static void look_whether_still_up(struct gpu *gpu, uint64_t now)
{
    if (!gpu->asking && now - gpu->asked_ns >= ASK_EVERY_NS) {
        ask(gpu, "get_server_list\n");
    } else if (gpu->asking && now - gpu->asked_ns > ASK_NS) {
        uv_process_kill(&gpu->question, SIGKILL);
        kill_control(gpu, "no longer answers");
    }
}

static void tick(uv_timer_t *timer)
{
    struct gpu *gpu = timer->data;
    uint64_t now = mok_now_ns();

    if (gpu->mps->closing)
        return;
    switch (gpu->state) {
    case GPU_DOWN:
        if (!gpu->has_control && !gpu->hopeless && now >= gpu->next_ns)
            start_control(gpu);
        return;
    case GPU_STARTING:
        look_whether_up(gpu, now);
        return;
    case GPU_UP:
        look_whether_still_up(gpu, now);
    }
}

/* ------------------------------------------------------------------ the whole */

static struct gpu *find(struct mokd_mps *mps, uint32_t cuda)
{
    for (size_t i = 0; i < mps->count; i++)
        if (mps->gpu[i].cuda == cuda)
            return &mps->gpu[i];
    return NULL;
}

static void add_gpu(struct mokd_mps *mps, const struct mokd_device_config *device)
{
    struct gpu *gpu = &mps->gpu[mps->count++];

    gpu->mps = mps;
    gpu->cuda = device->cuda;
    memcpy(gpu->pipe, device->mps_pipe, sizeof(gpu->pipe));
    snprintf(gpu->log, sizeof(gpu->log), "%s/log", device->mps_pipe);
    snprintf(gpu->reason, sizeof(gpu->reason), "the MPS control daemon of GPU %u is starting", gpu->cuda);
    uv_timer_init(&mps->server->loop, &gpu->tick);
    gpu->tick.data = gpu;
    mps->open_handles++;
    uv_timer_start(&gpu->tick, tick, 0, TICK_MS);
}

int mokd_mps_start(struct mokd_server *server, struct mokd_mps **ret, struct mokd_error *error)
{
    const struct mokd_config *config = server->config;

    if (config->sharing != MOKD_SHARING_MPS || config->mps != MOKD_MPS_OWN)
        return 0;
    struct mokd_mps *mps = calloc(1, sizeof(*mps) + config->n_devices * sizeof(mps->gpu[0]));
    if (!mps)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    mps->server = server;
    for (size_t i = 0; i < config->n_devices; i++)
        if (config->devices[i].kind == MOK_DEVICE_CUDA && !find(mps, config->devices[i].cuda))
            add_gpu(mps, &config->devices[i]);
    if (mps->count == 0) {
        free(mps);
        return 0;
    }
    if (geteuid() != 0)
        mok_log(MOK_LOG_WARNING, "mps", "mps = own and mokd is not root: only clients of its own user can share a GPU",
                "uid=%u remedy=\"mps = site with mok-mps@.service\"", geteuid());
    *ret = mps;
    return 0;
}

bool mokd_mps_is_up(const struct mokd_mps *mps, uint32_t cuda, const char **ret_reason)
{
    const struct gpu *gpu = mps ? find((struct mokd_mps *)mps, cuda) : NULL;

    if (!gpu || gpu->state == GPU_UP)
        return true;
    *ret_reason = gpu->reason;
    return false;
}

static void quit_overdue(void *cookie)
{
    struct mokd_mps *mps = cookie;

    for (size_t i = 0; i < mps->count; i++) {
        if (mps->gpu[i].has_control)
            uv_process_kill(&mps->gpu[i].control, SIGKILL);
        if (mps->gpu[i].asking)
            uv_process_kill(&mps->gpu[i].question, SIGKILL);
    }
}

void mokd_mps_close(struct mokd_mps *mps)
{
    if (!mps)
        return;
    mps->closing = true;
    mps->quit = mokd_timer_start(&mps->server->loop, QUIT_MS, quit_overdue, mps);
    for (size_t i = 0; i < mps->count; i++) {
        if (mps->gpu[i].has_control)
            uv_process_kill(&mps->gpu[i].control, mps->quit ? SIGTERM : SIGKILL);
        uv_close((uv_handle_t *)&mps->gpu[i].tick, handle_closed);
    }
}
