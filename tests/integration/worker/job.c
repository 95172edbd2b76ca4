/* SPDX-License-Identifier: Apache-2.0 */
/* A whole job for tests of the worker: see job.h. */
#include "job.h"

#define PART_ALIGN 64u

const struct mok_layer_spec job_small = {
    .hidden = 32, .intermediate = 16, .experts = 4, .topk = 2, .max_tokens = 16, .precision = MOK_BF16
};

static void lay_out(struct job *job, const struct mok_plan *plan)
{
    const struct mok_layer_spec *spec = &plan->spec;
    uint64_t rows = (uint64_t)spec->max_tokens * spec->hidden, slots = (uint64_t)spec->max_tokens * spec->topk;
    uint64_t weights = (uint64_t)plan->local_experts * spec->hidden * spec->intermediate;
    const uint64_t bytes[JOB_PARTS] = {
        [JOB_IDS] = slots * 4,    [JOB_TOPK_WEIGHT] = slots * 4,
        [JOB_OUT] = rows * 2,     [JOB_CONTEXT] = plan->context_full_bytes,
        [JOB_D_X] = rows * 2,     [JOB_D_TOPK_WEIGHT] = slots * 4,
        [JOB_GATE] = weights * 2, [JOB_UP] = weights * 2,
        [JOB_DOWN] = weights * 2, [JOB_D_GATE] = weights * 4,
        [JOB_D_UP] = weights * 4, [JOB_D_DOWN] = weights * 4,
    };
    uint64_t offset = 0;

    for (unsigned part = 0; part < JOB_PARTS; part++) {
        job->offset[part] = offset;
        job->bytes[part] = bytes[part];
        offset += (bytes[part] + PART_ALIGN - 1) / PART_ALIGN * PART_ALIGN;
    }
}

static void bind_rank(struct job *job, uint32_t rank)
{
    Mok__LayerParams params = MOK__LAYER_PARAMS__INIT;
    Mok__Region region[6];
    Mok__Region **place[6] = { &params.gate, &params.up, &params.down, &params.d_gate, &params.d_up, &params.d_down };

    for (unsigned i = 0; i < 6; i++) {
        mok__region__init(&region[i]);
        region[i].buffer = job->own[rank].id;
        region[i].offset = job->offset[JOB_GATE + i];
        region[i].length = job->bytes[JOB_GATE + i];
        *place[i] = &region[i];
    }
    assert_int_equal(layer_bind(&job->layer, rank, &params), 0);
}

void job_open(struct job *job, struct worker *const *workers, uint32_t ep, const struct mok_layer_spec *spec)
{
    struct client *clients[HARNESS_MAX_EP];
    uint64_t rows_bytes = (uint64_t)spec->max_tokens * spec->hidden * 2;

    memset(job, 0, sizeof(*job));
    job->ep = ep;
    for (uint32_t rank = 0; rank < ep; rank++) {
        job->rank_tokens[rank] = spec->max_tokens;
        client_open(&job->client[rank], workers[rank], harness_id(), 16, 0);
        clients[rank] = &job->client[rank];
    }
    group_open(&job->group, harness_id(), clients, ep);
    layer_open(&job->layer, &job->group, spec);
    lay_out(job, &job->layer.plan);
    buffer_symmetric(&job->x, &job->group, rows_bytes);
    buffer_symmetric(&job->d_out, &job->group, rows_bytes);
    for (uint32_t rank = 0; rank < ep; rank++) {
        uint64_t bytes = job->offset[JOB_PARTS - 1] + job->bytes[JOB_PARTS - 1];
        buffer_private(&job->own[rank], &job->client[rank], bytes);
        bind_rank(job, rank);
    }
}

void job_free(struct job *job)
{
    for (uint32_t rank = 0; rank < job->ep; rank++) {
        buffer_free(&job->own[rank]);
        client_free(&job->client[rank]);
    }
    buffer_free(&job->x);
    buffer_free(&job->d_out);
    job->ep = 0;
}

void job_close(struct job *job)
{
    for (uint32_t rank = 0; rank < job->ep; rank++) {
        struct client *client = &job->client[rank];
        if (client->worker->control < 0)
            continue;
        assert_int_equal(group_close(&job->group, rank), 0);
        assert_int_equal(client_close(client), 0);
        assert_int_equal(buffer_unmap(client->worker, client->session, 0, 0, job->own[rank].id), 0);
    }
    job_free(job);
}

void *job_part(struct job *job, uint32_t rank, enum job_part part)
{
    return (char *)job->own[rank].address[0] + job->offset[part];
}

/* ------------------------------------------------------------------ submissions */

static void region(struct mok_sqe *sqe, enum mok_region_slot slot, const struct buffer *buffer, uint64_t offset,
                   uint64_t length)
{
    sqe->region[slot] = (struct mok_region){ .buffer = buffer->id, .offset = offset, .length = length };
}

static void own_region(struct job *job, struct mok_sqe *sqe, uint32_t rank, enum mok_region_slot slot,
                       enum job_part part)
{
    region(sqe, slot, &job->own[rank], job->offset[part], job->bytes[part]);
}

struct mok_sqe job_forward(struct job *job, uint32_t rank, uint64_t user_data)
{
    struct mok_sqe sqe = { .opcode = MOK_OP_FORWARD,
                           .context_mode = MOK_CONTEXT_FULL,
                           .user_data = user_data,
                           .layer = job->layer.id,
                           .tokens = job->rank_tokens[rank] };

    region(&sqe, MOK_REGION_X, &job->x, 0, job->x.bytes);
    own_region(job, &sqe, rank, MOK_REGION_IDS, JOB_IDS);
    own_region(job, &sqe, rank, MOK_REGION_TOPK_WEIGHT, JOB_TOPK_WEIGHT);
    own_region(job, &sqe, rank, MOK_REGION_OUT, JOB_OUT);
    own_region(job, &sqe, rank, MOK_REGION_CONTEXT, JOB_CONTEXT);
    return sqe;
}

struct mok_sqe job_backward(struct job *job, uint32_t rank, uint64_t user_data)
{
    struct mok_sqe sqe = { .opcode = MOK_OP_BACKWARD,
                           .context_mode = MOK_CONTEXT_FULL,
                           .user_data = user_data,
                           .layer = job->layer.id,
                           .tokens = job->rank_tokens[rank] };

    region(&sqe, MOK_REGION_X, &job->x, 0, job->x.bytes);
    region(&sqe, MOK_REGION_D_OUT, &job->d_out, 0, job->d_out.bytes);
    own_region(job, &sqe, rank, MOK_REGION_CONTEXT, JOB_CONTEXT);
    own_region(job, &sqe, rank, MOK_REGION_D_X, JOB_D_X);
    own_region(job, &sqe, rank, MOK_REGION_D_TOPK_WEIGHT, JOB_D_TOPK_WEIGHT);
    return sqe;
}

void job_submit_forward(struct job *job, uint32_t rank, uint64_t user_data)
{
    struct mok_sqe sqe = job_forward(job, rank, user_data);
    client_submit(&job->client[rank], &sqe);
}

void job_submit_backward(struct job *job, uint32_t rank, uint64_t user_data)
{
    struct mok_sqe sqe = job_backward(job, rank, user_data);
    client_submit(&job->client[rank], &sqe);
}

void job_submit_cancel(struct job *job, uint32_t rank, uint64_t user_data, uint64_t target)
{
    const struct mok_sqe sqe = { .opcode = MOK_OP_CANCEL, .user_data = user_data, .cancel_target = target };
    client_submit(&job->client[rank], &sqe);
}
