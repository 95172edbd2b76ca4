/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What can be known to be wrong with an argument before anything is sent. Each failure is a code and a sentence with
 * argument, value and bound. Looks at what it is given alone: no session, no socket. The worker checks again.
 */
#ifndef MOK_CLIENT_CHECK_H
#define MOK_CLIENT_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "control.pb-c.h"
#include "mok/mok.h"
#include "mok/ring_abi.h"

/*
 * Copies a caller's options, which begin with their size, into `ret` of `known` bytes; what the caller does not have
 * reads as zero. -MOK_EARG: NULL; -MOK_ESIZE: less than `needed` bytes, or bytes that this library does not know are
 * not zero.
 */
int check_options(void *ret, size_t known, size_t needed, const void *from, const char *type);
/* Bytes up to the end of `member`: what a caller must at least have. */
#define CHECK_THROUGH(type, member) (offsetof(type, member) + sizeof(((type *)0)->member))

int check_name(const char *what, const char *name);
int check_session_options(const mok_session_options *from, mok_session_options *ret);
int check_group_options(const mok_group_options *from, mok_group_options *ret);
int check_layer_options(const mok_layer_options *from, uint32_t ranks, Mok__LayerSpec *ret);

/* What a region must be. */
struct check_view {
    const char *name;
    const mok_view *view;
    uint64_t bytes; /* what is read or written of it at least */
    uint64_t most;  /* what is passed on of it at most; 0: as `bytes` */
    bool required;  /* an absent one is refused, unless bytes is 0 */
    bool written;   /* must overlap no other */
    bool symmetric; /* must be of a symmetric buffer */
};

/* Who uses the views. Opaque to this file but for comparing. */
struct check_place {
    const mok_session *session;
    const mok_group *group;
    uint32_t device;
};

/* Facts of a buffer, from buffer.c. */
struct check_buffer {
    uint32_t id;
    uint64_t bytes;
    struct check_place place; /* group: NULL for a private one */
};
struct check_buffer buffer_facts(const mok_buffer *buffer);

/* Checks `count` views and that written ones overlap none. Fills in regions; absent ones become zeros. */
int check_views(const struct check_place *place, const struct check_view *views, size_t count,
                struct mok_region *ret_regions);

#endif
