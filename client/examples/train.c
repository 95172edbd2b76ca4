/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Life of one rank, and its training loop on the host. All ranks take the same decisions: whatever could differ between
 * them is summed first.
 */
#include <errno.h>
#include <inttypes.h>
#include <libgen.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checkpoint.h"
#include "launch.h"
#include "ops.h"
#include "report.h"
#include "train_private.h"

struct model_shape train_shape(const struct options *o, unsigned rank)
{
    return (struct model_shape){
        .ranks = o->ranks,
        .rank = rank,
        .hidden = o->hidden,
        .intermediate = o->intermediate,
        .experts = o->experts,
        .topk = o->topk,
        .layers = o->layers,
        .window = o->window,
        .shared_intermediate = o->shared_expert ? o->intermediate : 0,
        .tokens = options_tokens(o),
        .micro_batches = o->micro_batches,
    };
}

struct moe_config train_moe_config(const struct options *o, unsigned rank)
{
    return (struct moe_config){
        .socket = o->sockets[rank],
        .job = o->job,
        .ranks = o->ranks,
        .rank = rank,
        .kind = o->engine,
        .any_device = o->any_devices,
        .device = o->devices[rank],
        .backend = &backend_host,
        .layers = o->layers,
        .micro_batches = o->micro_batches,
        .hidden = o->hidden,
        .intermediate = o->intermediate,
        .experts = o->experts,
        .topk = o->topk,
        .shared_intermediate = o->shared_expert ? o->intermediate : 0,
        .tokens = options_tokens(o),
        .precision = o->precision,
        .wgrad = options_wgrad(o),
        .recompute = o->recompute,
    };
}

size_t train_board_words(const struct options *options)
{
    return (size_t)options->layers * options->experts + options->ranks;
}

/* Collective: 0 if every rank came with 0, else this rank's own code, or -MOK_EPEER for another's failure. */
static int agree(struct rank *r, int rc)
{
    double failures = rc < 0;
    int sum_rc = comm_sum_double(r->comm, r->rank, &failures, 1);

    if (rc < 0)
        return rc;
    if (sum_rc < 0)
        return sum_rc;
    return failures > 0 ? -MOK_EPEER : 0;
}

static struct checkpoint_header checkpoint_header(const struct options *o, const struct text *text, uint64_t step)
{
    struct model_shape shape = train_shape(o, 0);

    return (struct checkpoint_header){
        .hidden = o->hidden,
        .intermediate = o->intermediate,
        .experts = o->experts,
        .topk = o->topk,
        .layers = o->layers,
        .window = o->window,
        .shared_intermediate = shape.shared_intermediate,
        .seq = o->seq,
        .micro_batches = o->micro_batches,
        .sequences = (uint64_t)o->batch * o->ranks,
        .seed = o->seed,
        .text_hash = text->hash,
        .dense_floats = model_dense_count(&shape),
        .precision = o->precision,
        .wgrad = options_wgrad(o),
        .step = step,
    };
}

typedef int (*section_function)(struct checkpoint *checkpoint, uint64_t section, const struct adamw_tensor *tensors,
                                size_t count);

/* The same, by way of this process's memory where the tensors are a GPU's. */
static int section(struct rank *r, struct checkpoint *checkpoint, section_function function, uint64_t number,
                   const struct adamw_tensor *tensors, size_t count)
{
    struct adamw_tensor copies[3] = { 0 };
    int rc = 0;

    if (!r->backend->queued)
        return function(checkpoint, number, tensors, count);
    for (size_t t = 0; t < count && rc == 0; t++) {
        float **copy[] = { &copies[t].value, &copies[t].first, &copies[t].second };
        const float *const from[] = { tensors[t].value, tensors[t].first, tensors[t].second };

        copies[t].count = tensors[t].count;
        for (size_t i = 0; i < 3 && rc == 0; i++) {
            *copy[i] = malloc(tensors[t].count * sizeof(float));
            rc = *copy[i] ? r->backend->get(*copy[i], from[i], tensors[t].count * sizeof(float)) : -MOK_ENOMEM;
        }
    }
    if (rc == 0)
        rc = function(checkpoint, number, copies, count);
    for (size_t t = 0; t < count; t++) {
        float *const copy[] = { copies[t].value, copies[t].first, copies[t].second };
        float *const to[] = { tensors[t].value, tensors[t].first, tensors[t].second };

        for (size_t i = 0; i < 3; i++) {
            if (rc == 0 && !checkpoint->writing)
                rc = r->backend->put(to[i], copy[i], tensors[t].count * sizeof(float));
            free(copy[i]);
        }
    }
    return rc;
}

