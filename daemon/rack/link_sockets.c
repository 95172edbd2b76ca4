/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ZeroMQ's side: sockets and their options, descriptors, and what the sockets' monitors tell. The ZAP socket is bound
 * first and closed last: without it libzmq would let everybody in.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include <zmq.h>

#include "common/log.h"
#include "link_private.h"
#include "util.h"

#define HANDSHAKE_MS 3000   /* a connection that is not authenticated by then is closed */
#define SOCKET_MESSAGES 256 /* that a ZeroMQ socket keeps for, or of, a connection */
#define RECONNECT_MS 100
#define RECONNECT_MAX_MS 1000
#define MIN_RETRY_MS 250u
#define MAX_RETRY_MS 4000u
#define STUCK_NS 8000000000ull /* not connected for so long: as good as dead */
#define PAUSE_NS 200000000ull
#define COMPLAIN_EVERY_NS 5000000000ull
#define SOCKETS_OF_A_PEER 3u /* dealer, and both ends of its monitor */
#define SOCKETS_OF_ALL 8u
#ifndef ZMQ_ZAP_ENFORCE_DOMAIN
#define ZMQ_ZAP_ENFORCE_DOMAIN 93 /* declared for drafts alone */
#endif

/* ------------------------------------------------------------------ descriptors */

