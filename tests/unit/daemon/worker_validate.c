/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a worker refuses, and how: one good submission, one field changed at a time, and the code, argument, value and
 * bound that must come of it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "validate.h"

enum {
    SESSION = 77,
    GROUP = 5,
    LAYER = 9,
    BUFFER_SYM = 1, /* own copy, of the layer's group */
    BUFFER_PRIVATE = 2,
    BUFFER_OTHER = 3,     /* private, of another session */
    BUFFER_SYM_OTHER = 4, /* own copy of another group of the session */
    BUFFER_CLOSED = 6,    /* own copy of a group that is being closed */
    BUFFER_PARAMS = 7,
    T = 6,
    MAX_T = 8,
    H = 32,
    K = 2,
    ROW = H * 2,
    BUFFER_BYTES = 1 << 16,
};

struct fixture {
    struct worker_tables tables;
    struct worker_queue queue, other_queue;
    struct worker_group group, other_group, closed_group;
    struct worker_layer layer;
    struct worker_buffer buffer[8];
    struct worker_op op;
    struct worker_fault fault;
    struct mok_sqe forward, backward;
};

static char memory[8][BUFFER_BYTES];

static void add_buffer(struct fixture *f, uint32_t id, uint64_t session, struct worker_group *group)
{
    struct worker_buffer *buffer = &f->buffer[id];

    buffer->id = id;
    buffer->own = true;
    buffer->session = session;
    buffer->group = group;
    buffer->bytes = BUFFER_BYTES;
    buffer->address = memory[id];
    worker_index_insert(&f->tables.buffers, &buffer->dispatch_node, worker_buffer_key(id, WORKER_OWN_RANK));
}

static void bind(struct fixture *f, enum worker_param param)
{
    f->layer.param[param] = (struct worker_span){ .buffer = &f->buffer[BUFFER_PARAMS],
                                                  .offset = (uint64_t)param * 1024,
                                                  .bytes = 1024,
                                                  .address = memory[BUFFER_PARAMS] + (size_t)param * 1024 };
}

static void region(struct mok_sqe *sqe, enum mok_region_slot slot, uint32_t buffer, uint64_t offset, uint64_t length)
{
    sqe->region[slot] = (struct mok_region){ .buffer = buffer, .offset = offset, .length = length };
}

static void fill_submissions(struct fixture *f)
{
    f->forward = (struct mok_sqe){ .opcode = MOK_OP_FORWARD,
                                   .context_mode = MOK_CONTEXT_FULL,
                                   .flags = MOK_SQE_ACCUMULATE_OUT,
                                   .user_data = 42,
                                   .layer = LAYER,
                                   .tokens = T,
                                   .timeout_ns = 1000 };
    region(&f->forward, MOK_REGION_X, BUFFER_SYM, 0, T * ROW);
    region(&f->forward, MOK_REGION_IDS, BUFFER_PRIVATE, 0, T * K * 4);
    region(&f->forward, MOK_REGION_TOPK_WEIGHT, BUFFER_PRIVATE, 1024, T * K * 4);
    region(&f->forward, MOK_REGION_OUT, BUFFER_PRIVATE, 2048, T * ROW);
    region(&f->forward, MOK_REGION_CONTEXT, BUFFER_PRIVATE, 4096, 3000);

    f->backward = (struct mok_sqe){ .opcode = MOK_OP_BACKWARD,
                                    .context_mode = MOK_CONTEXT_RECOMPUTE,
                                    .flags = MOK_SQE_OVERWRITE_WGRAD,
                                    .layer = LAYER,
                                    .tokens = T };
    region(&f->backward, MOK_REGION_X, BUFFER_SYM, 0, T * ROW);
    region(&f->backward, MOK_REGION_D_OUT, BUFFER_SYM, 1024, T * ROW);
    region(&f->backward, MOK_REGION_CONTEXT, BUFFER_PRIVATE, 4096, 2000);
    region(&f->backward, MOK_REGION_D_X, BUFFER_PRIVATE, 0, T * ROW);
    region(&f->backward, MOK_REGION_D_TOPK_WEIGHT, BUFFER_PRIVATE, 1024, T * K * 4);
}

