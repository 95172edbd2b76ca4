/* SPDX-License-Identifier: Apache-2.0 */
/* The loop's side of the thread: queues, their bounds, start and stop. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>

#include "link_private.h"
#include "util.h"
#include "wire.h"

/* ------------------------------------------------------------------ lists */

void rack_ops_push(struct rack_ops *ops, struct rack_op *op)
{
    op->next = NULL;
    if (ops->last)
        ops->last->next = op;
    else
        ops->first = op;
    ops->last = op;
}

struct rack_op *rack_ops_pop(struct rack_ops *ops)
{
    struct rack_op *op = ops->first;

    if (!op)
        return NULL;
    ops->first = op->next;
    if (!ops->first)
        ops->last = NULL;
    return op;
}

void rack_ops_append(struct rack_ops *ops, struct rack_ops *more)
{
    for (struct rack_op *op; (op = rack_ops_pop(more));)
        rack_ops_push(ops, op);
}

void rack_op_free(struct rack_op *op)
{
    if (!op)
        return;
    free(op->bytes);
    free(op);
}

void rack_items_push(struct rack_items *items, struct rack_item *item)
{
    item->next = NULL;
    if (items->last)
        items->last->next = item;
    else
        items->first = item;
    items->last = item;
    items->count++;
    items->bytes += item->bytes;
}

void rack_items_clear(struct rack_items *items)
{
    while (items->first) {
        struct rack_item *item = items->first;
        items->first = item->next;
        rack_item_free(item);
    }
    *items = (struct rack_items){ 0 };
}

struct rack_item *rack_item_new(enum rack_item_kind kind, const struct rack_connection *connection, const char *text)
{
    size_t size = strlen(text) + 1;
    struct rack_item *item = calloc(1, sizeof(*item) + size);

    if (!item)
        return NULL;
    item->kind = kind;
    item->slot = connection->slot;
    item->serial = connection->serial;
    memcpy(item->text, text, size);
    return item;
}

void rack_item_free(struct rack_item *item)
{
    if (!item)
        return;
    if (item->frame)
        mok_wire_free(&item->frame->base);
    free(item);
}

/* ------------------------------------------------------------------ to the thread */

/* With the mutex held: one write a batch, since the thread takes all that is there. */
static void kick(struct rack_link *link)
{
    uint64_t one = 1;

    if (link->kicked)
        return;
    link->kicked = true;
    ssize_t n = write(link->kick, &one, sizeof(one));
    (void)n; /* fails only when the counter is full, and then the thread is awake */
}

static struct rack_op *op_new(enum rack_op_kind kind, uint32_t slot)
{
    struct rack_op *op = calloc(1, sizeof(*op));

    if (!op)
        return NULL;
    op->kind = kind;
    op->slot = slot;
    return op;
}

static void ask(struct rack_link *link, struct rack_op *op)
{
    pthread_mutex_lock(&link->mutex);
    rack_ops_push(&link->ops, op);
    kick(link);
    pthread_mutex_unlock(&link->mutex);
}

int rack_link_add(struct rack_link *link, uint32_t slot, uint32_t serial, const char *address,
                  const uint8_t public_key[static RACK_KEY_BYTES])
{
    struct rack_op *op = op_new(RACK_OP_ADD, slot);

    if (!op)
        return -MOK_ENOMEM;
    op->serial = serial;
    snprintf(op->address, sizeof(op->address), "%s", address);
    memcpy(op->public_key, public_key, RACK_KEY_BYTES);
    ask(link, op);
    return 0;
}

/*
 * With the mutex held: drops what the thread has not taken yet of a peer, but for messages that `spared` is there for.
 */
static void purge(struct rack_link *link, uint32_t slot, struct rack_ops *spared)
{
    struct rack_ops kept = { 0 };

    for (struct rack_op *op; (op = rack_ops_pop(&link->ops));) {
        if (op->slot != slot) {
            rack_ops_push(&kept, op);
            continue;
        }
        if (op->kind == RACK_OP_SEND && spared) {
            rack_ops_push(spared, op);
            continue;
        }
        if (op->kind == RACK_OP_SEND) {
            link->load[slot].messages--;
            link->load[slot].bytes -= op->size;
        }
        rack_op_free(op);
    }
    link->ops = kept;
}

/* Flags, since taking something away must not fail for want of memory; the thread looks at them before the rest. */
void rack_link_bar(struct rack_link *link, uint32_t slot)
{
    pthread_mutex_lock(&link->mutex);
    link->flags.bar[slot] = true;
    kick(link);
    pthread_mutex_unlock(&link->mutex);
}

void rack_link_remove(struct rack_link *link, uint32_t slot)
{
    pthread_mutex_lock(&link->mutex);
    purge(link, slot, link->flags.remove[slot] ? NULL : &link->flags.last_words[slot]);
    link->flags.remove[slot] = true;
    kick(link);
    pthread_mutex_unlock(&link->mutex);
}

