/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sessions that ask for anything in any order, do not wait for answers, and vanish, while workers are killed: mokd
 * lives, and afterwards nothing of it all is left. The seed is the first argument.
 */
#include "fixture.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "util.h"

enum { SESSIONS = 4, STEPS = 10000, DEVICES = 3, RECENT = 3 };

static uint64_t seed = 1;

static uint32_t random_below(uint32_t bound)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)((seed >> 11) % bound);
}

/* What answers have named lately: most requests are about things that exist, or did a moment ago. */
enum kind { GROUP, BUFFER, LAYER, KINDS };
static uint32_t recent[SESSIONS][KINDS][RECENT];
static uint32_t current; /* whose turn it is */

static void remember(enum kind kind, uint32_t id)
{
    recent[current][kind][random_below(RECENT)] = id;
}

static uint32_t some(enum kind kind)
{
    return random_below(16) ? recent[current][kind][random_below(RECENT)] : random_below(200);
}

static void take_answers(struct client *client)
{
    struct pollfd look = { .fd = client->fd, .events = POLLIN };

    while (client->fd >= 0 && poll(&look, 1, 0) == 1) {
        _cleanup_answer_ struct answer answer = client_receive(client);
        if (!answer.reply) {
            client_close(client);
            return;
        }
        if (answer.reply->body_case == MOK__REPLY__BODY_GROUP_JOIN)
            remember(GROUP, answer.reply->group_join->group);
        if (answer.reply->body_case == MOK__REPLY__BODY_BUFFER_ALLOC)
            remember(BUFFER, answer.reply->buffer_alloc->buffer);
        if (answer.reply->body_case == MOK__REPLY__BODY_LAYER_CREATE)
            remember(LAYER, answer.reply->layer_create->layer);
    }
}

static void post(struct client *client, Mok__Request *request)
{
    request->id = ++client->last_id;
    mok_wire_send(client->fd, &request->base, NULL, 0); /* mokd may have ended it already */
}

static void ask_something(struct client *client)
{
    static const char *const names[] = { "a", "b", "no name" };
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__GroupJoin join;
    Mok__GroupLeave leave = MOK__GROUP_LEAVE__INIT;
    Mok__BufferAlloc alloc;
    Mok__BufferFree free_buffer = MOK__BUFFER_FREE__INIT;
    Mok__LayerSpec spec = MOK__LAYER_SPEC__INIT;
    Mok__LayerQuery query = MOK__LAYER_QUERY__INIT;
    Mok__LayerCreate create = MOK__LAYER_CREATE__INIT;
    Mok__LayerDestroy destroy = MOK__LAYER_DESTROY__INIT;
    Mok__LayerDescribe describe = MOK__LAYER_DESCRIBE__INIT;
    Mok__LayerParams params = MOK__LAYER_PARAMS__INIT;
    Mok__LayerBind bind = MOK__LAYER_BIND__INIT;
    Mok__Region gate = MOK__REGION__INIT;
    Mok__QueueOpen open = MOK__QUEUE_OPEN__INIT;
    Mok__StatusQuery status = MOK__STATUS_QUERY__INIT;
    Mok__OpQuery op = MOK__OP_QUERY__INIT;

    spec.hidden = spec.intermediate = 16;
    spec.experts = 6;
    spec.topk = 1 + random_below(2);
    spec.max_tokens = 4;
    spec.precision = MOK_BF16;
    switch (random_below(16)) {
    case 0:
    case 1:
    case 2: {
        uint32_t rank = random_below(2);
        request = ask_join(&join, names[random_below(16) ? random_below(2) : 2], random_below(32) ? 2 : 3, rank,
                           random_below(16) ? rank : random_below(DEVICES + 1));
        join.timeout_ms = random_below(2) ? 0 : 1 + random_below(20);
        break;
    }
    case 3:
        leave.group = random_below(4) ? 0 : some(GROUP);
        request.body_case = MOK__REQUEST__BODY_GROUP_LEAVE;
        request.group_leave = &leave;
        break;
    case 4:
    case 5:
    case 6:
        request = ask_alloc(&alloc, random_below(3) ? some(GROUP) : 0, random_below(DEVICES), 4096);
        alloc.timeout_ms = random_below(2) ? 0 : 1 + random_below(20);
        break;
    case 7:
        free_buffer.buffer = some(BUFFER);
        request.body_case = MOK__REQUEST__BODY_BUFFER_FREE;
        request.buffer_free = &free_buffer;
        break;
    case 8:
    case 9:
        create.group = some(GROUP);
        create.spec = random_below(16) ? &spec : NULL;
        create.timeout_ms = random_below(2) ? 0 : 1 + random_below(20);
        request.body_case = MOK__REQUEST__BODY_LAYER_CREATE;
        request.layer_create = &create;
        break;
    case 10:
        destroy.layer = some(LAYER);
        request.body_case = MOK__REQUEST__BODY_LAYER_DESTROY;
        request.layer_destroy = &destroy;
        break;
    case 11:
        gate.buffer = some(BUFFER);
        gate.length = 2048;
        params.gate = &gate;
        bind.layer = some(LAYER);
        bind.params = &params;
        request.body_case = MOK__REQUEST__BODY_LAYER_BIND;
        request.layer_bind = &bind;
        break;
    case 12:
        open.device = random_below(DEVICES);
        open.entries = 8;
        request.body_case = MOK__REQUEST__BODY_QUEUE_OPEN;
        request.queue_open = &open;
        break;
    case 13:
        query.group = some(GROUP);
        query.spec = &spec;
        request.body_case = MOK__REQUEST__BODY_LAYER_QUERY;
        request.layer_query = &query;
        break;
    case 14:
        describe.layer = some(LAYER);
        request.body_case = MOK__REQUEST__BODY_LAYER_DESCRIBE;
        request.layer_describe = &describe;
        break;
    default:
        op.queue = some(LAYER);
        request.body_case = random_below(2) ? MOK__REQUEST__BODY_OP_QUERY : MOK__REQUEST__BODY_STATUS_QUERY;
        if (request.body_case == MOK__REQUEST__BODY_OP_QUERY)
            request.op_query = &op;
        else
            request.status_query = &status;
    }
    post(client, &request);
}

