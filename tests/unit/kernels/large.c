/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Huge layers in sparse memory; see the header.
 */
#include "large.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "harness.h"
#include "plain_bf16.h"

#define FEW 24 /* tokens of the small problem, at most */

/* The huge layer, its memory and what is spread over it. */
struct large {
    struct problem small, shape;
    struct result want;
    struct harness *harness;
    struct layer *layer;
    struct tensors *tensors;
    uint32_t token[FEW]; /* where token i of the small problem stands */
};

static struct large large_open(const struct problem_options *options, uint32_t tokens, uint32_t experts)
{
    struct large l = { .shape = { .hidden = options->hidden,
                                  .intermediate = options->intermediate,
                                  .experts = experts,
                                  .topk = options->topk,
                                  .tokens = tokens } };

    problem_make(&l.small, options);
    run_problem(&l.small, &(struct run_options){ .context_mode = MOK_CONTEXT_RECOMPUTE }, &l.want);
    check_against_oracle("the small problem", &l.small, &l.want);
    l.harness = harness_open(&(struct harness_options){ 0 });
    l.layer = layer_open(l.harness, &l.shape, &(struct layer_options){ .sparse = true });
    l.tensors = tensors_make(l.layer, &l.shape, NULL, MOK_CONTEXT_RECOMPUTE);
    memset(l.tensors->ids[0].data, 0xff, l.tensors->ids[0].bytes);
    return l;
}

static void large_close(struct large *l)
{
    problem_free(&l->small);
    result_free(&l->want);
    tensors_free(l->tensors);
    harness_close(l->harness);
}

static void put(struct guarded *to, size_t at, const void *from, size_t from_at, size_t count, size_t size)
{
    memcpy(to->data + at * size, (const uint8_t *)from + from_at * size, count * size);
}

/* Token i of the small problem goes to token[i]; its ids are changed by `expert_of`, if given. */
static void spread_tokens(struct large *l, const int32_t *expert_of)
{
    struct tensors *t = l->tensors;
    size_t H = l->shape.hidden, K = l->shape.topk;

    for (size_t i = 0; i < l->small.tokens; i++) {
        put(&t->x[0], l->token[i] * H, l->small.x, i * H, H, 2);
        put(&t->d_out[0], l->token[i] * H, l->small.d_out, i * H, H, 2);
        put(&t->topk_weight[0], l->token[i] * K, l->small.topk_weight, i * K, K, 4);
        int32_t *ids = (int32_t *)(void *)t->ids[0].data + l->token[i] * K;
        for (size_t k = 0; k < K; k++) {
            int32_t id = l->small.ids[i * K + k];
            ids[k] = expert_of && id >= 0 ? expert_of[id] : id;
        }
    }
}

/* Expert e of the small problem goes to expert_of[e]; NULL: stays. */
static void spread_experts(struct large *l, const int32_t *expert_of)
{
    struct params *params = &l->layer->params[0];
    size_t size = problem_expert_elements(&l->shape);

    for (uint32_t e = 0; e < l->small.experts; e++) {
        size_t to = expert_of ? (size_t)expert_of[e] : e;
        put(&params->gate, to * size, l->small.gate, e * size, size, 2);
        put(&params->up, to * size, l->small.up, e * size, size, 2);
        put(&params->down, to * size, l->small.down, e * size, size, 2);
    }
}

static void rows_must_equal(const struct guarded *got, size_t at, const double *want, size_t count, const char *what)
{
    const uint16_t *bits = (const uint16_t *)(const void *)got->data + at;

    for (size_t i = 0; i < count; i++)
        if ((double)bf16_to_float(bits[i]) != want[i])
            fail_msg("%s at element %zu is %g, must be %g", what, at + i, (double)bf16_to_float(bits[i]), want[i]);
}

static void floats_must_equal(const struct guarded *got, size_t at, const double *want, size_t count, const char *what)
{
    const float *value = (const float *)(const void *)got->data + at;

    for (size_t i = 0; i < count; i++)
        if ((double)value[i] != want[i])
            fail_msg("%s at element %zu is %g, must be %g", what, at + i, (double)value[i], want[i]);
}

/* Forward and backward, each checked when it is done: d_x is written where out was, so that memory is touched once. */
static void run_and_check_tokens(struct large *l)
{
    const struct tensors *t = l->tensors;
    size_t H = l->shape.hidden, K = l->shape.topk;
    struct operation *op = layer_forward(l->tensors, 0);

    harness_drive(l->harness);
    operation_expect_success(op);
    for (size_t i = 0; i < l->small.tokens; i++)
        rows_must_equal(&t->out[0], l->token[i] * H, l->want.array[RESULT_OUT] + i * H, H, "out");
    op = layer_backward(l->tensors, 0);
    op->rank[0].args.d_x = t->out[0].data;
    harness_drive(l->harness);
    operation_expect_success(op);
    for (size_t i = 0; i < l->small.tokens; i++) {
        rows_must_equal(&t->out[0], l->token[i] * H, l->want.array[RESULT_D_X] + i * H, H, "d_x");
        floats_must_equal(&t->d_topk_weight[0], l->token[i] * K, l->want.array[RESULT_D_TOPK_WEIGHT] + i * K, K,
                          "d_topk_weight");
    }
}