static void fill(struct fixture *f)
{
    memset(f, 0, sizeof(*f));
    f->queue.session = SESSION;
    f->group = (struct worker_group){ .id = GROUP, .size = 2, .rank = 1, .session = SESSION };
    f->other_group = (struct worker_group){ .id = GROUP + 1, .size = 1, .session = SESSION };
    f->closed_group = (struct worker_group){ .id = GROUP + 2, .size = 1, .session = SESSION, .closed = true };
    f->layer.id = LAYER;
    f->layer.session = SESSION;
    f->layer.queue = &f->queue;
    f->layer.group = &f->group;
    f->layer.plan.spec = (struct mok_layer_spec){ .hidden = H,
                                                  .intermediate = 16,
                                                  .experts = 4,
                                                  .topk = K,
                                                  .ep = 2,
                                                  .rank = 1,
                                                  .max_tokens = MAX_T,
                                                  .precision = MOK_BF16 };
    f->layer.plan.local_experts = 2;
    f->layer.plan.context_full_bytes = 3000;
    f->layer.plan.context_recompute_bytes = 2000;
    worker_index_insert(&f->tables.layers, &f->layer.dispatch_node, LAYER);
    add_buffer(f, BUFFER_SYM, SESSION, &f->group);
    add_buffer(f, BUFFER_PRIVATE, SESSION, NULL);
    add_buffer(f, BUFFER_OTHER, SESSION + 1, NULL);
    add_buffer(f, BUFFER_SYM_OTHER, SESSION, &f->other_group);
    add_buffer(f, BUFFER_CLOSED, SESSION, &f->closed_group);
    add_buffer(f, BUFFER_PARAMS, SESSION, NULL);
    for (unsigned i = 0; i < 3; i++) {
        bind(f, (enum worker_param)(WORKER_PARAM_GATE + i));
        bind(f, (enum worker_param)(WORKER_PARAM_D_GATE + i));
    }
    fill_submissions(f);
}

static int validate(struct fixture *f, const struct mok_sqe *sqe)
{
    return worker_validate(&f->tables, &f->queue, sqe, &f->op, &f->fault);
}

static void a_good_forward_is_taken_apart_correctly(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    assert_int_equal(validate(&f, &f.forward), 0);
    assert_ptr_equal(f.op.layer, &f.layer);
    assert_int_equal(f.op.opcode, MOK_OP_FORWARD);
    assert_int_equal(f.op.context_mode, MOK_CONTEXT_FULL);
    assert_int_equal(f.op.flags, MOK_SQE_ACCUMULATE_OUT);
    assert_int_equal(f.op.tokens, T);
    assert_int_equal(f.op.timeout_ns, 1000);
    assert_ptr_equal(f.op.region[MOK_REGION_X].address, memory[BUFFER_SYM]);
    assert_ptr_equal(f.op.region[MOK_REGION_OUT].address, memory[BUFFER_PRIVATE] + 2048);
    assert_ptr_equal(f.op.region[MOK_REGION_OUT].buffer, &f.buffer[BUFFER_PRIVATE]);
    assert_null(f.op.region[MOK_REGION_D_X].buffer);
}

static void a_good_backward_is_accepted(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    assert_int_equal(validate(&f, &f.backward), 0);
    assert_ptr_equal(f.op.region[MOK_REGION_D_OUT].address, memory[BUFFER_SYM] + 1024);
}

