/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan: its choices follow their rules, overrides win and are reported as such, what cannot be is refused with the
 * bound, and the byte counts are those that the parts need.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "dispatch.h"
#include "guarded.h"
#include "layer.h"
#include "rng.h"

static const struct mok_device_limits host = { .kind = MOK_DEVICE_HOST, .units = 4, .memory_bytes = 1ull << 34 };
static const struct mok_layer_spec small = { .hidden = 64,
                                             .intermediate = 48,
                                             .experts = 8,
                                             .topk = 3,
                                             .ep = 2,
                                             .rank = 1,
                                             .max_tokens = 100,
                                             .precision = MOK_BF16 };

static struct mok_plan must_plan(const struct mok_layer_spec *spec, const struct mok_device_limits *device, char *text,
                                 size_t size)
{
    struct mok_message message = { { 0 } };
    struct mok_plan plan;

    if (mok_plan_make(spec, device, &plan, text, size, &message) < 0)
        fail_msg("refused: %s", message.text);
    return plan;
}

/* rows >= 2 C 128 256 / min(2I, H), from the design. */
static uint64_t two_waves(const struct mok_plan *plan)
{
    uint64_t narrow = plan->spec.hidden < 2 * plan->spec.intermediate ? plan->spec.hidden : 2 * plan->spec.intermediate;
    return (2ull * plan->compute_units * 128 * 256 + narrow - 1) / narrow;
}

static void the_minibatch_gives_two_full_waves(void **state)
{
    struct rng rng = { 70 };

    (void)state;
    for (int n = 0; n < 500; n++) {
        struct mok_device_limits device = host;
        struct mok_layer_spec spec = small;
        device.units = 1 + rng_below(&rng, 200);
        spec.hidden = 16 * (1 + rng_below(&rng, 500));
        spec.intermediate = 16 * (1 + rng_below(&rng, 500));
        spec.max_tokens = 1 + rng_below(&rng, 100000);
        struct mok_plan plan = must_plan(&spec, &device, NULL, 0);
        assert_true(plan.minibatch_rows > 0 && plan.minibatch_rows <= plan.ring_rows);
        assert_true(plan.minibatch_rows >= two_waves(&plan) || plan.minibatch_rows == plan.ring_rows);
        assert_int_equal(plan.minibatch_rows % plan.tile_rows, 0);
        assert_int_equal(plan.ring_rows % plan.tile_rows, 0);
        assert_true(plan.comm_units + plan.compute_units >= 1);
        assert_true(plan.compute_units >= 1 && plan.compute_units <= device.units);
    }
}

/* The example of the design: Kimi 2.5 on 148 compute units. */
static void the_minibatch_of_the_published_example_is_2368(void **state)
{
    struct mok_plan plan = { .spec = { .hidden = 7168, .intermediate = 2048 }, .compute_units = 148 };

    (void)state;
    assert_int_equal(two_waves(&plan), 2368);
    struct mok_layer_spec spec = { .hidden = 7168,
                                   .intermediate = 2048,
                                   .experts = 384,
                                   .topk = 8,
                                   .ep = 64,
                                   .max_tokens = 8192,
                                   .precision = MOK_BF16,
                                   .ring_bytes = 1u << 30 };
    struct mok_message message;
    for (uint32_t kind = MOK_DEVICE_HOST; kind <= MOK_DEVICE_CUDA; kind++) {
        struct mok_device_limits device = { .kind = kind, .units = 148, .memory_bytes = 1ull << 37 };
        int code = mok_plan_make(&spec, &device, &plan, NULL, 0, &message);
        if (code == -MOK_ENODEV)
            continue; /* this build has no such engine */
        assert_int_equal(code, 0);
        assert_true(plan.minibatch_rows >= two_waves(&plan));
        if (plan.compute_units == 148)
            assert_true(plan.minibatch_rows >= 2368);
    }
}

/* The line about `what`, or NULL. */
static const char *line_of(const char *text, const char *what, char *ret, size_t size)
{
    size_t length = strlen(what);

    for (const char *at = text; at && *at; at = strchr(at, '\n') ? strchr(at, '\n') + 1 : NULL)
        if (!strncmp(at, what, length) && !strncmp(at + length, " = ", 3)) {
            snprintf(ret, size, "%.*s", (int)strcspn(at, "\n"), at);
            return ret;
        }
    return NULL;
}

