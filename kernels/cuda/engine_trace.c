/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the device did and when, for whoever asks: the clock is read between kernels, and the megakernels mark their
 * tasks (struct mok_cuda_marks). Nothing of it is queued while nobody asks.
 */
#include <cuda_runtime_api.h>

#include "../hd.h"
#include "engine_layer.h"

/* What a look at the clock may be wrong by: its halves are read one after the other. */
#define SURPLUS_NS 1000000u

static bool allocate(struct mok_cuda_run_entry *entry)
{
    return entry->marks_copy || (cudaMalloc((void **)&entry->marks, sizeof(*entry->marks)) == cudaSuccess &&
                                 cudaHostAlloc((void **)&entry->marks_copy, sizeof(*entry->marks_copy),
                                               cudaHostAllocPortable) == cudaSuccess);
}

/* Without memory there are the spans between kernels alone. */
void mok_cuda_trace(struct mok_engine *engine, void (*told)(void *cookie, const struct mok_engine_span *span),
                    void *cookie)
{
    engine->told = told;
    engine->told_cookie = cookie;
    if (!told || cudaSetDevice((int)engine->config.index) != cudaSuccess)
        return;
    for (uint32_t i = 0; i < MOK_CUDA_ENTRIES; i++)
        if (!allocate(&engine->entry[i]))
            cudaGetLastError();
}

void mok_cuda_trace_close(struct mok_engine *engine)
{
    for (uint32_t i = 0; i < MOK_CUDA_ENTRIES; i++) {
        cudaFree(engine->entry[i].marks);
        cudaFreeHost(engine->entry[i].marks_copy);
    }
}

static bool has_main(enum mok_phase phase)
{
    return phase == MOK_PHASE_MAIN || phase == MOK_PHASE_WHOLE;
}

void mok_cuda_trace_ready(struct mok_cuda_run_entry *entry)
{
    entry->traced = entry->layer->engine->told && entry->refused.status == 0;
    entry->marks_now = entry->traced && has_main(entry->phase) && entry->marks_copy ? entry->marks : NULL;
}

static int note_clock(uint64_t *to, void *stream)
{
    return mok_cuda_launch_clock(to, stream) == 0 ? 0 : -MOK_EDEVICE;
}

int mok_cuda_trace_begin(struct mok_cuda_run_entry *entry, void *stream)
{
    struct mok_cuda_marks *m = entry->marks_now;

    if (!entry->traced)
        return 0;
    if (m && (cudaMemsetAsync(m->begun, 0xff, sizeof(m->begun), stream) != cudaSuccess ||
              cudaMemsetAsync(m->ended, 0, sizeof(m->ended), stream) != cudaSuccess))
        return -MOK_EDEVICE;
    return note_clock(&entry->report->begun_ns, stream);
}

int mok_cuda_trace_main_over(struct mok_cuda_run_entry *entry, void *stream)
{
    return entry->traced ? note_clock(&entry->report->main_over_ns, stream) : 0;
}

int mok_cuda_trace_end(struct mok_cuda_run_entry *entry, void *stream)
{
    if (!entry->traced)
        return 0;
    int r = note_clock(&entry->report->over_ns, stream);
    if (r == 0 && entry->marks_now &&
        cudaMemcpyAsync(entry->marks_copy, entry->marks_now, sizeof(*entry->marks_copy), cudaMemcpyDeviceToHost,
                        stream) != cudaSuccess)
        r = -MOK_EDEVICE;
    return r;
}

/* ------------------------------------------------------------------ telling */

/* The device's clock and ours, at the phase's end. */
struct clocks {
    const struct mok_engine *engine;
    uint64_t device_ns, host_ns;
    uint64_t most_ns; /* no span is longer, nor so far back */
};

static void tell(const struct clocks *c, enum mok_engine_work work, uint32_t slot, uint32_t turn, uint64_t begun_ns,
                 uint64_t ended_ns)
{
    if (begun_ns > ended_ns || ended_ns > c->device_ns || c->device_ns - begun_ns > c->most_ns)
        return;
    const struct mok_engine_span span = { .work = work,
                                          .slot = slot,
                                          .turn = turn,
                                          .start_ns = c->host_ns - (c->device_ns - begun_ns),
                                          .end_ns = c->host_ns - (c->device_ns - ended_ns) };
    c->engine->told(c->engine->told_cookie, &span);
}

static void tell_marks(const struct clocks *c, const struct mok_cuda_run_entry *entry)
{
    static const enum mok_engine_work works[MOK_CUDA_MARK_KINDS] = {
        [0] = MOK_WORK_SHARED,
        [MOK_TASK_PULL] = MOK_WORK_DISPATCH,
        [MOK_TASK_GATE_UP] = MOK_WORK_GATE_UP,
        [MOK_TASK_DOWN] = MOK_WORK_DOWN,
        [MOK_TASK_D_HIDDEN] = MOK_WORK_D_HIDDEN,
        [MOK_TASK_D_INPUT] = MOK_WORK_D_INPUT,
        [MOK_TASK_WGRAD] = MOK_WORK_WGRAD,
    };
    const struct mok_cuda_marks *m = entry->marks_copy;
    const uint32_t slots = entry->layer->main.common.slots;

    for (uint32_t i = 0; i < MOK_CUDA_MARKS; i++)
        if (m->ended[i]) {
            const uint32_t place = i / MOK_CUDA_MARK_KINDS;
            tell(c, works[i % MOK_CUDA_MARK_KINDS], place % slots, place / slots, m->begun[i], m->ended[i]);
        }
}

void mok_cuda_trace_tell(struct mok_cuda_run_entry *entry, uint64_t now_ns)
{
    const struct mok_engine *engine = entry->layer->engine;
    const struct mok_cuda_report *report = entry->report;

    if (!entry->traced || !engine->told)
        return;
    const struct clocks c = { engine, report->over_ns, now_ns, now_ns - entry->started_ns + SURPLUS_NS };
    const bool main = has_main(entry->phase), whole = entry->phase == MOK_PHASE_WHOLE;

    tell(&c, entry->phase == MOK_PHASE_REDUCE ? MOK_WORK_REDUCE : MOK_WORK_PREPARE, 0, 0, report->begun_ns,
         main ? report->schedule_from_ns : report->over_ns);
    if (main)
        tell(&c, MOK_WORK_SCHEDULE, 0, 0, report->schedule_from_ns, report->schedule_to_ns);
    if (entry->marks_now)
        tell_marks(&c, entry);
    if (whole)
        tell(&c, MOK_WORK_REDUCE, 0, 0, report->main_over_ns, report->over_ns);
}
