/* SPDX-License-Identifier: Apache-2.0 */
#include "state.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>

#include "buffer.h"
#include "common/layer_spec.h"
#include "fdstore.h"
#include "group.h"
#include "layer.h"
#include "names.h"
#include "state_file.h"
#include "wire.h"

/* How long the workers of the mokd before may take to see that it is gone; then they are killed. */
#define OLD_WORKERS_MS 3000

struct mokd_state {
    struct mokd_fdstore *store;
    Mok__State *earlier; /* read at start; NULL: nothing */
    int fd;              /* -1: nothing is kept */
    uint64_t sequence;
    bool touched, frozen, complained;
    struct {
        uint64_t number; /* of its pidfd in the store; 0: none */
    } worker[MOK_MAX_DEVICES];
};

bool mokd_state_is_kept(const struct mokd_server *server)
{
    return server->state && server->state->fd >= 0 && !server->state->frozen;
}

bool mokd_state_is_frozen(const struct mokd_server *server)
{
    return server->state && server->state->frozen;
}

void mokd_state_touch(struct mokd_server *server)
{
    if (server->state)
        server->state->touched = true;
}

/* ------------------------------------------------------------------ the message */

/* Memory of one message, all of it given back at once. */
struct arena {
    struct block {
        struct block *next;
        max_align_t memory[];
    } * first;
    bool failed;
};

static void *take(struct arena *arena, size_t count, size_t size)
{
    struct block *block = calloc(1, sizeof(*block) + (count ? count : 1) * size);

    if (!block) {
        arena->failed = true;
        return NULL;
    }
    block->next = arena->first;
    arena->first = block;
    return block->memory;
}

static void arena_clear(struct arena *arena)
{
    while (arena->first) {
        struct block *block = arena->first;
        arena->first = block->next;
        free(block);
    }
}

/* An initialised message and the place for a pointer to it: `list` has room for `n` + 1. NULL: no memory. */
#define APPEND(arena, list, n, type, init)                                                                             \
    ({                                                                                                                 \
        type *message_ = (list) ? take(arena, 1, sizeof(type)) : NULL;                                                 \
        if (message_) {                                                                                                \
            init(message_);                                                                                            \
            (list)[(n)++] = message_;                                                                                  \
        }                                                                                                              \
        message_;                                                                                                      \
    })

static bool session_is_kept(const struct mokd_session *session)
{
    return session->resumable && (session->state == MOKD_SESSION_OPEN || session->state == MOKD_SESSION_AWAY);
}

/* A group of which one rank cannot come back is of no use to the others. */
static bool group_is_kept(const struct mokd_group *group)
{
    /* Nor is one with ranks on other nodes: to them this mokd is lost. */
    if (group->span || (group->state != MOKD_GROUP_READY && group->state != MOKD_GROUP_SUSPENDED))
        return false;
    for (uint32_t rank = 0; rank < group->size; rank++) {
        const struct mokd_member *member = group->member[rank];
        if (!member || member->leaving || !session_is_kept(member->session))
            return false;
    }
    return true;
}

static void add_devices(struct arena *arena, const struct mokd_server *server, Mok__State *state)
{
    state->device = take(arena, server->n_devices, sizeof(*state->device));
    for (size_t i = 0; i < server->n_devices; i++) {
        const struct mokd_device *device = server->devices[i];
        Mok__StateDevice *to =
            APPEND(arena, state->device, state->n_device, Mok__StateDevice, mok__state_device__init);
        if (!to)
            return;
        to->index = device->index;
        to->name = (char *)device->config->name;
        to->kind = device->config->kind;
        to->worker = server->state->worker[i].number;
        to->ops_done = device->ops_done + device->latest.ops_done;
        to->device_ns = device->device_ns + device->latest.device_ns;
        to->errors = device->errors + device->latest.errors;
        to->restarts = device->restarts;
        to->draining = device->draining;
    }
}

