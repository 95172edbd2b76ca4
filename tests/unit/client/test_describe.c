/* SPDX-License-Identifier: Apache-2.0 */
/* A completion's numbers become a sentence that names argument, value and bound. */
#include "support.h"

#include "describe.h"

struct sentence_case {
    unsigned opcode;
    struct mok_cqe cqe;
    const char *sentence;
};

static void each_completion_says_what_where_and_what_it_must_be(void **state)
{
    static const struct sentence_case cases[] = {
        { MOK_OP_FORWARD,
          { .result = -MOK_EEXPERT,
            .argument = MOK_ARG_IDS,
            .value = 9,
            .bound = 8,
            .detail = (uint64_t)1 << 48 | 7 << 8 | 2 },
          "ids: rank 1, token 7, slot 2 holds 9, must be -1..7" },
        { MOK_OP_FORWARD,
          { .result = -MOK_EEXPERT,
            .value = (uint64_t)-7,
            .bound = 4096,
            .detail = (uint64_t)127 << 48 | (uint64_t)16777216 << 8 | 63 },
          "ids: rank 127, token 16777216, slot 63 holds -7, must be -1..4095" },
        { MOK_OP_FORWARD,
          { .result = -MOK_ERANGE, .argument = MOK_ARG_TOKENS, .value = 17, .bound = 16 },
          "forward: tokens is 17, must be at most 16" },
        { MOK_OP_FORWARD,
          { .result = -MOK_ERANGE, .argument = MOK_ARG_X, .value = 5000, .bound = 4096 },
          "forward: x ends at byte 5000 of its buffer, must end at most at 4096" },
        { MOK_OP_FORWARD,
          { .result = -MOK_ERANGE, .argument = MOK_ARG_FLAGS, .value = 6, .bound = 1 },
          "forward: flags is 0x6, known here are 0x1" },
        { MOK_OP_BACKWARD,
          { .result = -MOK_ESIZE, .argument = MOK_ARG_D_OUT, .value = 10, .bound = 20 },
          "backward: d_out has 10 bytes, must have at least 20" },
        { MOK_OP_BACKWARD,
          { .result = -MOK_EALIGN, .argument = MOK_ARG_CONTEXT, .value = 8, .bound = 16 },
          "backward: context has offset 8, must be a multiple of 16" },
        { MOK_OP_FORWARD,
          { .result = -MOK_EBUFFER, .argument = MOK_ARG_OUT, .value = 0, .bound = 1 },
          "forward: out is absent, must be given" },
        { MOK_OP_FORWARD,
          { .result = -MOK_EBUFFER, .argument = MOK_ARG_X, .value = 5, .bound = 3 },
          "forward: x is in buffer 5, must be in a symmetric one of group 3" },
        { MOK_OP_FORWARD,
          { .result = -MOK_EBUFFER, .argument = MOK_ARG_X, .value = 5 },
          "forward: x is in buffer 5, which the worker does not have for this session" },
        { MOK_OP_FORWARD,
          { .result = -MOK_ERESERVED, .argument = MOK_ARG_RESERVED, .value = 1 },
          "forward: reserved has 1 where 0 must be" },
        { 9,
          { .result = -MOK_EOPCODE, .argument = MOK_ARG_OPCODE, .value = 9, .bound = 3 },
          "operation: opcode is 9, must be at most 3" },
        { MOK_OP_FORWARD,
          { .result = -MOK_ENOENT, .argument = MOK_ARG_LAYER, .value = 12 },
          "forward: layer 12 does not exist" },
        { MOK_OP_BACKWARD,
          { .result = -MOK_ESTATE, .argument = MOK_ARG_WGRADS },
          "backward: layer weight gradients are not all bound, see mok_layer_bind" },
        { MOK_OP_FORWARD,
          { .result = -MOK_EMISMATCH, .argument = MOK_ARG_CONTEXT_MODE, .value = 2, .detail = 3 },
          "forward: ranks disagree on context_mode: rank 3 has 2, rank 0 another" },
        { MOK_OP_FORWARD,
          { .result = -MOK_EMISMATCH, .argument = MOK_ARG_OPCODE, .value = 2, .detail = 1 },
          "forward: ranks disagree on the operation: rank 1 submitted backward, rank 0 another" },
        { MOK_OP_BACKWARD,
          { .result = -MOK_EARG, .argument = MOK_ARG_CONTEXT, .value = 0x123, .detail = 1 },
          "backward on rank 1: context is not what a forward of this layer and these ranks left there" },
        { MOK_OP_BACKWARD,
          { .result = -MOK_EARG, .argument = MOK_ARG_CONTEXT_MODE, .value = 2 },
          "backward: context was left by a forward with context_mode 2, must be used with the same" },
        { MOK_OP_BACKWARD,
          { .result = -MOK_EARG, .argument = MOK_ARG_CONTEXT_MODE, .value = 0, .bound = 1 },
          "backward: context_mode is not valid here (value 0, bound 1)" },
        { MOK_OP_BACKWARD,
          { .result = -MOK_ESIZE, .argument = MOK_ARG_TOKENS, .value = 7 },
          "backward: tokens must be 7, as in the forward that left the context" },
        { MOK_OP_BACKWARD,
          { .result = -MOK_EEXPERT, .argument = MOK_ARG_CONTEXT, .value = 4, .bound = 4, .detail = 3 },
          "ids in the context: rank 0, token 0, slot 3 holds 4, must be -1..3" },
        { MOK_OP_FORWARD,
          { .result = -MOK_EARG, .argument = MOK_ARG_OUT, .value = 32, .bound = 64 },
          "forward: out, which is written, begins at byte 32 in a region that ends at byte 64" },
        { MOK_OP_FORWARD, { .result = -MOK_EPEER, .detail = 3 }, "forward ended because rank 3 of the group is gone" },
        { MOK_OP_BACKWARD,
          { .result = -MOK_ETIMEDOUT, .detail = 2 },
          "backward did not complete within its timeout_ns; rank 2 was not done in time" },
        { MOK_OP_NOP, { .result = -MOK_EDAEMON }, "no-op ended because mokd is gone" },
        { MOK_OP_FORWARD, { .result = -MOK_ECANCELED }, "forward was canceled" },
        { MOK_OP_FORWARD, { .result = -MOK_EINTERNAL }, "forward: internal error" },
        { MOK_OP_FORWARD, { .result = -12345 }, "forward: unknown error" },
    };
    char text[256];
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        describe_completion(cases[i].opcode, &cases[i].cqe, text, sizeof(text));
        assert_string_equal(text, cases[i].sentence);
    }
}

