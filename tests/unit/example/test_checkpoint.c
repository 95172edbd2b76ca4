/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checkpoint files: what is written is read back bit for bit; everything else is refused and named.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "checkpoint.h"
#include "mok/types.h"

enum { DENSE = 100, EXPERT = 16 * 32, EXPERTS = 4, LAYERS = 2, SECTIONS = 1 + EXPERTS * LAYERS };

struct fixture {
    char folder[64], path[96], temporary[112];
    struct checkpoint_header header;
    float data[SECTIONS][9 * EXPERT]; /* the dense section uses the first 3 * DENSE */
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    if (!f)
        return -1;
    strcpy(f->folder, "/tmp/mok-test-checkpoint-XXXXXX");
    if (!mkdtemp(f->folder))
        return -1;
    snprintf(f->path, sizeof(f->path), "%s/file", f->folder);
    snprintf(f->temporary, sizeof(f->temporary), "%s.tmp", f->path);
    f->header = (struct checkpoint_header){ .hidden = 16,
                                            .intermediate = 32,
                                            .experts = EXPERTS,
                                            .topk = 2,
                                            .layers = LAYERS,
                                            .window = 3,
                                            .seq = 8,
                                            .micro_batches = 1,
                                            .sequences = 4,
                                            .seed = 5,
                                            .text_hash = 77,
                                            .dense_floats = DENSE,
                                            .precision = MOK_MXFP8_PER32,
                                            .wgrad = MOK_WGRAD_BF16,
                                            .step = 12 };
    for (size_t s = 0; s < SECTIONS; s++)
        for (size_t i = 0; i < 9 * EXPERT; i++)
            f->data[s][i] = (float)(s * 100000 + i) / 7;
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    unlink(f->path);
    unlink(f->temporary);
    rmdir(f->folder);
    free(f);
    return 0;
}

/* The tensors of a section inside `data`; returns how many. */
static size_t tensors_of(float *data, uint64_t section, struct adamw_tensor *ret)
{
    size_t count = section == 0 ? DENSE : EXPERT, tensors = section == 0 ? 1 : 3;

    for (size_t i = 0; i < tensors; i++, data += 3 * count)
        ret[i] = (struct adamw_tensor){ data, data + count, data + 2 * count, count };
    return tensors;
}

static void write_sections(struct fixture *f, struct checkpoint *checkpoint, uint64_t from, uint64_t to)
{
    for (uint64_t s = from; s < to; s++) {
        struct adamw_tensor tensors[3];
        size_t count = tensors_of(f->data[s], s, tensors);

        assert_int_equal(checkpoint_write(checkpoint, s, tensors, count), 0);
    }
    assert_int_equal(checkpoint_sync(checkpoint), 0);
}

/* Two writers, as two ranks do. */
static void write_file(struct fixture *f)
{
    struct checkpoint one, two;

    assert_int_equal(checkpoint_create(f->path, &f->header, &one), 0);
    assert_int_equal(checkpoint_join(f->path, &f->header, &two), 0);
    write_sections(f, &one, 0, 5);
    write_sections(f, &two, 5, SECTIONS);
    assert_int_equal(checkpoint_commit(&one), 0);
    checkpoint_close(&one, 1);
    checkpoint_close(&two, 0);
}

static int read_section(struct fixture *f, uint64_t section, float *ret)
{
    struct checkpoint checkpoint;
    struct adamw_tensor tensors[3];
    size_t count = tensors_of(ret, section, tensors);
    int rc = checkpoint_open(f->path, &f->header, &checkpoint);

    assert_int_equal(rc, 0);
    rc = checkpoint_read(&checkpoint, section, tensors, count);
    assert_int_equal(checkpoint.header.step, 12);
    checkpoint_close(&checkpoint, 0);
    return rc;
}

static void what_was_written_is_read_back_bit_for_bit(void **state)
{
    struct fixture *f = *state;
    float got[9 * EXPERT];

    write_file(f);
    for (uint64_t s = 0; s < SECTIONS; s++) {
        assert_int_equal(read_section(f, s, got), 0);
        assert_memory_equal(got, f->data[s], (s == 0 ? 3 * DENSE : 9 * EXPERT) * sizeof(float));
    }
    assert_int_equal(access(f->temporary, F_OK), -1);
}

static void a_file_that_was_not_committed_does_not_replace_the_old_one(void **state)
{
    struct fixture *f = *state;
    struct checkpoint checkpoint;
    float old = f->data[0][0], got[9 * EXPERT];

    write_file(f);
    f->data[0][0] = 12345;
    assert_int_equal(checkpoint_create(f->path, &f->header, &checkpoint), 0);
    write_sections(f, &checkpoint, 0, SECTIONS);
    checkpoint_close(&checkpoint, 1);
    assert_int_equal(read_section(f, 0, got), 0);
    assert_true(got[0] == old);
    assert_int_equal(access(f->temporary, F_OK), -1);
}

