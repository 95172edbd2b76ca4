/* SPDX-License-Identifier: Apache-2.0 */
/* Whether the way of sharing GPUs that the configuration asks for is to be had on this machine. Touches no GPU. */
#ifndef MOKD_SHARING_H
#define MOKD_SHARING_H

#include "config.h"
#include "error.h"

/* 0, or -MOK_ESHARING with the sentence: no MPS control daemon answers where it should. */
int mokd_sharing_check(const struct mokd_config *config, struct mokd_error *error);

#endif
