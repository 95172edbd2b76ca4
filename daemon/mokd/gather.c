/* SPDX-License-Identifier: Apache-2.0 */
#include "device.h"

/* The count starts at one, for mokd_gather_end, so that answers that come at once do not end it early. */
void mokd_gather_begin(struct mokd_gather *gather, void (*done)(struct mokd_gather *gather))
{
    gather->pending = 1;
    gather->first.code = 0;
    gather->first.text[0] = '\0';
    gather->first_tag = 0;
    gather->done = done;
}

void mokd_gather_hold(struct mokd_gather *gather)
{
    gather->pending++;
}

void mokd_gather_drop(struct mokd_gather *gather, uint32_t tag, const struct mokd_error *error)
{
    if (error && error->code < 0 && gather->first.code == 0) {
        gather->first = *error;
        gather->first_tag = tag;
    }
    if (--gather->pending == 0)
        gather->done(gather);
}

static void answered(void *cookie, uint32_t tag, const struct mokd_answer *answer)
{
    struct mokd_gather *gather = cookie;
    struct mokd_error error;

    mokd_error_set(&error, answer->code, "%s", answer->text);
    mokd_gather_drop(gather, tag, &error);
}

void mokd_gather_send(struct mokd_gather *gather, struct mokd_device *device, Mok__WorkerRequest *request,
                      const int *fds, size_t count, uint64_t timeout_ms, uint32_t tag)
{
    mokd_gather_hold(gather);
    mokd_device_send(device, request, fds, count, timeout_ms, answered, gather, tag);
}

void mokd_gather_end(struct mokd_gather *gather)
{
    mokd_gather_drop(gather, 0, NULL);
}
