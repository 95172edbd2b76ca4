/* SPDX-License-Identifier: Apache-2.0 */
#include "fixture.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "util.h"

#define PATIENCE_MS 5000

static const char two_devices[] = "[device host0]\nmemory = 64M\n[device host1]\nmemory = 64M\n";

void sleep_ms(unsigned ms)
{
    struct timespec time = { .tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000 };
    nanosleep(&time, NULL);
}

static const char *build_dir(void)
{
    const char *dir = getenv("MOK_BUILD_DIR");
    return dir ? dir : MOK_TEST_BUILD_DIR;
}

/* ------------------------------------------------------------------ the daemon */

static void write_config(const struct daemon *daemon, const char *config)
{
    FILE *file = fopen(daemon->config, "we");
    assert_non_null(file);
    fprintf(file, "[daemon]\nsocket = %s\nlog_level = debug\nworker = %s/tests/unit/daemon/fake-worker\n%s\n",
            daemon->socket, build_dir(), config);
    assert_int_equal(fclose(file), 0);
}

static pid_t spawn(const struct daemon *daemon, const char *option, unsigned descriptors)
{
    char program[512];
    const char *other = getenv("MOK_TEST_MOKD");
    snprintf(program, sizeof(program), "%s/%s", build_dir(), other ? other : "daemon/mokd/mokd");
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int log = open(daemon->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    struct rlimit limit = { descriptors, descriptors };
    if (descriptors)
        setrlimit(RLIMIT_NOFILE, &limit);
    if (daemon->store)
        fdstore_hand_over(daemon->store);
    execl(program, "mokd", "--config", daemon->config, option, (char *)NULL);
    _exit(127);
}

static int wait_for(pid_t pid)
{
    int status;

    for (int waited = 0; waited < 2 * PATIENCE_MS; waited += 5) {
        if (waitpid(pid, &status, WNOHANG) == pid)
            return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
        sleep_ms(5);
    }
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    return -1;
}

static bool try_connect(const char *path, int *ret_fd)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

    assert_true(fd >= 0);
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    if (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
        close(fd);
        return false;
    }
    *ret_fd = fd;
    return true;
}

void daemon_await_listening(const struct daemon *daemon)
{
    int fd = -1;

    for (int waited = 0; waited < PATIENCE_MS && !try_connect(daemon->socket, &fd); waited += 5)
        sleep_ms(5);
    assert_true(fd >= 0);
    close(fd);
}

static void make_place(struct daemon *daemon, const char *config)
{
    memset(daemon, 0, sizeof(*daemon));
    snprintf(daemon->dir, sizeof(daemon->dir), "/tmp/mokd-test-XXXXXX");
    assert_non_null(mkdtemp(daemon->dir));
    assert_int_equal(chmod(daemon->dir, 0755), 0); /* other users may connect */
    snprintf(daemon->config, sizeof(daemon->config), "%s/conf", daemon->dir);
    snprintf(daemon->socket, sizeof(daemon->socket), "%s/socket", daemon->dir);
    snprintf(daemon->log, sizeof(daemon->log), "%s/log", daemon->dir);
    write_config(daemon, config ? config : two_devices);
}

void daemon_start(struct daemon *daemon, const char *config, unsigned descriptors)
{
    make_place(daemon, config);
    daemon->pid = spawn(daemon, NULL, descriptors);
    daemon_await_listening(daemon);
}

void daemon_start_kept(struct daemon *daemon, const char *config, unsigned bound)
{
    char path[96];

    make_place(daemon, config);
    snprintf(path, sizeof(path), "%s/notify", daemon->dir);
    daemon->store = calloc(1, sizeof(*daemon->store));
    assert_non_null(daemon->store);
    assert_int_equal(fdstore_open(daemon->store, path, bound), 0);
    daemon_begin(daemon);
}

void daemon_end(struct daemon *daemon, int number)
{
    assert_int_equal(kill(daemon->pid, number), 0);
    assert_int_equal(waitpid(daemon->pid, NULL, 0), daemon->pid);
    if (daemon->store)
        fdstore_settle(daemon->store);
}

void daemon_begin(struct daemon *daemon)
{
    daemon->pid = spawn(daemon, NULL, 0);
    daemon_await_listening(daemon);
}

void daemon_configure(const struct daemon *daemon, const char *config)
{
    write_config(daemon, config);
}

void daemon_reload(struct daemon *daemon, const char *config)
{
    write_config(daemon, config);
    assert_int_equal(kill(daemon->pid, SIGHUP), 0);
}

