/* SPDX-License-Identifier: Apache-2.0 */
#include "zap.h"

#include <stdio.h>
#include <string.h>

#include <zmq.h>

#include "util.h"

/* RFC 27: version, request id, domain, address, identity, mechanism, credentials. */
enum { FRAME_VERSION, FRAME_REQUEST, FRAME_DOMAIN, FRAME_ADDRESS, FRAME_IDENTITY, FRAME_MECHANISM, FRAME_KEY };

static bool says(const struct rack_zap_frame *frame, const char *text)
{
    return frame->size == strlen(text) && memcmp(frame->data, text, frame->size) == 0;
}

static bool refuse(struct rack_zap_answer *answer, const char *text)
{
    answer->status = "400";
    answer->text = text;
    return true;
}

bool rack_zap_decide(const struct rack_zap_frame *frames, size_t count, rack_zap_allow allow, void *cookie,
                     struct rack_zap_answer *ret)
{
    *ret = (struct rack_zap_answer){ .status = "500", .text = "no request" };
    if (count < 2)
        return false;
    if (!says(&frames[FRAME_VERSION], "1.0"))
        return refuse(ret, "version is not 1.0");
    if (count != RACK_ZAP_FRAMES)
        return refuse(ret, "not seven frames");
    if (!says(&frames[FRAME_DOMAIN], RACK_ZAP_DOMAIN))
        return refuse(ret, "another domain");
    if (!says(&frames[FRAME_MECHANISM], "CURVE"))
        return refuse(ret, "another mechanism than CURVE");
    if (frames[FRAME_KEY].size != RACK_KEY_BYTES)
        return refuse(ret, "a key has 32 bytes");
    if (!allow(cookie, frames[FRAME_KEY].data))
        return refuse(ret, "the key is not in the inventory");
    ret->status = "200";
    ret->text = "";
    mok_rack_key_text(frames[FRAME_KEY].data, ret->user_id);
    return true;
}

/* ------------------------------------------------------------------ the socket */

struct request {
    zmq_msg_t messages[RACK_ZAP_FRAMES];
    struct rack_zap_frame frames[RACK_ZAP_FRAMES];
    size_t count, seen; /* kept; in all */
};

static bool receive(void *socket, struct request *request)
{
    int more = 1;

    request->count = request->seen = 0;
    while (more) {
        zmq_msg_t spare, *message = &spare;
        bool keep = request->count < RACK_ZAP_FRAMES;
        if (keep)
            message = &request->messages[request->count];
        zmq_msg_init(message);
        if (zmq_msg_recv(message, socket, ZMQ_DONTWAIT) < 0) {
            zmq_msg_close(message);
            return false;
        }
        more = zmq_msg_more(message);
        request->seen++;
        if (!keep) {
            zmq_msg_close(message);
            continue;
        }
        request->frames[request->count].data = zmq_msg_data(message);
        request->frames[request->count].size = zmq_msg_size(message);
        request->count++;
    }
    return true;
}

static void release(struct request *request)
{
    for (size_t i = 0; i < request->count; i++)
        zmq_msg_close(&request->messages[i]);
}

static void reply(void *socket, const struct rack_zap_frame *request_id, const struct rack_zap_answer *answer)
{
    const struct rack_zap_frame parts[] = {
        { "1.0", 3 },
        *request_id,
        { answer->status, strlen(answer->status) },
        { answer->text, strlen(answer->text) },
        { answer->user_id, strlen(answer->user_id) },
        { "", 0 }, /* no metadata */
    };

    for (size_t i = 0; i < ARRAY_SIZE(parts); i++)
        zmq_send(socket, parts[i].data, parts[i].size, ZMQ_DONTWAIT | (i + 1 < ARRAY_SIZE(parts) ? ZMQ_SNDMORE : 0));
}

static void note_address(const struct request *request, char *ret)
{
    const struct rack_zap_frame *frame = &request->frames[FRAME_ADDRESS];

    if (request->count > FRAME_ADDRESS)
        snprintf(ret, RACK_MAX_ADDRESS + 1, "%.*s",
                 (int)(frame->size < RACK_MAX_ADDRESS ? frame->size : RACK_MAX_ADDRESS), (const char *)frame->data);
}

size_t rack_zap_serve(void *socket, rack_zap_allow allow, void *cookie, char *last_refused)
{
    struct rack_zap_answer answer;
    struct request request;
    size_t refused = 0;

    while (receive(socket, &request)) {
        const struct rack_zap_frame none = { "", 0 };
        rack_zap_decide(request.frames, request.seen, allow, cookie, &answer);
        if (strcmp(answer.status, "200") != 0) {
            note_address(&request, last_refused);
            refused++;
        }
        reply(socket, request.count > FRAME_REQUEST ? &request.frames[FRAME_REQUEST] : &none, &answer);
        release(&request);
    }
    release(&request);
    return refused;
}
