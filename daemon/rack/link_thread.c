/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread: turns of poll, ask, send, receive, hand over. Every turn reads its sockets until they have nothing more
 * or the batch is full, and a full batch polls without waiting: a ZeroMQ socket tells of news once, not for as long as
 * there are some.
 */
#include <errno.h>
#include <string.h>

#include <zmq.h>

#include "link_private.h"
#include "util.h"
#include "wire.h"

#define RECEIVE_BATCH 512u
#define SEND_BATCH 512u
#define REPEAT_ERROR_NS 10000000000ull
#define IDLE_MS 250
#define SOON_NS 250000000ull
#define MAX_POLLED (4 + 2 * RACK_MAX_NODES)

#ifdef __SANITIZE_THREAD__
/* Libraries that were built without ThreadSanitizer: it sees what they touch, and not how they take turns. */
const char *__tsan_default_suppressions(void);
__attribute__((visibility("default"))) const char *__tsan_default_suppressions(void)
{
    return "called_from_lib:libzmq.so\ncalled_from_lib:libsodium.so\ncalled_from_lib:libstdc++.so\n"
           "race:libzmq.so\nrace:libsodium.so\nrace:libstdc++.so\n";
}
#endif

/* ------------------------------------------------------------------ sending */

/* How much of a peer's load is gone. */
struct relief {
    size_t messages, bytes;
};

/* Takes the weight off a peer's load, and tells the loop if it had been refused. */
static void relieve(struct rack_link *link, uint32_t slot, struct relief relief)
{
    struct rack_load *load = &link->load[slot];
    bool drained = false;

    pthread_mutex_lock(&link->mutex);
    load->messages -= relief.messages;
    load->bytes -= relief.bytes;
    if (load->starved && load->messages <= RACK_QUEUE_MESSAGES / 2 && load->bytes <= RACK_QUEUE_BYTES / 2)
        drained = true;
    pthread_mutex_unlock(&link->mutex);
    if (!drained)
        return;
    struct rack_item *item = rack_item_new(RACK_ITEM_DRAINED, &link->connections[slot], "");
    link->connections[slot].owes_word = !item; /* said at the next turn */
    if (!item)
        return;
    rack_items_push(&link->arrived, item);
    pthread_mutex_lock(&link->mutex);
    load->starved = false;
    pthread_mutex_unlock(&link->mutex);
}

/* Drops all that waits in a connection. */
static void empty(struct rack_link *link, uint32_t slot)
{
    struct rack_connection *connection = &link->connections[slot];
    struct relief relief = { 0 };

    for (struct rack_op *op; (op = rack_ops_pop(&connection->queue));) {
        relief.messages++;
        relief.bytes += op->size;
        rack_op_free(op);
    }
    rack_op_free(connection->beat);
    connection->beat = NULL;
    relieve(link, slot, relief);
}

static bool send_op(struct rack_connection *connection, const struct rack_op *op)
{
    return zmq_send(connection->dealer, op->bytes, op->size, ZMQ_DONTWAIT) >= 0;
}

/* The beat first. True: there was more than a batch, and the socket would take it. */
static bool send_some(struct rack_link *link, struct rack_connection *connection)
{
    struct relief relief = { 0 };
    bool blocked = false;

    if (connection->beat) {
        blocked = !send_op(connection, connection->beat);
        if (!blocked) {
            rack_op_free(connection->beat);
            connection->beat = NULL;
        }
    }
    while (!blocked && connection->queue.first && relief.messages < SEND_BATCH) {
        blocked = !send_op(connection, connection->queue.first);
        if (blocked)
            break;
        struct rack_op *op = rack_ops_pop(&connection->queue);
        relief.messages++;
        relief.bytes += op->size;
        rack_op_free(op);
    }
    if (relief.messages > 0 || connection->owes_word)
        relieve(link, connection->slot, relief);
    return !blocked && connection->queue.first;
}

/* ------------------------------------------------------------------ what the loop asks */

