/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A real mokd with workers that agree to everything, and clients that speak control.proto to it by hand, so that they
 * can say what no library would. Everything fails the running test when it cannot be done.
 */
#ifndef MOK_TEST_DAEMON_FIXTURE_H
#define MOK_TEST_DAEMON_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include <cmocka.h>

#include "control.pb-c.h"
#include "fdstore.h"
#include "mok/types.h"
#include "wire.h"

struct daemon {
    char dir[64], config[96], socket[96], log[96];
    pid_t pid;
    struct fdstore *store; /* NULL: no service manager keeps anything */
};

/* Starts mokd; `config` is what follows [daemon] in its configuration. `descriptors` 0: no limit. */
void daemon_start(struct daemon *daemon, const char *config, unsigned descriptors);
/* With a service manager that keeps `bound` descriptors; daemon_stop ends that as well. */
void daemon_start_kept(struct daemon *daemon, const char *config, unsigned bound);
/* Ends mokd by that signal; starts the next and waits until it listens. */
void daemon_end(struct daemon *daemon, int number);
void daemon_begin(struct daemon *daemon);
/* Writes another configuration, for the next start. */
void daemon_configure(const struct daemon *daemon, const char *config);
/* Writes another configuration and sends SIGHUP; does not wait for what comes of it. */
void daemon_reload(struct daemon *daemon, const char *config);
/* SIGTERM; returns its exit code, -1 if it had to be killed. Checks that neither socket nor lock are left. */
int daemon_stop(struct daemon *daemon);
/* Runs another mokd with the same configuration to its end; returns the exit code. */
int daemon_run_again(const struct daemon *daemon, const char *option);
/* Until it takes connections. */
void daemon_await_listening(const struct daemon *daemon);
unsigned daemon_descriptors(const struct daemon *daemon);
/*
 * Whether it comes down to `bound` in a few seconds: mokd opens files of its own for moments, the user database's say.
 */
bool daemon_descriptors_settle(const struct daemon *daemon, unsigned bound);
unsigned long daemon_resident_kb(const struct daemon *daemon);

/* Two devices, cmocka's group set-up: *state is the struct daemon. */
int daemon_setup(void **state);
int daemon_teardown(void **state);

struct client {
    int fd;
    uint64_t last_id;
    uint64_t session;
};

/* An answer, with its descriptors. */
struct answer {
    Mok__Reply *reply;
    struct mok_wire_fds fds;
};
void answer_free(struct answer *answer);
#define _cleanup_answer_ __attribute__((cleanup(answer_free)))

void client_connect(struct client *client, const struct daemon *daemon); /* no Hello yet */
void client_open(struct client *client, const struct daemon *daemon);    /* with Hello, as a session */
void client_observe(struct client *client, const struct daemon *daemon); /* with Hello, as an observer */
void client_close(struct client *client);

/* Sends; returns the id. */
uint64_t client_send(struct client *client, Mok__Request *request);
/* The next message; fails the test after five seconds. reply NULL: mokd closed the connection. */
struct answer client_receive(struct client *client);
/* Sends and takes the answer, passing over events. */
struct answer client_ask(struct client *client, Mok__Request *request);
/* Fails unless the connection ends; returns the code of the last event before that, 0 if there was none. */
int client_expect_end(struct client *client);

/* Builders; the body is the caller's. */
Mok__Request ask_hello(Mok__Hello *hello);
Mok__Request ask_join(Mok__GroupJoin *join, const char *name, uint32_t size, uint32_t rank, uint32_t device);
Mok__Request ask_alloc(Mok__BufferAlloc *alloc, uint32_t group, uint32_t device, uint64_t bytes);

/* Whole conversations that must succeed. */
uint32_t client_join(struct client *clients, uint32_t size, const char *name); /* client r is rank r on device r */
uint32_t client_queue(struct client *client, uint32_t device);
uint32_t client_buffer(struct client *client, uint32_t device, uint64_t bytes);
uint64_t client_bytes_used(struct client *client);
/* Waits until the user's bytes are at `bytes`: frees end after their answer. */
void client_expect_bytes(struct client *client, uint64_t bytes);
struct answer client_status(struct client *client);

void sleep_ms(unsigned ms);

#endif
