/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Texts of a message that is still packed. Trusts nothing: the bytes are a stranger's, and nobody has looked at them
 * yet.
 */
#ifndef MOK_PACKED_TEXT_H
#define MOK_PACKED_TEXT_H

#include <stddef.h>
#include <stdint.h>

#include <protobuf-c/protobuf-c.h>

/*
 * Unpacked, a text ends at its first NUL: "admin\0x" would be taken for "admin". Each NUL inside a text becomes DEL,
 * which is part of no name and is shown to nobody. What is malformed stays as it is, for whoever unpacks it to refuse.
 */
void mok_packed_text_mend(const ProtobufCMessageDescriptor *type, uint8_t *bytes, size_t size);

#endif