static void an_operation_without_tokens_needs_no_tensors(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    f.forward.tokens = 0;
    for (unsigned slot = 0; slot < MOK_REGION_COUNT; slot++)
        if (slot != MOK_REGION_CONTEXT)
            region(&f.forward, (enum mok_region_slot)slot, 0, 0, 0);
    assert_int_equal(validate(&f, &f.forward), 0);

    region(&f.forward, MOK_REGION_CONTEXT, 0, 0, 0);
    assert_int_equal(validate(&f, &f.forward), -MOK_EBUFFER);
    f.forward.context_mode = MOK_CONTEXT_NONE;
    assert_int_equal(validate(&f, &f.forward), 0);
}

static void a_region_may_be_longer_than_needed_and_end_with_its_buffer(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    region(&f.forward, MOK_REGION_OUT, BUFFER_PRIVATE, 8192, BUFFER_BYTES - 8192);
    assert_int_equal(validate(&f, &f.forward), 0);
    region(&f.forward, MOK_REGION_OUT, BUFFER_PRIVATE, BUFFER_BYTES - T * ROW, T * ROW);
    assert_int_equal(validate(&f, &f.forward), 0);
}

static void other_tensors_may_lie_in_any_symmetric_buffer_of_the_session(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    f.forward.region[MOK_REGION_OUT].buffer = BUFFER_SYM_OTHER;
    f.forward.region[MOK_REGION_IDS] = (struct mok_region){ .buffer = BUFFER_SYM, .offset = 4096, .length = T * K * 4 };
    assert_int_equal(validate(&f, &f.forward), 0);
}

/* ------------------------------------------------------------------ one field changed */

struct mutation {
    const char *what;
    bool backward;
    size_t offset, size;
    uint64_t value;
    int code;
    unsigned argument;
    uint64_t fault_value, fault_bound;
};

#define FIELD(field) offsetof(struct mok_sqe, field), sizeof(((struct mok_sqe *)0)->field)
#define REGION(slot, field)                                                                                            \
    offsetof(struct mok_sqe, region) + MOK_REGION_##slot * sizeof(struct mok_region) +                                 \
        offsetof(struct mok_region, field),                                                                            \
        sizeof(((struct mok_region *)0)->field)

