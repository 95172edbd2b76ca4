/* SPDX-License-Identifier: Apache-2.0 */
/* See forming.h. */
#include "forming.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rack/group_node.h"
#include "rng.h"

#define MS UINT64_C(1000000)

/* Durations of the model, in ns. */
enum {
    LINK_NS = 30000,       /* of a message, at least; up to four times that */
    PREPARE_NS = 200000,   /* of a node's part of a call, up to twice that */
    CALL_GAP_NS = 50000,   /* between a rank's calls, at most */
    JOIN_GAP_NS = 20000,   /* between two joins of a job */
    AGAIN_NS = 5000000,    /* until a rank that lost its group joins again */
    DETECT_NS = 400000000, /* until a node's death is noticed, up to twice that */
    TICK_NS = 250000000,
};
#define GIVE_UP_NS (120000 * MS)

enum kind { JOIN, ARRIVE, PREPARED, CALL, FORGET, KILL, LOST, BOOT, TICK };

struct event {
    uint64_t at, number; /* earlier ones first, then those that were made first */
    enum kind kind;
    uint32_t node, other; /* or the job, or the rank */
    uint32_t group;
    uint64_t index;
};

struct letter {
    TAILQ_ENTRY(letter) link;
    uint64_t number;
    size_t size;
    uint8_t bytes[];
};

/* From one node to another: in order. */
struct wire {
    TAILQ_HEAD(, letter) letters;
    uint64_t last_ns;
};

struct part { /* what a node has of a job */
    uint32_t group;
    bool ended; /* this group is over here */
    uint64_t done;
};

struct node {
    struct rack *rack;
    uint32_t index;
    bool alive;
    struct group_node machine;
    struct part *part; /* [jobs] */
    uint64_t received;
};

struct job {
    uint64_t joined_ns; /* the last join */
    uint32_t committed; /* nodes on which the group has opened */
};

struct rack {
    struct forming_options o;
    uint32_t ranks;
    struct rng rng;
    uint64_t now, made, lost_ns;
    struct node *node;
    struct job *job;
    struct wire *wire; /* [nodes][nodes] */
    struct event *heap;
    uint64_t events, room;
    bool out_of_memory;
    struct forming_result result;
};

/* ------------------------------------------------------------------ events */

static bool before(const struct event *a, const struct event *b)
{
    return a->at != b->at ? a->at < b->at : a->number < b->number;
}

static void swap(struct event *a, struct event *b)
{
    struct event c = *a;
    *a = *b;
    *b = c;
}

static uint64_t push(struct rack *r, uint64_t at, struct event event)
{
    if (r->events == r->room) {
        uint64_t room = r->room ? 2 * r->room : 1024;
        struct event *heap = realloc(r->heap, room * sizeof(*heap));
        if (!heap) {
            r->out_of_memory = true;
            return 0;
        }
        r->heap = heap;
        r->room = room;
    }
    uint64_t i = r->events++;
    event.at = at;
    event.number = r->made++;
    r->heap[i] = event;
    for (; i > 0 && before(&r->heap[i], &r->heap[(i - 1) / 2]); i = (i - 1) / 2)
        swap(&r->heap[i], &r->heap[(i - 1) / 2]);
    return event.number;
}

static struct event pop(struct rack *r)
{
    struct event first = r->heap[0];

    r->heap[0] = r->heap[--r->events];
    for (uint64_t i = 0;;) {
        uint64_t least = i;
        for (uint64_t child = 2 * i + 1; child <= 2 * i + 2 && child < r->events; child++)
            if (before(&r->heap[child], &r->heap[least]))
                least = child;
        if (least == i)
            return first;
        swap(&r->heap[i], &r->heap[least]);
        i = least;
    }
}

static uint64_t soon(struct rack *r, uint32_t most)
{
    return r->now + 1 + rng_below(&r->rng, most);
}

/* ------------------------------------------------------------------ what the machines ask for */

static struct wire *wire_of(struct rack *r, uint32_t from, uint32_t to)
{
    return &r->wire[(size_t)from * r->o.nodes + to];
}

