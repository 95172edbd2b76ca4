/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of mokctl share: what was asked on the command line, and the ways to show mokd's answers. */
#ifndef MOKCTL_H
#define MOKCTL_H

#include <stdbool.h>
#include <stdint.h>

#include "control.pb-c.h"

enum mokctl_part {
    MOKCTL_STATUS, /* everything */
    MOKCTL_DEVICES,
    MOKCTL_JOBS,
    MOKCTL_GROUPS,
    MOKCTL_LAYERS,
};

enum mokctl_action {
    MOKCTL_SHOW,     /* a part of the status */
    MOKCTL_VERSION,
    MOKCTL_EXPLAIN,  /* the plan of a layer that is there */
    MOKCTL_RACK,     /* the nodes of the rack */
    MOKCTL_WOULD_BE, /* the plan of a layer that is not */
};

struct mokctl_arguments {
    enum mokctl_action action;
    enum mokctl_part part;
    const char *socket;
    bool json, help;
    uint32_t layer, rank;
    uint32_t ep, device;
    Mok__LayerSpec spec;
};

/* 0; -1: wrong usage, and stderr says what. */
int mokctl_parse(int argc, char **argv, struct mokctl_arguments *ret);
extern const char mokctl_usage[];

/* Print to stdout. 0; negative: no memory. */
int mokctl_print_table(enum mokctl_part part, const Mok__StatusReply *status);
int mokctl_print_json(enum mokctl_part part, const Mok__StatusReply *status);
struct cJSON *mokctl_status_json(enum mokctl_part part, const Mok__StatusReply *status);
int mokctl_print_version_json(const char *client, const char *daemon, unsigned protocol);
/* `plan` has "what = value (reason)" lines; `memory` NULL: only those. */
int mokctl_print_plan_json(const char *plan, const Mok__LayerMemory *memory);

/* rack.c */
int mokctl_print_rack(const Mok__RackReply *rack);
int mokctl_print_rack_json(const Mok__RackReply *rack);

/* keygen.c: the command by itself, which asks no mokd. The exit code. */
int mokctl_keygen(int argc, char **argv);

const char *mokctl_device_state(unsigned state);

#endif