/* A worker of another version may say anything; there must be a sentence, and it must fit. */
static void every_pair_of_code_and_argument_gives_a_sentence_that_fits(void **state)
{
    char text[64];
    (void)state;
    for (int code = 0; code < 64; code++) {
        for (unsigned argument = 0; argument < 64; argument++) {
            const struct mok_cqe cqe = { .result = -code,
                                         .argument = (uint16_t)argument,
                                         .value = UINT64_MAX,
                                         .bound = UINT64_MAX,
                                         .detail = UINT64_MAX };
            memset(text, '#', sizeof(text));
            describe_completion(MOK_OP_FORWARD, &cqe, text, sizeof(text));
            assert_non_null(memchr(text, 0, sizeof(text)));
            assert_true(strlen(text) > 4);
        }
    }
}

static void ranks_are_listed_as_people_do(void **state)
{
    static const uint32_t ranks[] = { 1, 3, 17 };
    char text[64];
    (void)state;
    describe_ranks(ranks, 0, text, sizeof(text));
    assert_string_equal(text, "no rank");
    describe_ranks(ranks, 1, text, sizeof(text));
    assert_string_equal(text, "rank 1");
    describe_ranks(ranks, 2, text, sizeof(text));
    assert_string_equal(text, "ranks 1 and 3");
    describe_ranks(ranks, 3, text, sizeof(text));
    assert_string_equal(text, "ranks 1, 3 and 17");
}

static void a_list_of_ranks_that_does_not_fit_is_cut(void **state)
{
    static const uint32_t ranks[] = { 100, 101, 102, 103, 104, 105, 106, 107 };
    char text[20];
    (void)state;
    memset(text, '#', sizeof(text));
    describe_ranks(ranks, ARRAY_SIZE(ranks), text, sizeof(text));
    assert_string_equal(text, "ranks 100, 101, 102");
}

static void the_last_error_is_the_thread_s_and_stays_until_its_next_failure(void **state)
{
    (void)state;
    assert_string_equal(mok_last_error(), "");
    assert_fails(mok_poll(NULL, 1, NULL), MOK_EARG, "session is NULL");
    assert_string_equal(mok_strerror(-MOK_EARG), "invalid argument");
    assert_string_equal(mok_error_name(MOK_EARG), "MOK_EARG");
    assert_string_equal(mok_error_name(0), "0");
    assert_string_equal(mok_error_name(999), "MOK_E?");
    assert_string_equal(mok_version(), "0.1.0");
    assert_string_equal(mok_last_error(), "session is NULL");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_last_error_is_the_thread_s_and_stays_until_its_next_failure),
        cmocka_unit_test(each_completion_says_what_where_and_what_it_must_be),
        cmocka_unit_test(every_pair_of_code_and_argument_gives_a_sentence_that_fits),
        cmocka_unit_test(ranks_are_listed_as_people_do),
        cmocka_unit_test(a_list_of_ranks_that_does_not_fit_is_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
