/* SPDX-License-Identifier: Apache-2.0 */
/* Histograms of durations: where a duration falls, and what a quantile says. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "stats.h"

static void every_bucket_ends_where_the_next_begins(void **state)
{
    (void)state;
    assert_int_equal(mok_stats_bucket(0), 0);
    for (unsigned i = 0; i + 1 < MOK_STATS_BUCKETS; i++) {
        assert_int_equal(mok_stats_bucket(mok_stats_bucket_end(i) - 1), i);
        assert_int_equal(mok_stats_bucket(mok_stats_bucket_end(i)), i + 1);
    }
    assert_true(mok_stats_bucket_end(MOK_STATS_BUCKETS - 1) == UINT64_MAX);
    assert_int_equal(mok_stats_bucket(UINT64_MAX), MOK_STATS_BUCKETS - 1);
}

static void powers_of_two_are_borders(void **state)
{
    (void)state;
    for (unsigned bits = MOK_STATS_FIRST_BITS; bits <= MOK_STATS_FIRST_BITS + MOK_STATS_OCTAVES; bits++) {
        uint64_t border = (uint64_t)1 << bits;
        assert_int_equal(mok_stats_bucket(border), mok_stats_bucket(border - 1) + 1);
    }
}

static void a_quantile_is_within_a_quarter_of_the_truth(void **state)
{
    struct mok_stats_histogram histogram = { 0 };

    (void)state;
    for (uint64_t us = 1; us <= 1000; us++)
        mok_stats_record(&histogram, us * 1000);
    assert_int_equal(histogram.count, 1000);
    assert_int_equal(histogram.sum_ns, 500500000);
    for (unsigned percent = 10; percent <= 99; percent++) {
        uint64_t truth = percent * 10000u, told = mok_stats_quantile(&histogram, percent / 100.0);
        assert_in_range(told, truth * 3 / 4, truth * 5 / 4);
    }
}

static void of_nothing_every_quantile_is_zero(void **state)
{
    struct mok_stats_histogram histogram = { 0 };

    (void)state;
    assert_int_equal(mok_stats_quantile(&histogram, 0.99), 0);
}

static void what_is_beyond_the_last_border_counts_as_that(void **state)
{
    struct mok_stats_histogram histogram = { 0 };

    (void)state;
    mok_stats_record(&histogram, UINT64_MAX / 2);
    assert_true(mok_stats_quantile(&histogram, 0.5) == mok_stats_bucket_end(MOK_STATS_BUCKETS - 2));
}

static void a_sum_of_histograms_holds_both(void **state)
{
    struct mok_stats_histogram sum = { 0 }, one = { 0 };

    (void)state;
    mok_stats_record(&one, 5000);
    mok_stats_histogram_add(&sum, &one);
    mok_stats_histogram_add(&sum, &one);
    assert_int_equal(sum.count, 2);
    assert_int_equal(sum.sum_ns, 10000);
    assert_int_equal(sum.bucket[mok_stats_bucket(5000)], 2);
}

static void everything_that_is_counted_has_a_name(void **state)
{
    (void)state;
    for (unsigned i = 0; i < MOK_LATENCIES; i++)
        assert_non_null(mok_latency_text(i));
    assert_null(mok_latency_text(MOK_LATENCIES));
    for (unsigned i = 0; i < MOK_STATS_KINDS; i++)
        assert_non_null(mok_stats_kind_text(i));
    for (unsigned i = 1; i < MOK_STATS_PHASES; i++)
        assert_non_null(mok_stats_phase_text(i));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_bucket_ends_where_the_next_begins),
        cmocka_unit_test(powers_of_two_are_borders),
        cmocka_unit_test(a_quantile_is_within_a_quarter_of_the_truth),
        cmocka_unit_test(of_nothing_every_quantile_is_zero),
        cmocka_unit_test(what_is_beyond_the_last_border_counts_as_that),
        cmocka_unit_test(a_sum_of_histograms_holds_both),
        cmocka_unit_test(everything_that_is_counted_has_a_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
