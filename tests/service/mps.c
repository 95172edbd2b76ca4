/* SPDX-License-Identifier: Apache-2.0 */
/* MPS control daemons of mokd's own, played by a script in their program's place: nothing here is said of the real one.
 */
#include "fixture.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mps.h"

/*
 * -f: stays, with a FIFO that it reads from, and notes how it was started. Without arguments: a client, which reads one
 * word. "deaf" in the directory: no client is answered. "stillborn": it ends at once.
 */
static const char script[] = "#!/bin/sh\n"
                             "dir=$CUDA_MPS_PIPE_DIRECTORY\n"
                             "if [ \"$1\" = -f ]; then\n"
                             "    echo \"$CUDA_VISIBLE_DEVICES $*\" >>\"$dir/../starts\"\n"
                             "    [ -e \"$dir/../stillborn\" ] && exit 3\n"
                             "    mkfifo \"$dir/control\" && exec 3<>\"$dir/control\"\n"
                             "    echo $$ >\"$dir/pid\"\n"
                             "    trap 'rm -f \"$dir/control\" \"$dir/pid\"; exit 0' TERM\n"
                             "    while :; do sleep 0.05; done\n"
                             "fi\n"
                             "[ -p \"$dir/control\" ] && [ ! -e \"$dir/../deaf\" ] || exit 1\n"
                             "read -r word\n"
                             "echo \"$word\" >>\"$dir/../words\"\n"
                             "[ \"$word\" = quit ] && kill \"$(cat \"$dir/pid\")\"\n"
                             "exit 0\n";

struct world {
    struct mokd_server server;
    struct mokd_config config;
    struct mokd_device_config devices[3];
    char dir[64];
};

static void write_file(const struct world *world, const char *name, const char *text, mode_t mode)
{
    char path[128];

    snprintf(path, sizeof(path), "%s/%s", world->dir, name);
    FILE *file = fopen(path, "we");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
    assert_int_equal(chmod(path, mode), 0);
}

static void read_file(const struct world *world, const char *name, char *ret, size_t size)
{
    char path[128];

    snprintf(path, sizeof(path), "%s/%s", world->dir, name);
    FILE *file = fopen(path, "re");
    size_t n = file ? fread(ret, 1, size - 1, file) : 0;
    ret[n] = '\0';
    if (file)
        fclose(file);
}

/* GPUs 0 and 3, the first of them with two devices. */
static void world_begin(struct world *world)
{
    static const uint32_t gpus[] = { 0, 0, 3 };

    memset(world, 0, sizeof(*world));
    snprintf(world->dir, sizeof(world->dir), "/tmp/mok-mps-XXXXXX");
    assert_non_null(mkdtemp(world->dir));
    write_file(world, "nvidia-cuda-mps-control", script, 0700);
    char path[512];
    snprintf(path, sizeof(path), "%s:/usr/bin:/bin", world->dir);
    setenv("PATH", path, 1);
    world->config = (struct mokd_config){ .sharing = MOKD_SHARING_MPS, .mps = MOKD_MPS_OWN };
    snprintf(world->config.mps_pipe, sizeof(world->config.mps_pipe), "%s", world->dir);
    for (size_t i = 0; i < ARRAY_SIZE(gpus); i++) {
        struct mokd_device_config *device = &world->devices[i];
        device->kind = MOK_DEVICE_CUDA;
        device->cuda = gpus[i];
        snprintf(device->mps_pipe, sizeof(device->mps_pipe), "%s/gpu%u", world->dir, gpus[i]);
    }
    world->config.devices = world->devices;
    world->config.n_devices = ARRAY_SIZE(gpus);
    world->server.config = &world->config;
    assert_int_equal(uv_loop_init(&world->server.loop), 0);
}

static void world_mps(struct world *world)
{
    struct mokd_error error = { 0 };
    assert_int_equal(mokd_mps_start(&world->server, &world->server.mps, &error), 0);
}

static void world_end(struct world *world)
{
    char command[128];

    mokd_mps_close(world->server.mps);
    uv_run(&world->server.loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&world->server.loop), 0);
    snprintf(command, sizeof(command), "%s/gpu0/control", world->dir);
    assert_int_equal(access(command, F_OK), -1); /* ended in order */
    snprintf(command, sizeof(command), "rm -r %s", world->dir);
    assert_int_equal(system(command), 0);
}

static bool is_up(const struct world *world, uint32_t cuda)
{
    const char *reason = NULL;
    return mokd_mps_is_up(world->server.mps, cuda, &reason);
}

static pid_t control_pid(const struct world *world)
{
    char text[32];

    read_file(world, "gpu0/pid", text, sizeof(text));
    return (pid_t)atoi(text);
}

