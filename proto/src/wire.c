/* SPDX-License-Identifier: Apache-2.0 */
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "mok/types.h"
#include "packed_text.h"
#include "util.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

struct mok_wire_packet {
    struct mok_wire_packet *next;
    size_t size;
    size_t count;
    int *fds;        /* behind the bytes */
    uint8_t bytes[]; /* `size` of them */
};

/* ------------------------------------------------------------------ descriptors */

void mok_wire_fds_close(struct mok_wire_fds *fds)
{
    for (size_t i = 0; i < fds->count; i++)
        fds->fd[i] = mok_close(fds->fd[i]);
    fds->count = 0;
}

int mok_wire_fds_take(struct mok_wire_fds *fds, size_t index)
{
    return index < fds->count ? mok_take_fd(&fds->fd[index]) : -1;
}

int mok_wire_fds_expect(struct mok_wire_fds *fds, size_t count)
{
    if (fds->count == count)
        return 0;
    mok_wire_fds_close(fds);
    return -MOK_EPROTO;
}

/* ------------------------------------------------------------------ sending */

union control_space {
    struct cmsghdr align;
    uint8_t bytes[CMSG_SPACE(sizeof(int) * MOK_WIRE_MAX_FDS)];
};

static int send_error(int error)
{
    switch (error) {
    case EAGAIN:
        return -MOK_EAGAIN;
    case EMSGSIZE:
        return -MOK_ESIZE;
    case ETOOMANYREFS:
    case EMFILE:
    case ENFILE:
        return -MOK_EFDS;
    case EPIPE:
    case ECONNRESET:
    case ENOTCONN:
        return -MOK_EDAEMON;
    case ENOMEM:
    case ENOBUFS:
        return -MOK_ENOMEM;
    }
    return -MOK_EIO;
}

static int send_bytes(int fd, const void *bytes, size_t size, const int *fds, size_t count)
{
    union control_space control;
    struct iovec part = { .iov_base = (void *)bytes, .iov_len = size };
    struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1 };

    if (count > 0) {
        memset(&control, 0, CMSG_SPACE(sizeof(int) * count));
        header.msg_control = control.bytes;
        header.msg_controllen = CMSG_SPACE(sizeof(int) * count);
        struct cmsghdr *rights = &control.align;
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int) * count);
        memcpy(CMSG_DATA(rights), fds, sizeof(int) * count);
    }

    ssize_t sent;
    do
        sent = sendmsg(fd, &header, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? send_error(errno) : 0;
}

/* An empty packet reads as end of file, so a message that packs to nothing must not be sent. */
static int packed_size(const ProtobufCMessage *message, size_t count, size_t *ret_size)
{
    if (count > MOK_WIRE_MAX_FDS)
        return -MOK_ERANGE;
    size_t size = protobuf_c_message_get_packed_size(message);
    if (size == 0 || size > MOK_WIRE_MAX_BYTES)
        return -MOK_ESIZE;
    *ret_size = size;
    return 0;
}

int mok_wire_send(int fd, const ProtobufCMessage *message, const int *fds, size_t count)
{
    _cleanup_free_ uint8_t *bytes = NULL;
    size_t size;

    int r = packed_size(message, count, &size);
    if (r < 0)
        return r;
    bytes = malloc(size);
    if (!bytes)
        return -MOK_ENOMEM;
    protobuf_c_message_pack(message, bytes);
    return send_bytes(fd, bytes, size, fds, count);
}

/* ------------------------------------------------------------------ receiving */

/* Counts every byte that unpacking ever asks for, so that a message cannot buy time by freeing. */
struct budget {
    size_t left;
    bool no_memory;
};

static void *budget_alloc(void *data, size_t size)
{
    struct budget *budget = data;
    if (size > budget->left)
        return NULL;
    budget->left -= size;
    void *memory = malloc(size ? size : 1);
    budget->no_memory |= !memory;
    return memory;
}

static void budget_free(void *data, void *memory)
{
    (void)data;
    free(memory);
}

static void strip(ProtobufCMessage *message);

static void strip_field(ProtobufCMessage *message, const ProtobufCFieldDescriptor *field)
{
    char *member = (char *)message + field->offset;

    if (field->type != PROTOBUF_C_TYPE_MESSAGE)
        return;
    if (field->label == PROTOBUF_C_LABEL_REPEATED) {
        size_t count = *(size_t *)(void *)((char *)message + field->quantifier_offset);
        for (size_t i = 0; i < count; i++)
            strip((*(ProtobufCMessage ***)(void *)member)[i]);
        return;
    }
    bool chosen = !(field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) ||
                  *(uint32_t *)(void *)((char *)message + field->quantifier_offset) == field->id;
    if (chosen && *(ProtobufCMessage **)(void *)member)
        strip(*(ProtobufCMessage **)(void *)member);
}

