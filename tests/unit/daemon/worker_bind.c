/* SPDX-License-Identifier: Apache-2.0 */
/* Which parameters can be bound to a layer, and the sentences of those that cannot. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "validate.h"

enum {
    SESSION = 3,
    BUFFER = 11,
    BUFFER_OTHER = 12,
    H = 32,
    I = 16,
    E_LOCAL = 2,
    WEIGHT = E_LOCAL * I * H * 2,
    GRADIENT = E_LOCAL * I * H * 4,
    BUFFER_BYTES = 1 << 16,
};

struct fixture {
    struct worker_tables tables;
    struct worker_group group;
    struct worker_layer layer;
    struct worker_buffer mine, other;
    struct worker_span span[WORKER_PARAM_COUNT];
    struct mok_message message;
    Mok__LayerParams params;
    Mok__Region gate, up, down, d_gate, d_up, d_down, extra;
};

static char memory[BUFFER_BYTES];

static void region(Mok__Region *ret, uint64_t offset, uint64_t length)
{
    mok__region__init(ret);
    ret->buffer = BUFFER;
    ret->offset = offset;
    ret->length = length;
}

static void add_buffer(struct fixture *f, struct worker_buffer *buffer, uint32_t id, uint64_t session)
{
    *buffer =
        (struct worker_buffer){ .id = id, .own = true, .session = session, .bytes = BUFFER_BYTES, .address = memory };
    worker_index_insert(&f->tables.buffers, &buffer->control_node, worker_buffer_key(id, WORKER_OWN_RANK));
}

static void fill(struct fixture *f)
{
    memset(f, 0, sizeof(*f));
    f->layer.session = SESSION;
    f->layer.group = &f->group;
    f->layer.plan.spec = (struct mok_layer_spec){ .hidden = H, .intermediate = I, .precision = MOK_BF16 };
    f->layer.plan.local_experts = E_LOCAL;
    add_buffer(f, &f->mine, BUFFER, SESSION);
    add_buffer(f, &f->other, BUFFER_OTHER, SESSION + 1);
    mok__layer_params__init(&f->params);
    region(f->params.gate = &f->gate, 0, WEIGHT);
    region(f->params.up = &f->up, 4096, WEIGHT);
    region(f->params.down = &f->down, 8192, WEIGHT);
    region(f->params.d_gate = &f->d_gate, 16384, GRADIENT);
    region(f->params.d_up = &f->d_up, 24576, GRADIENT);
    region(f->params.d_down = &f->d_down, 32768, GRADIENT);
}

static int validate(struct fixture *f)
{
    return worker_validate_params(&f->tables, &f->layer, &f->params, f->span, &f->message);
}

static void a_full_set_resolves_to_addresses(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    assert_int_equal(validate(&f), 0);
    assert_ptr_equal(f.span[WORKER_PARAM_GATE].address, memory);
    assert_ptr_equal(f.span[WORKER_PARAM_D_DOWN].address, memory + 32768);
    assert_int_equal(f.span[WORKER_PARAM_D_DOWN].bytes, GRADIENT);
    assert_null(f.span[WORKER_PARAM_GATE_SCALE].address);
}

static void absent_parameters_stay_unbound(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    f.params.d_gate = f.params.d_up = f.params.d_down = NULL;
    f.up.buffer = 0;
    assert_int_equal(validate(&f), 0);
    assert_null(f.span[WORKER_PARAM_UP].address);
    assert_null(f.span[WORKER_PARAM_D_GATE].address);
}

static void what_is_wrong_is_named_with_value_and_bound(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    f.down.length = WEIGHT - 2;
    assert_int_equal(validate(&f), -MOK_ESIZE);
    assert_string_equal(f.message.text, "down: region is too short (value 2046, bound 2048)");

    fill(&f);
    f.d_up.offset = 24584;
    assert_int_equal(validate(&f), -MOK_EALIGN);
    assert_string_equal(f.message.text, "d_up: offset is not aligned (value 24584, bound 16)");

    fill(&f);
    f.gate.offset = UINT64_MAX - 15;
    assert_int_equal(validate(&f), -MOK_ERANGE);

    fill(&f);
    f.gate.buffer = BUFFER_OTHER;
    assert_int_equal(validate(&f), -MOK_EBUFFER);
    assert_string_equal(f.message.text, "gate: no such buffer of this session (value 12, bound 0)");
}

static void nothing_is_returned_when_one_is_wrong(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    f.d_down.length = 0;
    assert_int_equal(validate(&f), -MOK_ESIZE);
    assert_null(f.span[WORKER_PARAM_GATE].address);
}

static void a_parameter_that_the_layer_lacks_is_refused(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    region(f.params.shared_gate = &f.extra, 40960, 1024);
    assert_int_equal(validate(&f), -MOK_EARG);
    f.layer.plan.spec.shared_intermediate = 16;
    assert_int_equal(validate(&f), 0);

    fill(&f);
    region(f.params.gate_scale = &f.extra, 40960, 1024);
    assert_int_equal(validate(&f), -MOK_EARG);
    f.layer.plan.spec.precision = MOK_MXFP8_PER128;
    assert_int_equal(validate(&f), 0);
    assert_int_equal(f.span[WORKER_PARAM_GATE_SCALE].bytes, E_LOCAL * I * (H / 32));
}

static void transposed_weights_are_of_layers_that_take_them(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    f.layer.plan.spec.precision = MOK_MXFP8_PER128;
    region(f.params.down_transposed = &f.extra, 40960, WEIGHT / 2);
    assert_int_equal(validate(&f), -MOK_EARG);
    assert_string_equal(f.message.text, "down_transposed: this layer has no such parameter (value 11, bound 0)");
    f.layer.plan.spec.transposed_weights = 1;
    assert_int_equal(validate(&f), 0);
    assert_ptr_equal(f.span[WORKER_PARAM_DOWN_TRANSPOSED].address, memory + 40960);
    assert_int_equal(f.span[WORKER_PARAM_DOWN_TRANSPOSED].bytes, WEIGHT / 2);

    f.extra.length--;
    assert_int_equal(validate(&f), -MOK_ESIZE);
    assert_string_equal(f.message.text, "down_transposed: region is too short (value 1023, bound 1024)");
    region(&f.extra, 16384, WEIGHT / 2);
    assert_int_equal(validate(&f), -MOK_EARG); /* under a gradient */
}

