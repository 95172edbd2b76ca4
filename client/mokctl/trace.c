/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trace as JSON for Perfetto (ui.perfetto.dev) or chrome://tracing: a process a device; in it a track for the
 * dispatcher, one for the phases that the device runs, one a minibatch of the ring with its transfers and products, and
 * one a session with its operations and what they wait for. Times are microseconds since the first event.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "command.h"
#include "error.h"
#include "mok/types.h"
#include "names.h"
#include "stats.h"
#include "trace_events.h"
#include "util.h"

#define DEFAULT_SECONDS 1u
#define MAX_SECONDS 60u

/* Tracks of a device. */
enum { TRACK_DISPATCHER = 1, TRACK_PHASES = 2, TRACK_WHOLE_LAYER = 3, TRACK_MINIBATCH = 10, TRACK_SESSION = 1000 };

struct output {
    FILE *file;
    const Mok__TraceReply *reply;
    uint64_t first_ns;
    uint64_t next_id; /* of operations, which overlap */
    bool comma;
};

/* ------------------------------------------------------------------ words */

static const char *work_text(uint32_t work)
{
    /* by enum mok_engine_work */
    static const char *const names[] = { "other",    "schedule", "dispatch", "gate, up", "down",   "combine",
                                         "d hidden", "d input",  "wgrad",    "shared",   "reduce", "prepare" };
    return work < ARRAY_SIZE(names) ? names[work] : "other";
}

/* A layer's work that belongs to no minibatch has a track of its own. */
static bool is_of_a_minibatch(uint32_t work)
{
    return work >= 2 && work <= 8;
}

static const char *kind_text(uint32_t kind)
{
    const char *text = mok_stats_kind_text(kind);
    return text ? text : "operation";
}

static const char *phase_text(uint32_t phase)
{
    const char *text = phase < MOK_STATS_PHASES ? mok_stats_phase_text(phase) : NULL;
    return text ? text : "phase";
}

static const char *wait_text(uint32_t latency)
{
    switch (latency) {
    case MOK_LATENCY_QUEUE:
        return "waits for the device";
    case MOK_LATENCY_READY:
        return "waits for ranks to be ready";
    case MOK_LATENCY_PUSH:
        return "waits for ranks to push";
    default:
        return "waits";
    }
}

/* ------------------------------------------------------------------ writing */

/* Names are of a small alphabet or mokd's own; all the same, nothing of them can end a string. */
static void put_string(FILE *file, const char *text)
{
    fputc('"', file);
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            fputc('\\', file);
        fputc(c < 0x20 || c >= 0x7f ? '?' : c, file);
    }
    fputc('"', file);
}

/* An entry up to its name. */
static void begin(struct output *out, const char *phase, uint32_t device, uint32_t track, const char *name)
{
    fprintf(out->file, "%s\n{\"ph\":\"%s\",\"pid\":%" PRIu32 ",\"tid\":%" PRIu32 ",\"name\":", out->comma ? "," : "",
            phase, device + 1, track);
    put_string(out->file, name);
    out->comma = true;
}

static void put_time(struct output *out, const char *key, uint64_t ns)
{
    fprintf(out->file, ",\"%s\":%" PRIu64 ".%03" PRIu64, key, ns / 1000, ns % 1000);
}

static void put_span(struct output *out, const struct mok_trace_event *event, uint32_t track, const char *name)
{
    begin(out, "X", event->device, track, name);
    put_time(out, "ts", event->start_ns - out->first_ns);
    put_time(out, "dur", event->end_ns - event->start_ns);
}

static void put_layer(struct output *out, const struct mok_trace_event *event)
{
    if (event->layer)
        fprintf(out->file, ",\"args\":{\"layer\":%" PRIu32 ",\"queue\":%" PRIu32 "}", event->layer, event->queue);
}

