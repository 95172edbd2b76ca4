/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The same inputs give the same bits, whatever the timing, the units, the minibatch, the ring, the context mode and
 * the number of ranks. MOK_TEST_ITERATIONS=N sets how often the soak repeats its layer.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "harness.h"

#ifdef MOK_SANITIZED
#define ITERATIONS 150
#define WIDE 1 /* how many of the costly cases */
#define EVERY 3 /* case of the lists: the bits are the release build's to prove */
#else
#define ITERATIONS 10000
#define WIDE 2
#define EVERY 1
#endif

/*
 * One plain, one with everything that could disturb an order, and one of each MXFP8 rule. All but the first have
 * experts with more rows than a tile, so that macrobatches end inside an expert.
 */
static const struct problem_options options[] = {
    { .hidden = 80, .intermediate = 48, .experts = 8, .topk = 4, .tokens = 61, .seed = 50 },
    { .hidden = 48,
      .intermediate = 112,
      .experts = 8,
      .topk = 3,
      .tokens = 290,
      .routing = ROUTE_ZIPF,
      .weighting = WEIGHT_ZERO_NEGATIVE,
      .masked = 0.2,
      .clamp = 0.7f,
      .shared_intermediate = 64,
      .seed = 51 },
    { .hidden = 112,
      .intermediate = 80,
      .experts = 8,
      .topk = 2,
      .tokens = 165,
      .routing = ROUTE_HOT_RANK,
      .shared_intermediate = 16,
      .seed = 52 },
    { .hidden = 144,
      .intermediate = 48,
      .experts = 8,
      .topk = 2,
      .tokens = 150,
      .routing = ROUTE_HOT_EXPERT,
      .seed = 53 },
};
#define PROBLEMS (sizeof(options) / sizeof(options[0]))
static const uint32_t precision[PROBLEMS] = { MOK_BF16, MOK_BF16, MOK_MXFP8_PER32, MOK_MXFP8_PER128 };

static struct problem problem[PROBLEMS];
static struct result plain[PROBLEMS]; /* one rank, one thread, the plan's choices */

static void run_precise(size_t i, const struct run_options *run, struct result *ret)
{
    struct run_options precise = *run;

    precise.layer.precision = precision[i];
    run_problem(&problem[i], &precise, ret);
}

static int setup(void **state)
{
    (void)state;
    for (size_t i = 0; i < PROBLEMS; i++) {
        problem_make(&problem[i], &options[i]);
        if (precision[i] != MOK_BF16)
            problem_quantise_weights(&problem[i], precision[i] == MOK_MXFP8_PER32 ? 32 : 128);
        run_precise(i, &(struct run_options){ .context_mode = MOK_CONTEXT_FULL }, &plain[i]);
    }
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    for (size_t i = 0; i < PROBLEMS; i++) {
        problem_free(&problem[i]);
        result_free(&plain[i]);
    }
    return 0;
}

static void must_equal_plain(const char *what, const struct run_options *run)
{
    uint32_t arrays = run->harness.ranks > 1 ? CHECK_ANY_EP : CHECK_ALL;

    for (size_t i = 0; i < PROBLEMS; i++) {
        struct result got;
        run_precise(i, run, &got);
        check_bitwise(what, &got, &plain[i], arrays);
        result_free(&got);
    }
}

static void the_plain_run_is_right(void **state)
{
    (void)state;
    for (size_t i = 0; i < PROBLEMS; i++)
        if (precision[i] == MOK_BF16)
            check_against_oracle("plain", &problem[i], &plain[i]);
        else
            check_against_mx_oracle("plain", &problem[i], &plain[i], precision[i], false);
}

static void a_second_run_gives_the_same_bits(void **state)
{
    (void)state;
    must_equal_plain("again", &(struct run_options){ 0 });
}

static void recompute_gives_the_bits_of_full(void **state)
{
    (void)state;
    for (uint32_t tiles = 0; tiles <= 3; tiles += EVERY)
        must_equal_plain("recompute", &(struct run_options){ .layer = { .ring_tiles = tiles },
                                                             .context_mode = MOK_CONTEXT_RECOMPUTE });
}

static void any_number_of_threads_and_comm_units_gives_the_same_bits(void **state)
{
    (void)state;
    for (uint32_t threads = 1, n = 0; threads <= 4; threads++)
        for (uint32_t comm = 0; comm < threads; comm++) {
            char what[60];
            if (n++ % EVERY != 0)
                continue;
            snprintf(what, sizeof(what), "%u threads, %u comm units", threads, comm);
            must_equal_plain(
                what, &(struct run_options){ .harness = { .threads = threads }, .layer = { .comm_units = comm } });
        }
}

