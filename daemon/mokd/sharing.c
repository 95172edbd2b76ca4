/* SPDX-License-Identifier: Apache-2.0 */
#include "sharing.h"

#include <string.h>

#include "mps_control.h"

static int check_directory(const char *directory, struct mokd_error *error)
{
    int reason = directory[0] ? mok_mps_answers(directory) : 0;

    if (reason == 0)
        return 0;
    return mokd_error_set(error, -MOK_ESHARING,
                          "sharing = mps: no MPS control daemon answers in mps_pipe = %s (%s); start one there with "
                          "nvidia-cuda-mps-control -d, or set sharing = slices",
                          directory, strerror(reason));
}

int mokd_sharing_check(const struct mokd_config *config, struct mokd_error *error)
{
    if (config->sharing != MOKD_SHARING_MPS || config->mps == MOKD_MPS_OWN)
        return 0;
    int r = check_directory(config->mps_pipe, error);
    for (size_t i = 0; r == 0 && i < config->n_devices; i++)
        r = check_directory(config->devices[i].mps_pipe, error);
    return r;
}
