/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One life of one mok-worker process: its birth, the requests to it, its death. What follows from a death is
 * device.c's affair. Every request is answered exactly once: by the worker, or by its end, since a worker that does
 * not answer in time is killed. So once an answer is there, nothing of the request is under way any more.
 */
#ifndef MOKD_WORKER_PROCESS_H
#define MOKD_WORKER_PROCESS_H

#include "control.pb-c.h"
#include "error.h"
#include "wire.h"

struct mokd_worker;

/* What came of a request. `reply` and `fds` are NULL when the worker never answered. */
struct mokd_answer {
    int code;
    const char *text;
    const Mok__WorkerReply *reply;
    struct mok_wire_fds *fds; /* that came with it; what the handler does not take is closed */
};
/* May be called before the sending function returns. */
typedef void (*mokd_answer_handler)(void *cookie, uint32_t tag, const struct mokd_answer *answer);

/* Starts `path`; requests may be sent at once. -MOK_EWORKER, -MOK_EFDS, -MOK_ENOMEM. */
int mokd_worker_spawn(struct mokd_device *device, const char *path, struct mokd_worker **ret, struct mokd_error *error);

/* Directory of the MPS that workers of a device run under; "": none. */
const char *mokd_worker_mps_pipe(const struct mokd_config *config, const struct mokd_device_config *device);

/* Sets the request's id. `handler` may be NULL. The descriptors stay the caller's. */
void mokd_worker_send(struct mokd_worker *worker, Mok__WorkerRequest *request, const int *fds, size_t count,
                      uint64_t timeout_ms, mokd_answer_handler handler, void *cookie, uint32_t tag);

/* Nothing is sent any more; mokd_device_worker_gone follows once the process is dead. `reason` is for people. */
void mokd_worker_kill(struct mokd_worker *worker, const char *reason);

/* Looks at the deadlines of the requests; kills a worker that missed one. */
void mokd_worker_check(struct mokd_worker *worker);
/* Since when it has been killed and not yet gone; 0: it has not been. */
uint64_t mokd_worker_doomed_ns(const struct mokd_worker *worker);
bool mokd_worker_has_requests(const struct mokd_worker *worker);
uint32_t mokd_worker_pid(const struct mokd_worker *worker);

/*
 * Gives everyone who still waits the code and the sentence, and the memory back. To be called once, by
 * mokd_device_worker_gone.
 */
void mokd_worker_bury(struct mokd_worker *worker, int code, const char *text);

#endif