static const struct mutation mutations[] = {
    { "opcode past the last", false, FIELD(opcode), 4, -MOK_EOPCODE, MOK_ARG_OPCODE, 4, MOK_OP_CANCEL },
    { "opcode of all bits", false, FIELD(opcode), 255, -MOK_EOPCODE, MOK_ARG_OPCODE, 255, MOK_OP_CANCEL },
    { "unknown flag", false, FIELD(flags), 1u << 31, -MOK_ERANGE, MOK_ARG_FLAGS, 1u << 31,
      MOK_SQE_ACCUMULATE_OUT | MOK_SQE_ON_STREAM },
    { "flag of backward", false, FIELD(flags), 2, -MOK_ERANGE, MOK_ARG_FLAGS, 2,
      MOK_SQE_ACCUMULATE_OUT | MOK_SQE_ON_STREAM },
    { "flag of forward", true, FIELD(flags), 1, -MOK_ERANGE, MOK_ARG_FLAGS, 1,
      MOK_SQE_OVERWRITE_WGRAD | MOK_SQE_ON_STREAM },
    { "reserved0", false, FIELD(reserved0), 1, -MOK_ERESERVED, MOK_ARG_RESERVED, 1, 0 },
    { "stream slot without the flag", false, FIELD(stream_slot), 3, -MOK_ERESERVED, MOK_ARG_STREAM, 3, 0 },
    { "stream number without the flag", true, FIELD(stream_number), 9, -MOK_ERESERVED, MOK_ARG_STREAM, 9, 0 },
    { "stream of a queue without slots", false, FIELD(flags), MOK_SQE_ON_STREAM, -MOK_ESTATE, MOK_ARG_STREAM, 0, 0 },
    { "reserved1[0]", false, FIELD(reserved1[0]), 5, -MOK_ERESERVED, MOK_ARG_RESERVED, 5, 0 },
    { "reserved1[1]", true, FIELD(reserved1[1]), 6, -MOK_ERESERVED, MOK_ARG_RESERVED, 6, 0 },
    { "reserved of a region", false, REGION(OUT, reserved), 3, -MOK_ERESERVED, MOK_ARG_OUT, 3, 0 },
    { "reserved of an unused region", false, REGION(D_X, reserved), 3, -MOK_ERESERVED, MOK_ARG_D_X, 3, 0 },
    { "region without use", false, REGION(D_OUT, buffer), BUFFER_SYM, -MOK_ERESERVED, MOK_ARG_D_OUT, BUFFER_SYM, 0 },
    { "ids in backward", true, REGION(IDS, buffer), BUFFER_SYM, -MOK_ERESERVED, MOK_ARG_IDS, BUFFER_SYM, 0 },
    { "offset without buffer", true, REGION(OUT, offset), 16, -MOK_ERESERVED, MOK_ARG_OUT, 16, 0 },
    { "length without buffer", true, REGION(OUT, length), 16, -MOK_ERESERVED, MOK_ARG_OUT, 16, 0 },
    { "no layer", false, FIELD(layer), 0, -MOK_ENOENT, MOK_ARG_LAYER, 0, 0 },
    { "unknown layer", true, FIELD(layer), LAYER + 1, -MOK_ENOENT, MOK_ARG_LAYER, LAYER + 1, 0 },
    { "too many tokens", false, FIELD(tokens), MAX_T + 1, -MOK_ERANGE, MOK_ARG_TOKENS, MAX_T + 1, MAX_T },
    { "tokens of all bits", true, FIELD(tokens), UINT32_MAX, -MOK_ERANGE, MOK_ARG_TOKENS, UINT32_MAX, MAX_T },
    { "unknown context mode", false, FIELD(context_mode), 3, -MOK_ERANGE, MOK_ARG_CONTEXT_MODE, 3, 2 },
    { "backward without context mode", true, FIELD(context_mode), 0, -MOK_EARG, MOK_ARG_CONTEXT_MODE, 0, 1 },
    { "cancel target of a forward", false, FIELD(cancel_target), 8, -MOK_ERESERVED, MOK_ARG_TARGET, 8, 0 },
    { "x of no buffer", false, REGION(X, buffer), 99, -MOK_EBUFFER, MOK_ARG_X, 99, 0 },
    { "x in private memory", false, REGION(X, buffer), BUFFER_PRIVATE, -MOK_EBUFFER, MOK_ARG_X, BUFFER_PRIVATE, GROUP },
    { "x in another group's memory", false, REGION(X, buffer), BUFFER_SYM_OTHER, -MOK_EBUFFER, MOK_ARG_X,
      BUFFER_SYM_OTHER, GROUP },
    { "d_out in private memory", true, REGION(D_OUT, buffer), BUFFER_PRIVATE, -MOK_EBUFFER, MOK_ARG_D_OUT,
      BUFFER_PRIVATE, GROUP },
    { "out in another session's memory", false, REGION(OUT, buffer), BUFFER_OTHER, -MOK_EBUFFER, MOK_ARG_OUT,
      BUFFER_OTHER, 0 },
    { "out in a group that closes", false, REGION(OUT, buffer), BUFFER_CLOSED, -MOK_EBUFFER, MOK_ARG_OUT, BUFFER_CLOSED,
      0 },
    { "x at an odd offset", false, REGION(X, offset), 8, -MOK_EALIGN, MOK_ARG_X, 8, 16 },
    { "d_topk_weight at an odd offset", true, REGION(D_TOPK_WEIGHT, offset), 1028, -MOK_EALIGN, MOK_ARG_D_TOPK_WEIGHT,
      1028, 16 },
    { "out past its buffer", false, REGION(OUT, offset), BUFFER_BYTES - 16, -MOK_ERANGE, MOK_ARG_OUT,
      BUFFER_BYTES - 16 + T *ROW, BUFFER_BYTES },
    { "out that wraps around", false, REGION(OUT, offset), UINT64_MAX - 15, -MOK_ERANGE, MOK_ARG_OUT, UINT64_MAX,
      BUFFER_BYTES },
    { "length past the buffer", true, REGION(D_X, length), BUFFER_BYTES + 1, -MOK_ERANGE, MOK_ARG_D_X, BUFFER_BYTES + 1,
      BUFFER_BYTES },
    { "length of all bits", true, REGION(D_OUT, length), UINT64_MAX, -MOK_ERANGE, MOK_ARG_D_OUT, UINT64_MAX,
      BUFFER_BYTES },
    { "x one byte short", false, REGION(X, length), T *ROW - 1, -MOK_ESIZE, MOK_ARG_X, T *ROW - 1, T *ROW },
    { "x of no length", false, REGION(X, length), 0, -MOK_ESIZE, MOK_ARG_X, 0, T *ROW },
    { "ids short", false, REGION(IDS, length), T *K * 4 - 4, -MOK_ESIZE, MOK_ARG_IDS, T *K * 4 - 4, T *K * 4 },
    { "topk_weight short", false, REGION(TOPK_WEIGHT, length), 4, -MOK_ESIZE, MOK_ARG_TOPK_WEIGHT, 4, T *K * 4 },
    { "out short", false, REGION(OUT, length), ROW, -MOK_ESIZE, MOK_ARG_OUT, ROW, T *ROW },
    { "full context short", false, REGION(CONTEXT, length), 2999, -MOK_ESIZE, MOK_ARG_CONTEXT, 2999, 3000 },
    { "recompute context short", true, REGION(CONTEXT, length), 1999, -MOK_ESIZE, MOK_ARG_CONTEXT, 1999, 2000 },
    { "context that is not asked for", false, FIELD(context_mode), 0, -MOK_EARG, MOK_ARG_CONTEXT, BUFFER_PRIVATE, 0 },
    { "d_out short", true, REGION(D_OUT, length), 0, -MOK_ESIZE, MOK_ARG_D_OUT, 0, T *ROW },
    { "d_x short", true, REGION(D_X, length), T *ROW - 2, -MOK_ESIZE, MOK_ARG_D_X, T *ROW - 2, T *ROW },
    { "d_topk_weight short", true, REGION(D_TOPK_WEIGHT, length), 0, -MOK_ESIZE, MOK_ARG_D_TOPK_WEIGHT, 0, T *K * 4 },
    { "out over ids", false, REGION(OUT, offset), 0, -MOK_EARG, MOK_ARG_OUT, 0, T *K * 4 },
    { "out over topk_weight", false, REGION(OUT, offset), 1024 - 16, -MOK_EARG, MOK_ARG_OUT, 1024 - 16,
      1024 + T *K * 4 },
    { "out over the context", false, REGION(OUT, offset), 4096 + 2992, -MOK_EARG, MOK_ARG_OUT, 4096 + 2992,
      4096 + 3000 },
    { "context over out", false, REGION(CONTEXT, offset), 2048, -MOK_EARG, MOK_ARG_OUT, 2048, 2048 + 3000 },
    { "d_x over d_topk_weight", true, REGION(D_X, offset), 1024, -MOK_EARG, MOK_ARG_D_X, 1024, 1024 + T *K * 4 },
    { "d_topk_weight over the context", true, REGION(D_TOPK_WEIGHT, offset), 4096, -MOK_EARG, MOK_ARG_D_TOPK_WEIGHT,
      4096, 4096 + 2000 },
    { "out over a parameter", false, REGION(OUT, buffer), BUFFER_PARAMS, -MOK_EARG, MOK_ARG_OUT, 2048, 3072 },
    { "context beside the gradients", true, REGION(CONTEXT, buffer), BUFFER_PARAMS, 0, 0, 0, 0 },
};

