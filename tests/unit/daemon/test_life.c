/* SPDX-License-Identifier: Apache-2.0 */
/* The daemon's own life: one a socket, ends in order, keeps nothing, bears the descriptor limit. */
#include "fixture.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static bool log_says(const struct daemon *daemon, const char *text)
{
    char line[2048];
    bool found = false;
    FILE *file = fopen(daemon->log, "re");

    assert_non_null(file);
    while (!found && fgets(line, sizeof(line), file))
        found = strstr(line, text);
    fclose(file);
    return found;
}

/* ------------------------------------------------------------------ starting */

static void a_second_daemon_on_the_same_socket_is_refused(void **state)
{
    struct daemon daemon;
    struct client client;

    (void)state;
    daemon_start(&daemon, NULL, 0);
    assert_int_equal(daemon_run_again(&daemon, NULL), 1);
    assert_true(log_says(&daemon, "another mokd"));
    client_open(&client, &daemon); /* the first one still serves */
    client_close(&client);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void the_socket_of_a_killed_daemon_is_replaced(void **state)
{
    struct daemon daemon;
    struct client client;
    struct stat status;

    (void)state;
    daemon_start(&daemon, NULL, 0);
    kill(daemon.pid, SIGKILL);
    waitpid(daemon.pid, NULL, 0);
    assert_int_equal(stat(daemon.socket, &status), 0);
    pid_t second = fork();
    if (second == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        _exit(daemon_run_again(&daemon, NULL));
    }
    for (int waited = 0; waited < 5000 && !log_says(&daemon, "stale socket removed"); waited += 5)
        sleep_ms(5);
    daemon_await_listening(&daemon);
    client_open(&client, &daemon);
    {
        _cleanup_answer_ struct answer answer = client_status(&client);
        daemon.pid = (pid_t)answer.reply->status->pid;
    }
    client_close(&client);
    kill(daemon.pid, SIGTERM);
    int code;
    assert_int_equal(waitpid(second, &code, 0), second);
    assert_true(WIFEXITED(code));
    assert_int_equal(WEXITSTATUS(code), 0);
    assert_int_equal(stat(daemon.socket, &status), -1);
    unlink(daemon.config);
    unlink(daemon.log);
    assert_int_equal(rmdir(daemon.dir), 0);
}

/* As systemd does for the unit, who takes no lock. */
static void a_socket_that_somebody_else_serves_stays(void **state)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    struct daemon daemon;
    struct stat before, after;

    (void)state;
    daemon_start(&daemon, NULL, 0);
    kill(daemon.pid, SIGKILL);
    waitpid(daemon.pid, NULL, 0);
    assert_int_equal(unlink(daemon.socket), 0);
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", daemon.socket);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(fd, 1), 0);
    assert_int_equal(stat(daemon.socket, &before), 0);
    assert_int_equal(daemon_run_again(&daemon, NULL), 1);
    assert_true(log_says(&daemon, "somebody serves"));
    assert_int_equal(stat(daemon.socket, &after), 0);
    assert_true(before.st_ino == after.st_ino);
    close(fd);
    daemon_begin(&daemon); /* what nobody serves any more goes */
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void a_file_in_the_sockets_place_stays(void **state)
{
    struct daemon daemon;
    char path[128], option[256];

    (void)state;
    daemon_start(&daemon, NULL, 0);
    snprintf(path, sizeof(path), "%s/file", daemon.dir);
    int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    close(fd);
    snprintf(option, sizeof(option), "--socket=%s", path);
    assert_int_equal(daemon_run_again(&daemon, option), 1);
    assert_true(log_says(&daemon, "is there and is no socket"));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void check_config_says_ok_or_what_is_wrong(void **state)
{
    struct daemon daemon;

    (void)state;
    daemon_start(&daemon, NULL, 0);
    assert_int_equal(daemon_run_again(&daemon, "--check-config"), 0);
    assert_true(log_says(&daemon, "OK\n"));
    FILE *file = fopen(daemon.config, "ae");
    assert_non_null(file);
    fputs("nonsense = 1\n", file);
    fclose(file);
    assert_int_equal(daemon_run_again(&daemon, "--check-config"), 2);
    assert_true(log_says(&daemon, "nonsense = 1: unknown key"));
    assert_int_equal(daemon_run_again(&daemon, "--no-such-option"), 2);
    assert_int_equal(daemon_run_again(&daemon, "--version"), 0);
    assert_int_equal(daemon_stop(&daemon), 0);
}

/* ------------------------------------------------------------------ ending */

static void sessions_are_told_when_the_daemon_stops(void **state)
{
    struct daemon daemon;
    struct client clients[2];

    (void)state;
    daemon_start(&daemon, NULL, 0);
    client_open(&clients[0], &daemon);
    client_open(&clients[1], &daemon);
    client_queue(&clients[0], 0);
    client_buffer(&clients[0], 0, 1 << 20);
    client_join(clients, 2, "stopping");
    kill(daemon.pid, SIGTERM);
    assert_int_equal(client_expect_end(&clients[0]), -MOK_EDAEMON);
    assert_int_equal(client_expect_end(&clients[1]), -MOK_EDAEMON);
    assert_int_equal(daemon_stop(&daemon), 0);
    client_close(&clients[0]);
    client_close(&clients[1]);
}

static void a_hangup_changes_nothing(void **state)
{
    struct daemon daemon;
    struct client client;

    (void)state;
    daemon_start(&daemon, NULL, 0);
    client_open(&client, &daemon);
    kill(daemon.pid, SIGHUP);
    client_bytes_used(&client);
    client_close(&client);
    assert_int_equal(daemon_stop(&daemon), 0);
}

/* ------------------------------------------------------------------ keeping nothing */

static void one_round(const struct daemon *daemon)
{
    struct client clients[2];
    Mok__BufferAlloc alloc;

    for (uint32_t i = 0; i < 2; i++) {
        client_open(&clients[i], daemon);
        client_queue(&clients[i], i);
        client_buffer(&clients[i], i, 100000);
    }
    uint32_t group = client_join(clients, 2, "round");
    Mok__Request request = ask_alloc(&alloc, group, 0, 50000);
    client_send(&clients[0], &request);
    client_send(&clients[1], &request);
    for (int i = 0; i < 2; i++) {
        _cleanup_answer_ struct answer answer = client_receive(&clients[i]);
        assert_int_equal(answer.reply->code, 0);
    }
    client_close(&clients[0]);
    client_close(&clients[1]);
}

static void two_hundred_rounds_leave_nothing(void **state)
{
    struct daemon daemon;
    struct client client;
    bool grows = true;

    (void)state;
    daemon_start(&daemon, NULL, 0);
    client_open(&client, &daemon);
    for (int round = 0; round < 20; round++)
        one_round(&daemon);
    client_expect_bytes(&client, 0);
    sleep_ms(20);
    unsigned descriptors = daemon_descriptors(&daemon);
    /* The allocator may take an arena for a thread at any time and keep it; a leak grows every time. */
    for (int time = 0; time < 4 && grows; time++) {
        unsigned long resident = daemon_resident_kb(&daemon);
        for (int round = 0; round < 200; round++) {
            one_round(&daemon);
            client_expect_bytes(&client, 0);
        }
        grows = daemon_resident_kb(&daemon) > resident + 512;
#ifdef MOK_SANITIZED /* keeps freed memory for a while, and finds leaks itself */
        grows = false;
#endif
    }
    assert_false(grows);
    assert_true(daemon_descriptors_settle(&daemon, descriptors));
    client_close(&client);
    assert_int_equal(daemon_stop(&daemon), 0);
}

/* ------------------------------------------------------------------ the descriptor limit */

enum { MANY = 64, LIMIT = 48 };

static void at_the_descriptor_limit_connections_are_turned_away_and_the_others_live(void **state)
{
    struct daemon daemon;
    struct client first, many[MANY];
    int turned_away = 0;

    (void)state;
    daemon_start(&daemon, NULL, LIMIT);
    client_open(&first, &daemon);
    for (int i = 0; i < MANY; i++)
        client_connect(&many[i], &daemon);
    client_bytes_used(&first);
    for (int tries = 0; tries < 2000 && !turned_away; tries++)
        turned_away = log_says(&daemon, "raise LimitNOFILE of mokd") || (sleep_ms(5), 0);
    assert_int_equal(turned_away, 1);
    assert_int_equal(client_expect_end(&many[MANY - 1]), -MOK_EFDS);
    for (int i = 0; i < MANY; i++)
        client_close(&many[i]);
    assert_true(daemon_descriptors_settle(&daemon, LIMIT - 8)); /* there is room again */
    client_open(&many[0], &daemon);
    client_close(&many[0]);
    client_close(&first);
    assert_int_equal(daemon_stop(&daemon), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_second_daemon_on_the_same_socket_is_refused),
        cmocka_unit_test(the_socket_of_a_killed_daemon_is_replaced),
        cmocka_unit_test(a_socket_that_somebody_else_serves_stays),
        cmocka_unit_test(a_file_in_the_sockets_place_stays),
        cmocka_unit_test(check_config_says_ok_or_what_is_wrong),
        cmocka_unit_test(sessions_are_told_when_the_daemon_stops),
        cmocka_unit_test(a_hangup_changes_nothing),
        cmocka_unit_test(two_hundred_rounds_leave_nothing),
        cmocka_unit_test(at_the_descriptor_limit_connections_are_turned_away_and_the_others_live),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
