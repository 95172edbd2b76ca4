/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads and writes checkpoint files by offset, so that ranks write their own experts at the same time. Never leaves a
 * half-written file under the final name.
 */
#include "checkpoint.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mok/mok.h"
#include "ops.h"
#include "report.h"

#define TABLE_AT 4096u

static uint64_t sections(const struct checkpoint_header *header)
{
    return 1 + (uint64_t)header->layers * header->experts;
}

/* Floats of a section, moments included. */
static uint64_t section_floats(const struct checkpoint_header *header, uint64_t section)
{
    if (section == 0)
        return 3 * header->dense_floats;
    return 9 * (uint64_t)header->intermediate * header->hidden;
}

static uint64_t section_at(const struct checkpoint_header *header, uint64_t section)
{
    uint64_t at = TABLE_AT + sections(header) * sizeof(uint64_t);

    if (section == 0)
        return at;
    return at + (section_floats(header, 0) + (section - 1) * section_floats(header, 1)) * sizeof(float);
}

static int io_failed(const char *what, const char *path)
{
    return fail(-MOK_EIO, "checkpoint %s: cannot %s: %s", path, what, strerror(errno));
}

static int write_at(struct checkpoint *checkpoint, const void *data, size_t bytes, uint64_t at)
{
    const char *from = data;

    while (bytes > 0) {
        ssize_t done = pwrite(checkpoint->fd, from, bytes, (off_t)at);

        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return io_failed("write", checkpoint->temporary);
        from += done;
        at += (uint64_t)done;
        bytes -= (size_t)done;
    }
    return 0;
}

static int read_at(struct checkpoint *checkpoint, void *data, size_t bytes, uint64_t at)
{
    char *to = data;

    while (bytes > 0) {
        ssize_t done = pread(checkpoint->fd, to, bytes, (off_t)at);

        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return io_failed("read", checkpoint->path);
        if (done == 0)
            return fail(-MOK_EIO, "checkpoint %s: ends at byte %" PRIu64 ", in the middle of its contents",
                        checkpoint->path, at);
        to += done;
        at += (uint64_t)done;
        bytes -= (size_t)done;
    }
    return 0;
}

static uint64_t header_hash(const struct checkpoint_header *header)
{
    struct checkpoint_header copy = *header;

    copy.hash = 0;
    return ops_hash(OPS_HASH_START, &copy, sizeof(copy));
}

static int prepare(const char *path, struct checkpoint *ret)
{
    *ret = (struct checkpoint){ .fd = -1 };
    ret->path = strdup(path);
    if (!ret->path || asprintf(&ret->temporary, "%s.tmp", path) < 0) {
        free(ret->path);
        *ret = (struct checkpoint){ .fd = -1 };
        return fail(-MOK_ENOMEM, "no memory");
    }
    return 0;
}

static int open_temporary(const char *path, const struct checkpoint_header *header, int flags, struct checkpoint *ret)
{
    struct checkpoint checkpoint;
    int rc = prepare(path, &checkpoint);

    if (rc < 0)
        return rc;
    checkpoint.header = *header;
    checkpoint.header.magic = CHECKPOINT_MAGIC;
    checkpoint.header.version = CHECKPOINT_VERSION;
    checkpoint.writing = 1;
    checkpoint.fd = open(checkpoint.temporary, O_RDWR | O_CLOEXEC | flags, 0644);
    if (checkpoint.fd < 0) {
        rc = io_failed("open", checkpoint.temporary);
        checkpoint_close(&checkpoint, 0);
        return rc;
    }
    *ret = checkpoint;
    return 0;
}

int checkpoint_create(const char *path, const struct checkpoint_header *header, struct checkpoint *ret)
{
    struct checkpoint checkpoint;
    int rc = open_temporary(path, header, O_CREAT | O_TRUNC, &checkpoint);

    if (rc < 0)
        return rc;
    /* A full disk shows here, not in the middle of the sections. */
    errno = posix_fallocate(checkpoint.fd, 0, (off_t)section_at(&checkpoint.header, sections(&checkpoint.header)));
    if (errno) {
        rc = io_failed("allocate", checkpoint.temporary);
        checkpoint_close(&checkpoint, 1);
        return rc;
    }
    *ret = checkpoint;
    return 0;
}