static void op_send(void *cookie, uint32_t to, const Mok__GroupMessage *message)
{
    struct node *from = cookie;
    struct rack *r = from->rack;
    struct wire *wire = wire_of(r, from->index, to);
    size_t size = mok__group_message__get_packed_size(message);
    struct letter *letter = malloc(sizeof(*letter) + size);

    r->result.messages++;
    r->result.bytes += size;
    r->result.largest = size > r->result.largest ? size : r->result.largest;
    if (!letter) {
        r->out_of_memory = true;
        return;
    }
    uint64_t at = r->now + LINK_NS + rng_below(&r->rng, 3 * LINK_NS);
    wire->last_ns = at > wire->last_ns ? at : wire->last_ns + 1;
    letter->size = mok__group_message__pack(message, letter->bytes);
    letter->number =
        push(r, wire->last_ns, (struct event){ .kind = ARRIVE, .node = from->index, .other = to });
    TAILQ_INSERT_TAIL(&wire->letters, letter, link);
}

/* "job7" */
static uint32_t job_of(const char *name)
{
    return (uint32_t)strtoul(name + 3, NULL, 10);
}

static uint32_t job_with(const struct node *node, uint32_t group)
{
    uint32_t job = 0;

    while (job < node->rack->o.jobs && node->part[job].group != group)
        job++;
    return job;
}

static void join_ranks(struct node *node, uint32_t job)
{
    struct rack *r = node->rack;

    for (uint32_t d = 0; d < r->o.devices; d++)
        push(r, r->now + AGAIN_NS + rng_below(&r->rng, AGAIN_NS),
             (struct event){ .kind = JOIN, .node = d * r->o.nodes + node->index, .other = job });
}

static void op_refused(void *cookie, uint64_t join, const struct group_error *error)
{
    struct node *node = cookie;
    struct rack *r = node->rack;

    (void)join;
    if (error->code == -MOK_ERANK) {
        r->result.taken++;
        return;
    }
    /* The only other reason here: a node went while the group formed. Which rank it was, the sentence's owner says. */
    for (uint32_t job = 0; job < r->o.jobs; job++)
        if (node->part[job].group == 0 && !node->part[job].ended) {
            push(r, r->now + AGAIN_NS, (struct event){ .kind = JOIN, .node = error->rank, .other = job });
            return;
        }
}

static void prepare(struct node *node, uint32_t group, uint64_t index)
{
    struct rack *r = node->rack;

    push(r, r->now + PREPARE_NS + rng_below(&r->rng, PREPARE_NS),
         (struct event){ .kind = PREPARED, .node = node->index, .group = group, .index = index });
}

static void op_open(void *cookie, const struct group_roster *roster)
{
    struct node *node = cookie;

    node->part[job_of(roster->name)] = (struct part){ .group = roster->id };
    prepare(node, roster->id, 0);
}

static void op_prepare(void *cookie, uint32_t group, uint64_t index, uint32_t kind, uint32_t object)
{
    (void)kind;
    (void)object;
    prepare(cookie, group, index);
}

static void end_here(struct node *node, uint32_t group)
{
    struct rack *r = node->rack;
    uint32_t job = job_with(node, group);

    if (job == r->o.jobs || node->part[job].ended)
        return;
    node->part[job].ended = true;
    r->result.ended++;
    if (r->lost_ns && r->now - r->lost_ns > r->result.told_ns)
        r->result.told_ns = r->now - r->lost_ns;
    push(r, r->now, (struct event){ .kind = FORGET, .node = node->index, .other = job, .group = group, .index = 1 });
}

