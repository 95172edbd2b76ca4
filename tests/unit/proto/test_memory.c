/* SPDX-License-Identifier: Apache-2.0 */
/* Shared memory: there when it is said to be, of a fixed size, and writable by nobody new once sealed. */
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "memory.h"

#define BYTES (3 * MOK_MEMORY_PAGE)

static void memory_is_zeroed_allocated_and_of_the_size_asked_for(void **state)
{
    (void)state;
    struct stat st;
    void *address;
    int fd;

    assert_int_equal(mok_memory_create("mok-test", BYTES + 100, &fd), 0);
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(st.st_size, BYTES + 100);
    assert_true(st.st_blocks * 512 >= st.st_size);
    assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    assert_int_equal(mok_memory_map(fd, BYTES + 100, MOK_MAP_WRITE | MOK_MAP_POPULATE, &address), 0);
    for (size_t i = 0; i < BYTES + 100; i++)
        assert_int_equal(((uint8_t *)address)[i], 0);
    mok_memory_unmap(address, BYTES + 100);
    mok_memory_unmap(NULL, 1);
    mok_close(fd);
}

static void sizes_that_cannot_be_are_refused(void **state)
{
    (void)state;
    int fd = -7;

    assert_int_equal(mok_memory_create("mok-test", 0, &fd), -MOK_ESIZE);
    assert_int_equal(mok_memory_create("mok-test", UINT64_MAX, &fd), -MOK_ESIZE);
    assert_int_equal(mok_memory_create("mok-test", (uint64_t)1 << 62, &fd), -MOK_ENOMEM);
    assert_int_equal(fd, -7);
    assert_int_equal(mok_memory_round(1), MOK_MEMORY_PAGE);
    assert_int_equal(mok_memory_round(MOK_MEMORY_PAGE), MOK_MEMORY_PAGE);
    assert_int_equal(mok_memory_round(UINT64_MAX), 0);
}

static void nobody_changes_its_size(void **state)
{
    (void)state;
    int fd;

    assert_int_equal(mok_memory_create("mok-test", BYTES, &fd), 0);
    assert_int_equal(ftruncate(fd, 1), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(ftruncate(fd, 2 * BYTES), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
    assert_int_equal(errno, EPERM);
    mok_close(fd);
}

static void mapping_refuses_what_is_too_small_or_could_shrink(void **state)
{
    (void)state;
    void *address = NULL;
    int fd;

    assert_int_equal(mok_memory_create("mok-test", BYTES, &fd), 0);
    assert_int_equal(mok_memory_map(fd, BYTES + 1, MOK_MAP_READ, &address), -MOK_ESIZE);
    assert_int_equal(mok_memory_map(fd, 0, MOK_MAP_READ, &address), -MOK_ESIZE);
    mok_close(fd);
    fd = memfd_create("mok-test-unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, BYTES), 0);
    assert_int_equal(mok_memory_map(fd, BYTES, MOK_MAP_READ, &address), -MOK_EACCESS);
    assert_null(address);
    mok_close(fd);
}

/* Tries every way in that Linux has. Returns the number of the one that worked, 0 when none did. */
static int find_a_way_to_write(int fd)
{
    char path[64];

    if (mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED)
        return 1;
    void *page = mmap(NULL, BYTES, PROT_READ, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return 2;
    if (mprotect(page, BYTES, PROT_READ | PROT_WRITE) == 0)
        return 3;
    if (madvise(page, BYTES, MADV_REMOVE) == 0)
        return 4;
    if (pwrite(fd, "x", 1, 0) >= 0)
        return 5;
    if (ftruncate(fd, 0) == 0 || ftruncate(fd, 2 * BYTES) == 0)
        return 6;
    if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, MOK_MEMORY_PAGE) == 0)
        return 7;
    if (fallocate(fd, 0, 0, 2 * BYTES) == 0)
        return 8;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    chmod(path, 0777);
    int again = open(path, O_RDWR | O_CLOEXEC);
    if (again >= 0) {
        if (mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0) != MAP_FAILED)
            return 9;
        if (pwrite(again, "x", 1, 0) >= 0)
            return 10;
        mok_close(again);
    }
    if (open(path, O_RDWR | O_TRUNC | O_CLOEXEC) >= 0 && *(volatile char *)page != 'm')
        return 11;
    munmap(page, BYTES);
    return 0;
}

static void assert_sealed_against(int fd, uid_t uid)
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        _exit(uid && setresuid(uid, uid, uid) ? 99 : find_a_way_to_write(fd));
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) != 99)
        assert_int_equal(WEXITSTATUS(status), 0);
}