int checkpoint_join(const char *path, const struct checkpoint_header *header, struct checkpoint *ret)
{
    return open_temporary(path, header, 0, ret);
}

static uint64_t chain_hash(uint64_t hash, const struct adamw_tensor *tensor)
{
    size_t bytes = tensor->count * sizeof(float);

    hash = ops_hash(hash, tensor->value, bytes);
    hash = ops_hash(hash, tensor->first, bytes);
    return ops_hash(hash, tensor->second, bytes);
}

static int check_section(const struct checkpoint *checkpoint, uint64_t section, const struct adamw_tensor *tensors,
                         size_t count)
{
    uint64_t floats = 0;

    for (size_t i = 0; i < count; i++)
        floats += 3 * tensors[i].count;
    if (section >= sections(&checkpoint->header) || floats != section_floats(&checkpoint->header, section))
        return fail(-MOK_ESIZE, "checkpoint %s: section %" PRIu64 " does not hold %" PRIu64 " floats", checkpoint->path,
                    section, floats);
    return 0;
}

int checkpoint_write(struct checkpoint *checkpoint, uint64_t section, const struct adamw_tensor *tensors, size_t count)
{
    uint64_t hash = OPS_HASH_START, at = section_at(&checkpoint->header, section);
    int rc = check_section(checkpoint, section, tensors, count);

    for (size_t i = 0; i < count && rc == 0; i++) {
        const float *parts[] = { tensors[i].value, tensors[i].first, tensors[i].second };
        size_t bytes = tensors[i].count * sizeof(float);

        hash = chain_hash(hash, &tensors[i]);
        for (size_t p = 0; p < 3 && rc == 0; p++, at += bytes)
            rc = write_at(checkpoint, parts[p], bytes, at);
    }
    if (rc < 0)
        return rc;
    return write_at(checkpoint, &hash, sizeof(hash), TABLE_AT + section * sizeof(hash));
}

int checkpoint_sync(struct checkpoint *checkpoint)
{
    return fsync(checkpoint->fd) < 0 ? io_failed("sync", checkpoint->temporary) : 0;
}

/* The rename itself is on disk once the folder is. */
static int sync_folder(const char *path)
{
    char *copy = strdup(path);
    int fd, rc = 0;

    if (!copy)
        return fail(-MOK_ENOMEM, "no memory");
    fd = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fsync(fd) < 0)
        rc = io_failed("sync the folder of", path);
    if (fd >= 0)
        close(fd);
    free(copy);
    return rc;
}

int checkpoint_commit(struct checkpoint *checkpoint)
{
    int rc;

    checkpoint->header.hash = header_hash(&checkpoint->header);
    rc = write_at(checkpoint, &checkpoint->header, sizeof(checkpoint->header), 0);
    if (rc == 0)
        rc = checkpoint_sync(checkpoint);
    if (rc < 0)
        return rc;
    if (rename(checkpoint->temporary, checkpoint->path) < 0)
        return io_failed("rename to", checkpoint->path);
    checkpoint->writing = 0;
    return sync_folder(checkpoint->path);
}

static int differs(const char *path, const char *field, uint64_t file, uint64_t run)
{
    return fail(-MOK_EMISMATCH, "checkpoint %s: was written with %s %" PRIu64 ", this run has %" PRIu64, path, field,
                file, run);
}

static int differs_by_name(const char *path, const char *field, const char *file, const char *run)
{
    return fail(-MOK_EMISMATCH, "checkpoint %s: was written with %s %s, this run has %s", path, field, file, run);
}

