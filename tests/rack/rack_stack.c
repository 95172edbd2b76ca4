/* SPDX-License-Identifier: Apache-2.0 */
#include "rack_stack.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "control.pb-c.h"
#include "rack_key.h"
#include "util.h"
#include "wire.h"

#define PORT 7117
#define PATIENCE_MS 30000

static void sleep_ms(long ms)
{
    struct timespec ts = { ms / 1000, ms % 1000 * 1000000 };
    nanosleep(&ts, NULL);
}

/* ------------------------------------------------------------------ configuration */

/* Of its own for each test process and node. */
static void address_of(unsigned node, char ret[32])
{
    unsigned pid = (unsigned)getpid();

    snprintf(ret, 32, "127.%u.%u.%u:%d", 10 + (pid >> 8) % 240, pid % 250 + 1, node + 1, PORT);
}

static int make_inventory(struct rack_stack *rack)
{
    size_t used = 0;

    for (unsigned node = 0; node < rack->nodes; node++) {
        char dir[96], text[MOK_RACK_KEY_SENTENCE], address[32], public_key[MOK_RACK_KEY_TEXT];
        struct mok_rack_key key;
        snprintf(dir, sizeof(dir), "%s/n%u", rack->dir, node);
        if (mkdir(dir, 0700) < 0 || mok_rack_key_generate(&key) < 0 || mok_rack_key_write(dir, &key, text) < 0)
            return -1;
        address_of(node, address);
        mok_rack_key_text(key.public_key, public_key);
        used += (size_t)snprintf(rack->inventory + used, sizeof(rack->inventory) - used,
                                 "[node n%u]\naddress = %s\npublic_key = %s\n", node, address, public_key);
    }
    return 0;
}

static int start_node(struct rack_stack *rack, unsigned node)
{
    char *extra = NULL;
    const struct rack_stack_options *asked = &rack->options;
    struct stack_options options = { .devices = asked->devices || asked->gpus ? asked->devices : 1,
                                     .gpus = asked->gpus,
                                     .gpu_first = asked->gpu_spread ? node % asked->gpu_spread : 0,
                                     .daemon = asked->daemon,
                                     .poll_us = 20,
                                     .chaos_delay_us = rack->options.chaos_delay_us };

    if (asprintf(&extra, "[rack]\nnode = n%u\nkey = %s/n%u/rack.key\nheartbeat_ms = %u\ntimeout_ms = %u\n%s%s%s%s",
                 node, rack->dir, node, rack->options.heartbeat_ms ? rack->options.heartbeat_ms : 100, rack->timeout_ms,
                 rack->options.mesh ? rack->options.mesh : "", rack->inventory,
                 rack->options.extra ? rack->options.extra : "",
                 rack->options.last && node + 1 == rack->nodes ? rack->options.last : "") < 0)
        return -1;
    options.extra = extra;
    int r = stack_start(&rack->node[node], &options);
    free(extra);
    return r;
}

/* The lines of a node in the inventory. */
static const char *section_of(const struct rack_stack *rack, unsigned node, size_t *ret_size)
{
    char title[16];

    snprintf(title, sizeof(title), "[node n%u]", node);
    const char *section = strstr(rack->inventory, title);
    const char *end = strstr(section + 1, "[node ");
    *ret_size = end ? (size_t)(end - section) : strlen(section);
    return section;
}

int rack_stack_reload(struct rack_stack *rack, unsigned at, unsigned node, int without)
{
    char text[8192];
    size_t size, used;
    const char *section = section_of(rack, node, &size);
    FILE *file = fopen(rack->node[at].config, "r+");

    if (!file)
        return -1;
    used = fread(text, 1, sizeof(text) - 1, file);
    text[used] = '\0';
    char *place = memmem(text, used, section, size);
    if (without && place) {
        memmove(place, place + size, used - (size_t)(place + size - text));
        used -= size;
    } else if (!without && !place && used + size < sizeof(text)) {
        memcpy(text + used, section, size);
        used += size;
    }
    rewind(file);
    fwrite(text, 1, used, file);
    int r = fflush(file) == 0 ? ftruncate(fileno(file), (off_t)used) : -1;
    fclose(file);
    return r == 0 ? kill(rack->node[at].mokd, SIGHUP) : -1;
}

/* ------------------------------------------------------------------ asking */

static int ask(const struct stack *node, Mok__Request *request, Mok__Reply **ret)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    struct timeval patience = { .tv_sec = 5 };
    ProtobufCMessage *message = NULL;
    _cleanup_fd_ int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    Mok__Request greeting = MOK__REQUEST__INIT;
    Mok__Hello hello = MOK__HELLO__INIT;

    snprintf(address.sun_path, sizeof(address.sun_path), "%s", node->socket);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
        return -1;
    hello.protocol_min = hello.protocol_max = 1;
    hello.job = (char *)"test";
    hello.observer = true;
    greeting.id = 1;
    greeting.body_case = MOK__REQUEST__BODY_HELLO;
    greeting.hello = &hello;
    request->id = 2;
    if (mok_wire_send(fd, &greeting.base, NULL, 0) < 0 ||
        mok_wire_recv(fd, &mok__reply__descriptor, &message, NULL) != 1)
        return -1;
    mok_wire_free(message);
    if (mok_wire_send(fd, &request->base, NULL, 0) < 0 ||
        mok_wire_recv(fd, &mok__reply__descriptor, &message, NULL) != 1)
        return -1;
    *ret = (Mok__Reply *)message;
    return 0;
}

