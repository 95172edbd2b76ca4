/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mokctl bundle: one archive for a bug report. Versions, status, configuration, log, doctor and hardware; never
 * anything that a layer computes, never a key: no buffer is opened, no key file is read, and all text goes through
 * redact().
 */
#include <archive.h>
#include <archive_entry.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "doctor.h"
#include "error.h"
#include "mok/mok.h"
#include "mokctl.h"
#include "redact.h"

#define LOG_LINES "4000"
#define TEXT_BYTES (2u << 20)

struct bundle {
    struct archive *archive;
    struct doctor *doctor;
    char root[64];   /* the folder in it */
    char list[1024]; /* what went in, for people */
    int code;        /* 0, or why it cannot be written */
};

/* ------------------------------------------------------------------ writing */

static void add_raw(struct bundle *bundle, const char *name, const char *text)
{
    struct archive_entry *entry = archive_entry_new();
    char path[128];
    size_t length = strlen(text);

    if (!entry) {
        bundle->code = client_fail(MOK_ENOMEM, "no memory for the archive");
        return;
    }
    snprintf(path, sizeof(path), "%s/%s", bundle->root, name);
    archive_entry_set_pathname(entry, path);
    archive_entry_set_size(entry, (la_int64_t)length);
    archive_entry_set_filetype(entry, AE_IFREG);
    archive_entry_set_perm(entry, 0600);
    archive_entry_set_mtime(entry, time(NULL), 0);
    if (bundle->code == 0 && (archive_write_header(bundle->archive, entry) != ARCHIVE_OK ||
                              archive_write_data(bundle->archive, text, length) != (la_ssize_t)length))
        bundle->code = client_fail(MOK_EIO, "the archive cannot be written: %s",
                                   archive_error_string(bundle->archive) ? archive_error_string(bundle->archive) : "?");
    archive_entry_free(entry);
}

static void add(struct bundle *bundle, const char *name, const char *text)
{
    _cleanup_free_ char *clean = redact(text);
    size_t used = strlen(bundle->list);

    if (!clean) {
        bundle->code = client_fail(MOK_ENOMEM, "no memory for %s", name);
        return;
    }
    add_raw(bundle, name, clean);
    snprintf(bundle->list + used, sizeof(bundle->list) - used, "  %s\n", name);
}

static void add_json(struct bundle *bundle, const char *name, cJSON *root)
{
    char *text = root ? cJSON_Print(root) : NULL;

    add(bundle, name, text ? text : "{}");
    cJSON_free(text);
    cJSON_Delete(root);
}

/* Any regular file, or one of /proc that says it is empty; the beginning, where it is too large. */
static void add_file(struct bundle *bundle, const char *name, const char *path)
{
    _cleanup_free_ char *text = calloc(1, TEXT_BYTES);
    FILE *file = fopen(path, "re");

    if (file && text)
        text[fread(text, 1, TEXT_BYTES - 1, file)] = '\0';
    else if (text)
        snprintf(text, TEXT_BYTES, "%s: %s\n", path, strerror(errno));
    if (file)
        fclose(file);
    if (text)
        add(bundle, name, text);
}

static void add_said(struct bundle *bundle, const char *name, const char *const *argv)
{
    _cleanup_free_ char *text = calloc(1, TEXT_BYTES);

    if (!text)
        return;
    int length = doctor_ask_program(argv, text, TEXT_BYTES);
    if (length == -1)
        strcat(text + strlen(text), "\n(cut: it took longer than two seconds)\n");
    else if (length < 0 && !text[0])
        snprintf(text, TEXT_BYTES, "%s cannot be run here, or says nothing\n", argv[0]);
    add(bundle, name, text);
}

/* ------------------------------------------------------------------ what goes in */

static void add_versions(struct bundle *bundle)
{
    const struct doctor *doctor = bundle->doctor;
    cJSON *root = cJSON_CreateObject();
    struct utsname name;

    cJSON_AddStringToObject(root, "mokctl", mok_version());
    if (doctor->hello.reply) {
        cJSON_AddStringToObject(root, "mokd", doctor->hello.reply->hello->daemon_version);
        mokctl_json_number(root, "protocol", doctor->hello.reply->hello->protocol);
    }
    if (uname(&name) == 0) {
        cJSON_AddStringToObject(root, "kernel", name.release);
        cJSON_AddStringToObject(root, "machine", name.machine);
    }
    add_json(bundle, "versions.json", root);
}