/* Nothing waits in a connection that nobody uses: what does counts against the slot, and so against its next user. */
static void add(struct rack_link *link, const struct rack_op *op)
{
    struct rack_connection *connection = &link->connections[op->slot];

    *connection = (struct rack_connection){ .used = true, .slot = op->slot, .serial = op->serial };
    memcpy(connection->public_key, op->public_key, RACK_KEY_BYTES);
    mok_rack_key_text(op->public_key, connection->user_id);
    memcpy(connection->endpoint, "tcp://", 6);
    memcpy(connection->endpoint + 6, op->address, strlen(op->address) + 1);
    rack_connection_open(link, connection);
}

/* Takes the operation, whose slot may be nobody's by now. */
static void queue(struct rack_link *link, struct rack_op *op)
{
    struct rack_connection *connection = &link->connections[op->slot];
    uint32_t slot = op->slot;

    if (op->kind == RACK_OP_BEAT) {
        rack_op_free(connection->beat);
        connection->beat = op;
    } else {
        rack_ops_push(&connection->queue, op);
    }
    if (!connection->used)
        empty(link, slot);
}

static void run_op(struct rack_link *link, struct rack_op *op)
{
    if (op->kind != RACK_OP_ADD) {
        queue(link, op);
        return;
    }
    add(link, op);
    rack_op_free(op);
}

/* What the socket takes now, ZeroMQ sends within a moment after the close. */
static void part(struct rack_link *link, struct rack_connection *connection, struct rack_ops *last_words)
{
    rack_ops_append(&connection->queue, last_words);
    while (connection->dealer && connection->connected && send_some(link, connection))
        ;
    rack_connection_linger(connection, RACK_GOODBYE_MS);
}

static void run_flags(struct rack_link *link, struct rack_flags *flags)
{
    for (uint32_t slot = 0; slot < RACK_MAX_NODES; slot++) {
        struct rack_connection *connection = &link->connections[slot];
        bool removed = flags->remove[slot];
        connection->barred |= flags->bar[slot];
        if (removed)
            part(link, connection, &flags->last_words[slot]);
        if (!flags->reset[slot] && !removed)
            continue;
        empty(link, slot);
        if (removed) {
            rack_connection_close(connection);
            connection->used = false;
        } else if (connection->used) {
            rack_connection_open(link, connection);
        }
    }
}

/* False: the thread is to end. */
static bool take_ops(struct rack_link *link)
{
    uint64_t count;

    ssize_t n = read(link->kick, &count, sizeof(count));
    (void)n; /* nothing there: then the flags say so too */
    pthread_mutex_lock(&link->mutex);
    struct rack_ops ops = link->ops;
    link->ops = (struct rack_ops){ 0 };
    struct rack_flags flags = link->flags;
    link->flags = (struct rack_flags){ 0 };
    link->kicked = false;
    bool stop = link->stop;
    pthread_mutex_unlock(&link->mutex);
    run_flags(link, &flags);
    for (struct rack_op *op; (op = rack_ops_pop(&ops));)
        run_op(link, op);
    return !stop;
}

/* ------------------------------------------------------------------ receiving */

static struct rack_connection *find_user(struct rack_link *link, const char *user_id)
{
    for (uint32_t i = 0; i < RACK_MAX_NODES; i++) {
        uint32_t slot = (link->last_sender + i) % RACK_MAX_NODES;
        struct rack_connection *connection = &link->connections[slot];
        if (!connection->used || strcmp(connection->user_id, user_id) != 0)
            continue;
        link->last_sender = slot;
        return connection;
    }
    return NULL;
}

static bool is_allowed(void *cookie, const uint8_t public_key[static RACK_KEY_BYTES])
{
    char user_id[RACK_USER_ID_MAX];

    mok_rack_key_text(public_key, user_id);
    const struct rack_connection *connection = find_user(cookie, user_id);
    return connection && !connection->barred;
}

static void serve_zap(struct rack_link *link, uint64_t now_ns)
{
    size_t refused = rack_zap_serve(link->zap, is_allowed, link, link->refused_from);

    if (refused == 0)
        return;
    link->refused += refused;
    link->refused_ns = now_ns;
    rack_lately_add(&link->refused_lately, refused, now_ns);
}

static void malformed(struct rack_link *link, const struct rack_connection *connection)
{
    struct rack_item *last = link->arrived.last;

    if (last && last->kind == RACK_ITEM_MALFORMED && last->slot == connection->slot) {
        last->bytes++;
        return;
    }
    struct rack_item *item = rack_item_new(RACK_ITEM_MALFORMED, connection, "");
    if (!item)
        return;
    item->bytes = 1;
    rack_items_push(&link->arrived, item);
}