/* libzmq gives up the whole process where it cannot have a descriptor for a thread or a mailbox: so we look before. */
int rack_descriptors_check(size_t count)
{
    int fds[64];
    size_t got = 0;

    count = count < ARRAY_SIZE(fds) ? count : ARRAY_SIZE(fds);
    while (got < count && (fds[got] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0)
        got++;
    for (size_t i = 0; i < got; i++)
        mok_close(fds[i]);
    return got == count ? 0 : -MOK_EFDS;
}

static uint64_t descriptor_limit(void)
{
    struct rlimit limit;

    return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 1024;
}

/* Inbound connections at once: an eighth of mokd's descriptors, so that strangers cannot have them all. */
static uint32_t connection_limit(void)
{
    uint64_t share = descriptor_limit() / 8;

    return (uint32_t)(share < 32 ? 32 : share > 4096 ? 4096 : share);
}

/* ------------------------------------------------------------------ options */

static bool set(void *socket, int option, int value)
{
    return zmq_setsockopt(socket, option, &value, sizeof(value)) == 0;
}

static bool set_common(const struct rack_link *link, void *socket)
{
    int timeout = (int)link->config.timeout_ms;

    return set(socket, ZMQ_LINGER, 0) && set(socket, ZMQ_SNDHWM, SOCKET_MESSAGES) &&
           set(socket, ZMQ_RCVHWM, SOCKET_MESSAGES) && set(socket, ZMQ_IPV6, link->config.ipv6) &&
           set(socket, ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS) && set(socket, ZMQ_TCP_MAXRT, timeout) &&
           set(socket, ZMQ_HEARTBEAT_IVL, timeout) && set(socket, ZMQ_HEARTBEAT_TIMEOUT, 2 * timeout);
}

static bool set_router(const struct rack_link *link, void *router)
{
    int64_t max = RACK_MAX_BYTES;

    /* Libraries without the option are as good: our handler refuses other domains itself. */
    if (!set(router, ZMQ_ZAP_ENFORCE_DOMAIN, 1) && errno != EINVAL)
        return false;
    return set_common(link, router) && set(router, ZMQ_CURVE_SERVER, 1) &&
           zmq_setsockopt(router, ZMQ_CURVE_SECRETKEY, link->config.secret_key, RACK_KEY_BYTES) == 0 &&
           zmq_setsockopt(router, ZMQ_ZAP_DOMAIN, RACK_ZAP_DOMAIN, strlen(RACK_ZAP_DOMAIN)) == 0 &&
           zmq_setsockopt(router, ZMQ_MAXMSGSIZE, &max, sizeof(max)) == 0;
}

static bool set_dealer(const struct rack_link *link, const struct rack_connection *connection, void *dealer)
{
    int64_t max = 4096; /* a peer's router says no more than handshake and keep-alive */

    return set_common(link, dealer) && set(dealer, ZMQ_IMMEDIATE, 1) && set(dealer, ZMQ_RECONNECT_IVL, RECONNECT_MS) &&
           set(dealer, ZMQ_RECONNECT_IVL_MAX, RECONNECT_MAX_MS) &&
           set(dealer, ZMQ_CONNECT_TIMEOUT, (int)link->config.timeout_ms) &&
           zmq_setsockopt(dealer, ZMQ_MAXMSGSIZE, &max, sizeof(max)) == 0 &&
           zmq_setsockopt(dealer, ZMQ_CURVE_SERVERKEY, connection->public_key, RACK_KEY_BYTES) == 0 &&
           zmq_setsockopt(dealer, ZMQ_CURVE_PUBLICKEY, link->config.public_key, RACK_KEY_BYTES) == 0 &&
           zmq_setsockopt(dealer, ZMQ_CURVE_SECRETKEY, link->config.secret_key, RACK_KEY_BYTES) == 0;
}

/* ------------------------------------------------------------------ opening */

static void *open_monitor(struct rack_link *link, void *socket, const char *name, int events)
{
    char endpoint[64];

    snprintf(endpoint, sizeof(endpoint), "inproc://monitor-%s", name);
    if (zmq_socket_monitor(socket, endpoint, events) < 0)
        return NULL;
    void *monitor = zmq_socket(link->context, ZMQ_PAIR);
    /* Without a bound, so that an I/O thread never waits for us to read what it tells. */
    if (monitor && set(monitor, ZMQ_RCVHWM, 0) && set(monitor, ZMQ_LINGER, 0) && zmq_connect(monitor, endpoint) == 0)
        return monitor;
    if (monitor)
        zmq_close(monitor);
    return NULL;
}

static int no_socket(char *text)
{
    int error = errno;

    snprintf(text, RACK_MAX_TEXT, "no socket for the rack: %s", zmq_strerror(error));
    return error == EMFILE ? -MOK_EFDS : -MOK_EIO;
}

/* libzmq listens on a socket of ours: then we can say who gets to it. */
static int bind_router(struct rack_link *link, char *text)
{
    char endpoint[RACK_MAX_ADDRESS + 8];
    int fd;

    int r = rack_gate_open(&link->gate, link->config.listen, &fd, text);
    if (r < 0)
        return r;
    snprintf(endpoint, sizeof(endpoint), "tcp://%s", link->config.listen);
    if (set(link->router, ZMQ_USE_FD, fd) && zmq_bind(link->router, endpoint) == 0)
        return 0;
    mok_close(fd);
    snprintf(text, RACK_MAX_TEXT, "[rack] listen = %s: %s", link->config.listen, zmq_strerror(errno));
    return -MOK_EIO;
}

static int check_descriptors(char *text)
{
    uint64_t limit = descriptor_limit();
    uint64_t need = 2 * (SOCKETS_OF_ALL + connection_limit());

    if (limit >= need && rack_descriptors_check(4 * SOCKETS_OF_ALL) == 0)
        return 0;
    snprintf(text, RACK_MAX_TEXT,
             "the rack needs up to %" PRIu64 " descriptors beside those in use, the limit is %" PRIu64
             ": raise LimitNOFILE of mokd",
             need, limit);
    return -MOK_EFDS;
}

int rack_sockets_open(struct rack_link *link, char *text)
{
    if (!zmq_has("curve")) {
        snprintf(text, RACK_MAX_TEXT, "this machine's libzmq has no CURVE: the rack needs it");
        return -MOK_ENOTSUP;
    }
    int r = check_descriptors(text);
    if (r < 0)
        return r;
    link->context = zmq_ctx_new();
    if (!link->context)
        return no_socket(text);
    zmq_ctx_set(link->context, ZMQ_MAX_SOCKETS, (int)(2 * SOCKETS_OF_A_PEER * RACK_MAX_NODES + SOCKETS_OF_ALL));
    int zero = 0;
    link->zap = zmq_socket(link->context, ZMQ_REP);
    if (!link->zap || zmq_setsockopt(link->zap, ZMQ_LINGER, &zero, sizeof(zero)) < 0 ||
        zmq_bind(link->zap, RACK_ZAP_ENDPOINT) < 0)
        return no_socket(text);
    link->router = zmq_socket(link->context, ZMQ_ROUTER);
    if (!link->router || !set_router(link, link->router))
        return no_socket(text);
    link->router_monitor = open_monitor(link, link->router, "router",
                                        ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_ACCEPT_FAILED | ZMQ_EVENT_DISCONNECTED);
    if (!link->router_monitor)
        return no_socket(text);
    link->stats.max_connections = connection_limit();
    return bind_router(link, text);
}

static void close_socket(void **socket)
{
    if (*socket)
        zmq_close(*socket);
    *socket = NULL;
}

/*
 * The telling ends before the listener goes: an I/O thread that has something to tell, and nobody to tell it to, waits
 * for ever, and all connections with it.
 */
static void close_monitored(void **socket, void **monitor)
{
    if (*socket)
        zmq_socket_monitor(*socket, NULL, 0);
    close_socket(monitor);
    close_socket(socket);
}

void rack_sockets_close(struct rack_link *link)
{
    for (size_t i = 0; i < RACK_MAX_NODES; i++)
        rack_connection_close(&link->connections[i]);
    close_monitored(&link->router, &link->router_monitor);
    close_socket(&link->zap);
    rack_gate_close(&link->gate);
    if (link->context)
        zmq_ctx_term(link->context);
    link->context = NULL;
}

/* ------------------------------------------------------------------ a connection to a peer */

void rack_connection_close(struct rack_connection *connection)
{
    close_monitored(&connection->dealer, &connection->monitor);
    connection->connected = connection->dead = false;
}

void rack_connection_linger(struct rack_connection *connection, int ms)
{
    if (connection->dealer && connection->connected)
        set(connection->dealer, ZMQ_LINGER, ms);
}

static bool dial(struct rack_link *link, struct rack_connection *connection)
{
    static _Atomic unsigned number; /* a monitor's name is free only some time after its socket was closed */
    char name[32];

    snprintf(name, sizeof(name), "%u", number++);
    if (rack_descriptors_check(2 * SOCKETS_OF_A_PEER) < 0)
        return false;
    connection->dealer = zmq_socket(link->context, ZMQ_DEALER);
    if (!connection->dealer || !set_dealer(link, connection, connection->dealer))
        return false;
    connection->monitor = open_monitor(link, connection->dealer, name,
                                       ZMQ_EVENT_CONNECT_RETRIED | ZMQ_EVENT_DISCONNECTED |
                                           ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                                           ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH);
    return connection->monitor && zmq_connect(connection->dealer, connection->endpoint) == 0;
}

void rack_connection_open(struct rack_link *link, struct rack_connection *connection)
{
    uint64_t now_ns = mok_now_ns();

    rack_connection_close(connection);
    connection->opened_ns = now_ns;
    if (dial(link, connection))
        return;
    rack_connection_close(connection);
    connection->retry_ns = now_ns + (uint64_t)MAX_RETRY_MS * 1000000u;
}

/* ------------------------------------------------------------------ monitors */

static bool next_event(void *monitor, uint16_t *ret_event, uint32_t *ret_value)
{
    uint8_t bytes[6];
    zmq_msg_t message;
    bool known = false;

    zmq_msg_init(&message);
    if (zmq_msg_recv(&message, monitor, ZMQ_DONTWAIT) < 0) {
        zmq_msg_close(&message);
        return false;
    }
    if (zmq_msg_size(&message) == sizeof(bytes)) {
        memcpy(bytes, zmq_msg_data(&message), sizeof(bytes));
        memcpy(ret_event, bytes, sizeof(*ret_event));
        memcpy(ret_value, bytes + sizeof(*ret_event), sizeof(*ret_value));
        known = true;
    }
    while (zmq_msg_more(&message) && zmq_msg_recv(&message, monitor, ZMQ_DONTWAIT) >= 0)
        ;
    zmq_msg_close(&message);
    if (!known)
        *ret_event = 0;
    return true;
}

static const char *take_event(struct rack_connection *connection, uint16_t event, char *text)
{
    switch (event) {
    case ZMQ_EVENT_HANDSHAKE_SUCCEEDED:
        connection->connected = true;
        connection->backoff_ms = 0;
        connection->error[0] = '\0'; /* the next one is news, whatever it is */
        return NULL;
    case ZMQ_EVENT_DISCONNECTED:
        connection->connected = false;
        return NULL;
    case ZMQ_EVENT_CONNECT_RETRIED:
        snprintf(text, RACK_MAX_TEXT, RACK_NOBODY_THERE "connection to %s", connection->endpoint);
        return text;
    case ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        snprintf(text, RACK_MAX_TEXT,
                 RACK_NOBODY_THERE "handshake with %s in %d ms: is it a mokd with the key of the inventory?",
                 connection->endpoint, HANDSHAKE_MS);
        return text;
    case ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL:
        connection->dead = true;
        snprintf(text, RACK_MAX_TEXT, "what listens at %s is no mokd with the key of the inventory",
                 connection->endpoint);
        return text;
    case ZMQ_EVENT_HANDSHAKE_FAILED_AUTH:
        connection->dead = true;
        snprintf(text, RACK_MAX_TEXT, "%s refuses the key of this node: is it in the inventory there?",
                 connection->endpoint);
        return text;
    }
    return NULL;
}

const char *rack_connection_watch(struct rack_connection *connection, char *text)
{
    const char *report = NULL, *latest;
    uint16_t event;
    uint32_t value;

    while (connection->monitor && next_event(connection->monitor, &event, &value))
        if ((latest = take_event(connection, event, text)))
            report = latest;
    if (!connection->dealer || connection->connected)
        return report;
    uint64_t now_ns = mok_now_ns();
    if (now_ns - connection->opened_ns > STUCK_NS) {
        rack_connection_close(connection);
        connection->retry_ns = now_ns;
    } else if (connection->dead) {
        uint32_t doubled = 2 * connection->backoff_ms;
        connection->backoff_ms = doubled < MIN_RETRY_MS   ? MIN_RETRY_MS
                                 : doubled < MAX_RETRY_MS ? doubled
                                                          : MAX_RETRY_MS;
        rack_connection_close(connection);
        connection->retry_ns = now_ns + (uint64_t)connection->backoff_ms * 1000000u;
    }
    return report;
}

/* ------------------------------------------------------------------ inbound connections */

static void set_gate(struct rack_link *link, enum rack_gate_level level)
{
    struct rack_address members[RACK_MAX_NODES];
    size_t count = 0;

    if (level == link->gate.level)
        return;
    for (size_t i = 0; i < RACK_MAX_NODES; i++)
        if (link->connections[i].used && rack_address_parse(link->connections[i].endpoint + 6, &members[count]) == 0)
            count++;
    rack_gate_set(&link->gate, level, members, count);
}

static void complain(struct rack_link *link, uint64_t now_ns, const char *why)
{
    if (link->complained_ns && now_ns - link->complained_ns < COMPLAIN_EVERY_NS)
        return;
    link->complained_ns = now_ns;
    mok_log(MOK_LOG_WARNING, "rack", "new connections are turned away", "reason=\"%s\" connections=%u", why,
            link->inbound);
}

static void starve(struct rack_link *link, uint64_t now_ns)
{
    rack_gate_starve(&link->gate);
    link->starved_ns = now_ns;
    complain(link, now_ns, "no descriptor is left: raise LimitNOFILE of mokd");
}

/* Members alone from the bound on, nobody beyond it; everybody again below half of it. */
static void mind_gate(struct rack_link *link, uint64_t now_ns)
{
    uint32_t bound = link->stats.max_connections;

    if (link->starved_ns) {
        if (now_ns - link->starved_ns < PAUSE_NS || !rack_gate_recover(&link->gate))
            return;
        link->starved_ns = 0;
    }
    if (link->inbound >= bound)
        complain(link, now_ns, "too many at once; those without a key of the inventory go after 3 s");
    if (link->inbound >= bound + bound / 4)
        set_gate(link, RACK_GATE_CLOSED);
    else if (link->inbound >= bound)
        set_gate(link, RACK_GATE_MEMBERS);
    else if (link->inbound < bound / 2)
        set_gate(link, RACK_GATE_OPEN);
}

void rack_listener_watch(struct rack_link *link, uint64_t now_ns)
{
    uint16_t event;
    uint32_t value;

    while (next_event(link->router_monitor, &event, &value)) {
        if (event == ZMQ_EVENT_ACCEPTED)
            link->inbound++;
        else if (event == ZMQ_EVENT_DISCONNECTED && link->inbound > 0)
            link->inbound--;
        else if (event == ZMQ_EVENT_ACCEPT_FAILED)
            starve(link, now_ns);
    }
    mind_gate(link, now_ns);
}
