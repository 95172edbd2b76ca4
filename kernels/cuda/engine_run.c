/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Phases on the engine's own stream, from start to outcome: one that runs, and one behind it that starts by itself when
 * its client's stream says so. Never waits for the device.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <time.h>

#include "driver.h"
#include "engine.h"
#include "engine_layer.h"

#define FAULT_LOOK_NS 1000000u /* a phase that has not ended is asked about so often: the device may have failed */

static void CUDART_CB ring(void *data)
{
    const struct mok_engine *e = data;
    e->config.notify(e->config.cookie);
}

static uint64_t now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static struct mok_cuda_run_entry *free_entry(struct mok_engine *e)
{
    return &e->entry[(e->oldest + e->started) % MOK_CUDA_ENTRIES];
}

static void has_started(struct mok_engine *e, struct mok_cuda_run_entry *entry)
{
    e->looked_ns = entry->started_ns;
    e->started++;
}

int mok_cuda_run_start(struct mok_engine_layer *layer, const struct mok_op_args *args, enum mok_phase phase)
{
    struct mok_engine *e = layer->engine;
    struct mok_cuda_run_entry *entry = free_entry(e);

    if (e->started)
        return -MOK_EBUSY;
    entry->started_ns = now_ns();
    int r = mok_cuda_ready(entry, layer, args, phase, NULL);
    if (r == 0)
        r = mok_cuda_queue(layer, args, phase, e->stream);
    if (r < 0)
        return r;
    /* A word in host memory costs a poll nothing; an event would cost two records, a query a poll and a subtraction. */
    entry->number = ++e->number;
    if (e->driver.write_value((CUstream)e->stream, (CUdeviceptr)&entry->report->ended, entry->number,
                              CU_STREAM_WRITE_VALUE_DEFAULT) != CUDA_SUCCESS ||
        (e->config.notify && cudaLaunchHostFunc(e->stream, ring, e) != cudaSuccess))
        return -MOK_EDEVICE;
    has_started(e, entry);
    return 0;
}

/* ------------------------------------------------------------------ operations that start by themselves */

#define ROOM_NS 1000000000u

/* What the other streams are used for while this one waits. */
static cudaError_t use_others(struct mok_engine *e)
{
    struct mok_cuda_run_entry *entry = &e->entry[0];
    cudaError_t r = cudaMemsetAsync(entry->bad_id, 0, sizeof(uint32_t), e->side);

    for (int i = 0; i < 2 && r == cudaSuccess; i++) {
        cudaStream_t stream = i ? e->boards : e->side;
        r = cudaMemcpyAsync(entry->abort_word, &entry->report->withdraw, sizeof(uint32_t), cudaMemcpyDefault, stream);
        if (r == cudaSuccess)
            r = cudaMemcpyAsync(&entry->report->withdraw, entry->abort_word, sizeof(uint32_t), cudaMemcpyDefault,
                                stream);
    }
    return r;
}

static bool others_pass(const struct mok_engine *e)
{
    cudaError_t side, boards;
    uint64_t until = now_ns() + ROOM_NS;

    do {
        side = cudaStreamQuery(e->side);
        boards = cudaStreamQuery(e->boards);
    } while ((side == cudaErrorNotReady || boards == cudaErrorNotReady) && now_ns() < until);
    return side == cudaSuccess && boards == cudaSuccess;
}

/*
 * Streams of a process share queues of the hardware, and what stands in one behind a wait waits too: for a word that we
 * may write only when it is over. How many queues there are is the driver's, the environment's and an MPS's affair, so
 * it is tried out.
 */
int mok_cuda_run_find_room(struct mok_engine *e)
{
    struct mok_cuda_report *report = e->entry[0].report;

    if (e->driver.wait_value((CUstream)e->stream, (CUdeviceptr)&report->go, 1, CU_STREAM_WAIT_VALUE_GEQ) !=
        CUDA_SUCCESS)
        return -MOK_EDEVICE;
    cudaError_t r = use_others(e);
    e->crowded = r != cudaSuccess || !others_pass(e);
    __atomic_store_n(&report->go, 1, __ATOMIC_RELEASE);
    if (r != cudaSuccess || cudaStreamSynchronize(e->stream) != cudaSuccess ||
        cudaStreamSynchronize(e->side) != cudaSuccess || cudaStreamSynchronize(e->boards) != cudaSuccess)
        return -MOK_EDEVICE;
    return 0;
}

