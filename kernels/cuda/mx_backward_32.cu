/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backward of MXFP8 layers that have a scale for each 32 values: mx_backward.cu, whose products are promoted four times as often.
 */
#define MOK_MX_SCALE 32
#include "mx_backward.cu"