static int compare(const char *path, const struct checkpoint_header *file, const struct checkpoint_header *run)
{
#define SAME(field, name)                                                                                              \
    if (file->field != run->field)                                                                                     \
    return differs(path, name, file->field, run->field)
    SAME(hidden, "--hidden");
    SAME(intermediate, "--intermediate");
    SAME(experts, "--experts");
    SAME(topk, "--topk");
    SAME(layers, "--layers");
    SAME(window, "--window");
    SAME(shared_intermediate, "a shared expert of width");
    SAME(seq, "--seq");
    SAME(micro_batches, "--micro-batches");
    SAME(sequences, "--batch x --ranks");
    SAME(seed, "--seed");
    SAME(dense_floats, "dense parameters");
#undef SAME
    if (file->precision != run->precision)
        return differs_by_name(path, "--precision", mok_precision_name(file->precision),
                               mok_precision_name(run->precision));
    if (file->wgrad != run->wgrad)
        return differs_by_name(path, "--wgrad", mok_wgrad_name(file->wgrad), mok_wgrad_name(run->wgrad));
    if (file->text_hash != run->text_hash)
        return fail(-MOK_EMISMATCH, "checkpoint %s: was written while learning another --text", path);
    return 0;
}

static int check_header(struct checkpoint *checkpoint, const struct checkpoint_header *expected)
{
    const struct checkpoint_header *header = &checkpoint->header;
    struct stat st;
    int rc = read_at(checkpoint, &checkpoint->header, sizeof(checkpoint->header), 0);

    if (rc < 0)
        return rc;
    if (header->magic != CHECKPOINT_MAGIC)
        return fail(-MOK_EIO, "checkpoint %s: not a checkpoint of train_moe_lm", checkpoint->path);
    if (header->version != CHECKPOINT_VERSION)
        return fail(-MOK_EVERSION, "checkpoint %s: version %u, this program reads %u", checkpoint->path,
                    header->version, CHECKPOINT_VERSION);
    if (header->hash != header_hash(header))
        return fail(-MOK_EIO, "checkpoint %s: damaged header", checkpoint->path);
    rc = compare(checkpoint->path, header, expected);
    if (rc < 0)
        return rc;
    if (fstat(checkpoint->fd, &st) < 0)
        return io_failed("stat", checkpoint->path);
    if ((uint64_t)st.st_size != section_at(header, sections(header)))
        return fail(-MOK_EIO, "checkpoint %s: %" PRIu64 " bytes, should be %" PRIu64, checkpoint->path,
                    (uint64_t)st.st_size, section_at(header, sections(header)));
    return 0;
}

int checkpoint_open(const char *path, const struct checkpoint_header *expected, struct checkpoint *ret)
{
    struct checkpoint checkpoint;
    int rc = prepare(path, &checkpoint);

    if (rc < 0)
        return rc;
    checkpoint.fd = open(path, O_RDONLY | O_CLOEXEC);
    rc = checkpoint.fd < 0 ? io_failed("open", path) : check_header(&checkpoint, expected);
    if (rc < 0) {
        checkpoint_close(&checkpoint, 0);
        return rc;
    }
    *ret = checkpoint;
    return 0;
}

int checkpoint_read(struct checkpoint *checkpoint, uint64_t section, const struct adamw_tensor *tensors, size_t count)
{
    uint64_t hash = OPS_HASH_START, written, at = section_at(&checkpoint->header, section);
    int rc = check_section(checkpoint, section, tensors, count);

    for (size_t i = 0; i < count && rc == 0; i++) {
        float *parts[] = { tensors[i].value, tensors[i].first, tensors[i].second };
        size_t bytes = tensors[i].count * sizeof(float);

        for (size_t p = 0; p < 3 && rc == 0; p++, at += bytes)
            rc = read_at(checkpoint, parts[p], bytes, at);
        if (rc == 0)
            hash = chain_hash(hash, &tensors[i]);
    }
    if (rc == 0)
        rc = read_at(checkpoint, &written, sizeof(written), TABLE_AT + section * sizeof(written));
    if (rc < 0)
        return rc;
    if (hash != written)
        return fail(-MOK_EIO, "checkpoint %s: section %" PRIu64 " is damaged", checkpoint->path, section);
    return 0;
}

void checkpoint_close(struct checkpoint *checkpoint, int discard)
{
    if (discard && checkpoint->writing && checkpoint->temporary)
        unlink(checkpoint->temporary);
    if (checkpoint->path && checkpoint->fd >= 0)
        close(checkpoint->fd);
    free(checkpoint->path);
    free(checkpoint->temporary);
    *checkpoint = (struct checkpoint){ .fd = -1 };
}
