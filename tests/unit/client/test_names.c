/* SPDX-License-Identifier: Apache-2.0 */
/* Names of precisions, types and kinds of devices, to values and back, as a program that links libmok sees them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "mok/mok.h"

struct kind_of_name {
    const char *(*name)(uint32_t value);
    int (*from_name)(const char *name, uint32_t *ret_value);
    const char *const *names; /* of the values from 1 on; ends with NULL */
    const char *list;
};

static const struct kind_of_name kinds[] = {
    { mok_precision_name, mok_precision_from_name,
      (const char *const[]){ [MOK_BF16 - 1] = "bf16",
                             [MOK_MXFP8_PER32 - 1] = "mxfp8-per32",
                             [MOK_MXFP8_PER128 - 1] = "mxfp8-per128",
                             [MOK_MXFP8_PER128] = NULL },
      "bf16, mxfp8-per32, mxfp8-per128" },
    { mok_wgrad_name, mok_wgrad_from_name,
      (const char *const[]){ [MOK_WGRAD_BF16 - 1] = "bf16", [MOK_WGRAD_MXFP8 - 1] = "mxfp8", [MOK_WGRAD_MXFP8] = NULL },
      "bf16, mxfp8" },
    { mok_dtype_name, mok_dtype_from_name,
      (const char *const[]){ [MOK_DTYPE_BF16 - 1] = "bf16", [MOK_DTYPE_F32 - 1] = "f32", [MOK_DTYPE_F32] = NULL },
      "bf16, f32" },
    { mok_device_kind_name, mok_device_kind_from_name,
      (const char *const[]){ [MOK_DEVICE_HOST - 1] = "host", [MOK_DEVICE_CUDA - 1] = "cuda", [MOK_DEVICE_CUDA] = NULL },
      "host, cuda" },
};
#define KINDS (sizeof(kinds) / sizeof(kinds[0]))

static void every_value_has_a_name_that_leads_back_to_it(void **state)
{
    (void)state;
    for (size_t k = 0; k < KINDS; k++) {
        for (uint32_t value = 1; kinds[k].names[value - 1]; value++) {
            uint32_t found = 0;
            assert_string_equal(kinds[k].name(value), kinds[k].names[value - 1]);
            assert_int_equal(kinds[k].from_name(kinds[k].names[value - 1], &found), 0);
            assert_int_equal(found, value);
        }
    }
}

static void a_value_that_is_none_has_no_name(void **state)
{
    (void)state;
    for (size_t k = 0; k < KINDS; k++) {
        uint32_t beyond = 1;
        while (kinds[k].names[beyond - 1])
            beyond++;
        assert_string_equal(kinds[k].name(0), "?");
        assert_string_equal(kinds[k].name(beyond), "?");
        assert_string_equal(kinds[k].name(UINT32_MAX), "?");
    }
}

static void a_name_that_is_none_is_refused_with_those_that_are_and_writes_nothing(void **state)
{
    static const char *const none[] = { "", "?", "BF16", "bf16 ", "fp4", "mxfp8-per64", "hos" };
    (void)state;
    for (size_t k = 0; k < KINDS; k++) {
        for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
            uint32_t found = 77;
            assert_int_equal(kinds[k].from_name(none[i], &found), -MOK_EARG);
            assert_int_equal(found, 77);
            assert_non_null(strstr(mok_last_error(), kinds[k].list));
        }
    }
    uint32_t found;
    assert_int_equal(mok_precision_from_name("fp4\n", &found), -MOK_EARG);
    assert_string_equal(mok_last_error(),
                        "precision is \"fp4?\", must be one of bf16, mxfp8-per32, mxfp8-per128"); /* one line */
}

static void null_is_refused(void **state)
{
    uint32_t found = 77;
    (void)state;
    for (size_t k = 0; k < KINDS; k++) {
        assert_int_equal(kinds[k].from_name(NULL, &found), -MOK_EARG);
        assert_int_equal(kinds[k].from_name("bf16", NULL), -MOK_EARG);
    }
    assert_int_equal(found, 77);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_value_has_a_name_that_leads_back_to_it),
        cmocka_unit_test(a_value_that_is_none_has_no_name),
        cmocka_unit_test(a_name_that_is_none_is_refused_with_those_that_are_and_writes_nothing),
        cmocka_unit_test(null_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