static void must_say(const char *text, const char *what, uint64_t value, const char *reason)
{
    char line[300], want[100];

    if (!line_of(text, what, line, sizeof(line)))
        fail_msg("nothing is said about %s in:\n%s", what, text);
    snprintf(want, sizeof(want), "%s = %llu (", what, (unsigned long long)value);
    assert_memory_equal(line, want, strlen(want));
    assert_true(line[strlen(line) - 1] == ')' && strlen(line) > strlen(want) + 1);
    if (reason)
        assert_non_null(strstr(line, reason));
}

static void every_choice_is_reported_with_its_reason(void **state)
{
    char text[4096];

    (void)state;
    struct mok_plan plan = must_plan(&small, &host, text, sizeof(text));
    must_say(text, "comm_units", plan.comm_units, NULL);
    must_say(text, "compute_units", plan.compute_units, NULL);
    must_say(text, "minibatch_rows", plan.minibatch_rows, NULL);
    must_say(text, "ring_rows", plan.ring_rows, NULL);
    must_say(text, "tile_rows", plan.tile_rows, NULL);
    must_say(text, "symmetric_bytes", plan.symmetric_bytes, NULL);
    must_say(text, "private_bytes", plan.private_bytes, NULL);
    must_say(text, "context_full_bytes", plan.context_full_bytes, NULL);
    must_say(text, "context_recompute_bytes", plan.context_recompute_bytes, NULL);
}

static void overrides_win_and_are_reported_as_asked(void **state)
{
    char text[4096];
    struct mok_layer_spec spec = small;

    (void)state;
    struct mok_plan own = must_plan(&small, &host, NULL, 0);
    spec.max_tokens = 5000;
    spec.minibatch_rows = 3 * own.tile_rows;
    spec.comm_units = 1;
    spec.ring_bytes = 1u << 20;
    struct mok_plan plan = must_plan(&spec, &host, text, sizeof(text));
    assert_int_equal(plan.minibatch_rows, 3 * own.tile_rows);
    assert_int_equal(plan.comm_units, 1);
    assert_true(plan.ring_rows < plan.max_rows);
    must_say(text, "minibatch_rows", plan.minibatch_rows, "as asked");
    must_say(text, "comm_units", 1, "as asked");
    must_say(text, "ring_rows", plan.ring_rows, "as asked");

    spec.ring_bytes = 1u << 21; /* twice the bytes, twice the rows but for rounding to tiles */
    struct mok_plan twice = must_plan(&spec, &host, NULL, 0);
    assert_true(twice.ring_rows >= 2 * plan.ring_rows && twice.ring_rows <= 2 * plan.ring_rows + plan.tile_rows);
}

static void a_short_description_is_cut_and_terminated(void **state)
{
    char whole[4096];

    (void)state;
    must_plan(&small, &host, whole, sizeof(whole));
    for (size_t size = 1; size < 300; size++) {
        struct guarded text = guarded_alloc(size, GUARDED_AT_END);
        must_plan(&small, &host, (char *)text.data, size);
        assert_int_equal(strnlen((char *)text.data, size), size - 1);
        assert_memory_equal(text.data, whole, size - 1);
        assert_true(guarded_check(&text));
        guarded_free(&text);
    }
}

static void must_refuse(const struct mok_layer_spec *spec, int code, const char *argument, const char *value,
                        const char *bound)
{
    struct mok_message message = { { 0 } };
    struct mok_plan plan;

    poison(&plan, sizeof(plan));
    assert_int_equal(mok_plan_make(spec, &host, &plan, NULL, 0, &message), code);
    assert_true(is_poison(&plan, sizeof(plan)));
    if (!strstr(message.text, argument) || !strstr(message.text, value) || !strstr(message.text, bound))
        fail_msg("\"%s\" does not name %s, %s and %s", message.text, argument, value, bound);
    assert_int_equal(mok_plan_make(spec, &host, &plan, NULL, 0, NULL), code); /* the sentence is optional */
}

