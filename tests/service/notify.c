/* SPDX-License-Identifier: Apache-2.0 */
/* What mokd says to the service manager that starts it, and what it takes from it: played by this test. */
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
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "rack_key.h"
#include "service.h"
#include "util.h"

#define PATIENCE_MS 30000

/* A mokd and its manager. `sockets` are handed over, in the order client, admin. */
struct unit {
    struct daemon daemon;
    int notify;
    int sockets[2];
    unsigned watchdog_ms; /* 0: none */
    char admin[96], notify_path[96], slow[96];
};

struct said {
    char text[1024];
    uint64_t at_ns;
};

static const char *program(const char *name, char *buffer, size_t size)
{
    snprintf(buffer, size, "%s/%s", getenv("MOK_BUILD_DIR"), name);
    return buffer;
}

static int bound_socket(int type, const char *path)
{
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);

    assert_true(fd >= 0);
    snprintf(at.sun_path, sizeof(at.sun_path), "%s", path);
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof(at)), 0);
    return fd;
}

static void unit_prepare(struct unit *unit)
{
    struct daemon *daemon = &unit->daemon;

    *unit = (struct unit){ .notify = -1, .sockets = { -1, -1 } };
    snprintf(daemon->dir, sizeof(daemon->dir), "/tmp/mokd-test-XXXXXX");
    assert_non_null(mkdtemp(daemon->dir));
    snprintf(daemon->config, sizeof(daemon->config), "%s/conf", daemon->dir);
    snprintf(daemon->socket, sizeof(daemon->socket), "%s/mokd.sock", daemon->dir);
    snprintf(daemon->log, sizeof(daemon->log), "%s/log", daemon->dir);
    snprintf(unit->admin, sizeof(unit->admin), "%s/mokd-admin.sock", daemon->dir);
    snprintf(unit->notify_path, sizeof(unit->notify_path), "%s/notify", daemon->dir);
    snprintf(unit->slow, sizeof(unit->slow), "%s/slow-worker", daemon->dir);
    unit->notify = bound_socket(SOCK_DGRAM, unit->notify_path);
}

/* `worker` NULL: the one that agrees to everything. */
static void unit_configure(const struct unit *unit, const char *worker, const char *rest)
{
    char buffer[512];
    FILE *file = fopen(unit->daemon.config, "we");

    assert_non_null(file);
    fprintf(file, "[daemon]\nsocket = %s\nworker = %s\n%s\n", unit->daemon.socket,
            worker ? worker : program("tests/unit/daemon/fake-worker", buffer, sizeof(buffer)), rest);
    assert_int_equal(fclose(file), 0);
}