/* Applies checkpoint_read or checkpoint_write to this rank's sections; `dense`: to the dense one too. */
static int for_sections(struct rank *r, struct checkpoint *checkpoint, section_function function, int dense)
{
    unsigned experts = r->options->experts, local = experts / r->options->ranks;
    struct adamw_tensor tensor = model_dense(r->model);
    int rc = dense ? section(r, checkpoint, function, 0, &tensor, 1) : 0;

    for (unsigned l = 0; l < r->options->layers; l++) {
        for (unsigned e = 0; e < local && rc == 0; e++) {
            const struct adamw_tensor tensors[] = {
                model_expert(r->model, l, e, MOE_GATE),
                model_expert(r->model, l, e, MOE_UP),
                model_expert(r->model, l, e, MOE_DOWN),
            };

            rc = section(r, checkpoint, function, 1 + (uint64_t)l * experts + r->rank * local + e, tensors, 3);
        }
    }
    return rc;
}

/* Collective. The order create, join, write, commit is kept by the agreements between. */
int train_save(struct rank *r)
{
    struct checkpoint_header header = checkpoint_header(r->options, r->text, r->step);
    struct checkpoint checkpoint = { .fd = -1 };
    int first = r->rank == 0, rc;

    rc = agree(r, first ? checkpoint_create(r->options->checkpoint, &header, &checkpoint) : 0);
    if (rc == 0 && !first)
        rc = checkpoint_join(r->options->checkpoint, &header, &checkpoint);
    if (rc == 0)
        rc = for_sections(r, &checkpoint, checkpoint_write, first);
    if (rc == 0)
        rc = checkpoint_sync(&checkpoint);
    rc = agree(r, rc);
    if (rc == 0 && first)
        rc = checkpoint_commit(&checkpoint);
    rc = agree(r, rc);
    checkpoint_close(&checkpoint, first);
    return rc;
}

static int resume(struct rank *r)
{
    struct checkpoint_header expected = checkpoint_header(r->options, r->text, 0);
    struct checkpoint checkpoint = { .fd = -1 };
    int rc = checkpoint_open(r->options->checkpoint, &expected, &checkpoint);

    if (rc < 0)
        return rc;
    rc = for_sections(r, &checkpoint, checkpoint_read, 1);
    r->step = checkpoint.header.step;
    checkpoint_close(&checkpoint, 0);
    return rc;
}

static int check_resume(const struct options *o, const struct text *text)
{
    struct checkpoint_header expected = checkpoint_header(o, text, 0);
    struct checkpoint checkpoint = { .fd = -1 };
    uint64_t step;
    int rc = checkpoint_open(o->checkpoint, &expected, &checkpoint);

    if (rc < 0)
        return rc;
    step = checkpoint.header.step;
    checkpoint_close(&checkpoint, 0);
    if (step >= o->steps)
        return fail(-MOK_ERANGE, "--steps %" PRIu64 ": the checkpoint %s has done %" PRIu64 " already", o->steps,
                    o->checkpoint, step);
    return 0;
}

int train_check(const struct options *o, const struct text *text)
{
    char *copy;
    int rc = 0;

    if (!o->checkpoint)
        return 0;
    copy = strdup(o->checkpoint);
    if (!copy)
        return fail(-MOK_ENOMEM, "no memory");
    if (access(dirname(copy), W_OK) < 0)
        rc = fail(-MOK_EIO, "--checkpoint %s: cannot write to its folder: %s", o->checkpoint, strerror(errno));
    free(copy);
    if (rc == 0 && o->resume)
        rc = check_resume(o, text);
    return rc;
}

struct batch train_batch(const struct rank *r)
{
    const struct options *o = r->options;

    return (struct batch){ .text = r->bytes,
                           .size = r->text->size,
                           .window = o->window,
                           .seq = o->seq,
                           .seed = o->seed,
                           .step = r->step,
                           .first = (uint64_t)r->rank * o->batch };
}

float train_scale(const struct rank *r)
{
    const struct options *o = r->options;

    return 1.0f / (float)((uint64_t)o->ranks * o->batch * o->seq);
}

static int text_open(struct rank *r)
{
    int rc;

    r->bytes = r->text->bytes;
    if (!r->backend->queued)
        return 0;
    rc = r->backend->allocate(r->text->size, &r->bytes_copy);
    if (rc < 0)
        return rc;
    r->bytes = r->bytes_copy;
    return r->backend->put(r->bytes_copy, r->text->bytes, r->text->size);
}

