/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether there are GPUs to look after: mokd says it of its devices, and where none answers, its configuration does.
 * Finds no fault with the file: that is mokd --check-config's.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <ini.h>

#include "doctor.h"
#include "mok/types.h"
#include "names.h"

static bool status_has_gpu(const Mok__StatusReply *status)
{
    for (size_t i = 0; i < status->n_device; i++)
        if (status->device[i]->kind == MOK_DEVICE_CUDA)
            return true;
    return false;
}

/* inih's handler: one key = value. */
static int take_key(void *cookie, const char *section, const char *key, const char *value)
{
    bool *found = cookie;

    if (strncmp(section, "device ", 7) == 0 && strcmp(key, "kind") == 0 && value)
        *found = *found || mok_word_find(&mok_device_kinds, value) == MOK_DEVICE_CUDA;
    return 1;
}

/* Regular files alone, as mokd has it, and without waiting: opening a pipe would, for who writes to it. */
static FILE *open_regular(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat about;

    if (fd < 0)
        return NULL;
    FILE *file = fstat(fd, &about) == 0 && S_ISREG(about.st_mode) ? fdopen(fd, "r") : NULL;
    if (!file)
        mok_close(fd);
    return file;
}

/* A file that cannot be read has none; that it cannot is said where the file is looked at. */
static bool file_has_gpu(const char *path)
{
    bool found = false;
    FILE *file = open_regular(path);

    if (!file)
        return false;
    ini_parse_file(file, take_key, &found);
    fclose(file);
    return found;
}

bool doctor_has_gpu_devices(const struct doctor *doctor)
{
    const Mok__StatusReply *status = doctor_status(doctor);

    return status ? status_has_gpu(status) : file_has_gpu(doctor_config(doctor));
}
