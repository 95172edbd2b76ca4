/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host engine's interface: opens and closes it and its layers, hands out memory, starts and ends phases. Does no
 * arithmetic and never waits for another rank.
 */
#include "host.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_THREADS 1024u
#define CACHE_LINE 64u
#define UNIT_BLOCKS 6u

static int host_probe(const struct mok_engine_config *config, struct mok_device_limits *ret,
                      struct mok_message *message)
{
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);

    if (config->threads == 0 || config->threads > MAX_THREADS)
        return mok_fail(message, -MOK_ERANGE, "threads = %u is outside 1..%u", config->threads, MAX_THREADS);
    if (pages <= 0 || page <= 0)
        return mok_fail(message, -MOK_EDEVICE, "the size of this host's memory cannot be had (errno %d)", errno);
    *ret = (struct mok_device_limits){ .kind = MOK_DEVICE_HOST,
                                       .units = config->threads,
                                       .memory_bytes = (uint64_t)pages * (uint64_t)page };
    return 0;
}

static void host_close(struct mok_engine *engine)
{
    if (!engine)
        return;
    mok_host_pool_stop(engine);
    pthread_cond_destroy(&engine->moved);
    pthread_cond_destroy(&engine->work);
    pthread_mutex_destroy(&engine->lock);
    free(engine->scratch);
    free(engine->scratch_next);
    free(engine->unit);
    free(engine->thread);
    free(engine);
}

static int host_open(const struct mok_engine_config *config, struct mok_engine **ret, struct mok_message *message)
{
    struct mok_device_limits limits;
    struct mok_engine *engine;
    int r;

    r = host_probe(config, &limits, message);
    if (r < 0)
        return r;
    engine = calloc(1, sizeof(*engine));
    if (!engine)
        return mok_fail(message, -MOK_ENOMEM, "no memory for an engine of %u threads", config->threads);
    engine->config = *config;
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->work, NULL);
    pthread_cond_init(&engine->moved, NULL);
    engine->unit = calloc(config->threads, sizeof(*engine->unit));
    engine->thread = calloc(config->threads, sizeof(*engine->thread));
    engine->gemm = mok_gemm_choose();
    if (!engine->unit || !engine->thread)
        r = mok_fail(message, -MOK_ENOMEM, "no memory for an engine of %u threads", config->threads);
    else
        r = mok_host_pool_start(engine, message);
    if (r < 0) {
        host_close(engine);
        return r;
    }
    *ret = engine;
    return 0;
}

/* What the kernel thinks it can give without swapping; all of physical memory where it does not say. */
static uint64_t memory_available(void)
{
    unsigned long long kib = 0;
    FILE *file = fopen("/proc/meminfo", "re");
    char line[128];

    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
            break;
    if (file)
        fclose(file);
    if (kib > 0)
        return (uint64_t)kib * 1024;
    return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Sealed, so that no holder of the descriptor can take pages away under us; allocated, so that no write can fail. */
static int host_memory_alloc(struct mok_engine *engine, uint64_t bytes, int *ret_fd, uint8_t *ret_fabric,
                             struct mok_message *message)
{
    uint64_t available = memory_available();
    int fd, r;

    (void)engine;
    if (ret_fabric)
        return mok_fail(message, -MOK_ENOTSUP, "a host device's memory cannot be had by a fabric handle");
    if (bytes == 0)
        return mok_fail(message, -MOK_ERANGE, "bytes = 0, at least 1 is needed");
    /* asked first: an allocation that cannot succeed would take every page there is before it fails */
    if (bytes > available)
        return mok_fail(message, -MOK_ENOMEM, "bytes = %llu exceeds the %llu bytes that this host has available",
                        (unsigned long long)bytes, (unsigned long long)available);
    fd = memfd_create("mok", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return mok_fail(message, errno == EMFILE || errno == ENFILE ? -MOK_EFDS : -MOK_EIO, "memfd_create: errno %d",
                        errno);
    r = posix_fallocate(fd, 0, (off_t)bytes);
    if (r != 0) {
        close(fd);
        return mok_fail(message, -MOK_ENOMEM, "%llu bytes cannot be allocated (errno %d)", (unsigned long long)bytes,
                        r);
    }
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) < 0) {
        r = errno;
        close(fd);
        return mok_fail(message, -MOK_EIO, "sealing: errno %d", r);
    }
    *ret_fd = fd;
    return 0;
}

static int host_memory_map(struct mok_engine *engine, int fd, uint64_t bytes, void **ret, struct mok_message *message)
{
    struct stat st;
    void *address;

    (void)engine;
    if (fstat(fd, &st) < 0)
        return mok_fail(message, -MOK_EBUFFER, "descriptor %d: errno %d", fd, errno);
    if (bytes == 0 || (uint64_t)st.st_size < bytes)
        return mok_fail(message, -MOK_ESIZE, "bytes = %llu is outside 1..%llu, the size of what is mapped",
                        (unsigned long long)bytes, (unsigned long long)st.st_size);
    address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED)
        return mok_fail(message, errno == ENOMEM ? -MOK_ENOMEM : -MOK_EIO, "mapping %llu bytes: errno %d",
                        (unsigned long long)bytes, errno);
    *ret = address;
    return 0;
}

