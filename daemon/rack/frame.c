/* SPDX-License-Identifier: Apache-2.0 */
#include "frame.h"

#include <string.h>

#include "names.h"
#include "util.h"
#include "wire.h"

static const uint8_t magic[4] = { 'M', 'o', 'K', 'r' };

uint32_t rack_version_common(struct rack_versions a, struct rack_versions b)
{
    uint8_t newest = a.max < b.max ? a.max : b.max;
    uint8_t oldest = a.min > b.min ? a.min : b.min;

    return newest >= oldest ? newest : 0;
}

int rack_frame_pack(const struct rack_head *head, const Mok__RackFrame *frame, uint8_t **ret_bytes, size_t *ret_size)
{
    size_t size = protobuf_c_message_get_packed_size(&frame->base);

    if (size > RACK_MAX_BYTES - RACK_HEAD_BYTES)
        return -MOK_ESIZE;
    uint8_t *bytes = malloc(RACK_HEAD_BYTES + size);
    if (!bytes)
        return -MOK_ENOMEM;
    memcpy(bytes, magic, sizeof(magic));
    bytes[4] = head->version;
    bytes[5] = head->speaks.min;
    bytes[6] = head->speaks.max;
    bytes[7] = 0;
    protobuf_c_message_pack(&frame->base, bytes + RACK_HEAD_BYTES);
    *ret_bytes = bytes;
    *ret_size = RACK_HEAD_BYTES + size;
    return 0;
}

static int head_unpack(const uint8_t *bytes, size_t size, struct rack_head *ret)
{
    if (size < RACK_HEAD_BYTES || memcmp(bytes, magic, sizeof(magic)) != 0)
        return -MOK_EPROTO;
    struct rack_head head = { .version = bytes[4], .speaks = { .min = bytes[5], .max = bytes[6] } };
    if (head.speaks.min == 0 || head.speaks.min > head.speaks.max || head.version < head.speaks.min ||
        head.version > head.speaks.max)
        return -MOK_EPROTO;
    *ret = head;
    return 0;
}

static bool hello_is_sane(const Mok__RackHello *hello)
{
    return hello->beat && hello->beat->epoch != 0 && mok_name_is_valid(hello->node) &&
           (!hello->link_domain[0] || mok_name_is_valid(hello->link_domain));
}

/* A frame without a body is a command of a newer mokd: it counts in the sequence, and is nothing to this one. */
static bool is_sane(const Mok__RackFrame *frame)
{
    bool is_hello = frame->body_case == MOK__RACK_FRAME__BODY_HELLO;

    if (frame->sender_boot.len != RACK_BOOT_BYTES)
        return false;
    if (frame->target_boot.len != RACK_BOOT_BYTES && !(is_hello && frame->target_boot.len == 0))
        return false;
    if (is_hello)
        return hello_is_sane(frame->hello);
    return frame->body_case != MOK__RACK_FRAME__BODY_BEAT || frame->beat->epoch != 0;
}

int rack_frame_unpack(struct rack_versions ours, const void *bytes, size_t size, struct rack_head *ret_head,
                      Mok__RackFrame **ret_frame)
{
    const uint8_t *start = bytes;
    ProtobufCMessage *message = NULL;

    if (size > RACK_MAX_BYTES)
        return -MOK_EPROTO;
    int r = head_unpack(start, size, ret_head);
    if (r < 0)
        return r;
    if (ret_head->version < ours.min || ret_head->version > ours.max)
        return -MOK_EVERSION;
    r = mok_wire_unpack(&mok__rack_frame__descriptor, start + RACK_HEAD_BYTES, size - RACK_HEAD_BYTES, &message);
    if (r < 0)
        return r;
    Mok__RackFrame *frame = (Mok__RackFrame *)(void *)message;
    if (!is_sane(frame)) {
        mok_wire_free(message);
        return -MOK_EPROTO;
    }
    *ret_frame = frame;
    return 0;
}