static void op_verdict(void *cookie, uint32_t group, uint64_t index, const struct group_error *error)
{
    struct node *node = cookie;
    struct rack *r = node->rack;
    uint32_t number = job_with(node, group);
    struct job *job = &r->job[number];

    if (number == r->o.jobs)
        return;
    if (error->code < 0) {
        end_here(node, group);
        return;
    }
    if (index == 0 && ++job->committed == r->o.nodes) {
        uint64_t took = r->now - job->joined_ns;
        r->result.formed++;
        r->result.form_ns = took > r->result.form_ns ? took : r->result.form_ns;
        if (r->o.intruders) {
            uint32_t rank = rng_below(&r->rng, r->ranks);
            push(r, r->now, (struct event){ .kind = JOIN, .node = rank, .other = number, .index = 1 });
        }
    }
    node->part[number].done = index;
    if (index == r->o.calls) {
        push(r, soon(r, CALL_GAP_NS),
             (struct event){ .kind = FORGET, .node = node->index, .other = number, .group = group });
        return;
    }
    for (uint32_t d = 0; d < r->o.devices; d++)
        push(r, soon(r, CALL_GAP_NS),
             (struct event){ .kind = CALL, .node = node->index, .other = d * r->o.nodes + node->index, .group = group,
                             .index = index + 1 });
}

static void op_over(void *cookie, uint32_t group, const struct group_error *error)
{
    (void)error;
    end_here(cookie, group);
}

static void op_drop(void *cookie, uint32_t peer, uint64_t request, uint32_t group, uint32_t rank, uint32_t buffer)
{
    (void)cookie;
    (void)peer;
    (void)request;
    (void)group;
    (void)rank;
    (void)buffer;
}

static void op_dropped(void *cookie, uint32_t peer, uint64_t request)
{
    (void)cookie;
    (void)peer;
    (void)request;
}

static void op_layer_gone(void *cookie, uint32_t group, uint32_t layer, uint32_t rank)
{
    (void)cookie;
    (void)group;
    (void)layer;
    (void)rank;
}

static void op_unreached(void *cookie, const char *name, char *ret, size_t size)
{
    (void)cookie;
    (void)name;
    snprintf(ret, size, "lost");
}

static void op_apart(void *cookie, char *ret, size_t size)
{
    (void)cookie;
    (void)size;
    ret[0] = '\0';
}

static bool op_id_is_taken(void *cookie, uint32_t id)
{
    return job_with(cookie, id) < ((struct node *)cookie)->rack->o.jobs;
}

static const struct group_ops ops = {
    .send = op_send,
    .refused = op_refused,
    .open = op_open,
    .prepare = op_prepare,
    .verdict = op_verdict,
    .over = op_over,
    .drop = op_drop,
    .dropped = op_dropped,
    .layer_gone = op_layer_gone,
    .unreached = op_unreached,
    .apart = op_apart,
    .id_is_taken = op_id_is_taken,
};

/* ------------------------------------------------------------------ what happens */

static uint64_t now_ms(const struct rack *r)
{
    return r->now / MS + 1000;
}

static const char *name_of(uint32_t node, char buffer[16])
{
    snprintf(buffer, 16, "n%03u", node);
    return buffer;
}

/* A rank is of the node that follows from its number, unless it is an intruder. */
static void join(struct rack *r, uint32_t rank, uint32_t job, bool intruder)
{
    struct node *node = &r->node[(rank + intruder) % r->o.nodes];
    char name[16];
    uint64_t number;

    if (!node->alive)
        return; /* it joins when it is back */
    snprintf(name, sizeof(name), "job%u", job);
    struct group_joining joining = { .uid = 1000,
                                     .user = "ann",
                                     .name = name,
                                     .size = r->ranks,
                                     .rank = rank,
                                     .device = rank / r->o.nodes,
                                     .kind = MOK_DEVICE_CUDA,
                                     .session = rank + 1 };
    r->job[job].joined_ns = r->now;
    if (group_node_join(&node->machine, &joining, now_ms(r), &number) < 0)
        r->out_of_memory = true;
}

static void arrive(struct rack *r, const struct event *e)
{
    struct wire *wire = wire_of(r, e->node, e->other);
    struct letter *letter = TAILQ_FIRST(&wire->letters);
    struct node *to = &r->node[e->other];

    if (!letter || letter->number != e->number)
        return; /* lost with its link */
    TAILQ_REMOVE(&wire->letters, letter, link);
    Mok__GroupMessage *message = to->alive ? mok__group_message__unpack(NULL, letter->size, letter->bytes) : NULL;
    if (message) {
        to->received++;
        group_node_receive(&to->machine, e->node, message, now_ms(r));
        mok__group_message__free_unpacked(message, NULL);
    }
    free(letter);
}