static void any_minibatch_gives_the_same_bits(void **state)
{
    static const uint32_t rows[] = { 1, 128, 129, 256, 384, 100000 };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i += EVERY) {
        char what[60];
        snprintf(what, sizeof(what), "minibatch of %u rows", rows[i]);
        must_equal_plain(what,
                         &(struct run_options){ .harness = { .threads = 2 }, .layer = { .minibatch_rows = rows[i] } });
    }
}

static void any_ring_gives_the_same_bits(void **state)
{
    static const uint32_t tiles[] = { 1, 2, 3, 5, 8, 1000 };

    (void)state;
    for (size_t i = 0; i < sizeof(tiles) / sizeof(tiles[0]); i += EVERY)
        for (uint32_t mode = MOK_CONTEXT_FULL; mode <= MOK_CONTEXT_RECOMPUTE; mode++) {
            char what[60];
            snprintf(what, sizeof(what), "ring of %u tiles, context mode %u", tiles[i], mode);
            must_equal_plain(what, &(struct run_options){ .harness = { .threads = 2 },
                                                          .layer = { .ring_tiles = tiles[i] },
                                                          .context_mode = mode });
        }
}

static void any_number_of_ranks_and_any_split_gives_the_same_bits(void **state)
{
    struct rng rng = { 52 };

    (void)state;
    for (uint32_t ep = 1; ep <= 8; ep *= 2)
        for (uint32_t n = ep % EVERY; n < 3; n += EVERY) {
            char what[60];
            for (size_t i = 0; i < PROBLEMS; i++) {
                struct result got;
                uint32_t tokens[8];
                struct run_options run = { .harness = { .ranks = ep, .threads = 1 + n },
                                           .tokens = n ? tokens : NULL,
                                           .layer = { .ring_tiles = n },
                                           .context_mode = n % 2 ? MOK_CONTEXT_RECOMPUTE : MOK_CONTEXT_FULL };
                problem_cut(problem[i].tokens, ep, &rng, tokens);
                snprintf(what, sizeof(what), "EP %u, split %u", ep, n);
                run_precise(i, &run, &got);
                check_bitwise(what, &got, &plain[i], CHECK_ANY_EP);
                result_free(&got);
            }
        }
}

/* A rank's own shared-expert gradients depend on nothing but its own tokens. */
static void shared_gradients_of_a_split_sum_up_to_the_same_value(void **state)
{
    struct result got;

    (void)state;
    run_problem(&problem[1], &(struct run_options){ .harness = { .ranks = 4 } }, &got);
    check_against_oracle("shared gradients summed", &problem[1], &got);
    result_free(&got);
}

/* Wider than any block that an engine may cut its products into. */
static void wide_layers_give_the_same_bits_however_they_are_cut(void **state)
{
    static const struct problem_options wide[] = {
        { .hidden = 272, .intermediate = 528, .experts = 2, .topk = 2, .tokens = 140, .seed = 55 },
        { .hidden = 2880, .intermediate = 528, .experts = 2, .topk = 1, .tokens = 40, .seed = 56 },
    };
    static const struct run_options cut[] = {
        { .harness = { .ranks = 1, .threads = 3 }, .layer = { .ring_tiles = 1 } },
        { .harness = { .ranks = 2, .threads = 2 }, .layer = { .minibatch_rows = 128 } },
        { .harness = { .ranks = 2 }, .layer = { .ring_tiles = 2 }, .context_mode = MOK_CONTEXT_RECOMPUTE },
    };

    (void)state;
    for (size_t i = 0; i < WIDE; i++) {
        struct problem p;
        struct result want, got;
        problem_make(&p, &wide[i]);
        run_problem(&p, &(struct run_options){ .harness = { .ranks = 1 } }, &want);
        for (size_t n = 0; n < sizeof(cut) / sizeof(cut[0]); n++) {
            run_problem(&p, &cut[n], &got);
            check_bitwise("wide", &got, &want, CHECK_ANY_EP);
            result_free(&got);
        }
        result_free(&want);
        problem_free(&p);
    }
}

/*
 * A token's place among its rank's tokens changes with the split, and with it where it stands in the shared expert's
 * products. There are enough elements that a difference in the last bit of FP32 shows in some of them.
 */
