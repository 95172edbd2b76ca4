/* SPDX-License-Identifier: Apache-2.0 */
#include "host_link.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "rack/group_node.h"

#define BACKLOG 128
#define READ_BATCH 64
#define NOBODY UINT32_MAX
/* Connections that have not shown who they are. */
#define MAX_STRANGERS 32u
#define GREETING_NS UINT64_C(5000000000)
/* What waits for a peer that does not read; beyond that it is no peer any more. */
#define MAX_UNREAD_BYTES (4u << 20)
#define MAX_UNREAD_FDS 1024u

struct offer {
    bool made;
    char name[MOK_MAX_NAME + 1];
    uint8_t token[HOST_TOKEN_BYTES];
};

/*
 *   STRANGER --gives the token--> UP    (who connected to us)
 *   GREETING --is welcomed-----> UP     (whom we connected to)
 */
struct connection {
    TAILQ_ENTRY(connection) link;
    struct mokd_host_links *links;
    enum { STRANGER, GREETING, UP, GONE } state;
    uint32_t node;
    bool ending; /* we have said goodbye: how it ends is nobody's news */
    int fd;
    uint64_t since_ns;
    uv_poll_t poll;
    struct mok_wire_queue out;
};

struct mokd_host_links {
    struct mokd_server *server;
    const struct mokd_host_handlers *handlers; /* NULL: being freed */
    void *cookie;
    char path[MOKD_PATH_MAX];
    char self[MOK_MAX_NAME + 1];
    int fd;
    uv_poll_t poll;
    unsigned open_handles, strangers;
    struct offer offer[GROUP_MAX_NODES];
    struct connection *up[GROUP_MAX_NODES];
    TAILQ_HEAD(, connection) connections;
};

static void release(struct mokd_host_links *links)
{
    if (--links->open_handles == 0)
        free(links);
}

/* ------------------------------------------------------------------ a connection's end */

static void connection_closed(uv_handle_t *handle)
{
    struct connection *connection = handle->data;
    struct mokd_host_links *links = connection->links;

    mok_wire_queue_clear(&connection->out);
    free(connection);
    release(links);
}

/* Nobody is told. */
static void connection_close(struct connection *connection)
{
    struct mokd_host_links *links = connection->links;

    if (connection->state == UP)
        links->up[connection->node] = NULL;
    links->strangers -= connection->state == STRANGER;
    connection->state = GONE;
    TAILQ_REMOVE(&links->connections, connection, link);
    uv_poll_stop(&connection->poll);
    uv_close((uv_handle_t *)&connection->poll, connection_closed);
    connection->fd = mok_close(connection->fd);
}

static void connection_end(struct connection *connection, const char *reason)
{
    struct mokd_host_links *links = connection->links;
    bool was_up = connection->state == UP;

    if (connection->state == GONE)
        return;
    connection_close(connection);
    if (was_up && !connection->ending && links->handlers)
        links->handlers->down(links->cookie, connection->node, reason);
}

/* ------------------------------------------------------------------ sending */

static void on_ready(uv_poll_t *poll, int status, int events);

static void watch(struct connection *connection, bool writable)
{
    uv_poll_start(&connection->poll, UV_READABLE | UV_DISCONNECT | (writable ? UV_WRITABLE : 0), on_ready);
}

static int transmit(struct connection *connection, const Mok__HandlePacket *packet, const int *fds, size_t count)
{
    int r = mok_wire_queue_send(&connection->out, connection->fd, &packet->base, fds, count);

    if (r > 0)
        watch(connection, true);
    return r < 0 ? r : 0;
}

int mokd_host_hand(struct mokd_host_links *links, uint32_t node, const Mok__Handle *handle, int fd)
{
    Mok__HandlePacket packet = MOK__HANDLE_PACKET__INIT;

    if (!mokd_host_is_linked(links, node))
        return -MOK_EPEER;
    packet.body_case = MOK__HANDLE_PACKET__BODY_HANDLE;
    packet.handle = (Mok__Handle *)handle;
    return transmit(links->up[node], &packet, &fd, 1);
}