/* What fails for want of memory is missed in the sequence: the peer is lost then, and says what was under way again. */
static void unpack(struct rack_link *link, const struct rack_connection *connection, zmq_msg_t *message)
{
    struct rack_head head;
    Mok__RackFrame *frame = NULL;
    size_t size = zmq_msg_size(message);

    int r = rack_frame_unpack(link->config.versions, zmq_msg_data(message), size, &head, &frame);
    if (r == -MOK_EPROTO)
        malformed(link, connection);
    if (r < 0 && r != -MOK_EVERSION)
        return;
    struct rack_item *item = rack_item_new(r == 0 ? RACK_ITEM_FRAME : RACK_ITEM_VERSION, connection, "");
    if (!item) {
        if (frame)
            mok_wire_free(&frame->base);
        return;
    }
    item->arrived_ns = mok_now_ns();
    item->head = head;
    item->frame = frame;
    item->bytes = size;
    rack_items_push(&link->arrived, item);
}

static void hasten(struct rack_connection *connection)
{
    uint64_t soon_ns = mok_now_ns() + SOON_NS;

    if (connection->retry_ns > soon_ns)
        connection->retry_ns = soon_ns;
}

static void take_message(struct rack_link *link, zmq_msg_t *message, bool whole)
{
    /* Set by libzmq from our own ZAP answer. Without it nothing of a message is looked at. */
    const char *user_id = zmq_msg_gets(message, "User-Id");
    struct rack_connection *connection = user_id ? find_user(link, user_id) : NULL;

    if (!connection) {
        link->unknown++;
        return;
    }
    if (!connection->dealer) /* it is there: no need to wait longer before we call it again */
        hasten(connection);
    if (!whole)
        malformed(link, connection);
    else
        unpack(link, connection, message);
}

/* Routing id and one part; more parts are received and dropped. False: nothing there. */
static bool receive_one(struct rack_link *link)
{
    zmq_msg_t part, rest;
    size_t parts = 0;

    zmq_msg_init(&part);
    if (zmq_msg_recv(&part, link->router, ZMQ_DONTWAIT) < 0) {
        zmq_msg_close(&part);
        return false;
    }
    if (zmq_msg_more(&part)) {
        zmq_msg_recv(&part, link->router, ZMQ_DONTWAIT);
        parts++;
    }
    zmq_msg_init(&rest);
    bool more = zmq_msg_more(&part);
    while (more && zmq_msg_recv(&rest, link->router, ZMQ_DONTWAIT) >= 0) {
        more = zmq_msg_more(&rest);
        parts++;
    }
    take_message(link, &part, parts == 1);
    zmq_msg_close(&rest);
    zmq_msg_close(&part);
    return true;
}

/* True: there may be more. */
static bool receive_some(struct rack_link *link)
{
    for (unsigned i = 0; i < RECEIVE_BATCH; i++)
        if (!receive_one(link))
            return false;
    return true;
}

/* ------------------------------------------------------------------ a turn */

/* To the loop. False: it has not taken what is there, so no more is to be received. */
static bool hand_over(struct rack_link *link)
{
    bool wake = false;

    pthread_mutex_lock(&link->mutex);
    if (link->arrived.first) {
        if (link->inbox.last)
            link->inbox.last->next = link->arrived.first;
        else
            link->inbox.first = link->arrived.first;
        link->inbox.last = link->arrived.last;
        link->inbox.count += link->arrived.count;
        link->inbox.bytes += link->arrived.bytes;
        link->arrived = (struct rack_items){ 0 };
        wake = !link->woken;
        link->woken = true;
    }
    link->inbox_full = link->inbox.count >= RACK_INBOX_ITEMS || link->inbox.bytes >= RACK_INBOX_BYTES;
    bool room = !link->inbox_full;
    link->stats.refused = link->refused;
    link->stats.refused_ns = link->refused_ns;
    link->stats.refused_lately = link->refused_lately;
    memcpy(link->stats.refused_from, link->refused_from, sizeof(link->refused_from));
    link->stats.unknown = link->unknown;
    link->stats.connections = link->inbound;
    pthread_mutex_unlock(&link->mutex);
    if (wake)
        link->wake(link->cookie);
    return room;
}

