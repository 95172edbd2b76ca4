/* SPDX-License-Identifier: Apache-2.0 */
/* Whether an MPS control daemon is where it should be. Touches no GPU, starts nothing, and never waits. */
#ifndef MOK_MPS_CONTROL_H
#define MOK_MPS_CONTROL_H

/* Somebody reads the pipe, or listens at the socket, that a control daemon has in `directory`: 0, else an errno. */
int mok_mps_answers(const char *directory);

#endif
