/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as a packet on a control socket: refused by name, or a message that packs and unpacks to itself.
 * The first byte chooses who reads.
 */
#include <string.h>
#include <sys/socket.h>

#include "control.pb-c.h"
#include "mok/types.h"
#include "util.h"
#include "wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const ProtobufCMessageDescriptor *reader(uint8_t choice)
{
    const ProtobufCMessageDescriptor *const readers[] = {
        &mok__request__descriptor,
        &mok__reply__descriptor,
        &mok__worker_request__descriptor,
        &mok__worker_reply__descriptor,
    };
    return readers[choice % ARRAY_SIZE(readers)];
}

static void must(bool condition)
{
    if (!condition)
        abort();
}

/* Strings and bytes must be safe to look at in full. */
static void pack_and_unpack(const ProtobufCMessage *message)
{
    size_t size = protobuf_c_message_get_packed_size(message);
    _cleanup_free_ uint8_t *bytes = malloc(size + 1);
    ProtobufCMessage *again;

    must(bytes != NULL);
    must(protobuf_c_message_pack(message, bytes) == size);
    if (size == 0 || size > MOK_WIRE_MAX_BYTES || mok_wire_unpack(message->descriptor, bytes, size, &again) < 0)
        return;
    must(protobuf_c_message_get_packed_size(again) == size);
    mok_wire_free(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int pair[2] = { -1, -1 };
    ProtobufCMessage *message = NULL;

    if (size < 2)
        return 0;
    if (pair[0] < 0)
        must(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    must(send(pair[0], data + 1, size - 1, 0) == (ssize_t)(size - 1));
    int r = mok_wire_recv(pair[1], reader(data[0]), &message, NULL);
    must(r == 1 || r == -MOK_EPROTO);
    if (r == 1) {
        pack_and_unpack(message);
        mok_wire_free(message);
    }
    return 0;
}
