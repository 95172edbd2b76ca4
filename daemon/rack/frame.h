/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bytes of a rack message: the version frame (magic, version, the range that its sender speaks), then a packed
 * RackFrame. Only what came from an authenticated peer may get here. Never logs, keeps no state.
 */
#ifndef MOK_RACK_FRAME_H
#define MOK_RACK_FRAME_H

#include "rack.h"

#define RACK_PROTOCOL_MIN 1u
#define RACK_PROTOCOL_MAX 2u
/* The version since which there are goodbyes, the operator's commands, and reports of use. */
#define RACK_PROTOCOL_GOODBYE 2u
#define RACK_PROTOCOL_SHARED 2u
#define RACK_HEAD_BYTES 8u
#define RACK_MAX_BYTES 65536u /* head and frame */

struct rack_head {
    uint8_t version; /* in which the frame is written */
    struct rack_versions speaks;
};

/* The newest that both speak; 0: none. */
uint32_t rack_version_common(struct rack_versions a, struct rack_versions b);

/* Packs into memory that the caller frees. -MOK_ESIZE: more than RACK_MAX_PAYLOAD; -MOK_ENOMEM. */
int rack_frame_pack(const struct rack_head *head, const Mok__RackFrame *frame, uint8_t **ret_bytes, size_t *ret_size);

/*
 * *ret_head is set whenever the head is one. -MOK_EVERSION: the version is not in `ours`; -MOK_EPROTO: no head, or the
 * frame is malformed, too costly to unpack, or without sender, target or sane lengths; -MOK_ENOMEM. Free with
 * mok_wire_free(&frame->base).
 */
int rack_frame_unpack(struct rack_versions ours, const void *bytes, size_t size, struct rack_head *ret_head,
                      Mok__RackFrame **ret_frame);

#endif
