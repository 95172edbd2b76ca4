/* SPDX-License-Identifier: Apache-2.0 */
#include "memory_bound.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>

/* "max" and what cannot be read bound nothing. */
static uint64_t number_in(const char *path)
{
    char text[64] = "";
    FILE *file = fopen(path, "re");

    if (!file)
        return UINT64_MAX;
    const char *line = fgets(text, sizeof(text), file);
    fclose(file);
    char *end = text;
    uint64_t value = line ? strtoull(text, &end, 10) : 0;
    return end == text ? UINT64_MAX : value;
}

/* The least of the group's limit and those of the groups around it. */
static uint64_t least_limit(const char *hierarchy, char *group, const char *name)
{
    uint64_t least = UINT64_MAX;

    for (;;) {
        char path[4096];
        snprintf(path, sizeof(path), "%s%s/%s", hierarchy, group, name);
        uint64_t limit = number_in(path);
        least = limit < least ? limit : least;
        char *last = strrchr(group, '/');
        if (!last)
            return least;
        *last = '\0';
    }
}

/* A line of /proc/self/cgroup: "0::/path" of version 2, "4:memory:/path" of version 1. */
static uint64_t limit_of_line(const char *root, char *line)
{
    char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
    char hierarchy[1024];

    if (!group)
        return UINT64_MAX;
    *group++ = '\0';
    group[strcspn(group, "\n")] = '\0';
    if (strcmp(group, "/") == 0)
        group[0] = '\0';
    if (line[0] == '0' && controllers == line + 1 && !controllers[1]) {
        snprintf(hierarchy, sizeof(hierarchy), "%s/sys/fs/cgroup", root);
        return least_limit(hierarchy, group, "memory.max");
    }
    if (strcmp(controllers + 1, "memory") != 0)
        return UINT64_MAX;
    snprintf(hierarchy, sizeof(hierarchy), "%s/sys/fs/cgroup/memory", root);
    return least_limit(hierarchy, group, "memory.limit_in_bytes");
}

uint64_t mokd_memory_bound_of_groups(const char *root)
{
    uint64_t least = UINT64_MAX;
    char path[1024], line[4096];

    snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "re");
    if (!file)
        return UINT64_MAX;
    while (fgets(line, sizeof(line), file)) {
        uint64_t limit = limit_of_line(root, line);
        least = limit < least ? limit : least;
    }
    fclose(file);
    return least;
}

uint64_t mokd_memory_bound(int *ret_limited)
{
    struct sysinfo info;
    uint64_t groups = mokd_memory_bound_of_groups("");
    uint64_t machine = sysinfo(&info) < 0 ? 0 : (uint64_t)info.totalram * info.mem_unit;
    int limited = groups < machine || (machine == 0 && groups < UINT64_MAX);

    if (ret_limited)
        *ret_limited = limited;
    return limited ? groups : machine;
}
