/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MPS control daemons of our own (mps = own): one a GPU, in the foreground, a child of mokd with directories of its
 * own. No worker of a GPU starts before its control daemon answers, and all of them go when it does, since their
 * contexts do.
 *
 *   DOWN --start--> STARTING --answers--> UP --ends, or no longer answers--> DOWN, after a pause that grows
 *    +-- a start fails MPS_STARTS times before it was ever up: its devices have failed
 *
 * What is known of the program is what its own client says ("get_server_list"); mokd speaks no protocol of its own to
 * it.
 */
#ifndef MOKD_MPS_H
#define MOKD_MPS_H

#include "error.h"

struct mokd_mps;

/* One for each GPU that the configuration names; none unless mps = own. */
int mokd_mps_start(struct mokd_server *server, struct mokd_mps **ret, struct mokd_error *error);
/* Whether workers of that GPU may start; false: *ret_reason says why not. True without mps = own. */
bool mokd_mps_is_up(const struct mokd_mps *mps, uint32_t cuda, const char **ret_reason);
/* Ends them, at the latest by SIGKILL after two seconds; the memory goes with the loop's last turn. NULL is fine. */
void mokd_mps_close(struct mokd_mps *mps);

#endif
