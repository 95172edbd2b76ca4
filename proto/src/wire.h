/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Codec of the control sockets: one protobuf-c message a SOCK_SEQPACKET packet, descriptors beside it.
 * Trusts nothing that arrives: sizes are capped, allocations are capped, and a descriptor that arrives is either
 * handed to the caller or closed. Never logs, never waits unless the socket itself is blocking.
 */
#ifndef MOK_WIRE_H
#define MOK_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <protobuf-c/protobuf-c.h>

#include "mok/types.h"

#define MOK_WIRE_MAX_BYTES 65536u             /* of a packed message */
#define MOK_WIRE_MAX_FDS 253u                 /* of a packet; what Linux carries */
#define MOK_WIRE_MAX_UNPACKED (1024u * 1024u) /* memory that unpacking one message may take */

/* Bits of Hello's features, which both sides must have. */
#define MOK_FEATURE_RESUME (UINT64_C(1) << 0)    /* sessions that go on with the next mokd */
#define MOK_FEATURE_GRADIENTS (UINT64_C(1) << 1) /* LayerSpec.gradient_dtype */
#define MOK_FEATURE_WGRAD (UINT64_C(1) << 2)     /* LayerSpec.wgrad_precision */
#define MOK_FEATURE_TRANSPOSED (UINT64_C(1) << 3) /* LayerSpec.transposed_weights */

/* LayerSpec.wgrad_precision of what was asked for, an enum mok_wgrad or 0: whoever does not say gets what is faster. */
static inline uint32_t mok_wire_wgrad(uint32_t asked, uint32_t precision)
{
    if (asked == 0 && precision == MOK_MXFP8_PER128)
        return MOK_WGRAD_MXFP8;
    return asked == MOK_WGRAD_BF16 ? 0 : asked; /* one way to say it */
}

/* Descriptors that came with a message. Whatever is still in here when it is closed, is closed. */
struct mok_wire_fds {
    size_t count;
    int fd[MOK_WIRE_MAX_FDS]; /* -1 once taken */
};
#define MOK_WIRE_FDS_INIT                                                                                              \
    {                                                                                                                  \
        .count = 0                                                                                                     \
    }

void mok_wire_fds_close(struct mok_wire_fds *fds);
#define _cleanup_wire_fds_ __attribute__((cleanup(mok_wire_fds_close)))
/* Moves descriptor `index` to the caller; -1 when there is none. */
int mok_wire_fds_take(struct mok_wire_fds *fds, size_t index);
/* 0 when exactly `count` came; otherwise closes all of them and returns -MOK_EPROTO. */
int mok_wire_fds_expect(struct mok_wire_fds *fds, size_t count);

/*
 * Sends one message. The caller keeps the descriptors. Blocks only if the socket does.
 * -MOK_EAGAIN: no room in the socket, nothing was sent; -MOK_ESIZE: packs to more than MOK_WIRE_MAX_BYTES or the
 * socket's send buffer; -MOK_ERANGE: more than MOK_WIRE_MAX_FDS; -MOK_EFDS: too many descriptors in flight;
 * -MOK_EDAEMON: the other end is gone; -MOK_ENOMEM; -MOK_EIO.
 */
int mok_wire_send(int fd, const ProtobufCMessage *message, const int *fds, size_t count);

/*
 * Receives one message. 1: *ret_message (free with mok_wire_free) and *ret_fds are set, descriptors close-on-exec;
 * 0: the other end is gone. With ret_fds NULL the message must not carry descriptors, and none ever gets in.
 * -MOK_EAGAIN: nothing there (non-blocking socket); -MOK_EPROTO: truncated, oversized, malformed or too costly to
 * unpack; -MOK_EFDS: descriptors were lost at the descriptor limit, those that arrived are closed; -MOK_ENOMEM;
 * -MOK_EIO. After any error but -MOK_EAGAIN the connection is to be closed.
 */
int mok_wire_recv(int fd, const ProtobufCMessageDescriptor *type, ProtobufCMessage **ret_message,
                  struct mok_wire_fds *ret_fds);
/*
 * As mok_wire_recv, for who wants to know whose descriptors were lost: 2 when they were, with *ret_message set and
 * *ret_fds untouched; the connection can go on.
 */
int mok_wire_recv_lossy(int fd, const ProtobufCMessageDescriptor *type, ProtobufCMessage **ret_message,
                        struct mok_wire_fds *ret_fds);
void mok_wire_free(ProtobufCMessage *message); /* NULL is fine */

/*
 * The part of receiving that has no socket. Fields that this version does not know are dropped, and a NUL inside a text
 * is DEL, so that no text is taken for what stands before it. -MOK_EPROTO, -MOK_ENOMEM.
 */
int mok_wire_unpack(const ProtobufCMessageDescriptor *type, const void *bytes, size_t size,
                    ProtobufCMessage **ret_message);
/* The same for bytes that came another way, of any size; unpacking may take `budget` bytes. */
int mok_wire_unpack_within(const ProtobufCMessageDescriptor *type, const void *bytes, size_t size, size_t budget,
                           ProtobufCMessage **ret_message);

/*
 * Messages that wait until a non-blocking socket takes them, in order. Holds duplicates of their descriptors.
 * Zero-initialised is empty. `max_bytes` bounds the packed bytes that wait, `max_fds` the descriptors; 0: no bound.
 */
struct mok_wire_packet;
struct mok_wire_queue {
    struct mok_wire_packet *first, *last;
    size_t bytes;
    size_t packets;
    size_t fds;
    size_t max_bytes;
    size_t max_fds;
};

/*
 * Sends now if nothing waits and the socket takes it, else appends. 0: sent; 1: something waits, so watch the socket
 * for writability; -MOK_EQUOTA: would exceed a bound (the other end does not read); else as mok_wire_send, and
 * -MOK_EFDS when the descriptors cannot be duplicated. An error leaves the queue as it was.
 */
int mok_wire_queue_send(struct mok_wire_queue *queue, int fd, const ProtobufCMessage *message, const int *fds,
                        size_t count);
/* Call when the socket is writable. 0: nothing waits any more; 1: something does; else as mok_wire_send. */
int mok_wire_queue_flush(struct mok_wire_queue *queue, int fd);
/* Drops the message that waits longest. */
void mok_wire_queue_drop(struct mok_wire_queue *queue);
/* Drops what waits and closes the duplicates. */
void mok_wire_queue_clear(struct mok_wire_queue *queue);

/* Who is at the other end of a connected Unix socket, as the kernel knows it. */
struct mok_wire_peer {
    pid_t pid;
    uid_t uid;
    gid_t gid;
    int pidfd; /* close-on-exec; the caller closes it */
};

/* -MOK_EDAEMON: it is gone already; -MOK_EFDS; -MOK_EIO. */
int mok_wire_peer_query(int fd, struct mok_wire_peer *ret_peer);

#endif