int mok_cuda_run_gate_map(struct mok_engine *engine, void *memory, uint64_t bytes, struct mok_message *message)
{
    cudaSetDevice((int)engine->config.index);
    cudaError_t e = cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
    void *address = NULL;
    if (e == cudaSuccess) {
        e = cudaHostGetDevicePointer(&address, memory, 0);
        if (e == cudaSuccess && address == memory)
            return 0;
        cudaHostUnregister(memory);
    }
    snprintf(message->text, sizeof(message->text), "making a client's stream slots usable by the device: %s",
             e == cudaSuccess ? "it has another address there" : cudaGetErrorString(e));
    return -MOK_EDEVICE;
}

void mok_cuda_run_gate_unmap(struct mok_engine *engine, void *memory)
{
    cudaSetDevice((int)engine->config.index);
    cudaHostUnregister(memory);
}

static bool is_open(const struct mok_engine_gate *gate)
{
    return (int32_t)(__atomic_load_n(gate->start, __ATOMIC_ACQUIRE) - gate->number) >= 0;
}

/* A client that moves the word back while the device does not look could make it wait for ever, so it is said again. */
static void open_gate(const struct mok_cuda_run_entry *entry)
{
    if (!is_open(&entry->gate))
        __atomic_store_n((uint32_t *)(uintptr_t)entry->gate.start, entry->gate.number, __ATOMIC_RELEASE);
}

static void aim(struct mok_cuda_run_entry *entry, const struct mok_engine_gate *tell)
{
    entry->report->tell.done = tell->done; /* gate_map: the device has the same address */
    entry->report->tell.done_number = tell->number;
}

static int queue_ahead(struct mok_engine *e, struct mok_cuda_run_entry *entry, const struct mok_op_args *args,
                       const struct mok_engine_gate *asked)
{
    const struct mok_engine_gate *gate = &entry->gate;

    aim(entry, asked);
    entry->report->tell.number = entry->number;
    entry->open = is_open(gate);
    mok_cuda_graph_ready(entry, args); /* before the stream waits: making one takes memory, which may wait for all streams */
    if (!entry->open && e->driver.wait_value((CUstream)e->stream, (CUdeviceptr)gate->start, gate->number,
                                             CU_STREAM_WAIT_VALUE_GEQ) != CUDA_SUCCESS)
        return -MOK_EDEVICE;
    return mok_cuda_graph_queue(entry, args);
}

int mok_cuda_run_start_ahead(struct mok_engine_layer *layer, const struct mok_op_args *args, enum mok_phase phase,
                             const struct mok_engine_gate *gate)
{
    struct mok_engine *e = layer->engine;
    struct mok_cuda_run_entry *entry = free_entry(e);

    if (e->crowded)
        return -MOK_ENOTSUP;
    if (e->started == MOK_CUDA_ENTRIES)
        return -MOK_EBUSY;
    int r = mok_cuda_ready(entry, layer, args, phase, gate);
    if (r < 0 || entry->refused.status < 0)
        return r < 0 ? r : entry->refused.status;
    entry->number = ++e->number;
    if (!gate->start) {
        entry->gate.number = entry->number;
        entry->report->go = entry->number - 1;
    }
    entry->started_ns = now_ns();
    r = queue_ahead(e, entry, args, gate);
    if (r < 0)
        return r;
    has_started(e, entry);
    return 0;
}

static struct mok_cuda_run_entry *youngest(struct mok_engine *e)
{
    return e->started ? &e->entry[(e->oldest + e->started - 1) % MOK_CUDA_ENTRIES] : NULL;
}

void mok_cuda_run_go(struct mok_engine *engine, const struct mok_engine_gate *tell)
{
    struct mok_cuda_run_entry *entry = youngest(engine);

    if (!entry || !entry->gate.start)
        return;
    if (tell)
        aim(entry, tell);
    entry->started_ns = now_ns();
    entry->open = true;
    open_gate(entry);
}

