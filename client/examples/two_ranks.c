/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The smallest whole program: two processes, two devices, one layer; forward, backward, and a check against plain
 * loops. Stops at the first error with its sentence. Needs a running mokd whose devices 0 and 1 are up.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <mok/bf16.h>
#include <mok/mok.h>

enum { RANKS = 2, H = 64, I = 32, E = 4, K = 2, T = 8, E_L = E / RANKS, MATRIX = H * I };

#define MUST(call) must((call), #call)

static void must(int code, const char *what)
{
    if (code >= 0)
        return;
    fprintf(stderr, "%s\n  %s (%s)\n", what, mok_last_error(), mok_error_name(code));
    _exit(1);
}

/* Numbers in -0.25..0.25 that every process can make: a weight of an expert, or a token of a rank. */
static uint16_t number(unsigned what, unsigned whose, unsigned i)
{
    uint32_t u = (what * 1000003u + whose * 10007u + i + 1) * 2654435761u;
    return mok_bf16_from_float((float)(u >> 16) / 131072.0f - 0.25f);
}

enum { GATE, UP, DOWN, TOKEN };

static float value(unsigned what, unsigned whose, unsigned i)
{
    return mok_bf16_to_float(number(what, whose, i));
}

/* y = down (silu(gate x) * (up x)) for token 0 of a rank. */
static void plain_expert(unsigned expert, unsigned rank, float y[H])
{
    float h[I];

    for (unsigned i = 0; i < I; i++) {
        float a = 0, b = 0;
        for (unsigned j = 0; j < H; j++) {
            a += value(GATE, expert, i * H + j) * value(TOKEN, rank, j);
            b += value(UP, expert, i * H + j) * value(TOKEN, rank, j);
        }
        h[i] = a / (1 + expf(-a)) * b;
    }
    for (unsigned j = 0; j < H; j++) {
        y[j] = 0;
        for (unsigned i = 0; i < I; i++)
            y[j] += value(DOWN, expert, j * I + i) * h[i];
    }
}

static void finish(mok_session *session, mok_ticket ticket)
{
    mok_result result;

    MUST(mok_wait(session, ticket, 10000000000, &result));
    must(result.code, "the operation");
}

static void *private_buffer(mok_session *session, unsigned device, uint64_t bytes, mok_buffer **ret)
{
    MUST(mok_buffer_alloc_private(session, device, bytes, ret));
    return mok_buffer_data(*ret);
}

/* Sleeps until every rank has come here: until nobody holds the pipe's writing end. */
static void wait_for_all(const int ends[2])
{
    char byte;

    close(ends[1]);
    if (read(ends[0], &byte, 1) != 0)
        _exit(1);
}

