/* SPDX-License-Identifier: Apache-2.0 */
/* The file that the state is written to: whatever cuts a write off, the blob before it is still whole. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "state_file.h"
#include "util.h"

#define PLACE (MOKD_STATE_MAX_BYTES + 4096u) /* from the start of one blob to that of the other */
#define HEADER 32u

static int new_file(void)
{
    int fd = -1;

    assert_int_equal(mokd_state_file_create(&fd), 0);
    return fd;
}

static int read_code(int fd, struct mokd_error *error)
{
    void *bytes = NULL;
    size_t size = 0;
    uint64_t sequence = 0;
    int r = mokd_state_file_read(fd, &bytes, &size, &sequence, error);

    free(bytes);
    return r;
}

static void expect(int fd, uint64_t sequence, const char *text)
{
    struct mokd_error error = { 0 };
    void *bytes = NULL;
    size_t size = 0;
    uint64_t found = 0;

    assert_int_equal(mokd_state_file_read(fd, &bytes, &size, &found, &error), 0);
    assert_int_equal(found, sequence);
    assert_int_equal(size, strlen(text));
    assert_memory_equal(bytes, text, size);
    free(bytes);
}

static void put(int fd, uint64_t sequence, const char *text)
{
    assert_int_equal(mokd_state_file_write(fd, sequence, text, strlen(text)), 0);
}

static void the_newest_blob_is_read(void **state)
{
    (void)state;
    struct mokd_error error = { 0 };
    _cleanup_fd_ int fd = new_file();

    assert_int_equal(read_code(fd, &error), -MOK_ENOENT);
    put(fd, 1, "one");
    expect(fd, 1, "one");
    put(fd, 2, "two, and longer");
    expect(fd, 2, "two, and longer");
    put(fd, 3, "3");
    expect(fd, 3, "3");
}

static void a_write_that_is_cut_off_anywhere_leaves_the_blob_before(void **state)
{
    (void)state;
    uint8_t whole[HEADER + 5];
    _cleanup_fd_ int other = new_file();

    put(other, 2, "later");
    assert_int_equal(pread(other, whole, sizeof(whole), 0), sizeof(whole)); /* even numbers have the first place */
    for (size_t cut = 0; cut < sizeof(whole); cut++) {
        _cleanup_fd_ int fd = new_file();
        put(fd, 1, "before");
        assert_int_equal(pwrite(fd, whole, cut, 0), cut);
        expect(fd, 1, "before");
    }
}

static void each_flipped_byte_is_noticed(void **state)
{
    (void)state;
    struct mokd_error error = { 0 };

    for (off_t at = 0; at < (off_t)(HEADER + 4); at++) {
        _cleanup_fd_ int fd = new_file();
        uint8_t byte;
        put(fd, 2, "text");
        assert_int_equal(pread(fd, &byte, 1, at), 1);
        byte ^= 0x40;
        assert_int_equal(pwrite(fd, &byte, 1, at), 1);
        assert_int_equal(read_code(fd, &error), -MOK_EPROTO);
        put(fd, 3, "next");
        expect(fd, 3, "next");
    }
}

static uint64_t hash(uint64_t seed, const uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        seed = (seed ^ bytes[i]) * UINT64_C(0x100000001b3);
    return seed;
}

static void another_format_is_named(void **state)
{
    (void)state;
    struct mokd_error error = { 0 };
    uint8_t header[HEADER];
    uint32_t format = MOKD_STATE_FORMAT + 1;
    _cleanup_fd_ int fd = new_file();

    put(fd, 2, "text");
    assert_int_equal(pread(fd, header, sizeof(header), 0), sizeof(header));
    memcpy(header + 8, &format, sizeof(format));
    uint64_t sum = hash(hash(UINT64_C(0xcbf29ce484222325), header, 24), (const uint8_t *)"text", 4);
    memcpy(header + 24, &sum, sizeof(sum));
    assert_int_equal(pwrite(fd, header, sizeof(header), 0), sizeof(header));
    assert_int_equal(read_code(fd, &error), -MOK_EVERSION);
    assert_non_null(strstr(error.text, "format 2: this mokd knows 1"));
}

static void a_spoilt_file_is_empty(void **state)
{
    (void)state;
    struct mokd_error error = { 0 };
    _cleanup_fd_ int fd = new_file();

    put(fd, 1, "one");
    put(fd, 2, "two");
    mokd_state_file_spoil(fd);
    assert_int_equal(read_code(fd, &error), -MOK_ENOENT);
}

static void what_mokd_did_not_make_is_refused(void **state)
{
    (void)state;
    struct mokd_error error = { 0 };
    _cleanup_fd_ int unsealed = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    int pipe_fds[2];

    assert_int_equal(ftruncate(unsealed, 2 * (off_t)PLACE), 0);
    assert_int_equal(read_code(unsealed, &error), -MOK_EPROTO);
    assert_int_equal(pipe(pipe_fds), 0);
    assert_int_equal(read_code(pipe_fds[0], &error), -MOK_EPROTO);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
}

static void a_blob_may_have_its_greatest_size_and_no_more(void **state)
{
    (void)state;
    struct mokd_error error = { 0 };
    _cleanup_free_ char *text = malloc(MOKD_STATE_MAX_BYTES + 1u);
    _cleanup_fd_ int fd = new_file();

    assert_non_null(text);
    memset(text, 'x', MOKD_STATE_MAX_BYTES + 1u);
    assert_int_equal(mokd_state_file_write(fd, 1, text, MOKD_STATE_MAX_BYTES), 0);
    assert_int_equal(mokd_state_file_write(fd, 2, text, MOKD_STATE_MAX_BYTES), 0);
    assert_int_equal(mokd_state_file_write(fd, 3, text, MOKD_STATE_MAX_BYTES + 1u), -MOK_ESIZE);
    assert_int_equal(read_code(fd, &error), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_newest_blob_is_read),
        cmocka_unit_test(a_write_that_is_cut_off_anywhere_leaves_the_blob_before),
        cmocka_unit_test(each_flipped_byte_is_noticed),
        cmocka_unit_test(another_format_is_named),
        cmocka_unit_test(a_spoilt_file_is_empty),
        cmocka_unit_test(what_mokd_did_not_make_is_refused),
        cmocka_unit_test(a_blob_may_have_its_greatest_size_and_no_more),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
