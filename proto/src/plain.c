/* SPDX-License-Identifier: Apache-2.0 */
#include "plain.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* ------------------------------------------------------------------ one text */

static size_t announced_length(unsigned char first)
{
    if (first < 0x80)
        return 1;
    if (first >= 0xc2 && first < 0xe0)
        return 2;
    if (first >= 0xe0 && first < 0xf0)
        return 3;
    return first >= 0xf0 && first < 0xf5 ? 4 : 0;
}

/* Bytes of the UTF-8 character that begins here; 0: there is none. The end of the text is part of none. */
static size_t read_character(const char *at, uint32_t *ret)
{
    static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
    unsigned char first = (unsigned char)*at;
    size_t length = announced_length(first);
    uint32_t code = length == 1 ? first : first & (0x7fu >> length);

    for (size_t i = 1; i < length; i++) {
        if (((unsigned char)at[i] & 0xc0) != 0x80)
            return 0;
        code = code << 6 | ((unsigned char)at[i] & 0x3f);
    }
    if (length == 0 || code < least[length] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        return 0;
    *ret = code;
    return length;
}

static bool is_control(uint32_t code)
{
    return code < 0x20 || (code >= 0x7f && code < 0xa0);
}

void mok_plain_text(char *text, const char *kept)
{
    while (*text) {
        uint32_t code = 0;
        size_t length = read_character(text, &code);
        bool stays = length > 0 && (!is_control(code) || (length == 1 && strchr(kept, *text)));
        if (length == 0)
            length = 1;
        if (!stays)
            memset(text, '?', length);
        text += length;
    }
}

/* ------------------------------------------------------------------ all of a message */

static void make_plain(const ProtobufCFieldDescriptor *field, void *value)
{
    if (field->type == PROTOBUF_C_TYPE_STRING && value)
        mok_plain_text(value, "\n");
    else if (field->type == PROTOBUF_C_TYPE_MESSAGE && value)
        mok_plain_message(value);
}

/* Of a oneof only the member that was sent is there. */
static bool is_there(const ProtobufCMessage *message, const ProtobufCFieldDescriptor *field)
{
    const uint32_t *which = (const void *)((const char *)message + field->quantifier_offset);
    return !(field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) || *which == field->id;
}

void mok_plain_message(ProtobufCMessage *message)
{
    for (unsigned i = 0; i < message->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &message->descriptor->fields[i];
        void *member = (char *)message + field->offset;
        bool has_text = field->type == PROTOBUF_C_TYPE_STRING || field->type == PROTOBUF_C_TYPE_MESSAGE;
        if (!has_text || !is_there(message, field))
            continue;
        if (field->label != PROTOBUF_C_LABEL_REPEATED) {
            make_plain(field, *(void **)member);
            continue;
        }
        const size_t *count = (const void *)((const char *)message + field->quantifier_offset);
        for (size_t k = 0; k < *count; k++)
            make_plain(field, (*(void ***)member)[k]);
    }
}