static void add_mokd(struct bundle *bundle)
{
    const Mok__StatusReply *status = doctor_status(bundle->doctor);
    char path[64];

    if (!status)
        return;
    add_json(bundle, "status.json", mokctl_status_json(MOKCTL_STATUS, status));
    snprintf(path, sizeof(path), "/proc/%u/limits", status->pid);
    add_file(bundle, "mokd-limits.txt", path);
    snprintf(path, sizeof(path), "/proc/%u/status", status->pid);
    add_file(bundle, "mokd-process.txt", path);
}

static void add_hardware(struct bundle *bundle)
{
    static const char *const lscpu[] = { "lscpu", NULL }, *const gpus[] = { "nvidia-smi", NULL };

    add_said(bundle, "cpu.txt", lscpu);
    add_file(bundle, "memory.txt", "/proc/meminfo");
    add_file(bundle, "os.txt", "/etc/os-release");
    add_file(bundle, "driver.txt", "/proc/driver/nvidia/version");
    add_said(bundle, "gpus.txt", gpus);
}

static void add_all(struct bundle *bundle)
{
    static const char *const journal[] = { "journalctl", "-u", "mokd.service", "-n", LOG_LINES,
                                           "--no-pager", "-o", "short-iso",    NULL };
    static const char *const unit[] = { "systemctl", "cat", "mokd.service", "mokd.socket", "--no-pager", NULL };

    add_versions(bundle);
    add_json(bundle, "doctor.json", doctor_json(bundle->doctor));
    add_mokd(bundle);
    add_file(bundle, "mokd.conf", doctor_config(bundle->doctor));
    add_said(bundle, "log.txt", journal);
    add_said(bundle, "unit.txt", unit);
    add_hardware(bundle);
}

/* ------------------------------------------------------------------ the file */

static bool ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), n = strlen(end);
    return length >= n && strcmp(text + length - n, end) == 0;
}

static int open_file(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);

    if (fd < 0)
        client_fail(errno == EEXIST ? MOK_EEXIST : MOK_EIO, "--out %s: %s", path, strerror(errno));
    return fd < 0 ? (errno == EEXIST ? -MOK_EEXIST : -MOK_EIO) : fd;
}

static int write_bundle(struct bundle *bundle, int fd, const char *path)
{
    bundle->archive = archive_write_new();
    if (!bundle->archive)
        return client_fail(MOK_ENOMEM, "no memory for the archive");
    archive_write_set_format_pax_restricted(bundle->archive);
    if (ends_with(path, ".gz") || ends_with(path, ".tgz"))
        archive_write_add_filter_gzip(bundle->archive);
    if (archive_write_open_fd(bundle->archive, fd) != ARCHIVE_OK)
        bundle->code = client_fail(MOK_EIO, "--out %s: %s", path, archive_error_string(bundle->archive));
    else
        add_all(bundle);
    if (archive_write_close(bundle->archive) != ARCHIVE_OK && bundle->code == 0)
        bundle->code = client_fail(MOK_EIO, "--out %s: %s", path, archive_error_string(bundle->archive));
    archive_write_free(bundle->archive);
    return bundle->code;
}

int mokctl_bundle(struct mokctl_line *line)
{
    struct bundle bundle = { .code = 0 };
    struct doctor doctor;

    if (!line->out) {
        fprintf(stderr, "mokctl: bundle needs --out FILE, a name that ends in .tar or .tar.gz\n");
        return EXIT_USAGE;
    }
    int fd = open_file(line->out);
    if (fd < 0)
        return fd;
    time_t now = time(NULL);
    struct tm parts;
    strftime(bundle.root, sizeof(bundle.root), "mok-%Y%m%d-%H%M%S", gmtime_r(&now, &parts));
    doctor_examine(line, &doctor);
    bundle.doctor = &doctor;
    int r = write_bundle(&bundle, fd, line->out);
    doctor_release(&doctor);
    mok_close(fd);
    if (r < 0) {
        unlink(line->out);
        return r;
    }
    printf("%s has:\n%sKeys, tokens and passwords were taken out as far as they look like it; names of users, jobs and "
           "machines are in it. Look through it before you send it.\n",
           line->out, bundle.list);
    return 0;
}
