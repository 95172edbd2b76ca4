/* SPDX-License-Identifier: Apache-2.0 */
#include "port.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>

#include "fork.h"
#include "queue.h"
#include "resume.h"

/* Longest sleep between two looks at whether mokd is still there, and how often a caller that polls looks. */
#define SLICE_NS 200000000u
#define LOOK_NS 100000000u
/* How often somebody looks for streams that wait. */
#define WATCH_NAP_NS 20000000

/* How long what an earlier call has left behind may take before one looks again. */
#define RETURN_US 5000u

/* How long an operation whose stream has failed is tried to be cancelled. */
#define CALL_BACK_TRIES 200
#define CALL_BACK_NAP_NS 1000000

/* Control page, submissions, doorbell. */
#define QUEUE_FDS 3

/*
 * Where the counters of a queue start: near their end, so that every session goes through the wrap-around early and
 * none does so for the first time after days.
 */
#define INITIAL_COUNTER 0xFFFFFFF0u

/* A queue, kept while it is the port's or somebody sleeps on it. */
struct lane {
    struct mok_queue_client client;
    uint32_t id;
    int doorbell_fd;
    unsigned users;
    uint32_t losses; /* of the connection, when it was asked for: it ends with the next */
};

struct port {
    mok_session *session;
    uint32_t device, entries;

    pthread_mutex_t opening; /* of the GPU and of stream slots; taken before the lock */
    struct cuda_device *cuda;

    pthread_mutex_t lock; /* all below */
    struct stream_page *pages; /* newest first; kept, since streams may look at them for as long as they like */
    uint32_t on_stream;        /* operations in flight that a stream waits for */
    pthread_t watcher;         /* once there is a page */
    pthread_cond_t watch;      /* on_stream is not 0 any more, or closing */
    bool closing;
    struct lane *lane;
    int over; /* why nothing more goes through the lane; 0: it does */
    uint64_t looked_ns;
    struct ticket_table tickets;
    uint32_t cancels; /* of the tickets in use */
};

/* ------------------------------------------------------------------ lanes */

static void lane_put(struct lane *lane)
{
    if (!lane || --lane->users > 0)
        return;
    mok_queue_client_release(&lane->client);
    if (lane->doorbell_fd >= 0) {
        fork_disown_fd(lane->doorbell_fd);
        mok_close(lane->doorbell_fd);
    }
    free(lane);
}

static int lane_map(struct lane *lane, struct mok_wire_fds *fds, uint32_t entries)
{
    int r = mok_queue_client_open(fds->fd[0], fds->fd[1], fds->fd[2], &lane->client);
    if (r < 0)
        return client_fail(r, "the queue that mokd sent cannot be mapped: %s", mok_strerror(r));
    if (lane->client.layout.sq_entries != entries)
        return client_fail(MOK_EPROTO, "the queue that mokd sent has %" PRIu32 " entries, must have %" PRIu32,
                           lane->client.layout.sq_entries, entries);
    if (madvise((void *)lane->client.header, lane->client.layout.control_bytes, MADV_DONTFORK) < 0 ||
        madvise(lane->client.submit, lane->client.layout.submit_bytes, MADV_DONTFORK) < 0)
        return client_fail(MOK_ENOMEM, "cannot keep the queue's memory out of children");
    r = fork_own_fd(fds->fd[2]);
    if (r == 0)
        lane->doorbell_fd = mok_wire_fds_take(fds, 2);
    return r;
}

/*
 * mokd gives a session one queue a device, and one whose descriptors got lost on the way stays that one. So a process
 * at its descriptor limit does not ask.
 */
static int check_room_for_fds(void)
{
    int fd[QUEUE_FDS], r = 0;

    for (size_t i = 0; i < QUEUE_FDS; i++) {
        fd[i] = eventfd(0, EFD_CLOEXEC);
        if (fd[i] < 0)
            r = client_fail(MOK_EFDS,
                            "a queue brings %d descriptors, more than this process may still have (ulimit -n)",
                            QUEUE_FDS);
    }
    for (size_t i = 0; i < QUEUE_FDS; i++)
        mok_close(fd[i]);
    return r;
}