static void add_buffers(struct arena *arena, const struct mokd_session *session, Mok__StateSession *to)
{
    const struct mokd_buffer *buffer;

    to->buffer = take(arena, session->n_buffers, sizeof(*to->buffer));
    TAILQ_FOREACH(buffer, &session->buffers, link) {
        if (!buffer->ready || (buffer->member && !group_is_kept(buffer->member->group)))
            continue;
        Mok__StateBuffer *entry =
            APPEND(arena, to->buffer, to->n_buffer, Mok__StateBuffer, mok__state_buffer__init);
        if (!entry)
            return;
        entry->buffer = buffer->id;
        entry->bytes = buffer->bytes;
        entry->device = buffer->device->index;
        entry->memory = buffer->storage->number;
        entry->group = buffer->member ? buffer->member->group->id : 0;
    }
}

static void add_sessions(struct arena *arena, const struct mokd_server *server, Mok__State *state)
{
    const struct mokd_session *session;
    uint64_t now = mok_now_ns();
    size_t count = 0;

    TAILQ_FOREACH(session, &server->sessions, link)
        count++;
    state->session = take(arena, count, sizeof(*state->session));
    TAILQ_FOREACH(session, &server->sessions, link) {
        if (!session_is_kept(session))
            continue;
        Mok__StateSession *to =
            APPEND(arena, state->session, state->n_session, Mok__StateSession, mok__state_session__init);
        if (!to)
            return;
        to->session = session->id;
        to->uid = session->peer.uid;
        to->pid = (uint32_t)session->peer.pid;
        to->job = (char *)session->job;
        to->token = (ProtobufCBinaryData){ .len = sizeof(session->token), .data = (uint8_t *)session->token };
        to->age_ms = (now - session->started_ns) / 1000000u;
        mokd_session_totals(session, to);
        add_buffers(arena, session, to);
    }
}

static void add_parts(struct arena *arena, const struct mokd_layer *layer, Mok__StateLayer *to)
{
    to->part = take(arena, layer->group->size, sizeof(*to->part));
    for (uint32_t rank = 0; rank < layer->group->size; rank++) {
        const struct mokd_layer_part *part = &layer->part[rank];
        Mok__StatePart *entry = APPEND(arena, to->part, to->n_part, Mok__StatePart, mok__state_part__init);
        struct mokd_params_message *params = take(arena, 1, sizeof(*params));
        entry = params ? entry : NULL;
        if (!entry || !(entry->memory = take(arena, 1, sizeof(*entry->memory))))
            return;
        entry->rank = rank;
        entry->open = part->open;
        mokd_layer_memory_message(&part->plan, entry->memory);
        if (part->is_bound)
            entry->params = mokd_layer_params_message(part->region, params);
    }
}

static void add_layers(struct arena *arena, const struct mokd_group *group, Mok__StateGroup *to)
{
    const struct mokd_layer *layer;
    size_t count = 0;

    TAILQ_FOREACH(layer, &group->layers, link)
        count++;
    to->layer = take(arena, count, sizeof(*to->layer));
    TAILQ_FOREACH(layer, &group->layers, link) {
        if (!layer->ready)
            continue;
        Mok__StateLayer *entry = APPEND(arena, to->layer, to->n_layer, Mok__StateLayer, mok__state_layer__init);
        if (!entry || !(entry->spec = take(arena, 1, sizeof(*entry->spec))))
            return;
        entry->layer = layer->id;
        *entry->spec = mok_layer_spec_message(&layer->part[0].plan.spec);
        add_parts(arena, layer, entry);
    }
}

static void add_members(struct arena *arena, const struct mokd_group *group, Mok__StateGroup *to)
{
    to->member = take(arena, group->size, sizeof(*to->member));
    for (uint32_t rank = 0; rank < group->size; rank++) {
        Mok__StateMember *entry =
            APPEND(arena, to->member, to->n_member, Mok__StateMember, mok__state_member__init);
        if (!entry)
            return;
        entry->session = group->member[rank]->session->id;
        entry->device = group->member[rank]->device->index;
    }
}

static void add_groups(struct arena *arena, const struct mokd_server *server, Mok__State *state)
{
    const struct mokd_group *group;
    size_t count = 0;

    TAILQ_FOREACH(group, &server->groups, link)
        count++;
    state->group = take(arena, count, sizeof(*state->group));
    TAILQ_FOREACH(group, &server->groups, link) {
        if (!group_is_kept(group))
            continue;
        Mok__StateGroup *to = APPEND(arena, state->group, state->n_group, Mok__StateGroup, mok__state_group__init);
        if (!to)
            return;
        to->group = group->id;
        to->name = (char *)group->name;
        to->uid = group->uid;
        to->exclusive = group->exclusive;
        add_members(arena, group, to);
        add_layers(arena, group, to);
    }
}

