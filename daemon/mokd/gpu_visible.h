/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What CUDA_VISIBLE_DEVICES of a device's worker says, so that it sees its own GPU and no other, under an MPS control
 * daemon, too. Starts no CUDA.
 */
#ifndef MOKD_GPU_VISIBLE_H
#define MOKD_GPU_VISIBLE_H

#include "config.h"

#define MOKD_GPU_VISIBLE_MAX 64

/* `root`: "" but for tests. */
void mokd_gpu_visible(const struct mokd_config *config, const struct mokd_device_config *device, const char *root,
                      char ret[MOKD_GPU_VISIBLE_MAX]);

#endif