/* Asks again while the answer is `in_the_way`, which is what it is in the end if that lasts for the session's time. */
static int ask_while(mok_session *session, int in_the_way, Mok__Request *request, Mok__Reply__BodyCase body, size_t fds,
                     struct control_answer *ret_answer)
{
    uint64_t deadline = control_deadline(session->timeout_ms);
    int r;

    while ((r = session_call(session, request, body, fds, ret_answer)) == in_the_way && mok_now_ns() < deadline)
        usleep(RETURN_US);
    return r;
}

/*
 * A session asks one queue a device and knows what it has, so one that is in the way is one whose answer came too late:
 * it is on its way back to mokd.
 */
static int ask_for_queue(mok_session *session, Mok__Request *request, struct control_answer *ret_answer)
{
    int r = ask_while(session, -MOK_EEXIST, request, MOK__REPLY__BODY_QUEUE_OPEN, QUEUE_FDS, ret_answer);

    if (r != -MOK_EEXIST)
        return r;
    return client_fail(MOK_ETIMEDOUT,
                       "the queue to device %" PRIu32 " whose answer came too late is still there after %" PRIu64 " ms",
                       request->queue_open->device, session->timeout_ms);
}

static int lane_make(struct control_answer *answer, uint32_t entries, uint32_t losses, struct lane **ret_lane)
{
    struct lane *lane = calloc(1, sizeof(*lane));

    if (!lane)
        return client_fail(MOK_ENOMEM, "no memory for a queue");
    lane->doorbell_fd = -1;
    lane->users = 1;
    lane->losses = losses;
    lane->id = answer->reply->queue_open->queue;
    int r = lane_map(lane, &answer->fds, entries);
    if (r < 0) {
        lane_put(lane);
        return r;
    }
    *ret_lane = lane;
    return 0;
}

static int lane_open(mok_session *session, uint32_t device, struct lane **ret_lane)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__QueueOpen body = MOK__QUEUE_OPEN__INIT;

    body.device = device;
    body.entries = session->queue_entries;
    body.initial_counter = INITIAL_COUNTER;
    request.body_case = MOK__REQUEST__BODY_QUEUE_OPEN;
    request.queue_open = &body;
    uint32_t losses = 0;
    int r = check_room_for_fds();
    if (r < 0)
        return r;
    r = control_await(session->control, control_deadline(session->timeout_ms));
    if (r == 0) {
        losses = control_losses(session->control);
        r = ask_for_queue(session, &request, &answer);
    }
    if (r < 0)
        return r;
    r = lane_make(&answer, session->queue_entries, losses, ret_lane);
    if (r < 0)
        control_give_back(session->control, answer.reply);
    return r;
}

/* ------------------------------------------------------------------ completions */

/* Under the lock. What the operation used is the caller's again. */
static void complete(struct port *port, struct ticket_slot *slot, const struct mok_cqe *cqe)
{
    if (slot->page) {
        stream_end(slot->page, slot->stream_slot);
        slot->page = NULL;
        port->on_stream--;
    }
    slot->state = TICKET_DONE;
    slot->cqe = *cqe;
    if (slot->layer)
        slot->layer->operations--;
    slot->layer = NULL;
    for (size_t i = 0; i < ARRAY_SIZE(slot->buffer); i++) {
        if (slot->buffer[i])
            slot->buffer[i]->operations--;
        slot->buffer[i] = NULL;
    }
    if (slot->unwanted) {
        port->cancels -= slot->opcode == MOK_OP_CANCEL;
        ticket_give(&port->tickets, slot);
    }
}

/* Under the lock. Nothing will complete what is still in flight: it ends here. */
static void fail_flying(struct port *port, int code)
{
    port->over = code;
    for (uint32_t i = 0; i < port->tickets.capacity; i++) {
        struct ticket_slot *slot = &port->tickets.slot[i];
        struct mok_cqe cqe = { .user_data = slot->ticket, .result = code };
        if (slot->state == TICKET_FLYING)
            complete(port, slot, &cqe);
    }
}