/* PREPARE asks; REDUCE has no kernel of one thread that could. Nobody has opened its gate, so it does not run. */
static void withdraw_reduce(struct mok_engine *e, const struct mok_cuda_run_entry *entry)
{
    static const uint32_t withdrawn = MOK_STOP_WITHDRAWN;

    if (cudaSetDevice((int)e->config.index) == cudaSuccess &&
        cudaMemcpyAsync(entry->bad_id, &withdrawn, sizeof(withdrawn), cudaMemcpyHostToDevice, e->side) == cudaSuccess)
        cudaStreamSynchronize(e->side);
}

void mok_cuda_run_withdraw(struct mok_engine *engine)
{
    struct mok_cuda_run_entry *entry = youngest(engine);

    if (!entry || !entry->gate.start || entry->report->withdraw)
        return;
    if (entry->phase == MOK_PHASE_REDUCE && !entry->open)
        withdraw_reduce(engine, entry);
    __atomic_store_n(&entry->report->withdraw, 1, __ATOMIC_SEQ_CST);
    entry->open = true;
    open_gate(entry);
}

/* ------------------------------------------------------------------ the end of a phase */

/* An abort that came too late changes nothing but must not hit the next operation. */
static void settle_abort(struct mok_engine *e, struct mok_cuda_run_entry *entry, struct mok_op_result *result)
{
    cudaStreamSynchronize(e->side);
    mok_cuda_clear(e, entry->abort_word);
    if (result->status == 0)
        result->status = -MOK_ECANCELED;
}

/* The device will not end the running phase any more. */
static bool has_failed(struct mok_engine *e, struct mok_cuda_run_entry *entry)
{
    uint64_t now = now_ns();

    if (entry->gate.start && !entry->open) {
        entry->open = is_open(&entry->gate);
        entry->started_ns = entry->open ? entry->started_ns : now;
    }
    if (now - e->looked_ns < FAULT_LOOK_NS)
        return false;
    e->looked_ns = now;
    if (entry->open)
        open_gate(entry);
    if (cudaSetDevice((int)e->config.index) != cudaSuccess)
        return true;
    cudaError_t status = cudaStreamQuery(e->stream);
    return status != cudaSuccess && status != cudaErrorNotReady;
}

int mok_cuda_run_poll(struct mok_engine *engine, struct mok_op_result *ret)
{
    struct mok_cuda_run_entry *entry = &engine->entry[engine->oldest];
    struct mok_op_result result = { 0 };

    if (!engine->started)
        return 0;
    bool ended = __atomic_load_n(&entry->report->ended, __ATOMIC_ACQUIRE) == entry->number;
    if (!ended && !has_failed(engine, entry))
        return 0;
    engine->oldest = (engine->oldest + 1) % MOK_CUDA_ENTRIES;
    engine->started--;
    uint64_t now = now_ns();
    engine->entry[engine->oldest].started_ns = now; /* of what waited behind this one */
    if (ended && entry->gate.start && entry->report->withdrawn)
        return 2;
    if (!ended || cudaSetDevice((int)engine->config.index) != cudaSuccess ||
        mok_cuda_entry_outcome(entry, &result) < 0) {
        result.status = -MOK_EDEVICE;
    } else {
        result.device_ns = now - entry->started_ns;
        if (entry->aborted)
            settle_abort(engine, entry, &result);
        else if (result.status == 0)
            mok_cuda_trace_tell(entry, now);
    }
    *ret = result;
    return 1;
}

void mok_cuda_run_abort(struct mok_engine *engine)
{
    static const uint32_t one = 1;
    struct mok_cuda_run_entry *entry = &engine->entry[engine->oldest];

    if (!engine->started || cudaSetDevice((int)engine->config.index) != cudaSuccess)
        return;
    entry->aborted = true;
    cudaMemcpyAsync(entry->abort_word, &one, sizeof(one), cudaMemcpyHostToDevice, engine->side);
}
