/* SPDX-License-Identifier: Apache-2.0 */
/* Many sessions of one process that each keep many operations of a small layer in flight. */
#ifndef MOK_TEST_CROWD_H
#define MOK_TEST_CROWD_H

#include <stdint.h>

struct crowd {
    const char *socket;
    unsigned sessions, in_flight; /* of each */
    unsigned operations;          /* that each does */
    unsigned devices;             /* sessions take them in turn */
};

struct crowd_result {
    uint64_t done, failed;
    int first_code; /* of those that failed */
    double seconds;
    double p50_ms, p99_ms; /* from submission to completion, as clients see it */
};

/* 0; -1 when a session could not be set up, after saying why. */
int crowd_run(const struct crowd *crowd, struct crowd_result *ret);

#endif
