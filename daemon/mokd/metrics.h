/* SPDX-License-Identifier: Apache-2.0 */
/* What mokd knows, as metrics for Prometheus and as JSON for the status page. Reads everything, changes nothing. */
#ifndef MOKD_METRICS_H
#define MOKD_METRICS_H

#include <stdbool.h>
#include <stddef.h>

#include "server.h"

/* Two spellings of the same: OpenMetrics 1.0, and the older text format 0.0.4. */
enum mokd_metrics_format { MOKD_OPENMETRICS, MOKD_PROMETHEUS_TEXT };

/* Both: text to be freed with free(), or NULL for want of memory. */
char *mokd_metrics_text(struct mokd_server *server, enum mokd_metrics_format format, size_t *ret_length);
char *mokd_status_json(struct mokd_server *server, size_t *ret_length);

#endif
