/* SPDX-License-Identifier: Apache-2.0 */
/* A client's own kernel, for tests beside which operations run. */
#ifndef MOK_TEST_BUSY_H
#define MOK_TEST_BUSY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* `blocks` blocks that run for `ns`, on a cudaStream_t. 0 or a cudaError_t. */
int busy_launch(uint32_t blocks, uint64_t ns, void *stream);

#ifdef __cplusplus
}
#endif
#endif
