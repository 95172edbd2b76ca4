/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One connection: a session of a job, or an observer. The socket is the lease: when it ends, everything that the
 * session owned goes, and nobody else notices.
 *
 *   GREETING --Hello--> OPEN or OBSERVER --EOF, bad message, stop--> CLOSING --nothing refers to it--> gone
 *                        ^                                              ^
 *     AWAY --its client--+------------- nobody comes in time -----------+
 *
 * AWAY is a session of the mokd before, which waits for its client (resume.c).
 *
 * CLOSING goes in steps, each once nothing of the one before is under way: queues closed at their workers (and groups
 * failed for the other ranks, at once) -> groups left -> private buffers unmapped and freed -> the session freed.
 */
#ifndef MOKD_SESSION_H
#define MOKD_SESSION_H

#include "control.pb-c.h"
#include "error.h"
#include "state.pb-c.h"
#include "user.h"
#include "wire.h"

struct mokd_buffer;
struct mokd_member;
struct mokd_queue;

#define MOKD_TOKEN_BYTES 32u

/* A request that waits for its answer; keeps the session. */
struct mokd_call {
    struct mokd_session *session; /* NULL: answered, or never begun */
    uint64_t id;
};

enum mokd_session_state {
    MOKD_SESSION_GREETING,
    MOKD_SESSION_OPEN,
    MOKD_SESSION_OBSERVER,
    MOKD_SESSION_AWAY,
    MOKD_SESSION_CLOSING
};

struct mokd_session {
    TAILQ_ENTRY(mokd_session) link;
    struct mokd_server *server;
    uint64_t id; /* 0: none (yet) */
    enum mokd_session_state state;
    int fd;
    uv_poll_t poll;
    struct mok_wire_queue out;
    struct mok_wire_peer peer;
    struct mokd_user *user;
    bool admin;   /* may ask for what changes the service, not only its own */
    bool counted; /* as a session of the user, not as a stranger */
    char job[MOK_MAX_NAME + 1];
    uint32_t weight; /* of a device's time, among the sessions of its user */
    uint64_t started_ns;
    struct mokd_timer *greeting;
    bool watched;
    unsigned refs;  /* the connection, calls in progress, things being taken down */
    unsigned calls; /* requests not answered yet */
    unsigned close_step;
    int doom; /* why it ends at the next turn of the loop; 0: it does not */
    const char *doom_text;
    TAILQ_HEAD(, mokd_queue) queues;
    TAILQ_HEAD(, mokd_buffer) buffers; /* its own copies: private and symmetric */
    TAILQ_HEAD(, mokd_member) members; /* ranks that it is */
    uint32_t n_buffers, n_members, n_layers;
    uint64_t ops_done, rows, device_ns; /* of queues that are gone */
    bool resumable;                /* the next mokd will know it */
    bool returned;                 /* its client wants its groups again */
    bool deaf;                     /* has had mokd's last word */
    uint8_t token[MOKD_TOKEN_BYTES];
    struct mokd_call recover;      /* the Recover under way */
    struct mokd_timer *recover_deadline;
    uint64_t recover_ms;
};

/* Makes one that is away, for whoever fills it in. NULL: out of memory. */
struct mokd_session *mokd_session_new_away(struct mokd_server *server, uid_t uid);
/* Its client is back: takes over the connection of `guest`, which ends. -MOK_EIO: it stays away. */
int mokd_session_attach(struct mokd_session *session, struct mokd_session *guest);
/* mokd ends, and the next one goes on with the session: tells its client, and nothing more from now on. */
void mokd_session_hang_up(struct mokd_session *session, const char *text);
/* What it has done, queues that are open included. */
void mokd_session_totals(const struct mokd_session *session, Mok__StateSession *ret);
void mokd_session_resume_totals(struct mokd_session *session, const Mok__StateSession *from);

/*
 * Takes over a connected socket; `admin`: it came through the administrator's door. A negative return: it was closed,
 * and its client told why.
 */
int mokd_session_accept(struct mokd_server *server, int fd, bool admin);

/* Whether it may ask for what an administrator may: by its user, or by the door that it came through. */
bool mokd_session_is_admin(const struct mokd_session *session);

/* Ends the session for a reason that the client is told (code 0: none, it left by itself). Harmless if it is ending. */
void mokd_session_close(struct mokd_session *session, int code, const char *text);

void mokd_session_ref(struct mokd_session *session);
void mokd_session_unref(struct mokd_session *session);

/* Sends an event: a reply that nobody asked for. Dropped when the session is ending. */
void mokd_session_event(struct mokd_session *session, Mok__Reply *event);

struct mokd_call mokd_call_begin(struct mokd_session *session, uint64_t id);
/* Each answers and ends the call; an ending session gets no answer. Descriptors stay the caller's. */
void mokd_call_reply(struct mokd_call *call, Mok__Reply *reply, const int *fds, size_t count);
void mokd_call_done(struct mokd_call *call); /* success without a body */
void mokd_call_fail(struct mokd_call *call, const struct mokd_error *error);

/* Answers a request on the spot: refusal, with the sentence. */
void mokd_session_refuse(struct mokd_session *session, uint64_t id, const struct mokd_error *error);
/* As a refusal, to a question of which that is an answer like any other: nobody's error, and not counted. */
void mokd_session_decline(struct mokd_session *session, uint64_t id, const struct mokd_error *error);

/* resume.c: a Hello that wants to go on with a session; a session that wants its groups again. */
void mokd_session_resume(struct mokd_session *guest, uint64_t id, const Mok__Hello *hello);
void mokd_session_recover(struct mokd_session *session, uint64_t id, const Mok__Recover *request);
/* One of its groups is whole or has failed: answers the recover if it was the last. */
void mokd_session_recovered(struct mokd_session *session);
/* Those that are away have this long. */
void mokd_sessions_await(struct mokd_server *server);

/* It is known which groups the user is in: his connections may speak. */
void mokd_sessions_let_in(struct mokd_user *user);

/* The device of an index, if the session's user may use it: -MOK_EACCESS, or as mokd_device_find. */
int mokd_session_device(const struct mokd_session *session, uint32_t index, struct mokd_device **ret,
                        struct mokd_error *error);

/* request.c: what a session is told at its begin; acts on one message. */
void mokd_hello_answer(struct mokd_session *session, uint64_t id, const Mok__Hello *hello);
void mokd_request_handle(struct mokd_session *session, const Mok__Request *request);

#endif
