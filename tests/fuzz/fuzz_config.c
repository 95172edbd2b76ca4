/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as mokd's configuration: taken without a complaint and within bounds, or refused with at least one
 * sentence, each of a line that tells a terminal nothing to do.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "config.h"
#include "util.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool condition)
{
    if (!condition)
        abort();
}

static void read_complaint(void *cookie, const char *sentence)
{
    unsigned *complaints = cookie;

    must(sentence[0] != '\0');
    for (const char *c = sentence; *c; c++)
        must((unsigned char)*c >= 0x20 && *c != 0x7f);
    ++*complaints;
}

static void must_be_a_string(const char *text, size_t size)
{
    must(memchr(text, '\0', size) != NULL);
}

static void look_at(const struct mokd_config *config)
{
    must(config->n_devices >= 1 && config->n_devices <= MOK_MAX_DEVICES);
    must(config->limits.weight >= 1 && config->limits.queue_entries >= 4);
    must_be_a_string(config->socket, sizeof(config->socket));
    must_be_a_string(config->worker, sizeof(config->worker));
    must_be_a_string(config->mps_pipe, sizeof(config->mps_pipe));
    for (size_t i = 0; i < config->n_devices; i++) {
        must_be_a_string(config->devices[i].name, sizeof(config->devices[i].name));
        must_be_a_string(config->devices[i].mps_pipe, sizeof(config->devices[i].mps_pipe));
        must(config->devices[i].name[0] != '\0' && config->devices[i].memory > 0);
        for (size_t other = 0; other < i; other++)
            must(strcmp(config->devices[i].name, config->devices[other].name) != 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[64];
    unsigned complaints = 0;
    struct mokd_config config;

    _cleanup_fd_ int fd = memfd_create("conf", MFD_CLOEXEC);
    must(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    int r = mokd_config_load(path, read_complaint, &complaints, &config);
    must((r == 0) == (complaints == 0));
    if (r == 0) {
        look_at(&config);
        mokd_config_release(&config);
    }
    return 0;
}