static void host_memory_unmap(struct mok_engine *engine, void *address, uint64_t bytes)
{
    (void)engine;
    if (address)
        munmap(address, bytes);
}

static void map_schedule(struct mok_engine_layer *layer)
{
    const struct mok_host_layout *layout = &layer->layout;
    uint8_t *memory = layer->memory;

    layer->schedule = (struct mok_schedule){
        .ep = layer->plan.spec.ep,
        .local_experts = layer->plan.local_experts,
        .tile_rows = layer->plan.tile_rows,
        .count = (uint64_t *)(void *)(memory + layout->count),
        .start = (uint64_t *)(void *)(memory + layout->start),
        .first = (uint64_t *)(void *)(memory + layout->first),
        .expert_rows = (uint64_t *)(void *)(memory + layout->expert_rows),
        .live = (uint32_t *)(void *)(memory + layout->live),
        .row = (struct mok_row *)(void *)(memory + layout->row),
    };
}

/* Working memory for the largest layer: taken over when the next phase starts, since one may be running. */
static int provide_scratch(struct mok_engine *engine, uint64_t floats, struct mok_message *message)
{
    uint64_t bytes = mok_round_up(floats * sizeof(float), CACHE_LINE) * UNIT_BLOCKS * engine->config.threads;
    float *scratch;
    bool enough;

    pthread_mutex_lock(&engine->lock);
    enough = floats <= engine->scratch_floats || floats <= engine->scratch_next_floats;
    pthread_mutex_unlock(&engine->lock);
    if (enough)
        return 0;
    scratch = aligned_alloc(CACHE_LINE, bytes);
    if (!scratch)
        return mok_fail(message, -MOK_ENOMEM, "%llu bytes of working memory for %u threads cannot be had",
                        (unsigned long long)bytes, engine->config.threads);
    pthread_mutex_lock(&engine->lock);
    free(engine->scratch_next);
    engine->scratch_next = scratch;
    engine->scratch_next_floats = floats;
    pthread_mutex_unlock(&engine->lock);
    return 0;
}

static void take_over_scratch(struct mok_engine *engine)
{
    uint64_t step;
    uint32_t i;

    if (!engine->scratch_next)
        return;
    free(engine->scratch);
    engine->scratch = engine->scratch_next;
    engine->scratch_floats = engine->scratch_next_floats;
    engine->scratch_next = NULL;
    engine->scratch_next_floats = 0;
    step = mok_round_up(engine->scratch_floats * sizeof(float), CACHE_LINE) / sizeof(float);
    for (i = 0; i < engine->config.threads; i++) {
        float *base = engine->scratch + step * UNIT_BLOCKS * i;
        struct mok_host_unit *unit = &engine->unit[i];

        unit->weight[0] = base;
        unit->weight[1] = base + step;
        unit->rows[0] = base + 2 * step;
        unit->rows[1] = base + 3 * step;
        unit->out[0] = base + 4 * step;
        unit->out[1] = base + 5 * step;
    }
}

static void host_layer_close(struct mok_engine_layer *layer)
{
    if (!layer)
        return;
    free(layer->progress);
    free(layer);
}

static int host_layer_open(struct mok_engine *engine, const struct mok_plan *plan, void *const *symmetric,
                           void *private_memory, struct mok_engine_layer **ret, struct mok_message *message)
{
    struct mok_engine_layer *layer;
    uint32_t r;
    int code;

    if (plan->device.kind != MOK_DEVICE_HOST)
        return mok_fail(message, -MOK_EDEVICE, "device kind of the plan = %u, this engine is %u", plan->device.kind,
                        MOK_DEVICE_HOST);
    if ((uintptr_t)private_memory % CACHE_LINE)
        return mok_fail(message, -MOK_EALIGN, "the private workspace is not aligned to %u bytes", CACHE_LINE);
    code = provide_scratch(engine, mok_host_block_floats(plan), message);
    if (code < 0)
        return code;
    layer = calloc(1, sizeof(*layer));
    if (!layer)
        return mok_fail(message, -MOK_ENOMEM, "no memory for a layer");
    layer->engine = engine;
    layer->plan = *plan;
    layer->hash = mok_plan_hash(plan);
    layer->memory = private_memory;
    mok_host_layout_make(plan, &layer->layout);
    mok_host_kept_make(plan, &layer->context_ring);
    for (r = 0; r < plan->spec.ep; r++)
        layer->sym[r] = symmetric[r];
    layer->max_slots = (uint32_t)mok_div_up(plan->ring_rows, plan->minibatch_rows);
    layer->progress = calloc((size_t)MOK_STAGES * layer->max_slots, sizeof(*layer->progress));
    if (!layer->progress) {
        code = mok_fail(message, -MOK_ENOMEM, "no memory for the progress of %u minibatches", layer->max_slots);
        host_layer_close(layer);
        return code;
    }
    map_schedule(layer);
    *ret = layer;
    return 0;
}

