/* SPDX-License-Identifier: Apache-2.0 */
/* Answers StatsQuery: the sums behind `mokctl top`. Reads everything, changes nothing. */
#ifndef MOKD_STATS_REPLY_H
#define MOKD_STATS_REPLY_H

#include "session.h"

void mokd_stats_query(struct mokd_session *session, uint64_t id);

#endif