static void fill(struct arena *arena, const struct mokd_server *server, Mok__State *state)
{
    state->version = (char *)MOK_BUILD_VERSION;
    state->last_session = server->last_session;
    state->last_id = server->last_id;
    state->ids_wrapped = server->ids_wrapped;
    state->last_memory = mokd_fdstore_last(server->state->store);
    state->errors = server->errors;
    add_devices(arena, server, state);
    add_sessions(arena, server, state);
    add_groups(arena, server, state);
}

/* ------------------------------------------------------------------ writing it down */

static int write_down(struct mokd_server *server)
{
    struct mokd_state *own = server->state;
    struct arena arena = { 0 };
    Mok__State state = MOK__STATE__INIT;
    _cleanup_free_ uint8_t *bytes = NULL;
    size_t size = 0;

    fill(&arena, server, &state);
    if (!arena.failed) {
        size = mok__state__get_packed_size(&state);
        bytes = size <= MOKD_STATE_MAX_BYTES ? malloc(size ? size : 1) : NULL;
    }
    if (bytes)
        mok__state__pack(&state, bytes);
    arena_clear(&arena);
    if (size > MOKD_STATE_MAX_BYTES)
        return -MOK_ESIZE;
    return bytes ? mokd_state_file_write(own->fd, own->sequence + 1, bytes, size) : -MOK_ENOMEM;
}

/* A state that is not true any more is worse than none. */
void mokd_state_save(struct mokd_server *server)
{
    struct mokd_state *own = server->state;

    if (!own || !own->touched || own->frozen || own->fd < 0)
        return;
    int r = write_down(server);
    if (r == 0) {
        own->sequence++;
        own->touched = own->complained = false;
        return;
    }
    mokd_state_file_spoil(own->fd);
    if (!own->complained)
        mok_log(MOK_LOG_WARNING, "state", "not written: a restart would end all sessions", "code=%s error=\"%s\"",
                mok_error_symbol(r), mok_error_text(r));
    own->complained = true;
}

void mokd_state_freeze(struct mokd_server *server, bool save)
{
    if (!mokd_state_is_kept(server))
        return;
    server->state->touched |= save;
    if (save)
        mokd_state_save(server);
    server->state->frozen = true;
}

/* ------------------------------------------------------------------ workers that may still write */

void mokd_state_note_worker(struct mokd_device *device, uint32_t pid)
{
    struct mokd_server *server = device->server;

    if (!mokd_state_is_kept(server))
        return;
    _cleanup_fd_ int pidfd = (int)syscall(SYS_pidfd_open, (pid_t)pid, 0);
    uint64_t *number = &server->state->worker[device->index].number;
    mokd_fdstore_drop(server->state->store, *number);
    *number = pidfd < 0 ? 0 : mokd_fdstore_keep(server->state->store, pidfd, MOKD_FDSTORE_OWN);
    mokd_state_touch(server);
    mokd_state_save(server); /* before it can be given anything to write to */
}

static bool ends_within(int pidfd, uint64_t until_ns)
{
    struct pollfd wait = { .fd = pidfd, .events = POLLIN };

    for (;;) {
        uint64_t now = mok_now_ns();
        int r = poll(&wait, 1, now < until_ns ? (int)((until_ns - now) / 1000000u) : 0);
        if (r > 0)
            return true;
        if (r == 0 || errno != EINTR)
            return false;
    }
}

/* They have seen the end of their socket and end by themselves; one that hangs would write to what others use. */
static void await_old_workers(struct mokd_state *own)
{
    uint64_t until = mok_now_ns() + (uint64_t)OLD_WORKERS_MS * 1000000u;

    for (size_t i = 0; own->earlier && i < own->earlier->n_device; i++) {
        const Mok__StateDevice *device = own->earlier->device[i];
        _cleanup_fd_ int pidfd = mokd_fdstore_take(own->store, device->worker);
        if (pidfd < 0)
            continue;
        if (!ends_within(pidfd, until)) {
            mok_log(MOK_LOG_WARNING, "state", "worker of the mokd before killed: it did not end by itself",
                    "device=%s", device->name);
            syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, 0);
            ends_within(pidfd, until + (uint64_t)OLD_WORKERS_MS * 1000000u);
        }
        mokd_fdstore_drop(own->store, device->worker);
    }
}