/* A newer peer's fields are ignored, not kept: what is passed on must be what was checked. */
static void strip(ProtobufCMessage *message)
{
    for (unsigned i = 0; i < message->n_unknown_fields; i++)
        free(message->unknown_fields[i].data);
    free(message->unknown_fields);
    message->n_unknown_fields = 0;
    message->unknown_fields = NULL;
    for (unsigned i = 0; i < message->descriptor->n_fields; i++)
        strip_field(message, &message->descriptor->fields[i]);
}

int mok_wire_unpack(const ProtobufCMessageDescriptor *type, const void *bytes, size_t size,
                    ProtobufCMessage **ret_message)
{
    if (size > MOK_WIRE_MAX_BYTES)
        return -MOK_EPROTO;
    return mok_wire_unpack_within(type, bytes, size, MOK_WIRE_MAX_UNPACKED, ret_message);
}

int mok_wire_unpack_within(const ProtobufCMessageDescriptor *type, const void *bytes, size_t size, size_t limit,
                           ProtobufCMessage **ret_message)
{
    struct budget budget = { .left = limit };
    ProtobufCAllocator allocator = { .alloc = budget_alloc, .free = budget_free, .allocator_data = &budget };
    _cleanup_free_ uint8_t *mended = NULL;

    if (memchr(bytes, 0, size)) {
        mended = malloc(size);
        if (!mended)
            return -MOK_ENOMEM;
        memcpy(mended, bytes, size);
        mok_packed_text_mend(type, mended, size);
        bytes = mended;
    }
    ProtobufCMessage *message = protobuf_c_message_unpack(type, &allocator, size, bytes);
    if (!message)
        return budget.no_memory ? -MOK_ENOMEM : -MOK_EPROTO;
    strip(message);
    *ret_message = message;
    return 0;
}

void mok_wire_free(ProtobufCMessage *message)
{
    if (message)
        protobuf_c_message_free_unpacked(message, NULL);
}

static int recv_error(int error)
{
    switch (error) {
    case EAGAIN:
        return -MOK_EAGAIN;
    case ECONNRESET: /* closed with our packets unread: gone all the same */
    case EPIPE:
    case ENOTCONN:
        return 0;
    case ENOMEM:
    case ENOBUFS:
        return -MOK_ENOMEM;
    }
    return -MOK_EIO;
}

static void collect_fds(struct msghdr *header, struct mok_wire_fds *fds)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS || c->cmsg_len < CMSG_LEN(0))
            continue;
        size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
            if (fds->count < MOK_WIRE_MAX_FDS)
                fds->fd[fds->count++] = fd;
            else
                mok_close(fd);
        }
    }
}

int mok_wire_recv_lossy(int fd, const ProtobufCMessageDescriptor *type, ProtobufCMessage **ret_message,
                        struct mok_wire_fds *ret_fds)
{
    _cleanup_wire_fds_ struct mok_wire_fds fds = MOK_WIRE_FDS_INIT;
    _cleanup_free_ uint8_t *bytes = malloc(MOK_WIRE_MAX_BYTES);
    union control_space control;

    if (!bytes)
        return -MOK_ENOMEM;
    struct iovec part = { .iov_base = bytes, .iov_len = MOK_WIRE_MAX_BYTES };
    struct msghdr header = {
        .msg_iov = &part,
        .msg_iovlen = 1,
        .msg_control = ret_fds ? control.bytes : NULL,
        .msg_controllen = ret_fds ? sizeof(control.bytes) : 0,
    };
    ssize_t size;
    do
        size = recvmsg(fd, &header, MSG_CMSG_CLOEXEC);
    while (size < 0 && errno == EINTR);
    if (size < 0)
        return recv_error(errno);

    collect_fds(&header, &fds);
    bool lost = header.msg_flags & MSG_CTRUNC;
    if ((lost && !ret_fds) || (header.msg_flags & MSG_TRUNC))
        return -MOK_EPROTO;
    if (size == 0)
        return fds.count > 0 || lost ? -MOK_EPROTO : 0;

    int r = mok_wire_unpack(type, bytes, (size_t)size, ret_message);
    if (r < 0)
        return lost ? -MOK_EFDS : r;
    if (ret_fds && !lost) {
        *ret_fds = fds;
        fds.count = 0;
    }
    return lost ? 2 : 1;
}

int mok_wire_recv(int fd, const ProtobufCMessageDescriptor *type, ProtobufCMessage **ret_message,
                  struct mok_wire_fds *ret_fds)
{
    ProtobufCMessage *message = NULL;

    int r = mok_wire_recv_lossy(fd, type, &message, ret_fds);
    if (r == 2) {
        mok_wire_free(message);
        return -MOK_EFDS;
    }
    if (r == 1)
        *ret_message = message;
    return r;
}

/* ------------------------------------------------------------------ waiting messages */

static void packet_free(struct mok_wire_packet *packet)
{
    for (size_t i = 0; i < packet->count; i++)
        mok_close(packet->fds[i]);
    free(packet);
}