static void a_gradient_lies_over_nothing_else(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    f.d_gate.offset = 8192 + WEIGHT - 16;
    assert_int_equal(validate(&f), -MOK_EARG);
    assert_string_equal(f.message.text, "d_gate: overlaps down (value 10224, bound 10240)");
    f.d_gate.offset = 8192 + WEIGHT;
    assert_int_equal(validate(&f), 0);
    f.d_down.offset = 24576 + 16;
    assert_int_equal(validate(&f), -MOK_EARG);
}

static void a_buffer_on_its_way_out_is_not_bound(void **state)
{
    static struct fixture f;
    (void)state;

    fill(&f);
    f.mine.closing = true;
    assert_int_equal(validate(&f), -MOK_EBUFFER);
    f.mine.closing = false;
    f.mine.group = &f.group;
    f.group.closing = true;
    assert_int_equal(validate(&f), -MOK_EBUFFER);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_full_set_resolves_to_addresses),
        cmocka_unit_test(absent_parameters_stay_unbound),
        cmocka_unit_test(what_is_wrong_is_named_with_value_and_bound),
        cmocka_unit_test(nothing_is_returned_when_one_is_wrong),
        cmocka_unit_test(a_parameter_that_the_layer_lacks_is_refused),
        cmocka_unit_test(transposed_weights_are_of_layers_that_take_them),
        cmocka_unit_test(a_gradient_lies_over_nothing_else),
        cmocka_unit_test(a_buffer_on_its_way_out_is_not_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