/* ------------------------------------------------------------------ opening */

static int read_earlier(struct mokd_state *own, int fd, struct mokd_error *error)
{
    _cleanup_free_ void *bytes = NULL;
    ProtobufCMessage *message = NULL;
    size_t size = 0;

    int r = mokd_state_file_read(fd, &bytes, &size, &own->sequence, error);
    if (r < 0)
        return r;
    r = mok_wire_unpack_within(&mok__state__descriptor, bytes, size, 8 * (size_t)MOKD_STATE_MAX_BYTES, &message);
    if (r < 0)
        return mokd_error_set(error, r, "it cannot be read: %s", mok_error_text(r));
    own->earlier = (Mok__State *)message;
    return 0;
}

static void forget_earlier(struct mokd_state *own)
{
    if (own->earlier)
        mok_wire_free(&own->earlier->base);
    own->earlier = NULL;
}

/* The earlier state's memory goes on being the state's. */
static void take_earlier(struct mokd_server *server)
{
    struct mokd_state *own = server->state;
    struct mokd_error error = { 0 };
    int fd = mokd_fdstore_take_state(own->store);

    if (fd < 0)
        return;
    int r = read_earlier(own, fd, &error);
    if (own->earlier)
        await_old_workers(own); /* whatever else is wrong with it */
    if (r == 0)
        r = mokd_state_check(server, own->earlier, &error);
    if (r == 0 && (!mokd_fdstore_is_there(own->store) || server->config->resume_timeout == 0))
        r = mokd_error_set(&error, -MOK_ENOTSUP, "the service manager keeps nothing any more, or resume_timeout is 0");
    if (r < 0) {
        char clean[MOKD_TEXT_MAX];
        mok_log(MOK_LOG_ERROR, "state", "not used, mokd starts without sessions", "code=%s error=\"%s\"",
                mok_error_symbol(r), mok_log_text(clean, sizeof(clean), error.text));
        forget_earlier(own);
        mok_close(fd);
        return;
    }
    own->fd = fd;
    mokd_fdstore_continue(own->store, own->earlier->last_memory);
}

static void begin(struct mokd_state *own)
{
    int fd = -1;

    own->sequence = 0;
    mokd_fdstore_clear(own->store);
    int r = mokd_state_file_create(&fd);
    if (r == 0)
        r = mokd_fdstore_keep_state(own->store, fd);
    if (r < 0) {
        mok_log(MOK_LOG_WARNING, "state", "sessions will end when mokd is restarted", "code=%s error=\"%s\"",
                mok_error_symbol(r), mok_error_text(r));
        mok_close(fd);
        return;
    }
    own->fd = fd;
}

int mokd_state_open(struct mokd_server *server)
{
    struct mokd_state *own = calloc(1, sizeof(*own));

    if (!own)
        return -MOK_ENOMEM;
    own->fd = -1;
    int r = mokd_fdstore_open(server->options->inherited, &own->store);
    if (r < 0) {
        free(own);
        return r;
    }
    server->state = own;
    server->store = own->store;
    take_earlier(server);
    if (own->fd >= 0)
        return 0;
    if (mokd_fdstore_is_there(own->store) && server->config->resume_timeout > 0)
        begin(own);
    else
        mokd_fdstore_clear(own->store);
    return 0;
}

void mokd_state_restore(struct mokd_server *server)
{
    struct mokd_state *own = server->state;

    if (own->earlier) {
        mokd_state_build(server, own->earlier);
        forget_earlier(own);
    }
    unsigned stale = mokd_fdstore_drop_rest(own->store);
    if (stale > 0)
        mok_log(MOK_LOG_INFO, "state", "descriptors that belong to nothing dropped", "count=%u", stale);
    mokd_state_touch(server);
    mokd_state_save(server);
}

void mokd_state_close(struct mokd_server *server)
{
    struct mokd_state *own = server->state;

    if (!own)
        return;
    forget_earlier(own);
    mok_close(own->fd);
    mokd_fdstore_close(own->store);
    free(own);
    server->state = NULL;
    server->store = NULL;
}