static int run_rank(unsigned rank, const int ends[2])
{
    mok_session_options so = { .size = sizeof(so), .job = "two-ranks" };
    mok_group_options go = { .size = sizeof(go), .name = "two-ranks", .ranks = RANKS, .rank = rank, .device = rank,
                             .timeout_ms = 10000 };
    mok_layer_options lo = { .size = sizeof(lo), .hidden = H, .intermediate = I, .experts = E, .topk = K,
                             .max_tokens = T, .precision = MOK_BF16 };
    mok_session *session;
    mok_group *group;
    mok_layer *layer;
    mok_layer_memory memory;
    mok_buffer *xs, *d_outs, *weights, *grads, *ids, *topk_weights, *outs, *contexts, *d_xs, *d_topk_weights;
    mok_ticket ticket;

    MUST(mok_session_open(&so, &session));
    MUST(mok_group_join(session, &go, &group));
    MUST(mok_layer_memory_query(group, &lo, &memory));
    MUST(mok_layer_create(group, &lo, 10000, &layer));

    /* What other ranks read is symmetric: collective, in the same order on all ranks. */
    MUST(mok_buffer_alloc_symmetric(group, T * H * 2, 10000, &xs));
    MUST(mok_buffer_alloc_symmetric(group, T * H * 2, 10000, &d_outs));
    uint16_t *weight = private_buffer(session, rank, 3 * E_L * MATRIX * 2, &weights);
    private_buffer(session, rank, 3 * E_L * MATRIX * 4, &grads);
    int32_t *id = private_buffer(session, rank, T * K * 4, &ids);
    float *topk_weight = private_buffer(session, rank, T * K * 4, &topk_weights);
    uint16_t *out = private_buffer(session, rank, T * H * 2, &outs);
    private_buffer(session, rank, memory.context_full_bytes, &contexts);
    private_buffer(session, rank, T * H * 2, &d_xs);
    float *d_topk_weight = private_buffer(session, rank, T * K * 4, &d_topk_weights);

    /* Rank r holds experts r*E_l .. (r+1)*E_l-1. */
    for (unsigned what = GATE; what <= DOWN; what++)
        for (unsigned i = 0; i < E_L * MATRIX; i++)
            weight[what * E_L * MATRIX + i] = number(what, rank * E_L + i / MATRIX, i % MATRIX);
    for (unsigned i = 0; i < T * H; i++) {
        ((uint16_t *)mok_buffer_data(xs))[i] = number(TOKEN, rank, i);
        ((uint16_t *)mok_buffer_data(d_outs))[i] = mok_bf16_from_float(1);
    }
    for (unsigned i = 0; i < T * K; i++) {
        id[i] = (int32_t)((i / K + i % K * 2 + rank) % E);
        topk_weight[i] = i % K ? 0.25f : 0.75f;
    }

    const uint64_t w = E_L * MATRIX * 2, g = E_L * MATRIX * 4;
    mok_layer_params params = { .size = sizeof(params),
                                .gate = MOK_VIEW_AT(weights, 0, w),    .d_gate = MOK_VIEW_AT(grads, 0, g),
                                .up = MOK_VIEW_AT(weights, w, w),      .d_up = MOK_VIEW_AT(grads, g, g),
                                .down = MOK_VIEW_AT(weights, 2 * w, w), .d_down = MOK_VIEW_AT(grads, 2 * g, g) };
    MUST(mok_layer_bind(layer, &params));

    mok_forward_args forward = { .size = sizeof(forward), .tokens = T, .context_mode = MOK_CONTEXT_FULL,
                                 .x = MOK_VIEW(xs), .ids = MOK_VIEW(ids), .topk_weight = MOK_VIEW(topk_weights),
                                 .out = MOK_VIEW(outs), .context = MOK_VIEW(contexts) };
    MUST(mok_layer_forward(layer, &forward, &ticket));
    finish(session, ticket);

    mok_backward_args backward = { .size = sizeof(backward), .tokens = T, .context_mode = MOK_CONTEXT_FULL,
                                   .x = MOK_VIEW(xs), .context = MOK_VIEW(contexts), .d_out = MOK_VIEW(d_outs),
                                   .d_x = MOK_VIEW(d_xs), .d_topk_weight = MOK_VIEW(d_topk_weights) };
    MUST(mok_layer_backward(layer, &backward, &ticket));
    finish(session, ticket);

    /* Token 0: its output, and with d_out = 1 the gradient of a routing weight is the sum of its expert's output. */
    float y[K][H], worst = 0, largest = 0, sum = 0;
    for (unsigned k = 0; k < K; k++)
        plain_expert((unsigned)id[k], rank, y[k]);
    for (unsigned j = 0; j < H; j++) {
        float plain = topk_weight[0] * y[0][j] + topk_weight[1] * y[1][j];
        worst = fmaxf(worst, fabsf(mok_bf16_to_float(out[j]) - plain));
        largest = fmaxf(largest, fabsf(plain));
        sum += y[0][j];
    }
    printf("rank %u: out[0][0] = %.5f, largest difference from plain loops %.5f of %.5f; d_topk_weight[0][0] = %.5f, "
           "plain %.5f\n", rank, (double)mok_bf16_to_float(out[0]), (double)worst, (double)largest,
           (double)d_topk_weight[0], (double)sum);
    fflush(stdout);
    int good = largest > 0 && worst <= 0.02f * largest && fabsf(d_topk_weight[0] - sum) <= 0.05f * fabsf(sum);
    wait_for_all(ends); /* who leaves early ends the operations that others still run */
    mok_session_close(session); /* frees and unmaps all of the above */
    return good ? 0 : 1;
}

int main(void)
{
    int failed = 0, status, ends[2];

    if (pipe(ends) < 0)
        return 1;

    /* Ranks are processes; a session must be opened after fork(). */
    for (unsigned rank = 0; rank < RANKS; rank++)
        if (fork() == 0)
            _exit(run_rank(rank, ends));
    close(ends[0]);
    close(ends[1]);
    while (wait(&status) > 0)
        failed |= status != 0;
    puts(failed ? "FAILED" : "OK");
    return failed;
}