/* A worker that takes its time before it says anything; 0: for ever. */
static void make_slow_worker(const struct unit *unit, unsigned seconds)
{
    char buffer[512];
    FILE *file = fopen(unit->slow, "we");

    assert_non_null(file);
    if (seconds)
        fprintf(file, "#!/bin/sh\nsleep %u\nexec %s\n", seconds,
                program("tests/unit/daemon/fake-worker", buffer, sizeof(buffer)));
    else
        fputs("#!/bin/sh\nexec sleep 3600\n", file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(chmod(unit->slow, 0700), 0);
}

static void hand_over_sockets(const struct unit *unit)
{
    int count = 0;
    char number[16];

    for (int i = 0; i < 2; i++)
        if (unit->sockets[i] >= 0)
            assert_true(dup2(unit->sockets[i], 100 + count++) >= 0);
    if (!count)
        return;
    for (int i = 0; i < count; i++)
        dup2(100 + i, 3 + i); /* dup2 makes descriptors that outlive exec */
    for (int i = 0; i < count; i++)
        close(100 + i);
    snprintf(number, sizeof(number), "%d", getpid());
    setenv("LISTEN_PID", number, 1);
    setenv("LISTEN_FDS", count == 2 ? "2" : "1", 1);
    setenv("LISTEN_FDNAMES", count == 2 ? "mok:mok-admin" : "mok", 1);
}

static void unit_start(struct unit *unit)
{
    char path[512], number[32];

    program("daemon/mokd/mokd", path, sizeof(path));
    unit->daemon.pid = fork();
    assert_true(unit->daemon.pid >= 0);
    if (unit->daemon.pid > 0)
        return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int log = open(unit->daemon.log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    setenv("NOTIFY_SOCKET", unit->notify_path, 1);
    if (unit->watchdog_ms) {
        snprintf(number, sizeof(number), "%u000", unit->watchdog_ms);
        setenv("WATCHDOG_USEC", number, 1);
    }
    hand_over_sockets(unit);
    execl(path, "mokd", "--config", unit->daemon.config, (char *)NULL);
    _exit(127);
}

static int unit_wait(struct unit *unit)
{
    int status;

    for (int waited = 0; waited < PATIENCE_MS; waited += 10) {
        if (waitpid(unit->daemon.pid, &status, WNOHANG) == unit->daemon.pid)
            return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
        sleep_ms(10);
    }
    return -1;
}

static void unit_clean(struct unit *unit)
{
    close(unit->notify);
    for (int i = 0; i < 2; i++)
        mok_close(unit->sockets[i]);
    unlink(unit->notify_path);
    unlink(unit->slow);
    unlink(unit->daemon.config);
    unlink(unit->daemon.log);
    assert_int_equal(rmdir(unit->daemon.dir), 0); /* nothing else was left */
}

static int unit_stop(struct unit *unit)
{
    kill(unit->daemon.pid, SIGTERM);
    return unit_wait(unit);
}

/* The next message; false when there is none for so long. */
static bool hear(const struct unit *unit, unsigned ms, struct said *ret)
{
    struct pollfd wait = { .fd = unit->notify, .events = POLLIN };

    if (poll(&wait, 1, (int)ms) <= 0)
        return false;
    ssize_t n = recv(unit->notify, ret->text, sizeof(ret->text) - 1, 0);
    assert_true(n > 0);
    ret->text[n] = '\0';
    ret->at_ns = mok_now_ns();
    return true;
}

/* The next message that says `text`. */
static struct said expect(const struct unit *unit, const char *text)
{
    struct said said;
    uint64_t until = mok_now_ns() + PATIENCE_MS * UINT64_C(1000000);

    while (mok_now_ns() < until)
        if (hear(unit, 1000, &said) && strstr(said.text, text))
            return said;
    fail_msg("nobody said %s", text);
    return said;
}

static bool log_says(const struct unit *unit, const char *text)
{
    char line[2048];
    bool found = false;
    FILE *file = fopen(unit->daemon.log, "re");

    while (file && !found && fgets(line, sizeof(line), file))
        found = strstr(line, text);
    if (file)
        fclose(file);
    return found;
}

/* ------------------------------------------------------------------ ready */

static void ready_is_said_once_the_socket_listens_and_every_device_is_up(void **state)
{
    struct unit unit;
    struct client client;

    (void)state;
    unit_prepare(&unit);
    unit_configure(&unit, NULL, "[device host0]\n[device host1]\n");
    unit_start(&unit);
    struct said said = expect(&unit, "READY=1");
    assert_non_null(strstr(said.text, "STATUS=Serving: 2 of 2 devices up"));
    client_open(&client, &unit.daemon);
    client_close(&client);
    assert_int_equal(unit_stop(&unit), 0);
    expect(&unit, "STOPPING=1");
    unit_clean(&unit);
}

/* Field report 28: slow device initialisation killed by the start's time limit, again and again. */
static void report_28_a_slow_device_extends_the_time_limit_and_delays_ready(void **state)
{
    struct unit unit;
    struct said said;

    (void)state;
    unit_prepare(&unit);
    make_slow_worker(&unit, 4);
    unit_configure(&unit, unit.slow, "[device host0]\n");
    uint64_t begin = mok_now_ns();
    unit_start(&unit);
    assert_true(hear(&unit, PATIENCE_MS, &said));
    assert_non_null(strstr(said.text, "EXTEND_TIMEOUT_USEC="));
    assert_non_null(strstr(said.text, "STATUS=Starting: 0 of 1 devices up, 0 sessions; host0 is starting"));
    assert_null(strstr(said.text, "READY=1"));
    said = expect(&unit, "host0 is starting: its worker has not answered in ");
    assert_null(strstr(said.text, "READY=1"));
    said = expect(&unit, "READY=1");
    assert_true(said.at_ns - begin >= UINT64_C(4000000000));
    assert_null(strstr(said.text, "not answered"));
    assert_false(log_says(&unit, "worker lost"));
    assert_int_equal(unit_stop(&unit), 0);
    unit_clean(&unit);
}

static void a_device_that_fails_for_good_is_named_and_the_others_are_served(void **state)
{
    struct unit unit;

    (void)state;
    unit_prepare(&unit);
    make_slow_worker(&unit, 0);
    unit_configure(&unit, unit.slow, "start_timeout = 1\n[device host0]\n");
    unit_start(&unit);
    struct said said = expect(&unit, "READY=1");
    assert_non_null(strstr(said.text, "0 of 1 devices up"));
    assert_non_null(strstr(said.text, "host0 has failed: the worker did not answer in time"));
    assert_int_equal(unit_stop(&unit), 0);
    unit_clean(&unit);
}

static void with_device_failure_exit_such_a_start_fails(void **state)
{
    struct unit unit;

    (void)state;
    unit_prepare(&unit);
    make_slow_worker(&unit, 0);
    unit_configure(&unit, unit.slow, "start_timeout = 1\ndevice_failure = exit\n[device host0]\n");
    unit_start(&unit);
    assert_int_equal(unit_wait(&unit), 1);
    assert_true(log_says(&unit, "a device has failed, and device_failure = exit"));
    unit_clean(&unit);
}

/* ------------------------------------------------------------------ not too much, not too little */

/* Field report 29: the manager was flooded with notifications. */
static void report_29_at_most_two_messages_a_second_under_load(void **state)
{
    struct unit unit;
    struct client client;
    struct said said;
    uint64_t last = 0;
    unsigned count = 0;

    (void)state;
    unit_prepare(&unit);
    unit.watchdog_ms = 1000;
    unit_configure(&unit, NULL, "[device host0]\n");
    unit_start(&unit);
    expect(&unit, "READY=1");
    uint64_t begin = mok_now_ns();
    while (mok_now_ns() - begin < UINT64_C(3000000000)) {
        client_open(&client, &unit.daemon); /* changes the status */
        kill(unit.daemon.pid, SIGHUP);
        client_close(&client);
        for (; hear(&unit, 0, &said); last = said.at_ns)
            count++;
    }
    uint64_t halves = (last - begin) / UINT64_C(500000000);
    assert_true(count >= 1);
    assert_true(count <= halves + 3); /* some may have waited to be heard */
    assert_int_equal(unit_stop(&unit), 0);
    unit_clean(&unit);
}

static pid_t worker_of(struct unit *unit, size_t device)
{
    struct client client;

    client_observe(&client, &unit->daemon);
    _cleanup_answer_ struct answer answer = client_status(&client);
    client_close(&client);
    return (pid_t)answer.reply->status->device[device]->worker_pid;
}

/*
 * A worker that was stopped is mokd's to replace, and the watchdog is fed all the while; one that is idle is left
 * alone.
 */
static void a_worker_that_stands_still_is_replaced_an_idle_one_is_not_and_the_watchdog_is_fed(void **state)
{
    struct unit unit;
    char worker[512];
    struct said said;
    uint64_t fed = 0;

    (void)state;
    unit_prepare(&unit);
    unit.watchdog_ms = 12000;
    unit_configure(&unit, program("daemon/worker/mok-worker", worker, sizeof(worker)),
                   "worker_timeout = 2\n[device host0]\nmemory = 64M\n[device idle]\nmemory = 64M\n");
    unit_start(&unit);
    expect(&unit, "READY=1");
    uint64_t begin = mok_now_ns();
    sleep_ms(1500); /* its heart has beaten */
    pid_t first = worker_of(&unit, 0), second = 0, idle = worker_of(&unit, 1);
    assert_int_equal(kill(first, SIGSTOP), 0);
    for (int waited = 0; waited < PATIENCE_MS / 500 && (second == 0 || second == first); waited++) {
        if (hear(&unit, 500, &said) && strstr(said.text, "WATCHDOG=1"))
            fed++;
        second = worker_of(&unit, 0);
    }
    assert_true(second != 0 && second != first);
    for (int i = 0; fed == 0 && i < PATIENCE_MS / 500; i++)
        fed += hear(&unit, 500, &said) && strstr(said.text, "WATCHDOG=1");
    assert_true(fed > 0);
    assert_true(log_says(&unit, "stood still for 2 s") || log_says(&unit, "did not answer in time"));
    while (mok_now_ns() - begin < UINT64_C(5000000000))
        sleep_ms(50);
    assert_int_equal(worker_of(&unit, 1), idle);
    assert_false(log_says(&unit, "worker lost device=idle"));
    expect(&unit, "WATCHDOG=1");
    assert_int_equal(unit_stop(&unit), 0);
    unit_clean(&unit);
}

/* The thread of that name; 0: there is none. */
static pid_t thread_of(pid_t pid, const char *name)
{
    char path[64], comm[32];
    pid_t found = 0;

    snprintf(path, sizeof(path), "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    assert_non_null(tasks);
    for (struct dirent *task; !found && (task = readdir(tasks));) {
        snprintf(path, sizeof(path), "/proc/%d/task/%.10s/comm", pid, task->d_name);
        FILE *file = fopen(path, "re");
        if (file && fgets(comm, sizeof(comm), file) && strncmp(comm, name, strlen(name)) == 0)
            found = (pid_t)strtol(task->d_name, NULL, 10);
        if (file)
            fclose(file);
    }
    closedir(tasks);
    return found;
}

static void configure_rack_of_one(const struct unit *unit, struct mok_rack_key *key)
{
    char text[MOK_RACK_KEY_SENTENCE], public_key[MOK_RACK_KEY_TEXT], rest[512];

    assert_int_equal(mok_rack_key_generate(key), 0);
    assert_int_equal(mok_rack_key_write(unit->daemon.dir, key, text), 0);
    mok_rack_key_text(key->public_key, public_key);
    snprintf(rest, sizeof(rest),
             "worker_timeout = 1\n[device host0]\n[rack]\nnode = n0\nkey = %s/rack.key\nlisten = 127.0.0.1:%d\n"
             "[node n0]\naddress = 127.0.0.1:9\npublic_key = %s\n",
             unit->daemon.dir, 20000 + getpid() % 12000, public_key);
    unit_configure(unit, NULL, rest);
}

/*
 * A signal stops a process; a debugger stops one thread of it. Of mokd that of the rack stands still, and all else goes
 * on: the manager is to act, since nobody else can.
 */
static void the_watchdog_goes_unfed_while_the_racks_thread_stands_still(void **state)
{
    struct unit unit;
    struct mok_rack_key key;
    struct said said;
    char path[128];

    (void)state;
#ifdef MOK_SANITIZED
    skip(); /* its threads are not to be stopped one by one */
#endif
    unit_prepare(&unit);
    unit.watchdog_ms = 1000;
    configure_rack_of_one(&unit, &key);
    unit_start(&unit);
    expect(&unit, "READY=1");
    expect(&unit, "WATCHDOG=1");
    pid_t thread = thread_of(unit.daemon.pid, "mok-rack");
    assert_true(thread > 0);
    if (ptrace(PTRACE_SEIZE, thread, NULL, NULL) < 0) { /* not here */
        unit_stop(&unit);
        skip();
    }
    assert_int_equal(ptrace(PTRACE_INTERRUPT, thread, NULL, NULL), 0);
    assert_int_equal(waitpid(thread, NULL, __WALL), thread);
    bool unfed = false;
    for (uint64_t fed = mok_now_ns(), begin = fed; !unfed; unfed = mok_now_ns() - fed > UINT64_C(2000000000)) {
        if (hear(&unit, 100, &said) && strstr(said.text, "WATCHDOG=1"))
            fed = mok_now_ns();
        assert_true(mok_now_ns() - begin < PATIENCE_MS * UINT64_C(1000000));
    }
    assert_true(log_says(&unit, "the watchdog is not fed because=rack"));
    assert_true(worker_of(&unit, 0) > 0); /* all else goes on */
    assert_int_equal(ptrace(PTRACE_DETACH, thread, NULL, NULL), 0);
    expect(&unit, "WATCHDOG=1");
    assert_int_equal(unit_stop(&unit), 0);
    for (const char *const *name = (const char *const[]){ "rack.key", "rack.pub", NULL }; *name; name++) {
        snprintf(path, sizeof(path), "%s/%s", unit.daemon.dir, *name);
        unlink(path);
    }
    unit_clean(&unit);
}

static bool lives;

static bool says_whether(void *cookie)
{
    assert_ptr_equal(cookie, &lives);
    return lives;
}

static unsigned feedings(const struct unit *unit, struct mokd_server *server, unsigned ms)
{
    struct said said;
    unsigned count = 0;
    uint64_t until = mok_now_ns() + ms * UINT64_C(1000000);

    while (mok_now_ns() < until) {
        uv_run(&server->loop, UV_RUN_NOWAIT);
        while (hear(unit, 10, &said))
            count += strstr(said.text, "WATCHDOG=1") != NULL;
    }
    return count;
}

/* As the rack's thread does: whatever was given to be watched must live, or the manager is to act. */
static void the_watchdog_goes_unfed_while_something_watched_does_not_live(void **state)
{
    struct unit unit;
    struct mokd_config config = { 0 };
    struct mokd_server server = { .config = &config };
    struct mokd_error error = { 0 };

    (void)state;
    unit_prepare(&unit);
    TAILQ_INIT(&server.sessions);
    assert_int_equal(uv_loop_init(&server.loop), 0);
    setenv("NOTIFY_SOCKET", unit.notify_path, 1);
    setenv("WATCHDOG_USEC", "1000000", 1);
    assert_int_equal(mokd_service_start(&server, &server.service, &error), 0);
    assert_true(mokd_service_watch(server.service, "the thread", says_whether, &lives));
    lives = false;
    assert_int_equal(feedings(&unit, &server, 1600), 0);
    lives = true;
    assert_true(feedings(&unit, &server, 1600) >= 1);
    mokd_service_close(server.service);
    uv_run(&server.loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&server.loop), 0);
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    unit_clean(&unit);
}

/* ------------------------------------------------------------------ the configuration, again */

static uint32_t sessions_allowed(const struct unit *unit)
{
    struct client client;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LimitsQuery query = MOK__LIMITS_QUERY__INIT;

    client_observe(&client, &unit->daemon);
    request.body_case = MOK__REQUEST__BODY_LIMITS_QUERY;
    request.limits_query = &query;
    _cleanup_answer_ struct answer answer = client_ask(&client, &request);
    client_close(&client);
    return answer.reply->limits->sessions;
}

static void a_hangup_reads_limits_again_and_a_bad_file_changes_nothing(void **state)
{
    struct unit unit;

    (void)state;
    unit_prepare(&unit);
    unit_configure(&unit, NULL, "[device host0]\n[limits]\nsessions = 5\n");
    unit_start(&unit);
    expect(&unit, "READY=1");
    assert_int_equal(sessions_allowed(&unit), 5);
    unit_configure(&unit, NULL, "[device host0]\n[limits]\nsessions = 7\n");
    kill(unit.daemon.pid, SIGHUP);
    struct said said = expect(&unit, "RELOADING=1");
    assert_non_null(strstr(said.text, "MONOTONIC_USEC="));
    expect(&unit, "READY=1");
    assert_int_equal(sessions_allowed(&unit), 7);
    unit_configure(&unit, NULL, "[device host0]\n[limits]\nsessions = none\n");
    kill(unit.daemon.pid, SIGHUP);
    expect(&unit, "sessions = none: not a number");
    expect(&unit, "READY=1");
    assert_int_equal(sessions_allowed(&unit), 7);
    assert_int_equal(unit_stop(&unit), 0);
    unit_clean(&unit);
}

/* ------------------------------------------------------------------ sockets */

static void sockets_that_are_handed_over_are_used_and_stay(void **state)
{
    struct unit unit;
    struct client client, admin;
    struct stat about;

    (void)state;
    unit_prepare(&unit);
    unit.sockets[0] = bound_socket(SOCK_SEQPACKET, unit.daemon.socket);
    unit.sockets[1] = bound_socket(SOCK_SEQPACKET, unit.admin);
    assert_int_equal(listen(unit.sockets[0], 8), 0);
    assert_int_equal(listen(unit.sockets[1], 8), 0);
    unit_configure(&unit, NULL, "[device host0]\n");
    client_connect(&client, &unit.daemon); /* waits in the socket until mokd is there */
    unit_start(&unit);
    expect(&unit, "READY=1");
    struct daemon other = unit.daemon;
    snprintf(other.socket, sizeof(other.socket), "%.90s", unit.admin);
    client_open(&admin, &other);
    client_close(&admin);
    client_close(&client);
    assert_int_equal(unit_stop(&unit), 0);
    assert_int_equal(stat(unit.daemon.socket, &about), 0);
    assert_int_equal(stat(unit.admin, &about), 0);
    unlink(unit.daemon.socket);
    unlink(unit.admin);
    unit_clean(&unit);
}

static void without_them_mokd_makes_both_and_keeps_the_administrators_to_itself(void **state)
{
    struct unit unit;
    struct stat about;

    (void)state;
    unit_prepare(&unit);
    unit_configure(&unit, NULL, "[device host0]\n");
    unit_start(&unit);
    expect(&unit, "READY=1");
    assert_int_equal(stat(unit.daemon.socket, &about), 0);
    assert_int_equal(about.st_mode & 07777, 0666);
    assert_int_equal(stat(unit.admin, &about), 0);
    assert_int_equal(about.st_mode & 07777, 0600);
    assert_int_equal(unit_stop(&unit), 0);
    unit_clean(&unit);
}

static void a_socket_of_another_kind_is_refused_by_name(void **state)
{
    struct unit unit;

    (void)state;
    unit_prepare(&unit);
    unit.sockets[0] = bound_socket(SOCK_STREAM, unit.daemon.socket);
    assert_int_equal(listen(unit.sockets[0], 8), 0);
    unit_configure(&unit, NULL, "[device host0]\n");
    unit_start(&unit);
    assert_int_equal(unit_wait(&unit), 1);
    assert_true(log_says(&unit, "descriptor 3 of the service manager is no listening Unix socket of kind seqpacket"));
    unlink(unit.daemon.socket);
    unit_clean(&unit);
}

/* ------------------------------------------------------------------ limits and pids */

/* Field report 27: limits of memory locks, capabilities and descriptors break things later, with unrelated words. */
static void report_27_a_low_limit_is_named_at_start_with_its_remedy(void **state)
{
    struct daemon daemon;
    char line[2048];
    unsigned lines = 0;

    (void)state;
    daemon_start(&daemon, NULL, 256);
    FILE *file = fopen(daemon.log, "re");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file))
        lines += strstr(line, "few descriptors") && strstr(line, "limit=256") && strstr(line, "LimitNOFILE");
    fclose(file);
    assert_int_equal(lines, 1);
    assert_int_equal(daemon_stop(&daemon), 0);
}