/* Under the lock. */
static void reap(struct port *port)
{
    struct mok_cqe cqe;
    int r = 0;

    while (!port->over && (r = mok_queue_client_reap(&port->lane->client, &cqe)) == 1) {
        struct ticket_slot *slot = ticket_find(&port->tickets, cqe.user_data);
        if (slot && slot->state == TICKET_FLYING)
            complete(port, slot, &cqe);
    }
    if (r == 0 && !port->over && port->lane->losses != control_losses(port->session->control))
        r = -MOK_EDAEMON; /* its worker went with mokd, whoever of them could still say so */
    if (r < 0)
        fail_flying(port, r);
}

/* Without the lock. Ends everything once mokd is gone; the worker may be gone with it and cannot say so. */
static void look(struct port *port)
{
    uint32_t queue = port_queue(port);
    int code = control_look(port->session->control);

    if (code == 0)
        return;
    pthread_mutex_lock(&port->lock);
    reap(port);
    if (!port->over && port->lane->id == queue) /* not one that was opened meanwhile, at another mokd */
        fail_flying(port, code);
    pthread_mutex_unlock(&port->lock);
}

/* ------------------------------------------------------------------ ports */

/* NULL, with a sentence: no memory. */
static struct port *port_new(mok_session *session, uint32_t device)
{
    struct port *port = calloc(1, sizeof(*port));

    if (!port || ticket_table_init(&port->tickets, device, session->queue_entries + PORT_CANCELS) < 0) {
        free(port);
        client_fail(MOK_ENOMEM, "no memory for the tickets of a queue of %" PRIu32 " entries", session->queue_entries);
        return NULL;
    }
    pthread_mutex_init(&port->lock, NULL);
    pthread_mutex_init(&port->opening, NULL);
    pthread_cond_init(&port->watch, NULL);
    port->session = session;
    port->device = device;
    port->entries = session->queue_entries;
    port->over = -MOK_EWORKER; /* until there is a lane */
    return port;
}

static void streams_close(struct port *port)
{
    if (!port->pages)
        return;
    pthread_mutex_lock(&port->lock);
    port->closing = true;
    pthread_cond_signal(&port->watch);
    pthread_mutex_unlock(&port->lock);
    pthread_join(port->watcher, NULL);
    while (port->pages) {
        struct stream_page *page = port->pages;
        port->pages = page->next;
        stream_page_close(page);
    }
}

void port_close(struct port *port)
{
    if (!port)
        return;
    streams_close(port);
    lane_put(port->lane);
    ticket_table_clear(&port->tickets);
    cuda_close(port->cuda);
    pthread_cond_destroy(&port->watch);
    pthread_mutex_destroy(&port->opening);
    pthread_mutex_destroy(&port->lock);
    free(port);
}

/* Whether the port's queue can be used, after what has come in meanwhile. */
static bool usable(struct port *port, uint32_t *ret_queue)
{
    pthread_mutex_lock(&port->lock);
    reap(port);
    bool is = !port->over;
    if (is && ret_queue)
        *ret_queue = port->lane->id;
    pthread_mutex_unlock(&port->lock);
    return is;
}

/* Under session->opening. */
static int port_reopen(struct port *port, uint32_t *ret_queue)
{
    struct lane *lane;

    int r = lane_open(port->session, port->device, &lane);
    if (r < 0)
        return r;
    if (ret_queue)
        *ret_queue = lane->id;
    pthread_mutex_lock(&port->lock);
    struct lane *earlier = port->lane;
    port->lane = lane;
    port->over = 0;
    lane_put(earlier);
    pthread_mutex_unlock(&port->lock);
    return 0;
}