static void another_shape_seed_or_text_is_refused(void **state)
{
    struct fixture *f = *state;
    struct checkpoint checkpoint;
    struct checkpoint_header other;

    write_file(f);
#define REFUSED(field)                                                                                                 \
    other = f->header;                                                                                                 \
    other.field++;                                                                                                     \
    assert_int_equal(checkpoint_open(f->path, &other, &checkpoint), -MOK_EMISMATCH)
    REFUSED(hidden);
    REFUSED(intermediate);
    REFUSED(experts);
    REFUSED(topk);
    REFUSED(layers);
    REFUSED(window);
    REFUSED(shared_intermediate);
    REFUSED(seq);
    REFUSED(micro_batches);
    REFUSED(sequences);
    REFUSED(seed);
    REFUSED(text_hash);
    REFUSED(precision); /* per 128: the rule of scales alone */
    REFUSED(wgrad);
#undef REFUSED
    other = f->header;
    other.step = 0;
    assert_int_equal(checkpoint_open(f->path, &other, &checkpoint), 0);
    checkpoint_close(&checkpoint, 0);
}

static void flip_byte(const char *path, long at)
{
    FILE *file = fopen(path, "r+");
    int byte;

    assert_non_null(file);
    fseek(file, at, SEEK_SET);
    byte = fgetc(file);
    fseek(file, at, SEEK_SET);
    fputc(byte ^ 1, file);
    fclose(file);
}

static void a_damaged_header_is_refused(void **state)
{
    struct fixture *f = *state;
    struct checkpoint checkpoint;

    write_file(f);
    flip_byte(f->path, (long)offsetof(struct checkpoint_header, step));
    assert_int_equal(checkpoint_open(f->path, &f->header, &checkpoint), -MOK_EIO);
}

static void a_damaged_section_is_refused_and_the_others_are_not(void **state)
{
    struct fixture *f = *state;
    struct stat st;
    float got[9 * EXPERT];

    write_file(f);
    assert_int_equal(stat(f->path, &st), 0);
    flip_byte(f->path, (long)st.st_size - 1);
    assert_int_equal(read_section(f, SECTIONS - 1, got), -MOK_EIO);
    assert_int_equal(read_section(f, SECTIONS - 2, got), 0);
}

static void a_truncated_or_foreign_or_missing_file_is_refused(void **state)
{
    struct fixture *f = *state;
    struct checkpoint checkpoint;
    struct stat st;

    assert_int_equal(checkpoint_open(f->path, &f->header, &checkpoint), -MOK_EIO);
    write_file(f);
    assert_int_equal(stat(f->path, &st), 0);
    assert_int_equal(truncate(f->path, st.st_size - 1), 0);
    assert_int_equal(checkpoint_open(f->path, &f->header, &checkpoint), -MOK_EIO);
    assert_int_equal(truncate(f->path, 10), 0);
    assert_int_equal(checkpoint_open(f->path, &f->header, &checkpoint), -MOK_EIO);
    assert_int_equal(truncate(f->path, 0), 0);
    assert_int_equal(truncate(f->path, 8192), 0);
    assert_int_equal(checkpoint_open(f->path, &f->header, &checkpoint), -MOK_EIO);
}

static void a_section_of_another_size_is_refused(void **state)
{
    struct fixture *f = *state;
    struct checkpoint checkpoint;
    struct adamw_tensor tensors[3];

    assert_int_equal(checkpoint_create(f->path, &f->header, &checkpoint), 0);
    tensors_of(f->data[1], 1, tensors);
    assert_int_equal(checkpoint_write(&checkpoint, 1, tensors, 2), -MOK_ESIZE);
    assert_int_equal(checkpoint_write(&checkpoint, 0, tensors, 3), -MOK_ESIZE);
    assert_int_equal(checkpoint_write(&checkpoint, SECTIONS, tensors, 3), -MOK_ESIZE);
    checkpoint_close(&checkpoint, 1);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(what_was_written_is_read_back_bit_for_bit),
        TEST(a_file_that_was_not_committed_does_not_replace_the_old_one),
        TEST(another_shape_seed_or_text_is_refused),
        TEST(a_damaged_header_is_refused),
        TEST(a_damaged_section_is_refused_and_the_others_are_not),
        TEST(a_truncated_or_foreign_or_missing_file_is_refused),
        TEST(a_section_of_another_size_is_refused),
    };
#undef TEST

    return cmocka_run_group_tests(tests, NULL, NULL);
}