/* Begin and end of what may overlap others on its track. */
static void put_async(struct output *out, const struct mok_trace_event *event, const char *category, const char *name)
{
    uint32_t track = TRACK_SESSION + event->queue;
    uint64_t id = ++out->next_id;

    begin(out, "b", event->device, track, name);
    put_time(out, "ts", event->start_ns - out->first_ns);
    fprintf(out->file, ",\"cat\":\"%s\",\"id\":%" PRIu64 ",\"args\":{\"layer\":%" PRIu32 ",\"op\":%" PRIu64, category,
            id, event->layer, event->op);
    if (event->type == MOK_TRACE_OP)
        fprintf(out->file, ",\"rows\":%" PRIu64 ",\"result\":\"%s\"", event->rows, mok_error_symbol(event->result));
    fputs("}}", out->file);
    begin(out, "e", event->device, track, name);
    put_time(out, "ts", event->end_ns - out->first_ns);
    fprintf(out->file, ",\"cat\":\"%s\",\"id\":%" PRIu64 "}", category, id);
}

static void put_event(struct output *out, const struct mok_trace_event *event)
{
    switch (event->type) {
    case MOK_TRACE_OP:
        put_async(out, event, "operation", kind_text(event->kind));
        return;
    case MOK_TRACE_WAIT:
        put_async(out, event, "wait", wait_text(event->kind));
        return;
    case MOK_TRACE_PHASE:
        put_span(out, event, TRACK_PHASES, event->queue ? phase_text(event->kind) : "somebody else's");
        put_layer(out, event);
        break;
    case MOK_TRACE_WORK:
        put_span(out, event, is_of_a_minibatch(event->kind) ? TRACK_MINIBATCH + event->slot : TRACK_WHOLE_LAYER,
                 work_text(event->kind));
        fprintf(out->file, ",\"args\":{\"layer\":%" PRIu32 ",\"macrobatch\":%" PRIu32 "}", event->layer, event->turn);
        break;
    default:
        put_span(out, event, TRACK_DISPATCHER, "sleeps");
    }
    fputc('}', out->file);
}

static void name_track(struct output *out, const char *what, uint32_t device, uint32_t track, const char *format, ...)
    _printf_(5, 6);
static void name_track(struct output *out, const char *what, uint32_t device, uint32_t track, const char *format, ...)
{
    char text[256];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    begin(out, "M", device, track, what);
    fputs(",\"args\":{\"name\":", out->file);
    put_string(out->file, text);
    fputs("}}", out->file);
}

static void name_tracks(struct output *out, const struct mok_trace *trace)
{
    const Mok__TraceReply *reply = out->reply;
    uint32_t slots[MOK_MAX_DEVICES] = { 0 };

    for (uint64_t i = 0; i < reply->events; i++) {
        const struct mok_trace_event *event = &trace->event[i];
        if (event->type == MOK_TRACE_WORK && is_of_a_minibatch(event->kind) &&
            event->slot < TRACK_SESSION - TRACK_MINIBATCH && slots[event->device] <= event->slot)
            slots[event->device] = event->slot + 1;
    }
    for (uint32_t d = 0; d < reply->n_device; d++) {
        name_track(out, "process_name", d, 0, "device %s", reply->device[d]);
        name_track(out, "thread_name", d, TRACK_DISPATCHER, "dispatcher");
        name_track(out, "thread_name", d, TRACK_PHASES, "phases");
        name_track(out, "thread_name", d, TRACK_WHOLE_LAYER, "schedule and the rest");
        for (uint32_t slot = 0; slot < slots[d]; slot++)
            name_track(out, "thread_name", d, TRACK_MINIBATCH + slot, "minibatch %" PRIu32, slot);
        for (size_t i = 0; i < reply->n_session; i++) {
            const Mok__TraceSession *session = reply->session[i];
            if (session->device == d)
                name_track(out, "thread_name", d, TRACK_SESSION + session->queue,
                           "%s of %s, session %" PRIu64 ", pid %" PRIu32, session->job, session->user, session->session,
                           session->pid);
        }
    }
}