/* Under session->opening. */
static int port_prepare(mok_session *session, uint32_t device, struct port **ret_port, uint32_t *ret_queue)
{
    struct port *known = session->port[device];
    struct port *port = known ? known : port_new(session, device);

    if (!port)
        return -MOK_ENOMEM;
    int r = known && usable(known, ret_queue) ? 0 : port_reopen(port, ret_queue);
    if (r < 0 && !known)
        port_close(port);
    if (r < 0)
        return r;
    if (!known)
        __atomic_store_n(&session->port[device], port, __ATOMIC_RELEASE);
    *ret_port = port;
    return 0;
}

int port_get(mok_session *session, uint32_t device, struct port **ret_port, uint32_t *ret_queue)
{
    if (device >= MOK_MAX_DEVICES)
        return client_fail(MOK_ERANGE, "device is %" PRIu32 ", must be 0..%u", device, MOK_MAX_DEVICES - 1);
    struct port *port = __atomic_load_n(&session->port[device], __ATOMIC_ACQUIRE);
    if (port && usable(port, ret_queue)) {
        *ret_port = port;
        return 0;
    }
    pthread_mutex_lock(&session->opening);
    int r = port_prepare(session, device, ret_port, ret_queue);
    pthread_mutex_unlock(&session->opening);
    return r;
}

struct port *port_of(mok_session *session, mok_ticket ticket)
{
    return __atomic_load_n(&session->port[ticket_device(ticket)], __ATOMIC_ACQUIRE);
}

uint32_t port_queue(struct port *port)
{
    pthread_mutex_lock(&port->lock);
    uint32_t id = port->lane->id;
    pthread_mutex_unlock(&port->lock);
    return id;
}

/* ------------------------------------------------------------------ submitting */

/* Under the lock. */
static int submit_check(struct port *port, const struct submission *s)
{
    bool is_cancel = s->sqe.opcode == MOK_OP_CANCEL;
    uint32_t operations = port->tickets.used - port->cancels;

    int r = s->layer ? session_recovered(port->session) : 0;
    if (r < 0)
        return r;
    if (port->over)
        return client_fail(port->over, "the queue to device %" PRIu32 " is closed: %s", port->device,
                           mok_strerror(port->over));
    if (s->queue != 0 && s->queue != port->lane->id)
        return client_fail(MOK_EWORKER,
                           "the worker of device %" PRIu32 " has restarted since the group was formed; form it again",
                           port->device);
    if (is_cancel && port->cancels >= PORT_CANCELS)
        return client_fail(MOK_EAGAIN, "cancels in flight are %" PRIu32 ", must be fewer than %u", port->cancels,
                           PORT_CANCELS);
    if (!is_cancel && operations >= port->entries)
        return client_fail(MOK_EAGAIN,
                           "operations in flight or with a result not yet asked for are %" PRIu32
                           ", must be fewer than queue_entries, %" PRIu32,
                           operations, port->entries);
    return s->layer ? layer_ready(s->layer, s->sqe.opcode) : 0;
}

/* A submission and the slot that its stream waits at; NULL: none. */
struct handed {
    const struct submission *submission;
    struct stream_page *page;
    uint32_t slot;
};

/* Under the lock. */
static int reserve(struct port *port, struct mok_sqe **ret_sqe)
{
    int r = mok_queue_client_reserve(&port->lane->client, ret_sqe);

    if (r == -MOK_EAGAIN)
        return client_fail(r, "the queue's %" PRIu32 " entries are full and the worker has not taken one yet",
                           port->entries);
    if (r < 0)
        return client_fail(r, "the queue to device %" PRIu32 " is closed: %s", port->device, mok_strerror(r));
    return 0;
}