static void print_log(const struct daemon *daemon)
{
    char line[1024];
    FILE *file = fopen(daemon->log, "re");

    while (file && fgets(line, sizeof(line), file))
        fprintf(stderr, "  mokd| %s", line);
    if (file)
        fclose(file);
}

int daemon_stop(struct daemon *daemon)
{
    kill(daemon->pid, SIGTERM);
    int code = wait_for(daemon->pid);

    if (code != 0)
        print_log(daemon);
    if (daemon->store)
        fdstore_close(daemon->store);
    free(daemon->store);
    daemon->store = NULL;
    unlink(daemon->config);
    unlink(daemon->log);
    if (rmdir(daemon->dir) < 0) /* socket or lock left behind */
        fail_msg("%s is not empty: %s", daemon->dir, strerror(errno));
    return code;
}

int daemon_run_again(const struct daemon *daemon, const char *option)
{
    return wait_for(spawn(daemon, option, 0));
}

unsigned daemon_descriptors(const struct daemon *daemon)
{
    char path[64];
    unsigned count = 0;

    snprintf(path, sizeof(path), "/proc/%d/fd", daemon->pid);
    DIR *dir = opendir(path);
    assert_non_null(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

bool daemon_descriptors_settle(const struct daemon *daemon, unsigned bound)
{
    for (int tries = 0; tries < 1000; tries++) {
        if (daemon_descriptors(daemon) <= bound)
            return true;
        usleep(5000);
    }
    return false;
}

unsigned long daemon_resident_kb(const struct daemon *daemon)
{
    char path[64];
    unsigned long size, resident;

    snprintf(path, sizeof(path), "/proc/%d/statm", daemon->pid);
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%lu %lu", &size, &resident), 2);
    fclose(file);
    return resident * ((unsigned long)sysconf(_SC_PAGESIZE) / 1024);
}

int daemon_setup(void **state)
{
    struct daemon *daemon = calloc(1, sizeof(*daemon));

    assert_non_null(daemon);
    daemon_start(daemon, NULL, 0);
    *state = daemon;
    return 0;
}

int daemon_teardown(void **state)
{
    int code = daemon_stop(*state);
    free(*state);
    return code;
}

/* ------------------------------------------------------------------ clients */

void answer_free(struct answer *answer)
{
    if (answer->reply)
        mok_wire_free(&answer->reply->base);
    answer->reply = NULL;
    mok_wire_fds_close(&answer->fds);
}

void client_connect(struct client *client, const struct daemon *daemon)
{
    *client = (struct client){ .fd = -1 };
    assert_true(try_connect(daemon->socket, &client->fd));
}

void client_close(struct client *client)
{
    client->fd = mok_close(client->fd);
}

uint64_t client_send(struct client *client, Mok__Request *request)
{
    request->id = ++client->last_id;
    assert_int_equal(mok_wire_send(client->fd, &request->base, NULL, 0), 0);
    return request->id;
}

struct answer client_receive(struct client *client)
{
    struct answer answer = { .fds = MOK_WIRE_FDS_INIT };
    struct pollfd wait = { .fd = client->fd, .events = POLLIN };
    ProtobufCMessage *message = NULL;

    assert_int_equal(poll(&wait, 1, PATIENCE_MS), 1);
    int r = mok_wire_recv(client->fd, &mok__reply__descriptor, &message, &answer.fds);
    assert_true(r >= 0);
    answer.reply = (Mok__Reply *)message;
    return answer;
}

struct answer client_ask(struct client *client, Mok__Request *request)
{
    uint64_t id = client_send(client, request);

    for (;;) {
        struct answer answer = client_receive(client);
        assert_non_null(answer.reply);
        if (answer.reply->id == id)
            return answer;
        assert_int_equal(answer.reply->id, 0);
        answer_free(&answer);
    }
}

int client_expect_end(struct client *client)
{
    int code = 0;

    for (;;) {
        _cleanup_answer_ struct answer answer = client_receive(client);
        if (!answer.reply)
            return code;
        if (answer.reply->id == 0)
            code = answer.reply->code;
    }
}

Mok__Request ask_hello(Mok__Hello *hello)
{
    Mok__Request request = MOK__REQUEST__INIT;

    *hello = (Mok__Hello)MOK__HELLO__INIT;
    hello->protocol_min = hello->protocol_max = 1;
    hello->job = (char *)"test";
    request.body_case = MOK__REQUEST__BODY_HELLO;
    request.hello = hello;
    return request;
}

static void greet(struct client *client, const struct daemon *daemon, bool observer)
{
    Mok__Hello hello;
    Mok__Request request = ask_hello(&hello);

    hello.observer = observer;
    client_connect(client, daemon);
    _cleanup_answer_ struct answer answer = client_ask(client, &request);
    assert_int_equal(answer.reply->code, 0);
    assert_int_equal(answer.reply->body_case, MOK__REPLY__BODY_HELLO);
    client->session = answer.reply->hello->session;
}

void client_open(struct client *client, const struct daemon *daemon)
{
    greet(client, daemon, false);
}

void client_observe(struct client *client, const struct daemon *daemon)
{
    greet(client, daemon, true);
    assert_int_equal(client->session, 0);
}

Mok__Request ask_join(Mok__GroupJoin *join, const char *name, uint32_t size, uint32_t rank, uint32_t device)
{
    Mok__Request request = MOK__REQUEST__INIT;

    *join = (Mok__GroupJoin)MOK__GROUP_JOIN__INIT;
    join->name = (char *)name;
    join->size = size;
    join->rank = rank;
    join->device = device;
    request.body_case = MOK__REQUEST__BODY_GROUP_JOIN;
    request.group_join = join;
    return request;
}

Mok__Request ask_alloc(Mok__BufferAlloc *alloc, uint32_t group, uint32_t device, uint64_t bytes)
{
    Mok__Request request = MOK__REQUEST__INIT;

    *alloc = (Mok__BufferAlloc)MOK__BUFFER_ALLOC__INIT;
    alloc->group = group;
    alloc->device = device;
    alloc->bytes = bytes;
    request.body_case = MOK__REQUEST__BODY_BUFFER_ALLOC;
    request.buffer_alloc = alloc;
    return request;
}

uint32_t client_join(struct client *clients, uint32_t size, const char *name)
{
    uint32_t group = 0;

    for (uint32_t rank = 0; rank < size; rank++) {
        Mok__GroupJoin join;
        Mok__Request request = ask_join(&join, name, size, rank, rank);
        client_send(&clients[rank], &request);
    }
    for (uint32_t rank = 0; rank < size; rank++) {
        _cleanup_answer_ struct answer answer = client_receive(&clients[rank]);
        assert_non_null(answer.reply);
        assert_int_equal(answer.reply->code, 0);
        group = answer.reply->group_join->group;
    }
    return group;
}

uint32_t client_queue(struct client *client, uint32_t device)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__QueueOpen open = MOK__QUEUE_OPEN__INIT;

    open.device = device;
    open.entries = 16;
    request.body_case = MOK__REQUEST__BODY_QUEUE_OPEN;
    request.queue_open = &open;
    _cleanup_answer_ struct answer answer = client_ask(client, &request);
    assert_int_equal(answer.reply->code, 0);
    assert_int_equal(answer.fds.count, 3);
    return answer.reply->queue_open->queue;
}

uint32_t client_buffer(struct client *client, uint32_t device, uint64_t bytes)
{
    Mok__BufferAlloc alloc;
    Mok__Request request = ask_alloc(&alloc, 0, device, bytes);
    _cleanup_answer_ struct answer answer = client_ask(client, &request);

    assert_int_equal(answer.reply->code, 0);
    assert_int_equal(answer.fds.count, 1);
    return answer.reply->buffer_alloc->buffer;
}

uint64_t client_bytes_used(struct client *client)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LimitsQuery query = MOK__LIMITS_QUERY__INIT;

    request.body_case = MOK__REQUEST__BODY_LIMITS_QUERY;
    request.limits_query = &query;
    _cleanup_answer_ struct answer answer = client_ask(client, &request);
    assert_int_equal(answer.reply->body_case, MOK__REPLY__BODY_LIMITS);
    return answer.reply->limits->bytes_used;
}

void client_expect_bytes(struct client *client, uint64_t bytes)
{
    uint64_t used = 0;

    for (int waited = 0; waited < PATIENCE_MS; waited += 5) {
        used = client_bytes_used(client);
        if (used == bytes)
            return;
        sleep_ms(5);
    }
    assert_int_equal(used, bytes);
}

struct answer client_status(struct client *client)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__StatusQuery query = MOK__STATUS_QUERY__INIT;

    request.body_case = MOK__REQUEST__BODY_STATUS_QUERY;
    request.status_query = &query;
    struct answer answer = client_ask(client, &request);
    assert_int_equal(answer.reply->body_case, MOK__REPLY__BODY_STATUS);
    return answer;
}
