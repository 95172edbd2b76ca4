/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer whose key is good and whose words are not: `garbage KEYFILE SERVER_KEY ADDRESS SECONDS` sends noise, heads
 * with noise behind them, frames cut short, frames of strange boots, versions and epochs, many parts, and too large
 * messages.
 */
#include <stdio.h>
#include <string.h>

#include <zmq.h>

#include "rack.pb-c.h"
#include "rack_key.h"
#include "util.h"

#define MAX_BYTES 70000

static uint8_t bytes[MAX_BYTES];

static void noise(uint8_t *to, size_t size)
{
    for (size_t i = 0; i < size; i++)
        to[i] = (uint8_t)rand();
}

static size_t head(uint8_t version)
{
    const uint8_t head[8] = { 'M', 'o', 'K', 'r', version, 1, version > 0 ? version : 1, 0 };

    memcpy(bytes, head, sizeof(head));
    return sizeof(head);
}

static size_t frame(unsigned kind)
{
    uint8_t boot[16], target[16];
    Mok__RackFrame message = MOK__RACK_FRAME__INIT;
    Mok__RackHello hello = MOK__RACK_HELLO__INIT;
    Mok__RackBeat beat = MOK__RACK_BEAT__INIT;
    Mok__RackPing ping = MOK__RACK_PING__INIT;

    noise(boot, sizeof(boot));
    noise(target, sizeof(target));
    message.sender_boot = (ProtobufCBinaryData){ .len = sizeof(boot), .data = boot };
    message.target_boot = (ProtobufCBinaryData){ .len = sizeof(target), .data = target };
    message.epoch = message.sequence = (uint64_t)rand();
    beat.epoch = (uint64_t)rand() + 1;
    beat.seen_epoch = (uint64_t)rand();
    beat.realtime_ns = beat.echo_ns = beat.echo_age_ns = UINT64_MAX - (uint64_t)rand();
    hello.node = (char *)"n1";
    hello.link_domain = (char *)"rack";
    hello.beat = &beat;
    message.body_case = kind == 0   ? MOK__RACK_FRAME__BODY_HELLO
                        : kind == 1 ? MOK__RACK_FRAME__BODY_BEAT
                                    : MOK__RACK_FRAME__BODY_PING;
    if (kind == 0)
        message.hello = &hello;
    else if (kind == 1)
        message.beat = &beat;
    else
        message.ping = &ping;
    size_t size = head(1);
    return size + protobuf_c_message_pack(&message.base, bytes + size);
}

static void send_one(void *socket, unsigned kind)
{
    size_t size = 0;
    unsigned parts = 1;

    switch (kind % 8) {
    case 0:
        size = (size_t)rand() % 300;
        noise(bytes, size);
        break;
    case 1:
        size = head(1) + (size_t)rand() % 300;
        noise(bytes + 8, size - 8);
        break;
    case 2:
        size = frame((unsigned)rand() % 3);
        size -= size > 12 ? (size_t)rand() % 4 : 0;
        break;
    case 3:
    case 4:
        size = frame((unsigned)rand() % 3);
        break;
    case 5:
        size = head((uint8_t)rand()) + 40;
        break;
    case 6:
        size = frame((unsigned)rand() % 3);
        parts = 3;
        break;
    case 7: /* ends the connection */
        size = rand() % 200 == 0 ? MAX_BYTES : 0;
        break;
    }
    for (unsigned i = 1; i <= parts; i++)
        zmq_send(socket, bytes, size, i < parts ? ZMQ_SNDMORE : 0);
}

int main(int argc, char **argv)
{
    char text[MOK_RACK_KEY_SENTENCE], endpoint[128];
    uint8_t server[MOK_RACK_KEY_BYTES];
    struct mok_rack_key key;
    int linger = 0, timeout = 200;

    if (argc != 5 || mok_rack_key_load(argv[1], &key, text) < 0 || mok_rack_key_parse(argv[2], server) < 0) {
        fprintf(stderr, "usage: garbage KEYFILE SERVER_KEY ADDRESS SECONDS\n");
        return 2;
    }
    void *context = zmq_ctx_new();
    void *socket = zmq_socket(context, ZMQ_DEALER);
    zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof(linger));
    zmq_setsockopt(socket, ZMQ_SNDTIMEO, &timeout, sizeof(timeout));
    zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, server, sizeof(server));
    zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, key.public_key, sizeof(key.public_key));
    zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, key.secret_key, sizeof(key.secret_key));
    snprintf(endpoint, sizeof(endpoint), "tcp://%s", argv[3]);
    zmq_connect(socket, endpoint);
    uint64_t end = mok_now_ns() + (uint64_t)atoi(argv[4]) * 1000000000u;
    for (unsigned i = 0; mok_now_ns() < end; i++)
        send_one(socket, i);
    zmq_close(socket);
    zmq_ctx_term(context);
    return 0;
}
