/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Identities of the log's messages that others may rely on: `journalctl MESSAGE_ID=...`. One never changes and is never
 * used again; deploy/mok.catalog has the same ones with words for people.
 */
#ifndef MOK_DAEMON_MESSAGE_IDS_H
#define MOK_DAEMON_MESSAGE_IDS_H

#include <stddef.h>

struct mok_message_id {
    const char *component, *message; /* as given to mok_log */
    const char *id;                  /* 128 bits in hexadecimal */
};
extern const struct mok_message_id mok_message_ids[];
extern const size_t mok_message_id_count;

/* NULL: the message has none. */
const char *mok_message_id_of(const char *component, const char *message);

#endif