static void what_cannot_be_is_refused_with_argument_value_and_bound(void **state)
{
    struct mok_layer_spec spec;

    (void)state;
#define REFUSED(field, bad, code, text, bound)                                                                         \
    spec = small;                                                                                                      \
    spec.field = bad;                                                                                                  \
    must_refuse(&spec, code, #field, text, bound)
    REFUSED(hidden, 0, -MOK_ERANGE, "0", "16");
    REFUSED(hidden, 24, -MOK_EALIGN, "24", "16");
    REFUSED(hidden, (1u << 20) + 16, -MOK_ERANGE, "1048592", "1048576");
    REFUSED(intermediate, 0, -MOK_ERANGE, "0", "16");
    REFUSED(intermediate, 40, -MOK_EALIGN, "40", "16");
    REFUSED(shared_intermediate, 8, -MOK_ERANGE, "8", "16");
    REFUSED(shared_intermediate, 40, -MOK_EALIGN, "40", "16");
    REFUSED(experts, 0, -MOK_ERANGE, "0", "4096");
    REFUSED(experts, 7, -MOK_ERANGE, "7", "2");
    REFUSED(experts, 4098, -MOK_ERANGE, "4098", "4096");
    REFUSED(topk, 0, -MOK_ERANGE, "0", "64");
    REFUSED(topk, 65, -MOK_ERANGE, "65", "64");
    REFUSED(ep, 0, -MOK_ERANGE, "0", "128");
    REFUSED(ep, 129, -MOK_ERANGE, "129", "128");
    REFUSED(rank, 2, -MOK_ERANK, "2", "2");
    REFUSED(max_tokens, 0, -MOK_ERANGE, "0", "16777216");
    REFUSED(max_tokens, (1u << 24) + 1, -MOK_ERANGE, "16777217", "16777216");
    REFUSED(precision, 0, -MOK_EDTYPE, "0", "1");
    REFUSED(precision, 9, -MOK_EDTYPE, "9", "3");
    REFUSED(ring_bytes, 1, -MOK_ERANGE, "1", "ring_bytes");
    REFUSED(comm_units, 1000, -MOK_ERANGE, "1000", "..");
    REFUSED(clamp, -1, -MOK_ERANGE, "-1", "clamp");
    REFUSED(clamp, HUGE_VALF, -MOK_ERANGE, "inf", "clamp");
    REFUSED(clamp, (float)NAN, -MOK_ERANGE, "nan", "clamp");
    REFUSED(transposed_weights, 2, -MOK_ERANGE, "2", "0..1");
    REFUSED(transposed_weights, 1, -MOK_EDTYPE, "transposed_weights = 1", "not of 1");
#undef REFUSED
}

static void ranks_with_equal_specs_get_equal_plans(void **state)
{
    struct mok_layer_spec spec = small;

    (void)state;
    spec.ep = 8;
    spec.rank = 0;
    struct mok_plan first = must_plan(&spec, &host, NULL, 0);
    for (spec.rank = 1; spec.rank < spec.ep; spec.rank++) {
        struct mok_plan plan = must_plan(&spec, &host, NULL, 0);
        assert_int_equal(plan.spec.rank, spec.rank);
        plan.spec.rank = 0;
        assert_memory_equal(&plan, &first, sizeof(plan));
    }
}

struct part {
    uint64_t offset, bytes;
};

/* Parts lie inside the buffer, do not overlap, and are aligned for their type. */
static void check_parts(const struct part *part, size_t count, uint64_t bytes)
{
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(part[i].offset % 16, 0);
        assert_true(part[i].offset <= bytes && part[i].bytes <= bytes - part[i].offset);
        for (size_t j = 0; j < i; j++)
            assert_true(part[i].offset + part[i].bytes <= part[j].offset ||
                        part[j].offset + part[j].bytes <= part[i].offset);
    }
}

static void check_memory_map(const struct mok_plan *plan)
{
    uint64_t slots = (uint64_t)plan->spec.max_tokens * plan->spec.topk;
    const struct part symmetric[] = { { plan->sym_ids, slots * 4 },
                                      { plan->sym_topk_weight, slots * 4 },
                                      { plan->sym_weight_slots, slots * 4 },
                                      { plan->sym_slots, slots * plan->spec.hidden * 2 } };
    const struct part context[] = { { 0, sizeof(struct mok_context_header) },
                                    { plan->ctx_ids, slots * 4 },
                                    { plan->ctx_topk_weight, slots * 4 } };
    uint64_t ring = plan->ring_rows * (plan->spec.hidden + 2 * plan->spec.intermediate) * 2;

    check_parts(symmetric, 4, plan->symmetric_bytes);
    check_parts(context, 3, plan->context_recompute_bytes);
    check_parts(context, 3, plan->context_full_bytes);
    assert_true(plan->ctx_ring >= plan->ctx_topk_weight + slots * 4);
    assert_true(plan->context_full_bytes >= plan->ctx_ring + ring || plan->spec.precision != MOK_BF16);
    assert_int_equal(plan->max_rows, plan->spec.ep * slots);
    assert_true(plan->ring_rows >= 1);
}

