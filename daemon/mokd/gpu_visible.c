/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu_visible.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UUID_DIGITS 36 /* 8-4-4-4-12 */

/* "GPU-" and hexadecimal digits; a GPU that nobody has used since the driver was loaded may have question marks. */
static bool is_uuid(const char *text)
{
    return strncmp(text, "GPU-", 4) == 0 && strspn(text + 4, "0123456789abcdefABCDEF-") == UUID_DIGITS &&
           text[4 + UUID_DIGITS] == '\0';
}

static bool uuid_in(const char *path, char ret[MOKD_GPU_VISIBLE_MAX])
{
    char line[256], uuid[MOKD_GPU_VISIBLE_MAX];
    bool found = false;
    FILE *file = fopen(path, "re");

    while (file && !found && fgets(line, sizeof(line), file))
        found = sscanf(line, "GPU UUID: %63s", uuid) == 1 && is_uuid(uuid);
    if (file)
        fclose(file);
    if (found)
        memcpy(ret, uuid, sizeof(uuid));
    return found;
}

static int is_gpu(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

/* The driver's folders go by PCI addresses, whose order is that of the numbers. */
static bool uuid_of(const char *root, uint32_t number, char ret[MOKD_GPU_VISIBLE_MAX])
{
    char folder[512], path[1024];
    struct dirent **gpus = NULL;
    bool found = false;

    snprintf(folder, sizeof(folder), "%s/proc/driver/nvidia/gpus", root);
    int count = scandir(folder, &gpus, is_gpu, alphasort);
    if (count > 0 && number < (uint32_t)count) {
        snprintf(path, sizeof(path), "%s/%s/information", folder, gpus[number]->d_name);
        found = uuid_in(path, ret);
    }
    for (int i = 0; i < count; i++)
        free(gpus[i]);
    free(gpus);
    return found;
}

/*
 * A control daemon that serves one GPU shows it as number 0, whichever it is of the machine, and nothing to a client
 * that asks for another number. Ours serve one each. How many a site's serves nobody says, but by its UUID a GPU is
 * found under each.
 */
void mokd_gpu_visible(const struct mokd_config *config, const struct mokd_device_config *device, const char *root,
                      char ret[MOKD_GPU_VISIBLE_MAX])
{
    bool mps = config->sharing == MOKD_SHARING_MPS;

    if (device->kind != MOK_DEVICE_CUDA)
        ret[0] = '\0';
    else if (mps && config->mps == MOKD_MPS_OWN)
        snprintf(ret, MOKD_GPU_VISIBLE_MAX, "0");
    else if (!mps || !uuid_of(root, device->cuda, ret))
        snprintf(ret, MOKD_GPU_VISIBLE_MAX, "%" PRIu32, device->cuda);
}
