/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The log as the journal gets it: a socket of our own stands where journald's is, in a mount namespace of our own.
 * Skipped where that cannot be had.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/log.h"
#include "common/message_ids.h"
#include "util.h"

#define JOURNAL_DIR "/run/systemd/journal"

static int journal = -1;
static char packet[16384];
static size_t packet_length;

static int leave_out(const char *what)
{
    fprintf(stderr, "SKIPPED: %s: %s\n", what, strerror(errno));
    return 77;
}

static int write_file(const char *path, const char *text)
{
    _cleanup_fd_ int fd = open(path, O_WRONLY | O_CLOEXEC);
    return fd < 0 || write(fd, text, strlen(text)) < 0 ? -1 : 0;
}

/* Root of a new user namespace where we are not root of this one. */
static int become_mounter(void)
{
    char map[64];
    uid_t uid = getuid();

    if (unshare(CLONE_NEWNS) == 0)
        return 0;
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0)
        return -1;
    snprintf(map, sizeof(map), "0 %u 1", uid);
    return write_file("/proc/self/uid_map", map);
}

/* 0, or the exit code. */
static int stand_in_for_journald(void)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX, .sun_path = JOURNAL_DIR "/socket" };

    if (become_mounter() < 0)
        return leave_out("no mount namespace");
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 || mount("run", "/run", "tmpfs", 0, NULL) < 0)
        return leave_out("no mount");
    if (mkdir("/run/systemd", 0755) < 0 || mkdir(JOURNAL_DIR, 0755) < 0)
        return leave_out(JOURNAL_DIR);
    journal = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (journal < 0 || bind(journal, (struct sockaddr *)&address, sizeof(address)) < 0)
        return leave_out("no socket");
    return 0;
}

/* systemd says so of the stream that it gave a service as stderr. */
static void claim_that_stderr_is_the_journals(void)
{
    struct stat status;
    char stream[64];

    assert_int_equal(fstat(STDERR_FILENO, &status), 0);
    snprintf(stream, sizeof(stream), "%llu:%llu", (unsigned long long)status.st_dev, (unsigned long long)status.st_ino);
    setenv("JOURNAL_STREAM", stream, 1);
    mok_log_open("mokd-test", MOK_LOG_INFO);
}

static void receive(void)
{
    ssize_t n = recv(journal, packet, sizeof(packet) - 1, MSG_DONTWAIT);

    packet_length = n > 0 ? (size_t)n : 0;
    packet[packet_length] = '\0';
}

static void expect_line(const char *line)
{
    size_t length = strlen(line);

    for (const char *at = packet; (at = strstr(at, line)); at += length)
        if ((at == packet || at[-1] == '\n') && at[length] == '\n')
            return;
    fail_msg("no line \"%s\" in:\n%s", line, packet);
}

static void fields_arrive_one_by_one(void **state)
{
    (void)state;
    mok_log(MOK_LOG_ERROR, "device", "worker lost", "device=%s pid=%u error=\"%s\"", "host0", 42u,
            "was ended by signal 9");
    receive();
    expect_line("MESSAGE=device: worker lost device=host0 pid=42 error=\"was ended by signal 9\"");
    expect_line("PRIORITY=3");
    expect_line("SYSLOG_IDENTIFIER=mokd-test");
    expect_line("MOK_COMPONENT=device");
    expect_line("MOK_DEVICE=host0");
    expect_line("MOK_PID=42");
    expect_line("MOK_ERROR=was ended by signal 9");
    expect_line("MESSAGE_ID=2902d4b74a524985b21525700849c3d3");
}

static void what_nobody_relies_on_has_no_identity(void **state)
{
    (void)state;
    mok_log(MOK_LOG_INFO, "test", "something", NULL);
    receive();
    expect_line("MESSAGE=test: something");
    assert_null(strstr(packet, "MESSAGE_ID="));
}

static void what_is_below_the_level_does_not_arrive(void **state)
{
    (void)state;
    mok_log(MOK_LOG_DEBUG, "test", "hidden", NULL);
    receive();
    assert_int_equal(packet_length, 0);
}

static void foreign_text_makes_no_field_of_its_own(void **state)
{
    char clean[128];

    (void)state;
    mok_log(MOK_LOG_WARNING, "session", "ended by mokd", "session=7 error=\"%s\"",
            mok_log_text(clean, sizeof(clean), "x\"\nPRIORITY=0\nMOK_UID=0 uid=0"));
    receive();
    expect_line("PRIORITY=4");
    expect_line("MOK_ERROR=x'?PRIORITY=0?MOK_UID=0 uid=0");
    assert_null(strstr(packet, "\nPRIORITY=0\n"));
    assert_null(strstr(packet, "\nMOK_UID="));
}

static void more_fields_than_are_kept_are_dropped_quietly(void **state)
{
    char fields[1024] = "";
    size_t used = 0;

    (void)state;
    for (int i = 0; i < 60; i++)
        used += (size_t)snprintf(fields + used, sizeof(fields) - used, "f%d=%d ", i, i);
    mok_log(MOK_LOG_ERROR, "device", "failed", "%s", fields);
    receive();
    expect_line("MOK_F0=0");
    expect_line("MESSAGE_ID=c2a39ec0ac2c401886e44b9ced5bc0f6");
    assert_null(strstr(packet, "MOK_F59="));
}

static void nobody_listens_and_nothing_happens(void **state)
{
    (void)state;
    unlink(JOURNAL_DIR "/socket");
    errno = EDOM;
    mok_log(MOK_LOG_ERROR, "server", "cannot start", "error=\"no journal\"");
    assert_int_equal(errno, EDOM);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fields_arrive_one_by_one),
        cmocka_unit_test(what_nobody_relies_on_has_no_identity),
        cmocka_unit_test(what_is_below_the_level_does_not_arrive),
        cmocka_unit_test(foreign_text_makes_no_field_of_its_own),
        cmocka_unit_test(more_fields_than_are_kept_are_dropped_quietly),
        cmocka_unit_test(nobody_listens_and_nothing_happens),
    };
    int code = stand_in_for_journald();
    if (code)
        return code;
    claim_that_stderr_is_the_journals();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