/* Under the lock. Takes a slot of the page, if there is one. */
static int submit(struct port *port, struct handed *handed, mok_ticket *ret_ticket)
{
    const struct submission *s = handed->submission;
    struct mok_sqe *sqe;

    reap(port);
    int r = submit_check(port, s);
    if (r == 0)
        r = reserve(port, &sqe);
    if (r == 0 && handed->page)
        r = stream_take(handed->page, &handed->slot);
    if (r < 0)
        return r;

    struct ticket_slot *slot = ticket_take(&port->tickets);
    slot->opcode = s->sqe.opcode;
    slot->layer = s->layer;
    if (s->layer) {
        s->layer->operations++;
        slot->group = s->layer->group->id;
    }
    for (size_t i = 0; i < ARRAY_SIZE(slot->buffer); i++) {
        slot->buffer[i] = s->buffer[i];
        if (s->buffer[i])
            s->buffer[i]->operations++;
    }
    port->cancels += s->sqe.opcode == MOK_OP_CANCEL;
    *sqe = s->sqe;
    sqe->user_data = slot->ticket;
    if (handed->page) {
        sqe->flags |= MOK_SQE_ON_STREAM;
        sqe->stream_slot = handed->slot;
        sqe->stream_number = handed->page->use[handed->slot].number;
        slot->page = handed->page;
        slot->stream_slot = handed->slot;
        port->on_stream++;
        pthread_cond_signal(&port->watch);
    }
    mok_queue_client_publish(&port->lane->client);
    *ret_ticket = slot->ticket;
    return 0;
}

int port_submit(struct port *port, const struct submission *submission, mok_ticket *ret_ticket)
{
    struct handed plain = { .submission = submission };

    pthread_mutex_lock(&port->lock);
    int r = submit(port, &plain, ret_ticket);
    pthread_mutex_unlock(&port->lock);
    return r;
}

/* ------------------------------------------------------------------ streams */

int port_cuda(struct port *port, const uint8_t *uuid, const char *mps_pipe, struct cuda_device **ret)
{
    const char *pipe = mps_pipe && mps_pipe[0] ? mps_pipe : port->session->mps_pipe;
    int r = 0;

    pthread_mutex_lock(&port->opening);
    if (!port->cuda)
        r = uuid ? cuda_open(uuid, pipe, &port->cuda) : cuda_open_current(&port->cuda);
    if (r == 0)
        *ret = port->cuda;
    pthread_mutex_unlock(&port->opening);
    return r;
}

/*
 * A GPU that waits sees neither a socket's end nor a closed ring. So while streams wait, somebody looks for them; the
 * worker itself releases them as long as it lives.
 */
static void *watch(void *cookie)
{
    const struct timespec nap = { .tv_nsec = WATCH_NAP_NS };
    struct port *port = cookie;

    pthread_mutex_lock(&port->lock);
    while (!port->closing) {
        if (port->on_stream == 0) {
            pthread_cond_wait(&port->watch, &port->lock);
            continue;
        }
        pthread_mutex_unlock(&port->lock);
        nanosleep(&nap, NULL);
        look(port);
        pthread_mutex_lock(&port->lock);
        reap(port);
    }
    pthread_mutex_unlock(&port->lock);
    return NULL;
}

/* All signals are the caller's threads' affair. */
static int watcher_start(struct port *port)
{
    sigset_t all, before;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&port->watcher, NULL, watch, port);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error ? client_fail(MOK_ENOMEM, "no thread to watch over waiting streams: %s", strerror(error)) : 0;
}

static int page_ask(struct port *port, uint32_t queue, struct stream_page **ret)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__StreamOpen body = MOK__STREAM_OPEN__INIT;

    int r = check_room_for_fds();
    if (r < 0)
        return r;
    body.queue = queue;
    request.body_case = MOK__REQUEST__BODY_STREAM_OPEN;
    request.stream_open = &body;
    /* Busy: it still makes them for an earlier call, whose answer came too late. */
    r = ask_while(port->session, -MOK_EBUSY, &request, MOK__REPLY__BODY_STREAM_OPEN, 1, &answer);
    if (r < 0)
        return r;
    const Mok__StreamOpenReply *reply = answer.reply->stream_open;
    r = stream_page_open(answer.fds.fd[0], reply->bytes, reply->slots, port->cuda, ret);
    if (r == 0)
        (*ret)->queue = queue;
    return r;
}

