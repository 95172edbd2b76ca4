/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The supervisor as a whole: the loop and the lists of everything that lives in it. All of it belongs to the loop
 * thread; only storage.c's jobs run elsewhere, and they see nothing of this. mokd never touches a device itself.
 */
#ifndef MOKD_SERVER_H
#define MOKD_SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>
#include <uv.h>

#include "config.h"
#include "job_totals.h"
#include "mok/types.h"
#include "util.h"
#include "wire.h"

#define MOKD_PROTOCOL 1u /* of control.proto */
#define MOKD_FEATURES                                                                                                  \
    (MOK_FEATURE_RESUME | MOK_FEATURE_GRADIENTS | MOK_FEATURE_WGRAD | MOK_FEATURE_TRANSPOSED)
#define MOKD_RESERVE 4
#define MOKD_TEXT_MAX 512 /* bytes of a sentence in an answer */

#define mokd_container_of(pointer, type, member) ((type *)(void *)((char *)(pointer)-offsetof(type, member)))

struct mokd_device;
struct mokd_fdstore;
struct mokd_group;
struct mokd_http;
struct mokd_trace;
struct mokd_inherited;
struct mokd_listener;
struct mokd_mps;
struct mokd_service;
struct mokd_session;
struct mokd_state;
struct mokd_usage;
struct mokd_user;
struct mokd_pool;
struct rack;
struct mokd_rack_groups;
struct mokd_rack_orders;
struct mokd_rack_share;

TAILQ_HEAD(mokd_session_list, mokd_session);
TAILQ_HEAD(mokd_user_list, mokd_user);
TAILQ_HEAD(mokd_pool_list, mokd_pool);
TAILQ_HEAD(mokd_group_list, mokd_group);

struct mokd_server {
    uv_loop_t loop;
    uv_signal_t sigterm, sigint, sighup;
    struct mokd_config *config; /* users, groups and limits change with SIGHUP, the rest does not */
    const struct mokd_options *options;
    struct mokd_listener *listener, *admin_listener;
    struct mokd_service *service;
    struct mokd_mps *mps; /* NULL: none of our own */
    struct mokd_device **devices; /* [n_devices], by index */
    size_t n_devices;
    struct mokd_session_list sessions; /* every connection, also those that are closing */
    struct mokd_user_list users;
    struct mokd_pool_list pools;
    bool reloading, reload_again; /* again: the file may have changed since it was read */
    struct mokd_usage *usage;
    struct mokd_group_list groups;
    struct mokd_job_total_list job_totals;
    struct rack *rack;      /* the other nodes; NULL: there are none */
    struct mokd_rack_groups *rack_groups; /* groups over nodes; NULL: there are none */
    struct mokd_rack_orders *rack_orders; /* rack_orders.c; NULL: there is no rack */
    struct mokd_rack_share *rack_share; /* rack_share.c; NULL: users are each node's own */
    struct mokd_trace *trace; /* the one under way */
    struct mokd_http *http; /* NULL: nothing is served */
    struct mokd_storage_queue *releases; /* storage.c */
    uint8_t boot_id[16];
    uint64_t started_ns;
    uint32_t descriptor_share; /* of mokd's descriptors, what one user's buffers, layers and queues may hold */
    int reserve[MOKD_RESERVE]; /* descriptors given up while a worker is started: device.c */
    uint64_t last_session;
    uint32_t last_id; /* of queues, groups, buffers and layers */
    uint64_t errors;  /* requests refused, sessions ended by us, workers lost */
    bool ids_wrapped;
    struct mokd_state *state;        /* what the next mokd will know */
    struct mokd_fdstore *store;      /* and have; the state's */
    uv_prepare_t save;               /* writes the state down before the loop sleeps */
    struct mokd_timer *resume_deadline; /* of sessions that are away */
    uint64_t rack_rounds, rack_seen_ns; /* of the mesh's thread, when it was last seen to turn: rack_node.c */
    bool stopping, workers_stopping, closing_sessions, handles_closed;
    int failure; /* why it stops before anybody asked it to */
    struct mokd_timer *stop_deadline;
};

/* How mokd was started; everything stays as long as the server. */
struct mokd_options {
    struct mokd_config *config;
    const char *socket;       /* where clients connect, unless the service manager hands over a socket */
    const char *admin_socket; /* the same for administrators; "": nowhere */
    const char *worker;
    struct mokd_inherited *inherited; /* sockets and descriptors of the service manager, each taken by who knows it */
};

/* Listens, starts a worker a device and runs until SIGTERM or SIGINT. 0, or -MOK_E* with the reason logged. */
int mokd_server_run(const struct mokd_options *options);
/* Ends it in order; mokd_server_run returns the code. */
void mokd_server_fail(struct mokd_server *server, int code);

/* A new id of a queue, group, buffer or layer; never 0, and never one of a thing that lives. */
uint32_t mokd_server_next_id(struct mokd_server *server);

/* Whether something has that id. */
bool mokd_server_id_is_taken(const struct mokd_server *server, uint32_t id);

/* Told by whoever goes away, so that an orderly stop knows when the next step is due. */
void mokd_server_session_gone(struct mokd_server *server);
void mokd_server_worker_gone(struct mokd_server *server);

#endif
