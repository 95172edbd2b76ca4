/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOKD_QUOTA_H
#define MOKD_QUOTA_H

#include "session.h"

/* What users and Unix groups have and may have: one's own, or to an administrator anyone's. */
void mokd_quota_query(struct mokd_session *session, uint64_t id, const Mok__QuotaQuery *request);

#endif