/* A mokd that is short of memory may end even this session; then once more. */
static void open_for_sure(struct client *client, const struct daemon *daemon)
{
    for (int attempt = 0; attempt < 100; attempt++) {
        Mok__Hello hello;
        Mok__Request request = ask_hello(&hello);
        client_connect(client, daemon);
        post(client, &request);
        for (bool ended = false; !ended;) {
            _cleanup_answer_ struct answer answer = client_receive(client);
            ended = !answer.reply || answer.reply->code < 0;
            if (!ended && answer.reply->body_case == MOK__REPLY__BODY_HELLO)
                return;
        }
        client_close(client);
    }
    fail_msg("no session in a hundred attempts");
}

static void open_session(struct client *client, const struct daemon *daemon)
{
    open_for_sure(client, daemon);
    for (uint32_t device = 0; device < DEVICES && random_below(4); device++) {
        Mok__Request request = MOK__REQUEST__INIT;
        Mok__QueueOpen open = MOK__QUEUE_OPEN__INIT;
        open.device = device;
        open.entries = 4;
        request.body_case = MOK__REQUEST__BODY_QUEUE_OPEN;
        request.queue_open = &open;
        post(client, &request);
    }
}

/* The next message, whatever it is; reply NULL when the connection ended. */
static struct answer ask_status(struct client *client)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__StatusQuery query = MOK__STATUS_QUERY__INIT;

    request.body_case = MOK__REQUEST__BODY_STATUS_QUERY;
    request.status_query = &query;
    post(client, &request);
    return client_receive(client);
}

static void kill_a_worker(const struct daemon *daemon)
{
    struct client client;
    open_for_sure(&client, daemon);
    _cleanup_answer_ struct answer answer = ask_status(&client);
    pid_t pid = 0;

    client_close(&client);
    if (answer.reply && answer.reply->body_case == MOK__REPLY__BODY_STATUS)
        pid = (pid_t)answer.reply->status->device[random_below(DEVICES)]->worker_pid;
    if (pid > 0)
        kill(pid, SIGKILL);
}

/* Whether nothing but the session that asks is left. */
static bool is_alone(const struct daemon *daemon)
{
    struct client client;
    open_for_sure(&client, daemon);
    _cleanup_answer_ struct answer answer = ask_status(&client);
    bool alone = false;

    if (answer.reply && answer.reply->body_case == MOK__REPLY__BODY_STATUS) {
        const Mok__StatusReply *status = answer.reply->status;
        alone = status->n_job == 1 && status->n_group == 0;
        for (size_t i = 0; i < status->n_device; i++)
            alone = alone && status->device[i]->sessions == 0 && status->device[i]->memory_used == 0;
    }
    client_close(&client);
    return alone;
}

static void a_storm_of_requests_and_deaths_leaves_nothing(void **state)
{
    struct client clients[SESSIONS];

    for (int i = 0; i < SESSIONS; i++)
        open_session(&clients[i], *state);
    for (int step = 0; step < STEPS; step++) {
        current = random_below(SESSIONS);
        struct client *client = &clients[current];
        take_answers(client);
        if (client->fd >= 0 && random_below(200) == 0)
            client_close(client);
        if (client->fd < 0)
            open_session(client, *state);
        ask_something(client);
        if (random_below(1500) == 0)
            kill_a_worker(*state);
    }
    for (int i = 0; i < SESSIONS; i++)
        client_close(&clients[i]);
    bool alone = false;
    for (int waited = 0; waited < 5000 && !alone; waited += 5) {
        alone = is_alone(*state);
        sleep_ms(5);
    }
    assert_true(alone);
}

static int setup(void **state)
{
    static struct daemon daemon;

#ifdef STORM_PROGRAM /* a mokd that is short of memory */
    setenv("MOK_TEST_MOKD", STORM_PROGRAM, 1);
    setenv("MOK_TEST_ALLOC_FAILS", "600", 1);
#endif
    daemon_start(&daemon, "[device a]\n[device b]\n[device c]\n", 0);
    *state = &daemon;
    return 0;
}

static int teardown(void **state)
{
    return daemon_stop(*state);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_storm_of_requests_and_deaths_leaves_nothing, setup, teardown),
    };
    if (argc > 1)
        seed = strtoull(argv[1], NULL, 10) * 2654435761u + 1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