/* mokd's memory comes first: libmok says how CUDA is to be started on this node. */
static int rank_open(struct rank *r)
{
    struct model_shape shape = train_shape(r->options, r->rank);
    struct moe_config config = train_moe_config(r->options, r->rank);
    int rc;

    config.backend = r->backend;
    rc = moe_open(&config, &r->moe);
    if (rc == 0)
        rc = r->backend->open(moe_activations(r->moe, 0, 0).x, r->options->report);
    if (rc == 0)
        rc = text_open(r);
    if (rc == 0)
        rc = model_create(&shape, r->backend, &r->model);
    if (rc < 0)
        return rc;
    if (r->options->resume)
        rc = resume(r);
    else
        model_initialise(r->model, r->options->seed);
    if (rc == 0)
        rc = model_publish(r->model, r->moe);
    if (rc < 0)
        return rc;
    r->adamw = adamw_default(r->options->rate);
    return comm_barrier(r->comm);
}

static void rank_close(struct rank *r)
{
    model_free(r->model);
    r->backend->release(r->bytes_copy);
    free(r->gradients);
    r->backend->close();
    moe_close(r->moe);
}

/*
 * Forward and backward; sums of loss and stop requests over the ranks. When mokd went away on any rank, all do it
 * again: nothing but what the step overwrites has been written.
 */
static int compute_step(struct rank *r, double sums[2])
{
    struct batch batch = train_batch(r);

    for (;;) {
        double all[3] = { 0 };
        int rc = model_step(r->model, r->moe, &batch, train_scale(r));

        if (rc == 0)
            rc = model_losses(r->model, r->step, 1, &all[0]);
        if (rc < 0 && rc != -MOK_EDAEMON)
            return rc;
        all[1] = comm_stop_requested(r->comm);
        all[2] = rc < 0;
        rc = comm_sum_double(r->comm, r->rank, all, 3);
        if (rc < 0)
            return rc;
        if (all[2] <= 0) {
            memcpy(sums, all, 2 * sizeof(*sums));
            return 0;
        }
        rc = moe_recover(r->moe);
        if (rc < 0)
            return rc;
        if (r->rank == 0 && !r->options->quiet)
            note("step %" PRIu64 " is done again: mokd was restarted", r->step + 1);
    }
}

/* One optimizer step; the mean loss over all ranks' tokens, and whether to stop afterwards. */
static int train_step(struct rank *r, double *ret_loss, int *ret_stop)
{
    const struct options *o = r->options;
    uint64_t tokens = (uint64_t)o->ranks * o->batch * o->seq;
    double sums[2];
    int rc;

    rc = compute_step(r, sums);
    if (rc < 0)
        return rc;
    if (!isfinite(sums[0]))
        return fail(-MOK_ESTATE, "step %" PRIu64 ": the loss is not finite; try a smaller --lr", r->step + 1);
    rc = comm_sum(r->comm, r->rank, model_gradients(r->model), model_dense(r->model).count);
    if (rc < 0)
        return rc;
    r->step++;
    model_update(r->model, r->moe, &r->adamw, r->step);
    *ret_loss = sums[0] / (double)tokens;
    *ret_stop = sums[1] > 0;
    return model_publish(r->model, r->moe);
}

/* Collective: the hash of all parameters, equal on all ranks; fails if the ranks' dense parameters differ. */
static int hash_parameters(struct rank *r, uint64_t *ret)
{
    const struct options *o = r->options;
    unsigned local = o->experts / o->ranks;
    uint64_t *board = comm_board(r->comm), *dense = board + (size_t)o->layers * o->experts;
    int rc = 0;

    for (unsigned l = 0; l < o->layers; l++) {
        for (unsigned e = 0; e < local && rc == 0; e++) {
            uint64_t *hash = &board[l * o->experts + r->rank * local + e];

            *hash = OPS_HASH_START;
            rc = model_hash_expert(r->model, l, e, hash);
        }
    }
    dense[r->rank] = OPS_HASH_START;
    if (rc == 0)
        rc = model_hash_dense(r->model, &dense[r->rank]);
    if (rc == 0)
        rc = comm_barrier(r->comm);
    if (rc < 0)
        return rc;
    for (unsigned i = 1; i < o->ranks; i++)
        if (dense[i] != dense[0])
            return fail(-MOK_EINTERNAL, "dense parameters of rank %u differ from those of rank 0", i);
    *ret = ops_hash(dense[0], board, (size_t)o->layers * o->experts * sizeof(*board));
    return comm_barrier(r->comm);
}

