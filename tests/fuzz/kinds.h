/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages of a kind that a byte chooses among all that there are, around any bytes: so that what is behind the
 * envelopes is reached without the luck of hitting their field numbers.
 */
#ifndef MOK_FUZZ_KINDS_H
#define MOK_FUZZ_KINDS_H

#include <protobuf-c/protobuf-c.h>
#include <stdint.h>
#include <string.h>

#include "util.h"

/* The n-th of the messages that a message can be one of; NULL: there are none. */
static inline const ProtobufCFieldDescriptor *kind_of(const ProtobufCMessageDescriptor *type, uint8_t n)
{
    const ProtobufCFieldDescriptor *kinds[256];
    unsigned count = 0;

    for (unsigned i = 0; i < type->n_fields && count < ARRAY_SIZE(kinds); i++)
        if (type->fields[i].type == PROTOBUF_C_TYPE_MESSAGE && type->fields[i].flags & PROTOBUF_C_FIELD_FLAG_ONEOF)
            kinds[count++] = &type->fields[i];
    return count > 0 ? kinds[n % count] : NULL;
}

static inline size_t put_varint(uint8_t *to, uint64_t value)
{
    size_t n = 0;

    for (; value >= 0x80; value >>= 7)
        to[n++] = (uint8_t)(value | 0x80);
    to[n++] = (uint8_t)value;
    return n;
}

/* Puts a message that holds these bytes, with space before them. Returns where it begins. */
static inline uint8_t *wrap(const ProtobufCFieldDescriptor *kind, uint8_t *bytes, size_t *size)
{
    uint8_t head[20];
    size_t used = put_varint(head, (uint64_t)kind->id << 3 | 2);

    used += put_varint(head + used, *size);
    *size += used;
    return memcpy(bytes - used, head, used);
}

#endif
