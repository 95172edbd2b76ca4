/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The configuration file: INI, read at start and on SIGHUP, never written. deploy/mokd.conf.sample documents every key.
 * Nothing is guessed: an unknown section or key, a value out of its bounds or a thing said twice is an error.
 */
#ifndef MOKD_CONFIG_H
#define MOKD_CONFIG_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "common/log.h"
#include "mok/types.h"
#include "rack/rack.h"

#define MOKD_DEFAULT_CONFIG "/etc/mok/mokd.conf"
#define MOKD_DEFAULT_RUNTIME_DIR "/run/mok"
#define MOKD_SOCKET_NAME "mokd.sock"
#define MOKD_DEFAULT_METRICS "127.0.0.1:9643" /* where there is a section [metrics] */
#define MOKD_PATH_MAX 256
#define MOKD_DEFAULT_MPS_DIR "/run/mok/mps"
/* What the administrator's socket is called beside a client socket NAME.sock or NAME. */
#define MOKD_ADMIN_SUFFIX "-admin.sock"

/* What is counted, of a user over all his sessions, and of the members of a Unix group together. */
enum mokd_resource {
    MOKD_BYTES, /* on all devices */
    MOKD_SESSIONS,
    MOKD_GROUPS, /* ranks of groups */
    MOKD_LAYERS,
    MOKD_BUFFERS,
    MOKD_DESCRIPTORS, /* of mokd's, by buffers, layers and queues */
    MOKD_RESOURCES,
};
#define MOKD_NO_LIMIT UINT64_MAX

struct mokd_limits {
    uint64_t of[MOKD_RESOURCES];
    uint32_t queue_entries; /* of a queue */
    uint32_t weight;        /* against other users, 1..MOK_MAX_WEIGHT */
    uint32_t priority;      /* enum mok_priority */
    uint32_t exclusive;     /* 1: he may ask for devices of his own */
    uint64_t devices;       /* bit i: he may use device i */
};

/* A section about a user or a Unix group. */
struct mokd_tenant_config {
    uint32_t id; /* uid or gid */
    uint32_t given; /* which keys it has: mokd_limit_is_given */
    struct mokd_limits limits;
    char name[MOK_MAX_NAME + 1];
    char *devices; /* as written, of use to the parser alone */
};

struct mokd_device_config {
    char name[MOK_MAX_NAME + 1];
    uint32_t kind;    /* enum mok_device_kind */
    uint32_t threads; /* host: at least 1. cuda: thread blocks of a kernel at most; 0: one an SM */
    uint64_t memory;  /* bytes that mokd may hand out */
    uint32_t cuda;    /* cuda: which GPU, in PCI order; several devices may share one */
    char mps_pipe[MOKD_PATH_MAX]; /* cuda, sharing = mps: directory of its GPU's control daemon */
    uint32_t reserve_sms; /* cuda: SMs that no kernel of ours takes */
    uint32_t yield_us;    /* cuda: how long a block works before it makes room at a task border; 0: to the end */
    uint32_t chaos_delay_us;
};

/* How workers and clients share a GPU. */
enum mokd_sharing {
    MOKD_SHARING_SLICES = 0, /* in turns: nobody notices another's fault; a hand-over between kernels costs a slice */
    MOKD_SHARING_MPS = 1,    /* at once, through an MPS control daemon; a fault of one ends all on that GPU */
};

/* Whose the MPS control daemons are. */
enum mokd_mps_owner {
    MOKD_MPS_SITE = 0, /* there are some, in the directories that the file names */
    MOKD_MPS_OWN = 1,  /* mokd starts one a GPU: mps.h */
};

/* What limits and shares of users and Unix groups are about. */
enum mokd_tenants {
    MOKD_TENANTS_RACK = 0, /* what they have and use on all nodes of the rack */
    MOKD_TENANTS_NODE = 1, /* on this node */
};

/* What becomes of a start with a device that fails for good. */
enum mokd_failure {
    MOKD_FAILURE_SERVE = 0, /* the others are served */
    MOKD_FAILURE_EXIT = 1,
};