static void every_part_has_its_place(void **state)
{
    struct rng rng = { 71 };

    (void)state;
    for (int n = 0; n < 300; n++) {
        struct mok_layer_spec spec = small;
        spec.ep = 1u << rng_below(&rng, 8);
        spec.rank = rng_below(&rng, spec.ep);
        spec.experts = spec.ep * (1 + rng_below(&rng, 30));
        spec.topk = 1 + rng_below(&rng, MOK_MAX_TOPK);
        spec.max_tokens = 1 + rng_below(&rng, 1u << rng_below(&rng, 24));
        spec.hidden = 16 * (1 + rng_below(&rng, 600));
        spec.intermediate = 16 * (1 + rng_below(&rng, 600));
        spec.precision = 1 + rng_below(&rng, 3);
        struct mok_plan plan = must_plan(&spec, &host, NULL, 0);
        check_memory_map(&plan);
    }
}

/* The largest layer that the bounds allow: no sum may wrap round. */
static void the_largest_layer_overflows_nothing(void **state)
{
    struct mok_layer_spec spec = { .hidden = MOK_MAX_DIM,
                                   .intermediate = MOK_MAX_DIM,
                                   .experts = MOK_MAX_EXPERTS,
                                   .topk = MOK_MAX_TOPK,
                                   .ep = MOK_MAX_EP,
                                   .max_tokens = MOK_MAX_TOKENS,
                                   .precision = MOK_BF16,
                                   .shared_intermediate = MOK_MAX_DIM,
                                   .ring_bytes = UINT64_MAX };

    (void)state;
    for (int n = 0; n < 2; n++) {
        struct mok_plan plan = must_plan(&spec, &host, NULL, 0);
        check_memory_map(&plan);
        assert_true(plan.symmetric_bytes < 1ull << 63 && plan.private_bytes < 1ull << 63);
        assert_true(plan.context_full_bytes < 1ull << 63);
        spec.ring_bytes = 0;
    }
}

static void the_hash_tells_layers_apart(void **state)
{
    struct mok_layer_spec spec = small;
    struct mok_plan plan = must_plan(&small, &host, NULL, 0);
    uint64_t hash = mok_plan_hash(&plan);

    (void)state;
    plan = must_plan(&spec, &host, NULL, 0);
    assert_int_equal(mok_plan_hash(&plan), hash);
#define DIFFERS(field, value)                                                                                          \
    spec = small;                                                                                                      \
    spec.field = value;                                                                                                \
    plan = must_plan(&spec, &host, NULL, 0);                                                                           \
    assert_true(mok_plan_hash(&plan) != hash)
    DIFFERS(hidden, 80);
    DIFFERS(intermediate, 64);
    DIFFERS(experts, 16);
    DIFFERS(topk, 4);
    DIFFERS(rank, 0);
    DIFFERS(max_tokens, 101);
    DIFFERS(precision, MOK_MXFP8_PER32);
    DIFFERS(clamp, 1);
#undef DIFFERS
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_minibatch_gives_two_full_waves),
        cmocka_unit_test(the_minibatch_of_the_published_example_is_2368),
        cmocka_unit_test(every_choice_is_reported_with_its_reason),
        cmocka_unit_test(overrides_win_and_are_reported_as_asked),
        cmocka_unit_test(a_short_description_is_cut_and_terminated),
        cmocka_unit_test(what_cannot_be_is_refused_with_argument_value_and_bound),
        cmocka_unit_test(ranks_with_equal_specs_get_equal_plans),
        cmocka_unit_test(every_part_has_its_place),
        cmocka_unit_test(the_largest_layer_overflows_nothing),
        cmocka_unit_test(the_hash_tells_layers_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