void rack_link_reset(struct rack_link *link, uint32_t slot)
{
    pthread_mutex_lock(&link->mutex);
    purge(link, slot, NULL);
    link->flags.reset[slot] = true;
    kick(link);
    pthread_mutex_unlock(&link->mutex);
}

int rack_link_send(struct rack_link *link, uint32_t slot, uint8_t *bytes, size_t size)
{
    struct rack_op *op = op_new(RACK_OP_SEND, slot);

    if (!op) {
        free(bytes);
        return -MOK_ENOMEM;
    }
    op->bytes = bytes;
    op->size = size;
    pthread_mutex_lock(&link->mutex);
    struct rack_load *load = &link->load[slot];
    bool full = load->messages >= RACK_QUEUE_MESSAGES || load->bytes + size > RACK_QUEUE_BYTES;
    if (full) {
        load->starved = true;
    } else {
        load->messages++;
        load->bytes += size;
        rack_ops_push(&link->ops, op);
        kick(link);
    }
    pthread_mutex_unlock(&link->mutex);
    if (full)
        rack_op_free(op);
    return full ? -MOK_EAGAIN : 0;
}

int rack_link_send_beat(struct rack_link *link, uint32_t slot, uint8_t *bytes, size_t size)
{
    struct rack_op *op = op_new(RACK_OP_BEAT, slot);

    if (!op) {
        free(bytes);
        return -MOK_ENOMEM;
    }
    op->bytes = bytes;
    op->size = size;
    ask(link, op);
    return 0;
}

void rack_link_leave(struct rack_link *link)
{
    pthread_mutex_lock(&link->mutex);
    link->leave = true;
    pthread_mutex_unlock(&link->mutex);
}

/* ------------------------------------------------------------------ from the thread */

struct rack_item *rack_link_take(struct rack_link *link)
{
    pthread_mutex_lock(&link->mutex);
    struct rack_item *first = link->inbox.first;
    link->inbox = (struct rack_items){ 0 };
    link->woken = false;
    if (link->inbox_full)
        kick(link);
    pthread_mutex_unlock(&link->mutex);
    return first;
}

void rack_link_stats(struct rack_link *link, struct rack_link_stats *ret)
{
    pthread_mutex_lock(&link->mutex);
    *ret = link->stats;
    pthread_mutex_unlock(&link->mutex);
}

/* ------------------------------------------------------------------ start and stop */

static int start_thread(struct rack_link *link, char *text)
{
    sigset_t all, before;

    /* Signals are the loop's. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&link->thread, NULL, rack_link_thread, link);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        snprintf(text, RACK_MAX_TEXT, "no thread for the rack: %s", strerror(error));
        return -MOK_ENOMEM;
    }
    pthread_setname_np(link->thread, "mok-rack");
    link->running = true;
    return 0;
}

int rack_link_start(const struct rack_link_config *config, void (*wake)(void *cookie), void *cookie,
                    struct rack_link **ret, char *text)
{
    struct rack_link *link = calloc(1, sizeof(*link));

    if (!link) {
        snprintf(text, RACK_MAX_TEXT, "out of memory");
        return -MOK_ENOMEM;
    }
    link->config = *config;
    link->gate = (struct rack_gate)RACK_GATE_INIT;
    link->wake = wake;
    link->cookie = cookie;
    pthread_mutex_init(&link->mutex, NULL);
    link->kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int r = 0;
    if (link->kick < 0) {
        snprintf(text, RACK_MAX_TEXT, "no eventfd for the rack: %s", strerror(errno));
        r = -MOK_EFDS;
    }
    if (r == 0)
        r = rack_sockets_open(link, text);
    if (r == 0)
        r = start_thread(link, text);
    if (r < 0) {
        rack_link_stop(link);
        return r;
    }
    *ret = link;
    return 0;
}

static void drop_ops(struct rack_ops *ops)
{
    for (struct rack_op *op; (op = rack_ops_pop(ops));)
        rack_op_free(op);
}

void rack_link_stop(struct rack_link *link)
{
    if (!link)
        return;
    if (link->running) {
        pthread_mutex_lock(&link->mutex);
        link->stop = true;
        kick(link);
        pthread_mutex_unlock(&link->mutex);
        pthread_join(link->thread, NULL);
    }
    rack_sockets_close(link);
    drop_ops(&link->ops);
    for (size_t i = 0; i < RACK_MAX_NODES; i++) {
        drop_ops(&link->connections[i].queue);
        rack_op_free(link->connections[i].beat);
        drop_ops(&link->flags.last_words[i]);
    }
    explicit_bzero(link->config.secret_key, sizeof(link->config.secret_key));
    rack_items_clear(&link->inbox);
    rack_items_clear(&link->arrived);
    mok_close(link->kick);
    pthread_mutex_destroy(&link->mutex);
    free(link);
}

uint64_t rack_link_rounds(const struct rack_link *link)
{
    return __atomic_load_n(&link->rounds, __ATOMIC_RELAXED);
}
