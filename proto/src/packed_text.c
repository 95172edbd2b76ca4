/* SPDX-License-Identifier: Apache-2.0 */
#include "packed_text.h"

#include <stdbool.h>
#include <string.h>

#define DEL 0x7f

enum wire_type { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_LENGTH = 2, WIRE_32 = 5 };

struct span {
    uint8_t *at, *end;
};

static bool take(struct span *from, uint64_t bytes, struct span *ret)
{
    if (bytes > (uint64_t)(from->end - from->at))
        return false;
    *ret = (struct span){ from->at, from->at + bytes };
    from->at += bytes;
    return true;
}

static bool take_varint(struct span *from, uint64_t *ret)
{
    uint64_t value = 0;

    for (unsigned shift = 0; shift < 64 && from->at < from->end; shift += 7) {
        uint8_t byte = *from->at++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80)) {
            *ret = value;
            return true;
        }
    }
    return false;
}

/* The bytes of a field's value; of one with a length, those behind it. */
static bool take_value(struct span *from, unsigned wire_type, struct span *ret)
{
    uint64_t value;

    switch (wire_type) {
    case WIRE_VARINT:
        *ret = (struct span){ from->at, from->at };
        return take_varint(from, &value);
    case WIRE_64:
        return take(from, 8, ret);
    case WIRE_32:
        return take(from, 4, ret);
    case WIRE_LENGTH:
        return take_varint(from, &value) && take(from, value, ret);
    }
    return false;
}

static void mend_text(struct span text)
{
    uint8_t *nul;

    while ((nul = memchr(text.at, 0, (size_t)(text.end - text.at)))) {
        *nul = DEL;
        text.at = nul + 1;
    }
}

void mok_packed_text_mend(const ProtobufCMessageDescriptor *type, uint8_t *bytes, size_t size)
{
    struct span rest = { bytes, bytes + size }, value = { 0 };
    uint64_t tag;

    while (take_varint(&rest, &tag) && take_value(&rest, tag & 7, &value)) {
        const ProtobufCFieldDescriptor *field = protobuf_c_message_descriptor_get_field(type, (unsigned)(tag >> 3));
        if (!field || (tag & 7) != WIRE_LENGTH)
            continue;
        if (field->type == PROTOBUF_C_TYPE_STRING)
            mend_text(value);
        else if (field->type == PROTOBUF_C_TYPE_MESSAGE)
            mok_packed_text_mend(field->descriptor, value.at, (size_t)(value.end - value.at));
    }
}