static void one_wrong_field_gives_its_code_argument_value_and_bound(void **state)
{
    static struct fixture f;
    (void)state;

    for (size_t i = 0; i < sizeof(mutations) / sizeof(mutations[0]); i++) {
        const struct mutation *m = &mutations[i];
        fill(&f);
        struct mok_sqe *sqe = m->backward ? &f.backward : &f.forward;
        memcpy((char *)sqe + m->offset, &m->value, m->size);
        int r = validate(&f, sqe);
        if (r != m->code)
            fail_msg("%s: code %d, want %d", m->what, r, m->code);
        if (r == 0)
            continue;
        if (f.fault.code != m->code || f.fault.argument != m->argument || f.fault.value != m->fault_value ||
            f.fault.bound != m->fault_bound)
            fail_msg("%s: argument %u value %llu bound %llu", m->what, f.fault.argument,
                     (unsigned long long)f.fault.value, (unsigned long long)f.fault.bound);
    }
}

static void every_required_region_is_missed_when_absent(void **state)
{
    static const struct {
        bool backward;
        enum mok_region_slot slot;
    } required[] = {
        { false, MOK_REGION_X },      { false, MOK_REGION_IDS },     { false, MOK_REGION_TOPK_WEIGHT },
        { false, MOK_REGION_OUT },    { false, MOK_REGION_CONTEXT }, { true, MOK_REGION_X },
        { true, MOK_REGION_D_OUT },   { true, MOK_REGION_D_X },      { true, MOK_REGION_D_TOPK_WEIGHT },
        { true, MOK_REGION_CONTEXT },
    };
    static struct fixture f;
    (void)state;

    for (size_t i = 0; i < sizeof(required) / sizeof(required[0]); i++) {
        fill(&f);
        struct mok_sqe *sqe = required[i].backward ? &f.backward : &f.forward;
        region(sqe, required[i].slot, 0, 0, 0);
        assert_int_equal(validate(&f, sqe), -MOK_EBUFFER);
        assert_int_equal(f.fault.argument, MOK_ARG_REGION0 + required[i].slot);
    }
}

