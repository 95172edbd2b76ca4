/* SPDX-License-Identifier: Apache-2.0 */
#include "state_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "util.h"

#define MAGIC UINT64_C(0x3154415453444b4d) /* "MKDSTAT1" */
#define PLACES 2u
#define PLACE_BYTES (MOKD_STATE_MAX_BYTES + 4096u)

struct header {
    uint64_t magic;
    uint32_t format;
    uint32_t size;
    uint64_t sequence;
    uint64_t checksum; /* of the fields before it, and of the bytes */
};
_Static_assert(sizeof(struct header) == 32, "the header has no holes");

static uint64_t add(uint64_t hash, const void *bytes, size_t size)
{
    const uint8_t *at = bytes;

    for (size_t i = 0; i < size; i++)
        hash = (hash ^ at[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static uint64_t checksum(const struct header *header, const void *bytes)
{
    return add(add(UINT64_C(0xcbf29ce484222325), header, offsetof(struct header, checksum)), bytes, header->size);
}

static off_t place(uint64_t index)
{
    return (off_t)(index % PLACES * PLACE_BYTES);
}

int mokd_state_file_create(int *ret_fd)
{
    _cleanup_fd_ int fd = memfd_create("mok-state", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd < 0)
        return errno == EMFILE || errno == ENFILE ? -MOK_EFDS : -MOK_ENOMEM;
    if (ftruncate(fd, (off_t)PLACES * PLACE_BYTES) < 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) < 0)
        return -MOK_EIO;
    *ret_fd = mok_take_fd(&fd);
    return 0;
}

/* By pwrite, which reports that there is no memory, where a mapping would kill. */
static bool write_all(int fd, const void *bytes, size_t size, off_t at)
{
    const uint8_t *from = bytes;

    while (size > 0) {
        ssize_t n = pwrite(fd, from, size, at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        from += n;
        at += n;
        size -= (size_t)n;
    }
    return true;
}

static bool read_all(int fd, void *bytes, size_t size, off_t at)
{
    uint8_t *to = bytes;

    while (size > 0) {
        ssize_t n = pread(fd, to, size, at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        to += n;
        at += n;
        size -= (size_t)n;
    }
    return true;
}

/* The header last: until then the place holds what its checksum denies, or the blob before the last. */
int mokd_state_file_write(int fd, uint64_t sequence, const void *bytes, size_t size)
{
    struct header header = {
        .magic = MAGIC, .format = MOKD_STATE_FORMAT, .size = (uint32_t)size, .sequence = sequence
    };

    if (size > MOKD_STATE_MAX_BYTES)
        return -MOK_ESIZE;
    header.checksum = checksum(&header, bytes);
    if (!write_all(fd, bytes, size, place(sequence) + (off_t)sizeof(header)) ||
        !write_all(fd, &header, sizeof(header), place(sequence)))
        return -MOK_ENOMEM;
    return 0;
}

void mokd_state_file_spoil(int fd)
{
    const struct header nothing = { 0 };

    for (uint64_t i = 0; i < PLACES; i++)
        write_all(fd, &nothing, sizeof(nothing), place(i));
}

/* Only what mokd made and sealed; its size is then as it was. */
static bool is_ours(int fd)
{
    struct stat about;
    int seals = fcntl(fd, F_GET_SEALS);

    return seals >= 0 && (seals & F_SEAL_SHRINK) && fstat(fd, &about) == 0 && about.st_size == PLACES * PLACE_BYTES;
}

/* -MOK_ENOENT: empty. */
static int read_place(int fd, uint64_t index, struct header *ret_header, void **ret_bytes)
{
    struct header header;
    _cleanup_free_ void *bytes = NULL;

    if (!read_all(fd, &header, sizeof(header), place(index)))
        return -MOK_EPROTO;
    if (header.magic == 0 && header.sequence == 0)
        return -MOK_ENOENT;
    if (header.magic != MAGIC || header.size > MOKD_STATE_MAX_BYTES)
        return -MOK_EPROTO;
    bytes = malloc(header.size ? header.size : 1);
    if (!bytes)
        return -MOK_ENOMEM;
    if (!read_all(fd, bytes, header.size, place(index) + (off_t)sizeof(header)) ||
        checksum(&header, bytes) != header.checksum)
        return -MOK_EPROTO;
    *ret_header = header;
    *ret_bytes = mok_take_pointer(&bytes);
    return 0;
}

static int nothing_whole(bool damaged, struct mokd_error *error)
{
    if (damaged)
        return mokd_error_set(error, -MOK_EPROTO, "it is damaged: no whole copy is left");
    return mokd_error_set(error, -MOK_ENOENT, "it is empty");
}

int mokd_state_file_read(int fd, void **ret_bytes, size_t *ret_size, uint64_t *ret_sequence, struct mokd_error *error)
{
    struct header best = { 0 };
    _cleanup_free_ void *bytes = NULL;
    bool damaged = false;

    if (!is_ours(fd))
        return mokd_error_set(error, -MOK_EPROTO, "it is no memory that mokd has sealed");
    for (uint64_t i = 0; i < PLACES; i++) {
        struct header header = { 0 };
        void *other = NULL;
        int r = read_place(fd, i, &header, &other);
        if (r == -MOK_ENOMEM)
            return mokd_error_set(error, r, "mokd is out of memory");
        damaged |= r == -MOK_EPROTO;
        if (r < 0)
            continue;
        if (bytes && header.sequence <= best.sequence) {
            free(other);
            continue;
        }
        free(bytes);
        bytes = other;
        best = header;
    }
    if (!bytes)
        return nothing_whole(damaged, error);
    if (best.format != MOKD_STATE_FORMAT)
        return mokd_error_set(error, -MOK_EVERSION, "format %u: this mokd knows %u", best.format, MOKD_STATE_FORMAT);
    *ret_bytes = mok_take_pointer(&bytes);
    *ret_size = best.size;
    *ret_sequence = best.sequence;
    return 0;
}
