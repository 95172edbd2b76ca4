/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One connection to mokd's control socket: requests of several threads in flight at once, answers matched by id.
 * One waiting thread reads and hands answers to the others. Knows messages, not sessions: mokctl uses it too.
 * Never holds its lock while it sleeps in a system call.
 *
 * A connection that may be replaced (control_keep) is *lost* when mokd goes away, not over: what was asked fails with
 * MOK_EDAEMON, what is asked later waits until there is another one, or until it is given up.
 */
#ifndef MOK_CLIENT_CONTROL_H
#define MOK_CLIENT_CONTROL_H

#include <stdbool.h>
#include <stdint.h>

#include "control.pb-c.h"
#include "wire.h"

#define MOK_DEFAULT_SOCKET "/run/mok/mokd.sock"
#define MOK_DEFAULT_TIMEOUT_MS 30000u

struct control;

/* An event that nobody asked for. Called by the thread that reads, without any lock held, one at a time. */
typedef void (*control_event_fn)(void *data, const Mok__Reply *reply);

/* Until it is cleared, what it names counts as not yet known to who asked. */
struct control_answer {
    Mok__Reply *reply;
    struct mok_wire_fds fds;
    struct control *from;
};
#define CONTROL_ANSWER_INIT                                                                                            \
    {                                                                                                                  \
        .reply = NULL, .fds = MOK_WIRE_FDS_INIT, .from = NULL                                                          \
    }
void control_answer_clear(struct control_answer *answer);
#define _cleanup_answer_ __attribute__((cleanup(control_answer_clear)))

/* CLOCK_MONOTONIC in nanoseconds when a time-out that begins now is over; UINT64_MAX: never, for 0 ms too. */
uint64_t control_deadline(uint64_t timeout_ms);

/* `path` as given, else $MOK_SOCKET, else the default. */
const char *control_socket_path(const char *path);

/* Connects. -MOK_EDAEMON, -MOK_EACCESS, -MOK_ERANGE, -MOK_ETIMEDOUT, -MOK_EFDS, -MOK_ENOMEM, with a sentence. */
int control_open(const char *path, uint64_t timeout_ms, control_event_fn on_event, void *event_data,
                 struct control **ret_control);
/* Ends the connection for mokd too, whoever else holds the socket. NULL is fine. */
void control_close(struct control *control);

/*
 * Sends `request` (its id is filled in) and waits for the answer; timeout_ms 0: for ever. An answer with a code is
 * that failure, with its sentence. `body`: what the answer must be (MOK__REPLY__BODY__NOT_SET: any), with exactly
 * `fds` descriptors. A negative return leaves *ret_answer empty and nothing behind at mokd that only the answer names.
 */
int control_call(struct control *control, Mok__Request *request, uint64_t timeout_ms, Mok__Reply__BodyCase body,
                 size_t fds, struct control_answer *ret_answer);

/*
 * mokd made something whose only name is in this answer, and nobody wants it: sends it back, without waiting. What
 * control_call() has refused, or what came after its time, is given back already.
 */
void control_give_back(struct control *control, const Mok__Reply *reply);

/* From now on the connection may be replaced when it is lost. */
void control_keep(struct control *control);
/* How often it was lost so far; any thread, no lock. */
uint32_t control_losses(const struct control *control);
/* The socket, for poll(): one descriptor for as long as the object lives. */
int control_fd(const struct control *control);
/* Sleeps until the connection is there (0), over, or deadline_ns has come; with a sentence. */
int control_await(struct control *control, uint64_t deadline_ns);
/*
 * Sleeps until the loss is known and nobody reads or holds an answer, a second at most; false: somebody still holds
 * one.
 */
bool control_settle(struct control *control);
/* Puts the connection of `other`, which is closed by this, in place of the lost one. */
int control_replace(struct control *control, struct control *other);
/* There will be no other: the connection is over, with that code and sentence. */
void control_give_up(struct control *control, int code, const char *text);
/* Makes who waits for an answer of it fail soon; any thread. */
void control_interrupt(struct control *control);

/* Reads what has arrived; never sleeps. 0, or why the connection is over, without a sentence. */
int control_look(struct control *control);
/* Records the sentence of a connection that is over and returns its code. */
int control_fail(struct control *control);

#endif