static void a_gradient_may_not_be_written_over_what_backward_reads(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    uint64_t gradient = (uint64_t)WORKER_PARAM_D_UP * 1024;
    region(&f.backward, MOK_REGION_CONTEXT, BUFFER_PARAMS, gradient - 1024, 2000);
    assert_int_equal(validate(&f, &f.backward), -MOK_EARG);
    assert_int_equal(f.fault.argument, MOK_ARG_CONTEXT);
}

/* ------------------------------------------------------------------ layers */

static void a_layer_is_of_one_session_and_one_queue(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    f.layer.queue = &f.other_queue;
    assert_int_equal(validate(&f, &f.forward), -MOK_ENOENT);
    fill(&f);
    f.layer.session = SESSION + 1;
    assert_int_equal(validate(&f, &f.forward), -MOK_ENOENT);
}

static void a_broken_group_answers_with_its_own_code(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    f.group.code = -MOK_EPEER;
    f.group.fault_rank = 1;
    assert_int_equal(validate(&f, &f.forward), -MOK_EPEER);
    assert_int_equal(f.fault.argument, MOK_ARG_RANKS);
    assert_int_equal(f.fault.detail, 1);
}

static void parameters_and_gradients_must_be_bound_first(void **state)
{
    static struct fixture f;
    (void)state;

    for (unsigned param = WORKER_PARAM_GATE; param <= WORKER_PARAM_DOWN; param++) {
        fill(&f);
        memset(&f.layer.param[param], 0, sizeof(f.layer.param[param]));
        assert_int_equal(validate(&f, &f.forward), -MOK_ESTATE);
        assert_int_equal(f.fault.argument, MOK_ARG_PARAMS);
    }
    for (unsigned param = WORKER_PARAM_D_GATE; param <= WORKER_PARAM_D_DOWN; param++) {
        fill(&f);
        memset(&f.layer.param[param], 0, sizeof(f.layer.param[param]));
        assert_int_equal(validate(&f, &f.forward), 0);
        assert_int_equal(validate(&f, &f.backward), -MOK_ESTATE);
        assert_int_equal(f.fault.argument, MOK_ARG_WGRADS);
    }
}