static void after_the_seal_no_process_of_any_user_gets_to_write(void **state)
{
    (void)state;
    void *writable, *readable, *late;
    int fd;

    assert_int_equal(mok_memory_create_open("mok-test", BYTES, &fd), 0);
    assert_int_equal(mok_memory_map(fd, BYTES, MOK_MAP_WRITE, &writable), 0);
    strcpy(writable, "mine");
    assert_int_equal(mok_memory_seal_future_write(fd), 0);
    assert_int_equal(mok_memory_map(fd, BYTES, MOK_MAP_READ, &readable), 0);
    assert_int_equal(mok_memory_map(fd, BYTES, MOK_MAP_WRITE, &late), -MOK_EACCESS);

    assert_sealed_against(fd, 0); /* whoever we are: the same user, perhaps root */
    assert_sealed_against(fd, 65534);

    assert_string_equal(readable, "mine");
    strcpy(writable, "mine still");
    assert_string_equal(readable, "mine still");
    mok_memory_unmap(writable, BYTES);
    mok_memory_unmap(readable, BYTES);
    mok_close(fd);
}

/* Shows that the probe above can find a way in. */
static void before_the_seal_there_is_a_way_to_write(void **state)
{
    (void)state;
    int fd;

    assert_int_equal(mok_memory_create_open("mok-test", BYTES, &fd), 0);
    assert_int_not_equal(find_a_way_to_write(fd), 0);
    mok_close(fd);
}

static void emptied_memory_holds_no_page_though_others_hold_the_file(void **state)
{
    (void)state;
    struct stat st;
    uint8_t *address;
    int fd;

    assert_int_equal(mok_memory_create("mok-test", BYTES + 1, &fd), 0);
    assert_int_equal(mok_memory_map(fd, BYTES + 1, MOK_MAP_WRITE, (void **)&address), 0);
    memset(address, 7, BYTES + 1);
    mok_memory_empty(fd, BYTES + 1);
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(st.st_blocks, 0);
    assert_int_equal(st.st_size, BYTES + 1);
    assert_int_equal(address[BYTES], 0);
    mok_memory_unmap(address, BYTES + 1);
    mok_close(fd);
}

static void creating_and_dropping_a_thousand_times_leaves_nothing(void **state)
{
    (void)state;
    size_t before = count_fds();

    for (int i = 0; i < 1000; i++) {
        void *address;
        int fd;
        assert_int_equal(mok_memory_create("mok-test", BYTES, &fd), 0);
        assert_int_equal(mok_memory_map(fd, BYTES, MOK_MAP_WRITE, &address), 0);
        mok_memory_unmap(address, BYTES);
        mok_close(fd);
    }
    assert_int_equal(count_fds(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_is_zeroed_allocated_and_of_the_size_asked_for),
        cmocka_unit_test(sizes_that_cannot_be_are_refused),
        cmocka_unit_test(nobody_changes_its_size),
        cmocka_unit_test(mapping_refuses_what_is_too_small_or_could_shrink),
        cmocka_unit_test(after_the_seal_no_process_of_any_user_gets_to_write),
        cmocka_unit_test(before_the_seal_there_is_a_way_to_write),
        cmocka_unit_test(emptied_memory_holds_no_page_though_others_hold_the_file),
        cmocka_unit_test(creating_and_dropping_a_thousand_times_leaves_nothing),
    };
    return cmocka_run_group_tests_name("memory", tests, NULL, NULL);
}
