/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Commands of mokctl with options of their own, and what such a command needs: its line, a connection, ways to ask and
 * to complain. Those that only look at the status are in arguments.c.
 */
#ifndef MOKCTL_COMMAND_H
#define MOKCTL_COMMAND_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "control.h"

enum exit_code { EXIT_OK = 0, EXIT_REFUSED = 1, EXIT_USAGE = 2, EXIT_UNREACHABLE = 3 };

#define MOKCTL_TIMEOUT_MS 10000u

/* A command line; what was not given is NULL or false. */
struct mokctl_line {
    const char *socket, *argument;
    const char *user, *since, *by, *out, *config, *interval, *seconds;
    bool json, help, all, node, wait, once;
    struct control *control; /* of commands that need mokd */
};

enum mokctl_needs { MOKCTL_NEEDS_MOKD, MOKCTL_NEEDS_NOTHING };

struct mokctl_command {
    const char *name;
    enum mokctl_needs needs;
    const char *options; /* names of those that it takes, beside --json, --socket and --help; separated by spaces */
    const char *argument; /* what its argument is; NULL: it takes none */
    /* 0, an exit code, or -MOK_E* whose sentence is the library's last error. */
    int (*run)(struct mokctl_line *line);
};

/* The command that a command line names, wherever among the options; NULL: none of these. */
const struct mokctl_command *mokctl_command_find(int argc, char **argv);
/* Runs it; the exit code. */
int mokctl_command_run(const struct mokctl_command *command, int argc, char **argv);

/* Connects as an observer; 0 or -MOK_E*, and then *ret_control is still the caller's to close, if it is not NULL. */
int mokctl_connect(const char *socket, unsigned timeout_ms, struct control **ret_control,
                   struct control_answer *ret_hello);
/* Says what went wrong and returns the exit code for it. */
int mokctl_complain(int code, bool connected, const char *socket);
/* The devices of the node. */
int mokctl_ask_devices(struct control *control, struct control_answer *ret);
int mokctl_ask_status(struct control *control, unsigned timeout_ms, struct control_answer *ret);

/* A number of 64 bits, which cJSON itself would round. */
void mokctl_json_number(cJSON *object, const char *name, uint64_t value);
/* Prints and frees. 0, or -MOK_ENOMEM with the sentence. */
int mokctl_json_print(cJSON *root);

/* An option's number in 1..most; -1 after saying what is wrong. */
int mokctl_whole_number(const char *option, const char *text, unsigned most, unsigned *ret);

/* The commands. */
int mokctl_quota(struct mokctl_line *line);
int mokctl_usage_of_jobs(struct mokctl_line *line);
int mokctl_drain(struct mokctl_line *line);
int mokctl_undrain(struct mokctl_line *line);
int mokctl_doctor(struct mokctl_line *line);
int mokctl_bundle(struct mokctl_line *line);
int mokctl_top(struct mokctl_line *line);
int mokctl_trace(struct mokctl_line *line);

#endif