/* Field report 35: stale pid files and recycled pids. Whoever has the number that the lock names is nobody's affair. */
static void report_35_a_stale_lock_with_a_strangers_pid_hurts_neither(void **state)
{
    struct unit unit;
    char path[128];
    int status;

    (void)state;
    unit_prepare(&unit);
    pid_t stranger = fork();
    if (stranger == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pause();
        _exit(0);
    }
    snprintf(path, sizeof(path), "%s.lock", unit.daemon.socket);
    FILE *file = fopen(path, "we");
    assert_non_null(file);
    fprintf(file, "%d\n", stranger);
    fclose(file);
    unit_configure(&unit, NULL, "[device host0]\n");
    unit_start(&unit);
    expect(&unit, "READY=1");
    assert_int_equal(unit_stop(&unit), 0);
    assert_int_equal(waitpid(stranger, &status, WNOHANG), 0); /* lives */
    kill(stranger, SIGKILL);
    waitpid(stranger, &status, 0);
    unit_clean(&unit);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ready_is_said_once_the_socket_listens_and_every_device_is_up),
        cmocka_unit_test(report_28_a_slow_device_extends_the_time_limit_and_delays_ready),
        cmocka_unit_test(a_device_that_fails_for_good_is_named_and_the_others_are_served),
        cmocka_unit_test(with_device_failure_exit_such_a_start_fails),
        cmocka_unit_test(report_29_at_most_two_messages_a_second_under_load),
        cmocka_unit_test(a_worker_that_stands_still_is_replaced_an_idle_one_is_not_and_the_watchdog_is_fed),
        cmocka_unit_test(the_watchdog_goes_unfed_while_the_racks_thread_stands_still),
        cmocka_unit_test(the_watchdog_goes_unfed_while_something_watched_does_not_live),
        cmocka_unit_test(a_hangup_reads_limits_again_and_a_bad_file_changes_nothing),
        cmocka_unit_test(sockets_that_are_handed_over_are_used_and_stay),
        cmocka_unit_test(without_them_mokd_makes_both_and_keeps_the_administrators_to_itself),
        cmocka_unit_test(a_socket_of_another_kind_is_refused_by_name),
        cmocka_unit_test(report_27_a_low_limit_is_named_at_start_with_its_remedy),
        cmocka_unit_test(report_35_a_stale_lock_with_a_strangers_pid_hurts_neither),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