static void call(struct rack *r, const struct event *e)
{
    struct group_params params = { .kind = GROUP_ALLOC, .bytes = 4096 };
    struct node *node = &r->node[e->node];

    if (node->alive)
        group_node_call(&node->machine, e->group, e->other, e->index, &params, 0, now_ms(r));
}

/* The group has done its work, or is over, and then its ranks want another. */
static void forget(struct rack *r, const struct event *e)
{
    struct node *node = &r->node[e->node];
    bool again = e->index != 0;

    if (!node->alive || node->part[e->other].group != e->group)
        return;
    if (!again && node->part[e->other].ended)
        return;
    if (!again) /* a rank that leaves is the end of the group: nobody leaves before all are done */
        for (uint32_t n = 0; n < r->o.nodes; n++)
            if (r->node[n].part[e->other].group != e->group || r->node[n].part[e->other].done < r->o.calls) {
                push(r, soon(r, CALL_GAP_NS), *e);
                return;
            }
    group_node_forget(&node->machine, e->group);
    if (!again)
        return;
    node->part[e->other] = (struct part){ 0 };
    r->job[e->other].committed = 0;
    join_ranks(node, e->other);
}

static void clear(struct rack *r, uint32_t from, uint32_t to)
{
    struct letter *letter;

    while ((letter = TAILQ_FIRST(&wire_of(r, from, to)->letters))) {
        TAILQ_REMOVE(&wire_of(r, from, to)->letters, letter, link);
        free(letter);
    }
}

static void start_node(struct rack *r, uint32_t index)
{
    struct node *node = &r->node[index];
    char name[16];

    node->rack = r;
    node->index = index;
    node->alive = true;
    group_node_init(&node->machine, &ops, node, index, name_of(index, name));
}

static void meet(struct rack *r, uint32_t a, uint32_t b)
{
    char name[16];

    group_node_peer_up(&r->node[a].machine, b, name_of(b, name), now_ms(r));
    group_node_peer_up(&r->node[b].machine, a, name_of(a, name), now_ms(r));
}

static void kill_node(struct rack *r, uint32_t index)
{
    struct node *node = &r->node[index];

    node->alive = false;
    group_node_release(&node->machine);
    for (uint32_t other = 0; other < r->o.nodes; other++) {
        clear(r, index, other);
        clear(r, other, index);
        if (other != index)
            push(r, r->now + DETECT_NS + rng_below(&r->rng, DETECT_NS),
                 (struct event){ .kind = LOST, .node = other, .other = index });
    }
    push(r, r->now + 3 * (uint64_t)DETECT_NS, (struct event){ .kind = BOOT, .node = index });
}

static void boot_node(struct rack *r, uint32_t index)
{
    struct node *node = &r->node[index];

    start_node(r, index);
    for (uint32_t other = 0; other < r->o.nodes; other++)
        if (other != index)
            meet(r, index, other);
    for (uint32_t job = 0; job < r->o.jobs; job++) {
        if (node->part[job].done == r->o.calls)
            continue; /* this node's ranks had all they wanted */
        node->part[job] = (struct part){ 0 };
        r->job[job].committed = 0;
        join_ranks(node, job);
    }
}

static bool all_done(const struct rack *r)
{
    for (uint32_t n = 0; n < r->o.nodes; n++)
        for (uint32_t job = 0; job < r->o.jobs; job++)
            if (r->node[n].part[job].done < r->o.calls)
                return false;
    return true;
}

static void tick(struct rack *r)
{
    for (uint32_t n = 0; n < r->o.nodes; n++)
        if (r->node[n].alive)
            group_node_tick(&r->node[n].machine, now_ms(r));
    if (!all_done(r) && r->now < GIVE_UP_NS)
        push(r, r->now + TICK_NS, (struct event){ .kind = TICK });
}

