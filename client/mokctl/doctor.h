/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mokctl doctor: looks at everything that MoK stands on, and says of each thing whether it is well, what it is for, and
 * what to do. Changes nothing, needs no mokd, and waits for nothing longer than two seconds.
 */
#ifndef MOKCTL_DOCTOR_H
#define MOKCTL_DOCTOR_H

#include "command.h"
#include "util.h"

#define DOCTOR_PATIENCE_MS 2000

enum doctor_verdict {
    DOCTOR_OK,
    DOCTOR_NONE, /* of no matter here */
    DOCTOR_WARN, /* works, but not as well as it could */
    DOCTOR_FAIL, /* something will not work */
};

struct doctor_finding {
    const char *name;
    enum doctor_verdict verdict;
    char text[400];
    char remedy[300]; /* "": nothing is to be done */
};

#define DOCTOR_FINDINGS 64

struct doctor {
    const char *socket; /* as asked for; NULL: the default */
    const char *config;
    struct control *control;
    struct control_answer hello, status; /* reply NULL: mokd does not say */
    struct doctor_finding finding[DOCTOR_FINDINGS];
    size_t count;
};

/* Does all of it. Give it back with doctor_release. */
void doctor_examine(const struct mokctl_line *line, struct doctor *ret);
void doctor_release(struct doctor *doctor);
enum doctor_verdict doctor_worst(const struct doctor *doctor);
cJSON *doctor_json(const struct doctor *doctor);

/* `remedy` may be NULL. */
void doctor_say(struct doctor *doctor, const char *name, enum doctor_verdict verdict, const char *remedy,
                const char *format, ...) _printf_(5, 6);
/* Of mokd's devices; of those in the configuration where mokd does not answer. */
bool doctor_has_gpu_devices(const struct doctor *doctor);
const Mok__StatusReply *doctor_status(const struct doctor *doctor); /* NULL: there is none */
/* The file that --config names, or that mokd says it reads, or the usual one. */
const char *doctor_config(const struct doctor *doctor);
/* The first line of a file, without its end; false: cannot be read. */
bool doctor_read_line(const char *path, char *ret, size_t size);
/*
 * What a program, or a function in a process of its own, writes to its standard output, until it ends or the patience
 * does. The length; -1: it did not end in time, and was killed; -2: it could not be run, or failed.
 */
int doctor_ask_program(const char *const *argv, char *ret, size_t size);
int doctor_ask_child(void (*function)(void), char *ret, size_t size);

/* The parts. */
void doctor_daemon(struct doctor *doctor);
void doctor_machine(struct doctor *doctor);
void doctor_gpu(struct doctor *doctor);

#endif