static unsigned count_up(const struct stack *node)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__RackQuery query = MOK__RACK_QUERY__INIT;
    Mok__Reply *reply = NULL;
    unsigned count = 0;

    request.body_case = MOK__REQUEST__BODY_RACK_QUERY;
    request.rack_query = &query;
    if (ask(node, &request, &reply) < 0)
        return 0;
    for (size_t i = 0; reply->body_case == MOK__REPLY__BODY_RACK && i < reply->rack->n_node; i++)
        count += !reply->rack->node[i]->self && strcmp(reply->rack->node[i]->state, "up") == 0;
    mok_wire_free(&reply->base);
    return count;
}

int rack_stack_await(struct rack_stack *rack, unsigned of, unsigned count)
{
    for (int waited = 0; waited < PATIENCE_MS; waited += 20) {
        if (count_up(&rack->node[of]) == count)
            return 0;
        sleep_ms(20);
    }
    fprintf(stderr, "node n%u does not see %u others, but %u\n", of, count, count_up(&rack->node[of]));
    stack_print_log(&rack->node[of]);
    return -1;
}

int rack_stack_forming(struct rack_stack *rack, unsigned at, const char *name, struct rack_stack_forming *ret)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__StatusQuery query = MOK__STATUS_QUERY__INIT;
    Mok__Reply *reply = NULL;
    int r = -1;

    request.body_case = MOK__REQUEST__BODY_STATUS_QUERY;
    request.status_query = &query;
    if (ask(&rack->node[at], &request, &reply) < 0)
        return -1;
    for (size_t i = 0; reply->body_case == MOK__REPLY__BODY_STATUS && i < reply->status->n_group; i++) {
        const Mok__GroupInfo *group = reply->status->group[i];
        if (strcmp(group->name, name) != 0 || strcmp(group->state, "forming") != 0)
            continue;
        snprintf(ret->home, sizeof(ret->home), "%s", group->home);
        ret->joined = group->joined;
        ret->partial = group->partial;
        r = 0;
    }
    mok_wire_free(&reply->base);
    return r;
}

int rack_stack_drain(struct rack_stack *rack, unsigned at, unsigned node, int undo)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__Drain body = MOK__DRAIN__INIT;
    Mok__Reply *reply = NULL;
    char name[16];

    snprintf(name, sizeof(name), "n%u", node);
    body.on = name;
    body.node = true;
    body.undo = undo;
    request.body_case = MOK__REQUEST__BODY_DRAIN_ON;
    request.drain_on = &body;
    if (ask(&rack->node[at], &request, &reply) < 0)
        return -1;
    int code = reply->code;
    mok_wire_free(&reply->base);
    return code;
}

/* ------------------------------------------------------------------ the rack */

int rack_stack_start(struct rack_stack *rack, const struct rack_stack_options *options)
{
    *rack = (struct rack_stack){ .dir = "/tmp/mok-rack-XXXXXX", .nodes = options->nodes, .options = *options };
    rack->timeout_ms = options->timeout_ms ? options->timeout_ms : 1000;
    if (!mkdtemp(rack->dir) || make_inventory(rack) < 0)
        return -1;
    for (unsigned node = 0; node < rack->nodes; node++)
        if (start_node(rack, node) < 0)
            return -1;
    for (unsigned node = 0; node < rack->nodes; node++)
        if (rack_stack_await(rack, node, rack->nodes - 1) < 0)
            return -1;
    return 0;
}

int rack_stack_boot(struct rack_stack *rack, unsigned node)
{
    return start_node(rack, node);
}

void rack_stack_kill(struct rack_stack *rack, unsigned node)
{
    struct stack *stack = &rack->node[node];

    kill(stack->mokd, SIGKILL);
    waitpid(stack->mokd, NULL, 0);
    stack->mokd = 0;
    stack_stop(stack); /* removes its directory */
}

int rack_stack_stop(struct rack_stack *rack)
{
    char path[128];
    int code = 0;

    for (unsigned node = 0; node < rack->nodes; node++) {
        if (rack->node[node].mokd > 0 && stack_stop(&rack->node[node]) != 0)
            code = -1;
        snprintf(path, sizeof(path), "%s/n%u/rack.key", rack->dir, node);
        unlink(path);
        snprintf(path, sizeof(path), "%s/n%u/rack.pub", rack->dir, node);
        unlink(path);
        snprintf(path, sizeof(path), "%s/n%u", rack->dir, node);
        rmdir(path);
    }
    rmdir(rack->dir);
    return code;
}