/* Under port->opening. The page of the queue that the port has now. */
static int page_get(struct port *port, struct stream_page **ret)
{
    struct stream_page *page = NULL;
    uint32_t queue = port_queue(port);

    if (!port->cuda) {
        int r = cuda_open_current(&port->cuda);
        if (r < 0)
            return r;
    }
    if (port->pages && port->pages->queue == queue) {
        *ret = port->pages;
        return 0;
    }
    int r = page_ask(port, queue, &page);
    if (r < 0)
        return r;
    r = port->pages ? 0 : watcher_start(port);
    if (r < 0) {
        stream_page_close(page);
        return r;
    }
    page->next = port->pages;
    port->pages = *ret = page;
    return 0;
}

/* An operation that its stream will never come to: the driver has refused. Nobody asks what became of it. */
static void call_back(struct port *port, mok_ticket ticket)
{
    const struct timespec nap = { .tv_nsec = CALL_BACK_NAP_NS };
    const struct submission cancel = { .sqe = { .opcode = MOK_OP_CANCEL, .cancel_target = ticket } };
    mok_ticket own;
    int r = -MOK_EAGAIN;

    for (int i = 0; i < CALL_BACK_TRIES && (r = port_submit(port, &cancel, &own)) == -MOK_EAGAIN; i++)
        nanosleep(&nap, NULL);
    port_disown(port, ticket);
    if (r == 0)
        port_disown(port, own);
}

static int submit_handed(struct port *port, struct handed *handed, void *stream, mok_ticket *ret_ticket)
{
    struct submission own = *handed->submission;
    mok_ticket ticket;

    own.queue = own.queue ? own.queue : handed->page->queue;
    handed->submission = &own;
    int r = stream_check(handed->page, stream);
    if (r < 0)
        return r;
    pthread_mutex_lock(&port->lock);
    r = submit(port, handed, &ticket);
    pthread_mutex_unlock(&port->lock);
    if (r < 0)
        return r;
    /* The worker readies it meanwhile. Without the lock: the stream may be full until an operation is over, and the
     * watcher may have to end that. */
    r = stream_hand_over(handed->page, handed->slot, stream);
    if (r < 0) {
        char why[640];
        snprintf(why, sizeof(why), "%s", client_last_error());
        stream_forget(handed->page, handed->slot);
        call_back(port, ticket);
        return client_fail_text(r, why);
    }
    *ret_ticket = ticket;
    return 0;
}

int port_submit_on_stream(struct port *port, const struct submission *submission, void *stream, mok_ticket *ret_ticket)
{
    struct handed handed = { .submission = submission };

    pthread_mutex_lock(&port->opening);
    int r = page_get(port, &handed.page);
    pthread_mutex_unlock(&port->opening);
    return r < 0 ? r : submit_handed(port, &handed, stream, ret_ticket);
}

/* ------------------------------------------------------------------ waiting */

static int unknown_ticket(mok_ticket ticket)
{
    return client_fail(MOK_ENOENT, "ticket is %" PRIu64 ", must be one whose result has not been had", ticket);
}

/* Under the lock. 1: *ret_outcome; 0: in flight; -MOK_ENOENT. */
static int fetch(struct port *port, mok_ticket ticket, struct outcome *ret_outcome)
{
    reap(port);
    struct ticket_slot *slot = ticket_find(&port->tickets, ticket);
    if (!slot || slot->unwanted)
        return unknown_ticket(ticket);
    if (slot->state == TICKET_FLYING)
        return 0;
    *ret_outcome = (struct outcome){ .cqe = slot->cqe, .group = slot->group, .opcode = slot->opcode };
    port->cancels -= slot->opcode == MOK_OP_CANCEL;
    ticket_give(&port->tickets, slot);
    return 1;
}