static const struct mok_host_program *program_of(const struct mok_op_args *args, enum mok_phase phase)
{
    switch (phase) {
    case MOK_PHASE_PREPARE:
        return &mok_host_prepare;
    case MOK_PHASE_MAIN:
        return args->kind == MOK_KIND_FORWARD ? &mok_host_forward : &mok_host_backward;
    case MOK_PHASE_REDUCE:
        return &mok_host_reduce;
    case MOK_PHASE_WHOLE:
        break;
    }
    return NULL;
}

static void clear_progress(struct mok_engine_layer *layer, enum mok_phase phase)
{
    uint32_t stage;

    if (phase == MOK_PHASE_MAIN) {
        memset(layer->progress, 0, (size_t)MOK_STAGES * layer->max_slots * sizeof(*layer->progress));
        return;
    }
    for (stage = 0; stage < MOK_STAGES; stage++)
        layer->progress[(size_t)stage * layer->max_slots] = (struct mok_host_progress){ 0 };
}

/* With the lock held. `before`: what the operation's phases before this one say; a refused phase ends as one that
 * failed, in a thread of ours. */
static void begin_phase(struct mok_engine_layer *layer, const struct mok_op_args *args, enum mok_phase phase,
                        const struct mok_host_op *before)
{
    struct mok_engine *engine = layer->engine;
    struct mok_op_result result = before->result;

    clear_progress(layer, phase);
    if (phase == MOK_PHASE_PREPARE)
        mok_host_check_args(layer, args, &result);
    else if (phase == MOK_PHASE_MAIN)
        mok_host_check_peers(layer, args, &result);
    engine->op = (struct mok_host_op){
        .layer = layer,
        .args = args,
        .program = program_of(args, phase),
        .started_ns = before->started_ns,
        .active = true,
        .phase = phase,
        .whole = before->whole,
        .result = result,
    };
    engine->phase++;
    pthread_cond_broadcast(&engine->work);
}

bool mok_host_next_phase(struct mok_engine *engine)
{
    struct mok_host_op before = engine->op;

    if (!before.whole || before.result.status < 0 || engine->aborted || before.phase == MOK_PHASE_REDUCE)
        return false;
    begin_phase(before.layer, before.args, before.phase + 1, &before);
    return true;
}

static int host_start(struct mok_engine_layer *layer, const struct mok_op_args *args, enum mok_phase phase)
{
    struct mok_engine *engine = layer->engine;
    struct mok_host_op nothing = { .whole = phase == MOK_PHASE_WHOLE };

    if (nothing.whole ? layer->plan.spec.ep != 1 : !program_of(args, phase))
        return -MOK_EARG;
    pthread_mutex_lock(&engine->lock);
    if (engine->op.active || engine->ended) {
        pthread_mutex_unlock(&engine->lock);
        return -MOK_EBUSY;
    }
    take_over_scratch(engine);
    engine->aborted = false;
    nothing.started_ns = mok_host_now_ns();
    begin_phase(layer, args, nothing.whole ? MOK_PHASE_PREPARE : phase, &nothing);
    pthread_mutex_unlock(&engine->lock);
    return 0;
}

static int host_poll(struct mok_engine *engine, struct mok_op_result *ret)
{
    int told = 0;

    pthread_mutex_lock(&engine->lock);
    if (engine->ended) {
        *ret = engine->op.result;
        engine->ended = false;
        told = 1;
    }
    pthread_mutex_unlock(&engine->lock);
    return told;
}

static void host_abort(struct mok_engine *engine)
{
    pthread_mutex_lock(&engine->lock);
    if (engine->op.active) {
        engine->aborted = true;
        pthread_cond_broadcast(&engine->moved);
    }
    pthread_mutex_unlock(&engine->lock);
}

static void host_trace(struct mok_engine *engine, void (*told)(void *cookie, const struct mok_engine_span *span),
                       void *cookie)
{
    pthread_mutex_lock(&engine->lock);
    engine->told = told;
    engine->told_cookie = cookie;
    pthread_mutex_unlock(&engine->lock);
}

const struct mok_engine_ops mok_host_engine = {
    .name = "host",
    .kind = MOK_DEVICE_HOST,
    .runs_whole = true,
    .probe = host_probe,
    .open = host_open,
    .close = host_close,
    .memory_alloc = host_memory_alloc,
    .memory_map = host_memory_map,
    .memory_unmap = host_memory_unmap,
    .layer_open = host_layer_open,
    .layer_close = host_layer_close,
    .start = host_start,
    .poll = host_poll,
    .abort = host_abort,
    .trace = host_trace,
};