static int train_loop(struct rank *r, struct progress *progress, int *ret_stopped)
{
    const struct options *o = r->options;

    while (r->step < o->steps && !*ret_stopped) {
        double loss = 0;
        int rc = train_step(r, &loss, ret_stopped);

        if (rc == 0 && r->rank == 0)
            rc = progress_step(progress, r->step, loss);
        if (rc == 0 && o->save_every && r->step % o->save_every == 0 && r->step < o->steps && !*ret_stopped)
            rc = train_save(r);
        if (rc < 0)
            return rc;
    }
    *ret_stopped = r->step < o->steps;
    return 0;
}

static void describe(const struct rank *r)
{
    const struct options *o = r->options;
    struct model_shape shape = train_shape(o, r->rank);
    size_t experts = (size_t)o->layers * o->experts * 3 * o->intermediate * o->hidden;

    if (o->quiet || r->rank != 0)
        return;
    printf("job %s: %u ranks, %zu dense and %zu expert parameters, %u experts top-%u, text %s (%zu bytes)\n", o->job,
           o->ranks, model_dense_count(&shape), experts, o->experts, o->topk, o->text, r->text->size);
    if (r->step > 0)
        printf("job %s: continues after step %" PRIu64 "\n", o->job, r->step);
    fflush(stdout);
}

/* What the first layer saw and was told in the last step, for whoever studies real activations. */
static int dump(const struct rank *r)
{
    const struct options *o = r->options;
    struct moe_activations a = moe_activations(r->moe, 0, 0);
    size_t count = (size_t)train_moe_config(o, 0).tokens * o->hidden;
    uint16_t *both = malloc(2 * count * sizeof(*both));
    FILE *file = fopen(o->dump, "we");
    int ok = both && file && r->backend->get(both, a.x, count * sizeof(*both)) == 0 &&
             r->backend->get(both + count, a.d_out, count * sizeof(*both)) == 0 &&
             fwrite(both, sizeof(*both), 2 * count, file) == 2 * count;

    free(both);
    if (file)
        ok &= fclose(file) == 0;
    return ok ? 0 : fail(-MOK_EIO, "--dump %s: %s", o->dump, strerror(errno));
}

static int finish(struct rank *r, const struct progress *progress, int stopped)
{
    const struct options *o = r->options;
    struct moe_totals totals = moe_totals(r->moe);
    uint64_t hash = 0;
    int rc = o->checkpoint ? train_save(r) : 0;

    if (rc == 0)
        rc = hash_parameters(r, &hash);
    if (rc < 0)
        return rc;
    if (totals.dropped)
        return fail(-MOK_EINTERNAL, "%" PRIu64 " rows were dropped", totals.dropped);
    if (r->rank != 0)
        return 0;
    if (o->dump && (rc = dump(r)) < 0)
        return rc;
    if (stopped)
        printf("job %s: stopped by a signal after step %" PRIu64 "%s\n", o->job, r->step,
               o->checkpoint ? ", --resume continues" : "");
    printf("parameters %016" PRIx64 "\n", hash);
    printf("job %s: %u ranks, %" PRIu64 " steps, loss %.4f -> %.4f, %.0f tokens/s\n", o->job, o->ranks, progress->done,
           progress->first_loss, progress->last_loss, progress_rate(progress));
    return fflush(stdout) == 0 ? 0 : fail(-MOK_EIO, "cannot write to stdout");
}

static int run(struct rank *r, struct progress *progress, int *ret_stopped)
{
    int rc = rank_open(r);

    if (rc < 0)
        return rc;
    describe(r);
    progress_start(progress, r->step + 1);
    rc = r->backend->queued ? train_stream(r, progress, ret_stopped) : train_loop(r, progress, ret_stopped);
    progress_end_line(progress);
    return rc < 0 ? rc : finish(r, progress, *ret_stopped);
}

int train_rank(unsigned rank, void *argument)
{
    const struct job *job = argument;
    struct rank r = {
        .options = job->options, .text = job->text, .comm = job->comm, .rank = rank, .backend = job->backend
    };
    const struct options *o = job->options;
    struct progress progress = { 0 };
    int stopped = 0, rc = 0;

    if (rank == 0)
        rc = progress_open(o->job, o->log, o->quiet, o->steps, (uint64_t)o->ranks * o->batch * o->seq, &progress);
    if (rc == 0)
        rc = run(&r, &progress, &stopped);
    if (progress_close(&progress) < 0)
        rc = -MOK_EIO;
    rank_close(&r);
    if (rc < 0)
        return 1;
    return stopped ? LAUNCH_INTERRUPTED : 0;
}
