/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that is charged to a user and a device before it exists, and given back after it is really gone.
 * Filling and freeing take as long as they take, in work threads, or at the worker where only that can make a device's
 * memory; frees share one thread, so that they never keep an allocation waiting.
 */
#ifndef MOKD_STORAGE_H
#define MOKD_STORAGE_H

#include "device.h"
#include "error.h"
#include "usage.h"
#include "user.h"

#define MOKD_FABRIC_BYTES 64u /* of a fabric handle: kernels/engine.h, group_node.h */

struct mokd_storage {
    TAILQ_ENTRY(mokd_storage) link;
    struct mokd_user *user;
    struct mokd_device *device;
    struct mokd_usage_row *usage;
    uint64_t bytes;
    int fd;          /* -1 until filled */
    bool fabric;     /* to be filled with memory that other hosts can map too, by the handle: set before that */
    uint8_t handle[MOKD_FABRIC_BYTES];
    uint64_t number; /* in the service manager's store; 0: not there */
    bool left_behind; /* mokd ends, and the next one has it: what is in it stays */
};

/*
 * To the session's user: -MOK_EQUOTA (his bytes), -MOK_ENOMEM (the device's memory), -MOK_EDEVICE, with the sentence.
 */
int mokd_storage_charge(struct mokd_session *session, struct mokd_device *device, uint64_t bytes,
                        struct mokd_storage **ret, struct mokd_error *error);

/*
 * Creates the memory of all `count` entries, then calls done(cookie, error) on the loop; error->code 0: all are there.
 * The list (count > 0, all of one user) is copied, the entries must stay. A negative return: not started, done is never
 * called.
 */
typedef void (*mokd_storage_filled)(void *cookie, const struct mokd_error *error);
int mokd_storage_fill(struct mokd_storage *const *list, size_t count, mokd_storage_filled done, void *cookie);

/*
 * Memory that the mokd before has left: charged, whatever the limits say now, and taken over with its descriptor. NULL:
 * out of memory, and the descriptor is still the caller's.
 */
struct mokd_storage *mokd_storage_adopt(struct mokd_session *session, struct mokd_device *device, uint64_t bytes,
                                        int fd, uint64_t number);
/* Leaves it to the next mokd as well; -MOK_EFDS: it will not know it. */
int mokd_storage_keep(struct mokd_storage *storage);

/* Takes the storage over: closes its descriptor in a work thread, then ends the charge. NULL is fine. */
void mokd_storage_release(struct mokd_storage *storage);

int mokd_storage_start(struct mokd_server *server);
void mokd_storage_stop(struct mokd_server *server); /* once the loop has ended */

#endif