void mokd_host_goodbye(struct mokd_host_links *links, uint32_t node, Mok__GoodbyeReason reason)
{
    Mok__HandlePacket packet = MOK__HANDLE_PACKET__INIT;
    Mok__HandleGoodbye body = MOK__HANDLE_GOODBYE__INIT;

    if (!mokd_host_is_linked(links, node) || links->up[node]->ending)
        return;
    body.reason = reason;
    packet.body_case = MOK__HANDLE_PACKET__BODY_GOODBYE;
    packet.goodbye = &body;
    transmit(links->up[node], &packet, NULL, 0);
    links->up[node]->ending = true;
}

/* ------------------------------------------------------------------ getting to know each other */

/* Only root, and who we are ourselves, may hand us memory. */
static bool is_trusted(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof(peer);

    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && (peer.uid == 0 || peer.uid == geteuid());
}

static void become_up(struct connection *connection, uint32_t node)
{
    struct mokd_host_links *links = connection->links;

    if (links->up[node])
        connection_end(links->up[node], "another link took its place");
    links->strangers -= connection->state == STRANGER;
    connection->state = UP;
    connection->node = node;
    links->up[node] = connection;
    links->handlers->up(links->cookie, node);
}

/* Takes the time it takes whatever the token is. */
static bool same_token(const uint8_t *a, const uint8_t *b)
{
    volatile uint8_t differs = 0;

    for (size_t i = 0; i < HOST_TOKEN_BYTES; i++)
        differs |= a[i] ^ b[i];
    return differs == 0;
}

static void greeted(struct connection *connection, const Mok__HandleHello *hello)
{
    struct mokd_host_links *links = connection->links;
    Mok__HandlePacket packet = MOK__HANDLE_PACKET__INIT;
    Mok__HandleWelcome welcome = MOK__HANDLE_WELCOME__INIT;

    for (uint32_t node = 0; node < GROUP_MAX_NODES; node++) {
        struct offer *offer = &links->offer[node];
        if (!offer->made || strcmp(offer->name, hello->node) != 0 || hello->token.len != HOST_TOKEN_BYTES ||
            !same_token(offer->token, hello->token.data))
            continue;
        packet.body_case = MOK__HANDLE_PACKET__BODY_WELCOME;
        packet.welcome = &welcome;
        if (transmit(connection, &packet, NULL, 0) < 0)
            break;
        become_up(connection, node);
        return;
    }
    connection_end(connection, "wrong token");
}

/* ------------------------------------------------------------------ receiving */

static void take_handle(struct connection *connection, const Mok__Handle *handle, struct mok_wire_fds *fds)
{
    struct mokd_host_links *links = connection->links;

    if (fds->count != 1) {
        connection_end(connection, "sent a handle without its descriptor");
        return;
    }
    links->handlers->handle(links->cookie, connection->node, handle, mok_wire_fds_take(fds, 0));
}

static void take_goodbye(struct connection *connection, const Mok__HandleGoodbye *goodbye)
{
    struct mokd_host_links *links = connection->links;

    connection_close(connection);
    if (!connection->ending)
        links->handlers->left(links->cookie, connection->node, (Mok__GoodbyeReason)goodbye->reason);
}

static void take_packet(struct connection *connection, const Mok__HandlePacket *packet, struct mok_wire_fds *fds)
{
    if (connection->state == STRANGER && packet->body_case == MOK__HANDLE_PACKET__BODY_HELLO)
        greeted(connection, packet->hello);
    else if (connection->state == GREETING && packet->body_case == MOK__HANDLE_PACKET__BODY_WELCOME)
        become_up(connection, connection->node);
    else if (connection->state == UP && packet->body_case == MOK__HANDLE_PACKET__BODY_HANDLE)
        take_handle(connection, packet->handle, fds);
    else if (connection->state == UP && packet->body_case == MOK__HANDLE_PACKET__BODY_GOODBYE)
        take_goodbye(connection, packet->goodbye);
    else
        connection_end(connection, "sent what has no place here");
}

/*
 * A peer that closes what it has not read makes the kernel say so once, before what the peer has sent: its last word is
 * behind that.
 */
static int receive(struct connection *connection, ProtobufCMessage **ret, struct mok_wire_fds *fds)
{
    int r = mok_wire_recv(connection->fd, &mok__handle_packet__descriptor, ret, fds);

    return r == 0 ? mok_wire_recv(connection->fd, &mok__handle_packet__descriptor, ret, fds) : r;
}