struct mokd_config {
    char *path; /* where it was read; absolute */
    char socket[MOKD_PATH_MAX]; /* "": MOKD_SOCKET_NAME in the runtime directory */
    char admin_socket[MOKD_PATH_MAX]; /* "": beside the other one, by MOKD_ADMIN_SUFFIX */
    char worker[MOKD_PATH_MAX]; /* "": found beside mokd */
    uint32_t socket_mode, admin_socket_mode;
    uint32_t start_timeout;  /* s, of a device's first start */
    uint32_t worker_timeout; /* s that a worker may stand still */
    uint32_t device_failure; /* enum mokd_failure */
    enum mok_log_level log_level;
    uint32_t poll_us;
    uint32_t resume_timeout;       /* seconds that sessions wait for their clients after a restart; 0: nothing is kept */
    uint32_t sharing;              /* enum mokd_sharing, of all GPUs */
    uint32_t mps;                  /* enum mokd_mps_owner */
    char mps_pipe[MOKD_PATH_MAX];  /* site: directory of the control daemon; own: what the GPUs' directories are in */
    char metrics_listen[MOKD_PATH_MAX]; /* endpoint.h; "": off */
    uint32_t metrics_mode;              /* of a Unix socket */
    char state_dir[MOKD_PATH_MAX]; /* "": $STATE_DIRECTORY, and without that nothing is kept */
    uint32_t usage_days;           /* how long the usage of jobs is kept */
    uint64_t usage_bytes;          /* at most, on disk */
    uint32_t has_admin_group;
    gid_t admin_gid;
    struct mokd_limits limits; /* whoever has no section */
    char *limits_devices;
    struct mokd_tenant_config *users, *groups;
    size_t n_users, n_groups;
    struct mokd_device_config *devices;
    size_t n_devices;
    struct rack_config rack; /* node "": this mokd is in no rack */
    struct rack_node_config *nodes; /* its inventory */
    uint32_t tenants; /* enum mokd_tenants */
    char link_domain[MOK_MAX_NAME + 1]; /* of nodes that name none */
};

/* Takes one sentence: "file:line: [section] key = value: what is wrong, and the bound". */
typedef void (*mokd_config_report)(void *cookie, const char *sentence);

/*
 * Reads `path` and reports every error in it. 0 and *ret (release with mokd_config_release), or -MOK_EARG once
 * everything wrong has been reported; -MOK_ENOENT, -MOK_EACCESS, -MOK_EIO with one report when it cannot be read.
 */
int mokd_config_load(const char *path, mokd_config_report report, void *cookie, struct mokd_config *ret);
void mokd_config_release(struct mokd_config *config);

/* Sections by number; NULL: there is none. */
const struct mokd_tenant_config *mokd_config_user(const struct mokd_config *config, uid_t uid);
const struct mokd_tenant_config *mokd_config_group(const struct mokd_config *config, gid_t gid);
/* Whether a section says something about a resource; "bytes" and the like. */
bool mokd_config_gives(const struct mokd_tenant_config *tenant, enum mokd_resource resource);
const char *mokd_resource_text(enum mokd_resource resource);

/*
 * What holds for a user who is in these Unix groups: his own section before those of his groups, the first in the file
 * first, before [limits]. What a group's section says about something counted binds its members together, and is not
 * in here.
 */
void mokd_config_limits(const struct mokd_config *config, uid_t uid, const gid_t *gids, size_t n_gids,
                        struct mokd_limits *ret);
/*
 * Of all that it says of users and Unix groups but devices, which are each node's own; 0 where it holds for the node
 * alone.
 */
uint64_t mokd_config_tenants_hash(const struct mokd_config *config);
/* "low", "normal", "high". */
const char *mokd_priority_text(uint32_t priority);

/* "512", "64K", "2M", "3G", "1T", "64KiB" ... to bytes; -MOK_EARG for anything else, -MOK_ERANGE beyond 64 bits. */
int mokd_parse_size(const char *text, uint64_t *ret);

#endif