/* Turns the loop until it is so; fails the test after half a minute. */
#define RUN_UNTIL(world, condition)                                                                                    \
    do {                                                                                                               \
        for (int turns = 0; !(condition); turns++) {                                                                   \
            assert_true(turns < 3000);                                                                                 \
            uv_run(&(world)->server.loop, UV_RUN_NOWAIT);                                                              \
            sleep_ms(10);                                                                                              \
        }                                                                                                              \
    } while (0)

static void one_control_daemon_a_gpu_in_directories_of_its_own(void **state)
{
    struct world world;
    char starts[256];

    (void)state;
    world_begin(&world);
    world_mps(&world);
    assert_false(is_up(&world, 0));
    RUN_UNTIL(&world, is_up(&world, 0) && is_up(&world, 3));
    read_file(&world, "starts", starts, sizeof(starts));
    const char *how = geteuid() == 0 ? "-f -multiuser-server\n" : "-f\n";
    char line[64];
    snprintf(line, sizeof(line), "0 %s", how);
    assert_non_null(strstr(starts, line));
    snprintf(line, sizeof(line), "3 %s", how);
    assert_non_null(strstr(starts, line));
    assert_int_equal(strlen(starts), 2 * strlen(line)); /* no third one for the second device of GPU 0 */
    assert_true(is_up(&world, 7));                      /* nobody's to wait for */
    world_end(&world);
}

static void one_that_died_comes_back(void **state)
{
    struct world world;

    (void)state;
    world_begin(&world);
    world_mps(&world);
    RUN_UNTIL(&world, is_up(&world, 0));
    pid_t first = control_pid(&world);
    assert_int_equal(kill(first, SIGKILL), 0);
    RUN_UNTIL(&world, !is_up(&world, 0));
    const char *reason = "";
    mokd_mps_is_up(world.server.mps, 0, &reason);
    assert_non_null(strstr(reason, "the MPS control daemon of GPU 0 ended (signal 9)"));
    RUN_UNTIL(&world, is_up(&world, 0));
    assert_true(control_pid(&world) != first);
    world_end(&world);
}

static void one_that_answers_no_more_is_replaced(void **state)
{
    struct world world;
    char words[256], path[128];

    (void)state;
    world_begin(&world);
    world_mps(&world);
    RUN_UNTIL(&world, is_up(&world, 0));
    RUN_UNTIL(&world, (read_file(&world, "words", words, sizeof(words)), strstr(words, "get_server_list\n")));
    assert_true(is_up(&world, 0));
    write_file(&world, "deaf", "", 0600);
    RUN_UNTIL(&world, !is_up(&world, 0));
    snprintf(path, sizeof(path), "%s/deaf", world.dir);
    unlink(path);
    RUN_UNTIL(&world, is_up(&world, 0));
    world_end(&world);
}

static void what_an_earlier_mokd_left_is_asked_to_quit(void **state)
{
    struct world world;

    (void)state;
    world_begin(&world);
    world_mps(&world);
    RUN_UNTIL(&world, is_up(&world, 0) && is_up(&world, 3));
    pid_t left = control_pid(&world);
    struct world second = { .server = { .config = &world.config } };
    assert_int_equal(uv_loop_init(&second.server.loop), 0);
    memcpy(second.dir, world.dir, sizeof(second.dir));
    world_mps(&second); /* in the same directories, as after kill -9 */
    RUN_UNTIL(&second, control_pid(&second) != left && is_up(&second, 0));
    mokd_mps_close(second.server.mps);
    uv_run(&second.server.loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&second.server.loop), 0);
    world_end(&world);
}

static void one_that_never_starts_is_given_up_with_a_reason(void **state)
{
    struct world world;
    char starts[512];
    unsigned lines = 0;
    const char *reason = "";

    (void)state;
    world_begin(&world);
    world.config.n_devices = 1;
    write_file(&world, "stillborn", "", 0600);
    world_mps(&world);
    uint64_t begin = mok_now_ns();
    RUN_UNTIL(&world, !mokd_mps_is_up(world.server.mps, 0, &reason) && strstr(reason, "ended (status 3)"));
    for (int i = 0; i < 10; i++) {
        uv_run(&world.server.loop, UV_RUN_NOWAIT);
        sleep_ms(50);
    }
    uint64_t pauses = (mok_now_ns() - begin) / UINT64_C(250000000); /* the shortest ones that fit */
    read_file(&world, "starts", starts, sizeof(starts));
    for (const char *c = starts; *c; c++)
        lines += *c == '\n';
    assert_true(lines >= 1 && lines <= pauses + 1);
    world_end(&world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_control_daemon_a_gpu_in_directories_of_its_own),
        cmocka_unit_test(one_that_died_comes_back),
        cmocka_unit_test(one_that_answers_no_more_is_replaced),
        cmocka_unit_test(what_an_earlier_mokd_left_is_asked_to_quit),
        cmocka_unit_test(one_that_never_starts_is_given_up_with_a_reason),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