static bool read_one(struct connection *connection)
{
    _cleanup_wire_fds_ struct mok_wire_fds fds = MOK_WIRE_FDS_INIT;
    bool known = connection->state == UP; /* others get no descriptor in */
    ProtobufCMessage *message = NULL;
    int r = receive(connection, &message, known ? &fds : NULL);

    if (r == -MOK_EAGAIN)
        return false;
    if (r <= 0) {
        connection_end(connection, r == 0 ? "its daemon closed the link" : "the link is unusable");
        return false;
    }
    take_packet(connection, (const Mok__HandlePacket *)message, &fds);
    mok_wire_free(message);
    return connection->state != GONE;
}

static void on_ready(uv_poll_t *poll, int status, int events)
{
    struct connection *connection = poll->data;

    if (status < 0) { /* libuv watches it no more: all that is there is read now */
        while (read_one(connection))
            ;
        connection_end(connection, "its daemon closed the link");
        return;
    }
    if (events & UV_WRITABLE) {
        int r = mok_wire_queue_flush(&connection->out, connection->fd);
        if (r < 0) {
            connection_end(connection, "the link cannot be written to");
            return;
        }
        watch(connection, r > 0);
    }
    for (int i = 0; i < READ_BATCH; i++)
        if (!read_one(connection))
            break;
}

/* Takes the descriptor. */
static struct connection *connection_new(struct mokd_host_links *links, int fd, uint32_t node)
{
    struct connection *connection = calloc(1, sizeof(*connection));

    if (!connection || uv_poll_init(&links->server->loop, &connection->poll, fd) < 0) {
        free(connection);
        mok_close(fd);
        return NULL;
    }
    links->open_handles++;
    connection->links = links;
    connection->node = node;
    connection->fd = fd;
    connection->since_ns = mok_now_ns();
    connection->out.max_bytes = MAX_UNREAD_BYTES;
    connection->out.max_fds = MAX_UNREAD_FDS;
    connection->poll.data = connection;
    connection->state = node == NOBODY ? STRANGER : GREETING;
    links->strangers += node == NOBODY;
    TAILQ_INSERT_TAIL(&links->connections, connection, link);
    watch(connection, false);
    return connection;
}

/* ------------------------------------------------------------------ who connects to us */

/* Those who do not say who they are make room for others. */
static void drop_silent(struct mokd_host_links *links)
{
    struct connection *connection, *next;
    uint64_t now = mok_now_ns();

    for (connection = TAILQ_FIRST(&links->connections); connection; connection = next) {
        next = TAILQ_NEXT(connection, link);
        if (connection->state != UP && now - connection->since_ns > GREETING_NS)
            connection_end(connection, "did not say who it is");
    }
}