static void write_all(struct output *out, const struct mok_trace *trace)
{
    out->first_ns = UINT64_MAX;
    for (uint64_t i = 0; i < out->reply->events; i++)
        if (trace->event[i].start_ns < out->first_ns)
            out->first_ns = trace->event[i].start_ns;
    fputs("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[", out->file);
    name_tracks(out, trace);
    for (uint64_t i = 0; i < out->reply->events; i++)
        put_event(out, &trace->event[i]);
    fprintf(out->file, "\n],\"otherData\":{\"events\":%" PRIu64 ",\"dropped\":%" PRIu64 "}}\n", out->reply->events,
            out->reply->dropped);
}

/* ------------------------------------------------------------------ the command */

/* What mokd sent is as large as it says, and names no device that is not there. */
static bool fits(const struct mok_trace *trace, const Mok__TraceReply *reply)
{
    if (trace->magic != MOK_TRACE_MAGIC || trace->version != MOK_TRACE_VERSION || reply->n_device > MOK_MAX_DEVICES)
        return false;
    for (uint64_t i = 0; i < reply->events; i++)
        if (trace->event[i].device >= reply->n_device || trace->event[i].start_ns > trace->event[i].end_ns)
            return false;
    return true;
}

static int write_file(const char *path, const Mok__TraceReply *reply, const struct mok_trace *trace)
{
    bool is_stdout = strcmp(path, "-") == 0;
    struct output out = { .file = is_stdout ? stdout : fopen(path, "we"), .reply = reply };

    if (!out.file)
        return client_fail(MOK_EIO, "%s cannot be written: %s", path, strerror(errno));
    write_all(&out, trace);
    bool failed = ferror(out.file) || fflush(out.file) != 0;
    if (!is_stdout && fclose(out.file) != 0)
        failed = true;
    return failed ? client_fail(MOK_EIO, "%s cannot be written: %s", path, strerror(errno)) : 0;
}

static int save(const char *path, const struct control_answer *answer)
{
    const Mok__TraceReply *reply = answer->reply->trace;
    struct stat about;

    if (fstat(answer->fds.fd[0], &about) < 0 || reply->events > UINT32_MAX ||
        (uint64_t)about.st_size < mok_trace_bytes((uint32_t)reply->events))
        return client_fail(MOK_EPROTO, "mokd's trace is smaller than it says");
    void *memory = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_PRIVATE, answer->fds.fd[0], 0);
    if (memory == MAP_FAILED)
        return client_fail(MOK_ENOMEM, "mokd's trace cannot be mapped: %s", strerror(errno));
    int r = fits(memory, reply) ? write_file(path, reply, memory)
                                : client_fail(MOK_EPROTO, "mokd's trace is none of this version");
    munmap(memory, (size_t)about.st_size);
    return r;
}

int mokctl_trace(struct mokctl_line *line)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__Trace body = MOK__TRACE__INIT;
    unsigned seconds = DEFAULT_SECONDS;

    if (!line->out) {
        fprintf(stderr, "mokctl: trace needs --out FILE; - is standard output\n");
        return EXIT_USAGE;
    }
    if (line->seconds && mokctl_whole_number("seconds", line->seconds, MAX_SECONDS, &seconds) < 0)
        return EXIT_USAGE;
    body.milliseconds = seconds * 1000;
    request.body_case = MOK__REQUEST__BODY_TRACE;
    request.trace = &body;
    int r = control_call(line->control, &request, seconds * 1000 + 2 * MOKCTL_TIMEOUT_MS, MOK__REPLY__BODY_TRACE, 1,
                         &answer);
    if (r == 0)
        r = save(line->out, &answer);
    if (r == 0 && strcmp(line->out, "-") != 0)
        printf("%s: %" PRIu64 " events%s%s\n", line->out, answer.reply->trace->events,
               answer.reply->trace->dropped ? ", the oldest were too many and are missing" : "",
               answer.reply->trace->displaced ? "; it ended early, since an administrator asked for one" : "");
    return r;
}