static void report(struct rack_link *link, struct rack_connection *connection, const char *text, uint64_t now_ns)
{
    if (strcmp(text, connection->error) == 0 && now_ns - connection->error_ns < REPEAT_ERROR_NS)
        return;
    memcpy(connection->error, text, strlen(text) + 1);
    connection->error_ns = now_ns;
    struct rack_item *item = rack_item_new(RACK_ITEM_ERROR, connection, text);
    if (item)
        rack_items_push(&link->arrived, item);
}

/* True: something could be sent at once. */
static bool tend(struct rack_link *link, struct rack_connection *connection, uint64_t now_ns)
{
    char text[RACK_MAX_TEXT];

    const char *error = rack_connection_watch(connection, text);
    if (error)
        report(link, connection, error, now_ns);
    if (!connection->dealer && now_ns >= connection->retry_ns)
        rack_connection_open(link, connection);
    return connection->dealer && send_some(link, connection);
}

/* Fills what to wait for; the kick first. */
static int gather(struct rack_link *link, bool receive, zmq_pollitem_t *items)
{
    int n = 0;

    items[n++] = (zmq_pollitem_t){ .fd = link->kick, .events = ZMQ_POLLIN };
    items[n++] = (zmq_pollitem_t){ .socket = link->zap, .events = ZMQ_POLLIN };
    items[n++] = (zmq_pollitem_t){ .socket = link->router_monitor, .events = ZMQ_POLLIN };
    if (receive)
        items[n++] = (zmq_pollitem_t){ .socket = link->router, .events = ZMQ_POLLIN };
    for (size_t i = 0; i < RACK_MAX_NODES; i++) {
        struct rack_connection *connection = &link->connections[i];
        if (!connection->used || !connection->dealer)
            continue;
        items[n++] = (zmq_pollitem_t){ .socket = connection->monitor, .events = ZMQ_POLLIN };
        if (connection->beat || connection->queue.first)
            items[n++] = (zmq_pollitem_t){ .socket = connection->dealer, .events = ZMQ_POLLOUT };
    }
    return n;
}

/* Last words: to sockets that take them now or within the moment that they have, which ZeroMQ sends after the close. */
static void take_leave(struct rack_link *link)
{
    uint64_t end_ns = mok_now_ns() + RACK_GOODBYE_MS * UINT64_C(1000000);
    zmq_pollitem_t items[RACK_MAX_NODES];
    int n;

    do {
        n = 0;
        for (size_t i = 0; i < RACK_MAX_NODES; i++) {
            struct rack_connection *connection = &link->connections[i];
            if (!connection->used || !connection->dealer || !connection->connected)
                continue;
            while (send_some(link, connection))
                ;
            if (connection->queue.first)
                items[n++] = (zmq_pollitem_t){ .socket = connection->dealer, .events = ZMQ_POLLOUT };
        }
        if (n > 0)
            zmq_poll(items, n, 10);
    } while (n > 0 && mok_now_ns() < end_ns);
    for (size_t i = 0; i < RACK_MAX_NODES; i++)
        if (link->connections[i].used)
            rack_connection_linger(&link->connections[i], RACK_GOODBYE_MS);
}

void *rack_link_thread(void *argument)
{
    struct rack_link *link = argument;
    zmq_pollitem_t items[MAX_POLLED];
    bool room = true, busy = true;

    for (;;) {
        int n = gather(link, room, items);
        zmq_poll(items, n, busy ? 0 : IDLE_MS);
        uint64_t now_ns = mok_now_ns();
        __atomic_store_n(&link->rounds, link->rounds + 1, __ATOMIC_RELAXED);
        if (!take_ops(link)) {
            if (link->leave) /* nobody writes it any more */
                take_leave(link);
            return NULL;
        }
        serve_zap(link, now_ns);
        rack_listener_watch(link, now_ns);
        busy = false;
        for (size_t i = 0; i < RACK_MAX_NODES; i++)
            if (link->connections[i].used)
                busy |= tend(link, &link->connections[i], now_ns);
        if (room)
            busy |= receive_some(link);
        room = hand_over(link);
    }
}
