/* SPDX-License-Identifier: Apache-2.0 */
#include "inherited.h"

#include <stdlib.h>
#include <string.h>

#include <systemd/sd-daemon.h>

#include "mok/types.h"
#include "util.h"

int mokd_inherited_load(struct mokd_inherited *ret)
{
    char **names = NULL;

    *ret = (struct mokd_inherited){ 0 };
    int n = sd_listen_fds_with_names(1, &names);
    if (n <= 0) {
        free(names);
        return n < 0 ? -MOK_EIO : 0;
    }
    ret->list = calloc((size_t)n, sizeof(*ret->list));
    for (int i = 0; i < n; i++) {
        if (!ret->list) {
            mok_close(SD_LISTEN_FDS_START + i);
            free(names[i]);
            continue;
        }
        ret->list[i] = (struct mokd_inherited_fd){ .fd = SD_LISTEN_FDS_START + i, .name = names[i] };
        ret->count++;
    }
    free(names);
    return ret->list ? 0 : -MOK_ENOMEM;
}

int mokd_inherited_take(struct mokd_inherited *inherited, const char *name)
{
    for (size_t i = 0; i < inherited->count; i++)
        if (inherited->list[i].fd >= 0 && strcmp(inherited->list[i].name, name) == 0)
            return mok_take_fd(&inherited->list[i].fd);
    return -1;
}

void mokd_inherited_release(struct mokd_inherited *inherited)
{
    for (size_t i = 0; i < inherited->count; i++) {
        mok_close(inherited->list[i].fd);
        free(inherited->list[i].name);
    }
    free(inherited->list);
    *inherited = (struct mokd_inherited){ 0 };
}
