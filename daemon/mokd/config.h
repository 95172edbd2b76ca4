/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The configuration file: INI, read once at start, never written. deploy/mokd.conf.sample documents every key.
 * Nothing is guessed: an unknown section or key, a value out of its bounds or a thing said twice is an error.
 */
#ifndef MOKD_CONFIG_H
#define MOKD_CONFIG_H

#include <stdint.h>
#include <sys/types.h>

#include "common/log.h"
#include "mok/types.h"

#define MOKD_DEFAULT_CONFIG "/etc/mok/mokd.conf"
#define MOKD_DEFAULT_RUNTIME_DIR "/run/mok"
#define MOKD_SOCKET_NAME "mokd.sock"
#define MOKD_DEFAULT_METRICS "127.0.0.1:9643" /* where there is a section [metrics] */
#define MOKD_PATH_MAX 256

/* What a user, or a session of his, may have at once. */
struct mokd_limits {
    uint64_t bytes;         /* of the user, over all devices */
    uint32_t sessions;      /* of the user */
    uint32_t groups;        /* memberships of a session */
    uint32_t queue_entries; /* of a queue */
    uint32_t layers;        /* of a session */
    uint32_t buffers;       /* of a session */
};

struct mokd_user_config {
    uid_t uid;
    struct mokd_limits limits; /* complete: defaults are filled in */
    uint32_t given;            /* which of them the file says; of use to the parser alone */
    char name[MOK_MAX_NAME + 1];
};

struct mokd_device_config {
    char name[MOK_MAX_NAME + 1];
    uint32_t kind;    /* enum mok_device_kind */
    uint32_t threads; /* host: at least 1. cuda: thread blocks of a kernel at most; 0: one an SM */
    uint64_t memory;  /* bytes that mokd may hand out */
    uint32_t cuda;    /* cuda: which GPU, in PCI order; several devices may share one */
    uint32_t chaos_delay_us;
};

/* How workers and clients share a GPU. */
enum mokd_sharing {
    MOKD_SHARING_SLICES = 0, /* in turns: nobody notices another's fault; a hand-over between kernels costs a slice */
    MOKD_SHARING_MPS = 1,    /* at once, through an MPS control daemon; a fault of one ends all on that GPU */
};

struct mokd_config {
    char socket[MOKD_PATH_MAX]; /* "": MOKD_SOCKET_NAME in the runtime directory */
    char worker[MOKD_PATH_MAX]; /* "": found beside mokd */
    uint32_t socket_mode;
    enum mok_log_level log_level;
    uint32_t poll_us;
    uint32_t sharing;              /* enum mokd_sharing, of all GPUs */
    char mps_pipe[MOKD_PATH_MAX];  /* mps: directory of the control daemon */
    char metrics_listen[MOKD_PATH_MAX]; /* endpoint.h; "": off */
    uint32_t metrics_mode;              /* of a Unix socket */
    struct mokd_limits limits;
    struct mokd_user_config *users;
    size_t n_users;
    struct mokd_device_config *devices;
    size_t n_devices;
};

/* Takes one sentence: "file:line: [section] key = value: what is wrong, and the bound". */
typedef void (*mokd_config_report)(void *cookie, const char *sentence);

/*
 * Reads `path` and reports every error in it. 0 and *ret (release with mokd_config_release), or -MOK_EARG once
 * everything wrong has been reported; -MOK_ENOENT, -MOK_EACCESS, -MOK_EIO with one report when it cannot be read.
 */
int mokd_config_load(const char *path, mokd_config_report report, void *cookie, struct mokd_config *ret);
void mokd_config_release(struct mokd_config *config);

/* The limits that hold for a user. */
const struct mokd_limits *mokd_config_limits(const struct mokd_config *config, uid_t uid);

/* "512", "64K", "2M", "3G", "1T" to bytes; -MOK_EARG for anything else, -MOK_ERANGE beyond 64 bits. */
int mokd_parse_size(const char *text, uint64_t *ret);

#endif