static void the_shared_expert_gives_the_same_bits_wherever_a_token_stands(void **state)
{
    static const uint32_t splits[][2] = { { 1, 400 }, { 200, 201 }, { 3, 398 }, { 8, 393 } };
    struct problem p;
    struct result want, got;

    (void)state;
    problem_make(&p, &(struct problem_options){ .hidden = 272,
                                                .intermediate = 16,
                                                .experts = 2,
                                                .topk = 1,
                                                .tokens = 401,
                                                .masked = 1,
                                                .shared_intermediate = 144,
                                                .seed = 57 });
    run_problem(&p, &(struct run_options){ .harness = { .ranks = 1 } }, &want);
    for (size_t i = 0; i < sizeof(splits) / sizeof(splits[0]) / 2 * WIDE; i++) {
        run_problem(&p, &(struct run_options){ .harness = { .ranks = 2 }, .tokens = splits[i] }, &got);
        check_bitwise("shared expert", &got, &want, CHECK_ANY_EP);
        result_free(&got);
    }
    result_free(&want);
    problem_free(&p);
}

static void random_delays_change_no_bit(void **state)
{
    (void)state;
    for (uint32_t seed = 0; seed < 8; seed++) { /* mostly several minibatches in a ring, on several threads */
        char what[60];
        struct run_options run = {
            .harness = { .ranks = 1u << seed % 3,
                         .threads = 2 + seed % 2,
                         .chaos_delay_us = 200,
                         .jitter = 30,
                         .seed = seed },
            .layer = { .ring_tiles = seed % 4 ? 1 + seed * 3 % 5 : 0, .minibatch_rows = seed % 4 == 1 ? 0 : 128 },
            .context_mode = seed % 2 ? MOK_CONTEXT_RECOMPUTE : MOK_CONTEXT_FULL,
            .overwrite = seed % 3 != 0,
        };
        snprintf(what, sizeof(what), "delays, seed %u", seed);
        must_equal_plain(what, &run);
    }
}

/* One layer, buffers used again and again, poisoned in between, with delays: every round the first round's bits. */
static void a_soak_of_one_layer_with_random_delays_gives_the_first_rounds_bits(void **state)
{
    const char *asked = getenv("MOK_TEST_ITERATIONS");
    int rounds = asked ? atoi(asked) : ITERATIONS;
    struct problem p;
    struct result first = { 0 }, got;
    struct harness *h = harness_open(
        &(struct harness_options){ .ranks = 2, .threads = 2, .chaos_delay_us = 5, .jitter = 3, .seed = 53 });

    (void)state;
    problem_make(&p, &(struct problem_options){
                         .hidden = 32, .intermediate = 16, .experts = 4, .topk = 2, .tokens = 13, .seed = 54 });
    struct layer *layer = layer_open(h, &p, &(struct layer_options){ .ring_tiles = 1 });
    struct tensors *t = tensors_make(layer, &p, NULL, MOK_CONTEXT_FULL);
    for (int n = 0; n < rounds; n++) {
        tensors_poison_outputs(t, true);
        layer_poison_gradients(layer);
        struct operation *forward = layer_forward(t, 0), *backward = layer_backward(t, MOK_OPF_OVERWRITE_WGRAD);
        harness_drive(h);
        operation_expect_success(forward);
        operation_expect_success(backward);
        tensors_collect(t, &p, n ? &got : &first);
        if (n) {
            check_bitwise("soak", &got, &first, CHECK_ALL);
            result_free(&got);
        }
    }
    tensors_check_canaries(t);
    layer_check_canaries(layer);
    check_against_oracle("soak", &p, &first);
    result_free(&first);
    tensors_free(t);
    harness_close(h);
    problem_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_plain_run_is_right),
        cmocka_unit_test(a_second_run_gives_the_same_bits),
        cmocka_unit_test(recompute_gives_the_bits_of_full),
        cmocka_unit_test(any_number_of_threads_and_comm_units_gives_the_same_bits),
        cmocka_unit_test(any_minibatch_gives_the_same_bits),
        cmocka_unit_test(any_ring_gives_the_same_bits),
        cmocka_unit_test(any_number_of_ranks_and_any_split_gives_the_same_bits),
        cmocka_unit_test(shared_gradients_of_a_split_sum_up_to_the_same_value),
        cmocka_unit_test(wide_layers_give_the_same_bits_however_they_are_cut),
        cmocka_unit_test(the_shared_expert_gives_the_same_bits_wherever_a_token_stands),
        cmocka_unit_test(random_delays_change_no_bit),
        cmocka_unit_test(a_soak_of_one_layer_with_random_delays_gives_the_first_rounds_bits),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
