/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who may connect: answers the questions that libzmq asks (ZAP) before it lets a handshake end. Only CURVE, only our
 * domain, only keys of the inventory. The user id that it gives to a connection is its key, so that every message says
 * whose it is.
 */
#ifndef MOK_RACK_ZAP_H
#define MOK_RACK_ZAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "rack.h"
#include "rack_key.h"

#define RACK_ZAP_ENDPOINT "inproc://zeromq.zap.01"
#define RACK_ZAP_DOMAIN "mok-rack"
#define RACK_ZAP_FRAMES 7u
#define RACK_USER_ID_MAX MOK_RACK_KEY_TEXT

typedef bool (*rack_zap_allow)(void *cookie, const uint8_t public_key[static RACK_KEY_BYTES]);

struct rack_zap_frame {
    const void *data;
    size_t size;
};

struct rack_zap_answer {
    const char *status; /* "200", "400" or "500" */
    const char *text;
    char user_id[RACK_USER_ID_MAX]; /* "" unless 200 */
};

/* The decision alone. False: the request is none, and gets no answer. */
bool rack_zap_decide(const struct rack_zap_frame *frames, size_t count, rack_zap_allow allow, void *cookie,
                     struct rack_zap_answer *ret);

/*
 * Answers all that wait on the REP socket; returns how many keys were refused. `last_refused`, RACK_MAX_ADDRESS + 1
 * bytes, gets the address of the last of them, and stays as it was if there was none.
 */
size_t rack_zap_serve(void *socket, rack_zap_allow allow, void *cookie, char *last_refused);

#endif