static void a_shared_expert_and_mxfp8_need_their_parameters_too(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    f.layer.plan.spec.shared_intermediate = 16;
    assert_int_equal(validate(&f, &f.forward), -MOK_ESTATE);
    for (unsigned i = 0; i < 3; i++)
        bind(&f, (enum worker_param)(WORKER_PARAM_SHARED_GATE + i));
    assert_int_equal(validate(&f, &f.forward), 0);
    assert_int_equal(validate(&f, &f.backward), -MOK_ESTATE);
    assert_int_equal(f.fault.argument, MOK_ARG_WGRADS);

    f.layer.plan.spec.precision = MOK_MXFP8_PER32;
    assert_int_equal(validate(&f, &f.forward), -MOK_ESTATE);
    for (unsigned i = 0; i < 3; i++)
        bind(&f, (enum worker_param)(WORKER_PARAM_GATE_SCALE + i));
    assert_int_equal(validate(&f, &f.forward), 0);
}

/* ------------------------------------------------------------------ no-op and cancel */

static void a_no_op_and_a_cancel_carry_nothing(void **state)
{
    static const struct {
        size_t offset, size;
        unsigned argument;
    } field[] = {
        { FIELD(layer), MOK_ARG_LAYER },
        { FIELD(tokens), MOK_ARG_TOKENS },
        { FIELD(context_mode), MOK_ARG_CONTEXT_MODE },
        { FIELD(timeout_ns), MOK_ARG_TIMEOUT },
        { REGION(X, buffer), MOK_ARG_X },
    };
    static struct fixture f;
    const uint64_t one = 1;
    (void)state;

    fill(&f);
    for (size_t i = 0; i < sizeof(field) / sizeof(field[0]); i++) {
        for (int opcode = MOK_OP_NOP; opcode <= MOK_OP_CANCEL; opcode += MOK_OP_CANCEL) {
            struct mok_sqe sqe = { .opcode = (uint8_t)opcode };
            assert_int_equal(validate(&f, &sqe), 0);
            assert_null(f.op.layer);
            memcpy((char *)&sqe + field[i].offset, &one, field[i].size);
            assert_int_equal(validate(&f, &sqe), -MOK_ERESERVED);
            assert_int_equal(f.fault.argument, field[i].argument);
        }
    }
    struct mok_sqe nop = { .opcode = MOK_OP_NOP, .cancel_target = 3 };
    assert_int_equal(validate(&f, &nop), -MOK_ERESERVED);
    nop = (struct mok_sqe){ .opcode = MOK_OP_NOP, .flags = 1 };
    assert_int_equal(validate(&f, &nop), -MOK_ERANGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_good_forward_is_taken_apart_correctly),
        cmocka_unit_test(a_good_backward_is_accepted),
        cmocka_unit_test(an_operation_without_tokens_needs_no_tensors),
        cmocka_unit_test(a_region_may_be_longer_than_needed_and_end_with_its_buffer),
        cmocka_unit_test(other_tensors_may_lie_in_any_symmetric_buffer_of_the_session),
        cmocka_unit_test(one_wrong_field_gives_its_code_argument_value_and_bound),
        cmocka_unit_test(every_required_region_is_missed_when_absent),
        cmocka_unit_test(a_gradient_may_not_be_written_over_what_backward_reads),
        cmocka_unit_test(a_layer_is_of_one_session_and_one_queue),
        cmocka_unit_test(a_broken_group_answers_with_its_own_code),
        cmocka_unit_test(parameters_and_gradients_must_be_bound_first),
        cmocka_unit_test(a_shared_expert_and_mxfp8_need_their_parameters_too),
        cmocka_unit_test(a_no_op_and_a_cancel_carry_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