static int packet_new(const ProtobufCMessage *message, const int *fds, size_t count, size_t size,
                      struct mok_wire_packet **ret_packet)
{
    size_t fds_at = (size + sizeof(int) - 1) / sizeof(int) * sizeof(int);
    struct mok_wire_packet *packet = malloc(sizeof(*packet) + fds_at + count * sizeof(int));

    if (!packet)
        return -MOK_ENOMEM;
    packet->next = NULL;
    packet->size = size;
    packet->count = 0;
    packet->fds = (int *)(void *)(packet->bytes + fds_at);
    protobuf_c_message_pack(message, packet->bytes);
    for (size_t i = 0; i < count; i++) {
        int copy = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);
        if (copy < 0) {
            int r = errno == EMFILE || errno == ENFILE ? -MOK_EFDS : -MOK_EIO;
            packet_free(packet);
            return r;
        }
        packet->fds[packet->count++] = copy;
    }
    *ret_packet = packet;
    return 0;
}

static int queue_push(struct mok_wire_queue *queue, const ProtobufCMessage *message, const int *fds, size_t count)
{
    struct mok_wire_packet *packet;
    size_t size;

    int r = packed_size(message, count, &size);
    if (r < 0)
        return r;
    if (queue->max_bytes > 0 && (queue->bytes > queue->max_bytes || size > queue->max_bytes - queue->bytes))
        return -MOK_EQUOTA;
    if (queue->max_fds > 0 && count > 0 && (queue->fds > queue->max_fds || count > queue->max_fds - queue->fds))
        return -MOK_EQUOTA;
    r = packet_new(message, fds, count, size, &packet);
    if (r < 0)
        return r;
    if (queue->last)
        queue->last->next = packet;
    else
        queue->first = packet;
    queue->last = packet;
    queue->bytes += size;
    queue->fds += packet->count;
    queue->packets++;
    return 1;
}

static void queue_pop(struct mok_wire_queue *queue)
{
    struct mok_wire_packet *packet = queue->first;

    queue->first = packet->next;
    if (!queue->first)
        queue->last = NULL;
    queue->bytes -= packet->size;
    queue->fds -= packet->count;
    queue->packets--;
    packet_free(packet);
}

int mok_wire_queue_send(struct mok_wire_queue *queue, int fd, const ProtobufCMessage *message, const int *fds,
                        size_t count)
{
    if (!queue->first) {
        int r = mok_wire_send(fd, message, fds, count);
        if (r != -MOK_EAGAIN)
            return r;
    }
    return queue_push(queue, message, fds, count);
}

int mok_wire_queue_flush(struct mok_wire_queue *queue, int fd)
{
    while (queue->first) {
        struct mok_wire_packet *packet = queue->first;
        int r = send_bytes(fd, packet->bytes, packet->size, packet->fds, packet->count);
        if (r == -MOK_EAGAIN)
            return 1;
        if (r < 0)
            return r;
        queue_pop(queue);
    }
    return 0;
}

void mok_wire_queue_drop(struct mok_wire_queue *queue)
{
    if (queue->first)
        queue_pop(queue);
}

void mok_wire_queue_clear(struct mok_wire_queue *queue)
{
    while (queue->first)
        queue_pop(queue);
}

/* ------------------------------------------------------------------ the other end */

static int pidfd_error(int error)
{
    switch (error) {
    case EMFILE:
    case ENFILE:
        return -MOK_EFDS;
    case ESRCH:
    case EINVAL:
    case ENODATA:
        return -MOK_EDAEMON;
    }
    return -MOK_EIO;
}

/* Kernels before 6.5: the pid may have been reused, unless the connection still stands after the look. */
static int pidfd_from_pid(int fd, pid_t pid, int *ret_pidfd)
{
    _cleanup_fd_ int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (pidfd < 0)
        return pidfd_error(errno);
    struct pollfd look = { .fd = fd, .events = 0 };
    if (poll(&look, 1, 0) < 0)
        return -MOK_EIO;
    if (look.revents & (POLLHUP | POLLERR | POLLNVAL))
        return -MOK_EDAEMON;
    *ret_pidfd = mok_take_fd(&pidfd);
    return 0;
}

int mok_wire_peer_query(int fd, struct mok_wire_peer *ret_peer)
{
    struct ucred ucred;
    socklen_t size = sizeof(ucred);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &ucred, &size) < 0)
        return -MOK_EIO;

    int pidfd = -1;
    size = sizeof(pidfd);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) < 0) {
        if (errno != ENOPROTOOPT)
            return pidfd_error(errno);
        int r = pidfd_from_pid(fd, ucred.pid, &pidfd);
        if (r < 0)
            return r;
    }
    *ret_peer = (struct mok_wire_peer){ .pid = ucred.pid, .uid = ucred.uid, .gid = ucred.gid, .pidfd = pidfd };
    return 0;
}
