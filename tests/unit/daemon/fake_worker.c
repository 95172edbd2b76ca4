/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A worker that owns no device: takes every request and agrees, so that tests see mokd alone. The device's name says
 * how it differs from that: "deny-maps" maps no buffer, "deny-groups" opens no group, "busy" lets no buffer go,
 * "stillborn" refuses to start, "poor" has no memory, "slow-drops" lets no buffer go before it has been
 * asked to map another one.
 */
#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "control.pb-c.h"
#include "memory.h"
#include "mok/types.h"
#include "util.h"
#include "wire.h"

#define CONTROL_FD 3
#define UUID_BYTE 0xCA /* of the GPU, the same as the fake libcuda's */

#define MAX_LATE 64

static char device[MOK_MAX_NAME + 1];

/* Requests whose answers wait. */
static uint64_t late[MAX_LATE];
static size_t n_late;
static bool no_more_waiting;

static bool is(const char *name)
{
    return strcmp(device, name) == 0;
}

static void decide(const Mok__WorkerRequest *request, Mok__WorkerReply *reply)
{
    switch (request->body_case) {
    case MOK__WORKER_REQUEST__BODY_BUFFER_MAP:
        reply->code = is("deny-maps") ? -MOK_ENOMEM : 0;
        reply->text = is("deny-maps") ? (char *)"no room for it" : reply->text;
        return;
    case MOK__WORKER_REQUEST__BODY_BUFFER_UNMAP:
        reply->code = is("busy") ? -MOK_EBUSY : 0;
        return;
    case MOK__WORKER_REQUEST__BODY_MEMORY_ALLOC:
        reply->code = is("poor") ? -MOK_ENOMEM : 0;
        reply->text = is("poor") ? (char *)"out of memory" : reply->text;
        return;
    case MOK__WORKER_REQUEST__BODY_GROUP_OPEN:
        reply->code = is("deny-groups") ? -MOK_EDEVICE : 0;
        return;
    default:
        return;
    }
}

static bool answers_late(const Mok__WorkerRequest *request)
{
    if (request->body_case == MOK__WORKER_REQUEST__BODY_BUFFER_UNMAP && is("slow-drops") && !no_more_waiting &&
        n_late < MAX_LATE) {
        late[n_late++] = request->id;
        return true;
    }
    if (request->body_case != MOK__WORKER_REQUEST__BODY_BUFFER_MAP || n_late == 0)
        return false;
    no_more_waiting = true;
    while (n_late > 0) {
        Mok__WorkerReply reply = MOK__WORKER_REPLY__INIT;
        reply.id = late[--n_late];
        mok_wire_send(CONTROL_FD, &reply.base, NULL, 0);
    }
    return false;
}

/* False once it is to stop. */
static bool serve(const Mok__WorkerRequest *request)
{
    Mok__WorkerReply reply = MOK__WORKER_REPLY__INIT;
    Mok__WorkerStarted started = MOK__WORKER_STARTED__INIT;
    Mok__WorkerStats stats = MOK__WORKER_STATS__INIT;
    uint8_t uuid[16];

    if (answers_late(request))
        return true;
    memset(uuid, UUID_BYTE, sizeof(uuid));
    reply.id = request->id;
    switch (request->body_case) {
    case MOK__WORKER_REQUEST__BODY_START:
        snprintf(device, sizeof(device), "%s", request->start->name);
        started.sms_or_threads = request->start->threads;
        started.uuid = (ProtobufCBinaryData){ .len = sizeof(uuid), .data = uuid };
        reply.body_case = MOK__WORKER_REPLY__BODY_STARTED;
        reply.started = &started;
        if (is("stillborn"))
            reply.code = -MOK_EDEVICE;
        break;
    case MOK__WORKER_REQUEST__BODY_PING:
        reply.body_case = MOK__WORKER_REPLY__BODY_STATS;
        reply.stats = &stats;
        break;
    default:
        decide(request, &reply);
    }
    int memory = -1;
    if (request->body_case == MOK__WORKER_REQUEST__BODY_MEMORY_ALLOC && !is("poor")) {
        uint64_t granules = (request->memory_alloc->bytes + 4095) / 4096; /* a GPU's memory comes in whole ones */
        if (mok_memory_create("fake", 4096 * granules, &memory) < 0)
            return false;
    }
    mok_wire_send(CONTROL_FD, &reply.base, &memory, memory >= 0);
    mok_close(memory);
    return request->body_case != MOK__WORKER_REQUEST__BODY_STOP;
}

int main(void)
{
    bool go_on = true;

    while (go_on) {
        _cleanup_wire_fds_ struct mok_wire_fds fds = MOK_WIRE_FDS_INIT;
        ProtobufCMessage *message = NULL;
        if (mok_wire_recv(CONTROL_FD, &mok__worker_request__descriptor, &message, &fds) != 1)
            return 0;
        go_on = serve((const Mok__WorkerRequest *)message);
        mok_wire_free(message);
    }
    return 0;
}
