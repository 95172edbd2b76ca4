/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text of others, before it reaches a terminal or a log: what is a control character (of ASCII, or U+0080..U+009F,
 * which terminals obey too), or no UTF-8, becomes '?'. Changes nothing else, and never the length.
 */
#ifndef MOK_PLAIN_H
#define MOK_PLAIN_H

#include <protobuf-c/protobuf-c.h>

/* `kept`: characters that stay though they are control characters. */
void mok_plain_text(char *text, const char *kept);
/* All texts of a message that was unpacked, and of the messages in it; ends of lines stay. */
void mok_plain_message(ProtobufCMessage *message);

#endif