static void check_experts(const struct large *l, const int32_t *expert_of)
{
    const struct params *params = &l->layer->params[0];
    size_t size = problem_expert_elements(&l->shape);

    for (uint32_t e = 0; e < l->small.experts; e++) {
        size_t at = (expert_of ? (size_t)expert_of[e] : e) * size, from = e * size;
        floats_must_equal(&params->d_gate, at, l->want.array[RESULT_D_GATE] + from, size, "d_gate");
        floats_must_equal(&params->d_up, at, l->want.array[RESULT_D_UP] + from, size, "d_up");
        floats_must_equal(&params->d_down, at, l->want.array[RESULT_D_DOWN] + from, size, "d_down");
    }
}

void large_slots_match_the_small_problem(void)
{
    struct problem_options o = { .hidden = 1024,
                                 .intermediate = 16,
                                 .experts = 3,
                                 .topk = 64,
                                 .tokens = FEW,
                                 .routing = ROUTE_DUPLICATES,
                                 .seed = 94 };
    uint32_t tokens = 70000;
    size_t slot_row = (size_t)o.topk * o.hidden; /* elements of a token's slots */
    struct large l = large_open(&o, tokens, o.experts);

    assert_true(tokens * slot_row > 1ull << 32);
    for (uint32_t i = 0; i < FEW / 6; i++) { /* first and last tokens, and four about each border */
        l.token[i] = i;
        l.token[FEW / 6 + i] = (uint32_t)((1ull << 30) / slot_row) - 2 + i;
        l.token[2 * FEW / 6 + i] = (uint32_t)((1ull << 31) / slot_row) - 2 + i;
        l.token[3 * FEW / 6 + i] = (uint32_t)((3ull << 30) / slot_row) - 2 + i;
        l.token[4 * FEW / 6 + i] = (uint32_t)((1ull << 32) / slot_row) - 2 + i;
        l.token[5 * FEW / 6 + i] = tokens - FEW / 6 + i;
    }
    spread_tokens(&l, NULL);
    spread_experts(&l, NULL);
    run_and_check_tokens(&l);
    check_experts(&l, NULL);
    large_close(&l);
}

#define CHUNK (16ull << 20)

/* All of a huge output but its first and last chunks is one chunk of memory, mapped over and over: 4 GiB take 48 MiB.
 */
static void alias_the_middle(struct guarded *memory)
{
    uint8_t *first = memory->data + CHUNK, *last = memory->data + (memory->bytes - 1) / CHUNK * CHUNK;
    int fd = memfd_create("alias", MFD_CLOEXEC);

    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, CHUNK), 0);
    for (uint8_t *at = first; at < last - CHUNK; at += CHUNK)
        assert_ptr_equal(mmap(at, CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, 0), at);
    close(fd);
}

void large_rows_match_the_small_problem(void)
{
    struct problem_options o = {
        .hidden = 8192, .intermediate = 16, .experts = 2, .topk = 2, .tokens = FEW, .seed = 95
    };
    uint32_t tokens = 263000;
    struct large l = large_open(&o, tokens, o.experts);

    assert_true((uint64_t)tokens * o.hidden * 2 > 1ull << 32);
    alias_the_middle(&l.tensors->out[0]);
    for (uint32_t i = 0; i < FEW / 2; i++) {
        l.token[i] = i;
        l.token[FEW / 2 + i] = tokens - FEW / 2 + i;
    }
    spread_tokens(&l, NULL);
    spread_experts(&l, NULL);
    run_and_check_tokens(&l);
    check_experts(&l, NULL);
    large_close(&l);
}

void large_weights_match_the_small_problem(void)
{
    struct problem_options o = {
        .hidden = 1040, .intermediate = 1024, .experts = 4, .topk = 4, .tokens = 3, .seed = 96
    };                                                          /* every token reaches all four */
    static const int32_t expert_of[] = { 0, 1009, 2018, 4095 }; /* 2^30 and 2^31 elements lie between */
    struct large l = large_open(&o, o.tokens, 4096);

    assert_true(problem_expert_elements(&l.shape) * 4095 > 1ull << 32);
    for (uint32_t i = 0; i < o.tokens; i++)
        l.token[i] = i;
    spread_tokens(&l, expert_of);
    spread_experts(&l, expert_of);
    run_and_check_tokens(&l);
    check_experts(&l, expert_of);
    large_close(&l);
}