static void handle(struct rack *r, const struct event *e)
{
    switch (e->kind) {
    case JOIN:
        join(r, e->node, e->other, e->index != 0);
        return;
    case ARRIVE:
        arrive(r, e);
        return;
    case PREPARED:
        if (r->node[e->node].alive)
            group_node_prepared(&r->node[e->node].machine, e->group, e->index, NULL, now_ms(r));
        return;
    case CALL:
        call(r, e);
        return;
    case FORGET:
        forget(r, e);
        return;
    case KILL:
        kill_node(r, e->node);
        return;
    case LOST:
        r->lost_ns = r->lost_ns ? r->lost_ns : r->now;
        group_node_peer_lost(&r->node[e->node].machine, e->other, "was lost: no heartbeat", now_ms(r));
        return;
    case BOOT:
        boot_node(r, e->node);
        return;
    case TICK:
        tick(r);
        return;
    }
}

/* ------------------------------------------------------------------ set-up */

static void begin_job(struct rack *r, uint32_t job)
{
    bool backwards = r->o.order == WORLD_OPPOSITE && job % 2;

    for (uint32_t i = 0; i < r->ranks; i++) {
        uint64_t at = (uint64_t)i * JOIN_GAP_NS;
        if (r->o.order == WORLD_RANDOM)
            at = rng_below(&r->rng, r->ranks * JOIN_GAP_NS);
        push(r, at + 1, (struct event){ .kind = JOIN, .node = backwards ? r->ranks - 1 - i : i, .other = job });
    }
}

static int open_rack(struct rack *r)
{
    size_t nodes = r->o.nodes;

    r->node = calloc(nodes, sizeof(*r->node));
    r->job = calloc(r->o.jobs, sizeof(*r->job));
    r->wire = calloc(nodes * nodes, sizeof(*r->wire));
    if (!r->node || !r->job || !r->wire)
        return -1;
    for (size_t i = 0; i < nodes * nodes; i++)
        TAILQ_INIT(&r->wire[i].letters);
    for (uint32_t n = 0; n < nodes; n++) {
        r->node[n].part = calloc(r->o.jobs, sizeof(*r->node[n].part));
        if (!r->node[n].part)
            return -1;
        start_node(r, n);
    }
    for (uint32_t a = 0; a < nodes; a++)
        for (uint32_t b = a + 1; b < nodes; b++)
            meet(r, a, b);
    return 0;
}

static void close_rack(struct rack *r)
{
    for (uint32_t a = 0; r->node && a < r->o.nodes; a++) {
        if (r->node[a].alive)
            group_node_release(&r->node[a].machine);
        free(r->node[a].part);
        for (uint32_t b = 0; r->wire && b < r->o.nodes; b++)
            clear(r, a, b);
    }
    free(r->node);
    free(r->job);
    free(r->wire);
    free(r->heap);
}

static void summarise(struct rack *r)
{
    r->result.virtual_ns = r->now;
    r->result.done = all_done(r);
    for (uint32_t n = 0; n < r->o.nodes; n++) {
        r->result.left += group_node_count(&r->node[n].machine);
        if (r->node[n].received > r->result.busiest)
            r->result.busiest = r->node[n].received;
    }
}

int forming_run(const struct forming_options *options, struct forming_result *ret)
{
    struct rack r = { .o = *options, .ranks = options->nodes * options->devices, .rng = { options->seed } };
    int code = open_rack(&r);

    if (code == 0) {
        for (uint32_t job = 0; job < options->jobs; job++)
            begin_job(&r, job);
        if (options->kill) /* of the middle of what a rack of its size takes */
            push(&r, (uint64_t)r.ranks * JOIN_GAP_NS + PREPARE_NS * 2,
                 (struct event){ .kind = KILL, .node = r.o.nodes / 2 });
        push(&r, TICK_NS, (struct event){ .kind = TICK });
        while (r.events && !r.out_of_memory) {
            struct event e = pop(&r);
            r.now = e.at;
            handle(&r, &e);
        }
        summarise(&r);
        *ret = r.result;
        code = r.out_of_memory ? -1 : 0;
    }
    close_rack(&r);
    return code;
}
