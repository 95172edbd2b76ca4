/* SPDX-License-Identifier: Apache-2.0 */
#include "passed.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <systemd/sd-daemon.h>

#include "common/log.h"
#include "mok/types.h"

/* One a process, as the environment that it comes from. */
static char **names;
static int *descriptors;
static size_t count;

int mokd_passed_open(void)
{
    int n = sd_listen_fds_with_names(1, &names);

    if (n < 0)
        return -MOK_EIO;
    if (n == 0)
        return 0;
    descriptors = calloc((size_t)n, sizeof(*descriptors));
    if (!descriptors)
        return -MOK_ENOMEM;
    count = (size_t)n;
    for (size_t i = 0; i < count; i++)
        descriptors[i] = SD_LISTEN_FDS_START + (int)i;
    return 0;
}

static int take(const char *text, size_t length, bool whole, char *ret_name, size_t size)
{
    for (size_t i = 0; i < count; i++) {
        if (descriptors[i] < 0 || strncmp(names[i], text, length) != 0 || (whole && names[i][length]))
            continue;
        int fd = descriptors[i];
        descriptors[i] = -1;
        if (ret_name)
            snprintf(ret_name, size, "%s", names[i]);
        return fd;
    }
    return -1;
}

int mokd_passed_take(const char *name)
{
    return take(name, strlen(name), true, NULL, 0);
}

int mokd_passed_take_prefixed(const char *prefix, char *ret_name, size_t size)
{
    return take(prefix, strlen(prefix), false, ret_name, size);
}

void mokd_passed_close(void)
{
    for (size_t i = 0; i < count; i++) {
        if (descriptors[i] >= 0) {
            mok_log(MOK_LOG_WARNING, "server", "descriptor of the service manager not used", "name=%s", names[i]);
            mok_close(descriptors[i]);
        }
        free(names[i]);
    }
    free(names);
    free(descriptors);
    names = NULL;
    descriptors = NULL;
    count = 0;
}