/* Under the lock, which it gives up meanwhile. */
static void doze(struct port *port, uint64_t until_ns)
{
    struct lane *lane = port->lane;
    uint32_t seen = mok_queue_client_seen(&lane->client);

    lane->users++;
    pthread_mutex_unlock(&port->lock);
    mok_queue_client_wait(&lane->client, seen, until_ns);
    pthread_mutex_lock(&port->lock);
    lane_put(lane);
}

int port_await(struct port *port, mok_ticket ticket, uint64_t deadline_ns, struct outcome *ret_outcome)
{
    int r;

    pthread_mutex_lock(&port->lock);
    for (;;) {
        r = fetch(port, ticket, ret_outcome);
        if (r != 0)
            break;
        uint64_t now = mok_now_ns();
        if (now - port->looked_ns >= LOOK_NS) {
            port->looked_ns = now;
            pthread_mutex_unlock(&port->lock);
            look(port);
            pthread_mutex_lock(&port->lock);
            r = fetch(port, ticket, ret_outcome);
            if (r != 0)
                break;
        }
        if (now >= deadline_ns)
            break;
        doze(port, deadline_ns - now < SLICE_NS ? deadline_ns : now + SLICE_NS);
    }
    pthread_mutex_unlock(&port->lock);
    return r;
}

int port_is_flying(struct port *port, mok_ticket ticket)
{
    pthread_mutex_lock(&port->lock);
    reap(port);
    struct ticket_slot *slot = ticket_find(&port->tickets, ticket);
    bool known = slot && !slot->unwanted;
    bool flying = known && slot->state == TICKET_FLYING;
    pthread_mutex_unlock(&port->lock);
    if (flying)
        return 0;
    return known ? client_fail(MOK_ENOENT, "ticket %" PRIu64 " has completed", ticket) : unknown_ticket(ticket);
}

void port_disown(struct port *port, mok_ticket ticket)
{
    pthread_mutex_lock(&port->lock);
    struct ticket_slot *slot = ticket_find(&port->tickets, ticket);
    if (slot) {
        slot->unwanted = true;
        if (slot->state == TICKET_DONE)
            complete(port, slot, &slot->cqe);
    }
    pthread_mutex_unlock(&port->lock);
}

/* ------------------------------------------------------------------ who uses what */

uint32_t port_buffer_operations(struct port *port, const mok_buffer *buffer)
{
    pthread_mutex_lock(&port->lock);
    reap(port);
    uint32_t operations = buffer->operations;
    pthread_mutex_unlock(&port->lock);
    return operations;
}

int port_layer_hold(struct port *port, mok_layer *layer)
{
    int r = 0;

    pthread_mutex_lock(&port->lock);
    reap(port);
    if (layer->changing)
        r = client_fail(MOK_EBUSY, "layer %" PRIu32 " is being bound or destroyed by another thread", layer->id);
    else if (layer->operations > 0)
        r = client_fail(MOK_EBUSY, "layer %" PRIu32 " has %" PRIu32 " operations in flight, must have 0", layer->id,
                        layer->operations);
    else
        layer->changing = true;
    pthread_mutex_unlock(&port->lock);
    return r;
}

void port_layer_settle(struct port *port, mok_layer *layer, bool has_weights, bool has_gradients)
{
    pthread_mutex_lock(&port->lock);
    layer->changing = false;
    layer->has_weights = has_weights;
    layer->has_gradients = has_gradients;
    pthread_mutex_unlock(&port->lock);
}

void port_forget_group(struct port *port, const mok_group *group)
{
    pthread_mutex_lock(&port->lock);
    reap(port);
    for (uint32_t i = 0; i < port->tickets.capacity; i++) {
        struct ticket_slot *slot = &port->tickets.slot[i];
        if (slot->state != TICKET_FLYING || !slot->layer || slot->layer->group != group)
            continue;
        slot->layer = NULL;
        for (size_t k = 0; k < ARRAY_SIZE(slot->buffer); k++) {
            if (slot->buffer[k] && slot->buffer[k]->group == group)
                slot->buffer[k] = NULL;
        }
    }
    pthread_mutex_unlock(&port->lock);
}