static void on_connection(uv_poll_t *poll, int status, int events)
{
    struct mokd_host_links *links = poll->data;

    (void)events;
    if (status < 0)
        return;
    drop_silent(links);
    int fd = accept4(links->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return;
    if (!is_trusted(fd) || links->strangers >= MAX_STRANGERS)
        mok_close(fd);
    else
        connection_new(links, fd, NOBODY);
}

void mokd_host_offer(struct mokd_host_links *links, uint32_t node, const char *name, const char **ret_path,
                     uint8_t ret_token[static HOST_TOKEN_BYTES])
{
    struct offer *offer = &links->offer[node];

    snprintf(offer->name, sizeof(offer->name), "%s", name);
    if (!offer->made)
        offer->made = getrandom(offer->token, sizeof(offer->token), 0) == sizeof(offer->token);
    *ret_path = links->path;
    memcpy(ret_token, offer->token, HOST_TOKEN_BYTES);
}

/* ------------------------------------------------------------------ whom we connect to */

static int connect_to(const char *path, int *ret_fd, struct mokd_error *error)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    _cleanup_fd_ int fd = -1;

    if (path[0] != '/' || strlen(path) >= sizeof(address.sun_path))
        return mokd_error_set(error, -MOK_ENOTSUP, "its link's path is no absolute one of at most %zu bytes",
                              sizeof(address.sun_path) - 1);
    strcpy(address.sun_path, path);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return mokd_error_set(error, errno == EMFILE ? -MOK_EFDS : -MOK_EIO, "no socket: %s", strerror(errno));
    if (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
        return mokd_error_set(error, -MOK_ENOTSUP, "%s: %s", path, strerror(errno));
    if (!is_trusted(fd))
        return mokd_error_set(error, -MOK_EACCESS, "%s belongs to another user", path);
    *ret_fd = mok_take_fd(&fd);
    return 0;
}

int mokd_host_accept_offer(struct mokd_host_links *links, uint32_t node, const char *path, const uint8_t *token,
                           size_t token_bytes, struct mokd_error *error)
{
    Mok__HandlePacket packet = MOK__HANDLE_PACKET__INIT;
    Mok__HandleHello hello = MOK__HANDLE_HELLO__INIT;
    struct connection *connection;
    int fd = -1;

    drop_silent(links);
    TAILQ_FOREACH(connection, &links->connections, link)
        if (connection->state != STRANGER && connection->node == node)
            return 0; /* under way */
    int r = connect_to(path, &fd, error);
    if (r < 0)
        return r;
    connection = connection_new(links, fd, node);
    if (!connection)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    hello.node = links->self;
    hello.token = (ProtobufCBinaryData){ .len = token_bytes, .data = (uint8_t *)token };
    packet.body_case = MOK__HANDLE_PACKET__BODY_HELLO;
    packet.hello = &hello;
    r = transmit(connection, &packet, NULL, 0);
    if (r < 0) {
        connection_end(connection, "");
        return mokd_error_set(error, r, "%s: cannot be written to", path);
    }
    return 0;
}

bool mokd_host_is_linked(const struct mokd_host_links *links, uint32_t node)
{
    return node < GROUP_MAX_NODES && links->up[node];
}

void mokd_host_forget(struct mokd_host_links *links, uint32_t node)
{
    struct connection *connection, *next;

    links->offer[node].made = false;
    for (connection = TAILQ_FIRST(&links->connections); connection; connection = next) {
        next = TAILQ_NEXT(connection, link);
        if (connection->state != STRANGER && connection->node == node)
            connection_end(connection, "the node is lost");
    }
}

/* ------------------------------------------------------------------ the whole */

static int listen_at(const char *path, int *ret_fd, struct mokd_error *error)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    _cleanup_fd_ int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (strlen(path) >= sizeof(address.sun_path))
        return mokd_error_set(error, -MOK_ENAME, "%s: the path has %zu bytes, must have 1..%zu", path, strlen(path),
                              sizeof(address.sun_path) - 1);
    strcpy(address.sun_path, path);
    if (fd < 0)
        return mokd_error_set(error, -MOK_EIO, "%s: %s", path, strerror(errno));
    unlink(path); /* of an earlier life; the lock of the clients' socket says that we are alone */
    if (bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 || chmod(path, 0600) < 0 || listen(fd, BACKLOG) < 0)
        return mokd_error_set(error, errno == EACCES ? -MOK_EACCESS : -MOK_EIO, "%s: %s", path, strerror(errno));
    *ret_fd = mok_take_fd(&fd);
    return 0;
}

int mokd_host_links_new(struct mokd_server *server, const char *path, const char *self,
                        const struct mokd_host_handlers *handlers, void *cookie, struct mokd_host_links **ret,
                        struct mokd_error *error)
{
    struct mokd_host_links *links = calloc(1, sizeof(*links));

    if (!links)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    links->server = server;
    links->handlers = handlers;
    links->cookie = cookie;
    TAILQ_INIT(&links->connections);
    snprintf(links->path, sizeof(links->path), "%s", path);
    snprintf(links->self, sizeof(links->self), "%s", self);
    int r = listen_at(path, &links->fd, error);
    if (r == 0 && uv_poll_init(&server->loop, &links->poll, links->fd) < 0) {
        mok_close(links->fd);
        r = mokd_error_set(error, -MOK_EIO, "%s: cannot be watched", path);
    }
    if (r < 0) {
        free(links);
        return r;
    }
    links->open_handles = 1;
    links->poll.data = links;
    uv_poll_start(&links->poll, UV_READABLE, on_connection);
    *ret = links;
    return 0;
}

static void listener_closed(uv_handle_t *handle)
{
    release(handle->data);
}

void mokd_host_links_free(struct mokd_host_links *links)
{
    struct connection *connection;

    if (!links)
        return;
    links->handlers = NULL;
    while ((connection = TAILQ_FIRST(&links->connections)))
        connection_end(connection, "");
    uv_poll_stop(&links->poll);
    uv_close((uv_handle_t *)&links->poll, listener_closed);
    links->fd = mok_close(links->fd);
    unlink(links->path);
}
