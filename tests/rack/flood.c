/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A flooder without a key: `flood HOST PORT SECONDS CONNECTIONS` keeps so many connections to a mesh's port busy, a
 * fifth each silent, sending noise, greeting and then silent, greeting without a key (NULL), greeting CURVE and then
 * sending noise for a handshake. Loopback and 10.77.0.0/24, the tests' own network, only.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "util.h"

#define MAX_CONNECTIONS 2048

static struct sockaddr_in target = { .sin_family = AF_INET };
static struct pollfd connections[MAX_CONNECTIONS];
static uint64_t opened, closed;

static bool is_ours(in_addr_t address)
{
    uint32_t host = ntohl(address);

    return host >> 24 == 127 || host >> 8 == (10u << 16 | 77u << 8);
}

/* ZMTP 3.1: signature, version, mechanism, as-server, filler. */
static void greet(int fd, const char *mechanism)
{
    uint8_t greeting[64] = { 0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1 };

    memcpy(greeting + 12, mechanism, strlen(mechanism));
    send(fd, greeting, sizeof(greeting), MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void send_noise(int fd, size_t size)
{
    uint8_t noise[512];

    for (size_t i = 0; i < sizeof(noise); i++)
        noise[i] = (uint8_t)rand();
    send(fd, noise, size, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* A command frame "HELLO" of the right length, with noise for its contents. */
static void send_hello(int fd)
{
    uint8_t head[] = { 4, 200, 5, 'H', 'E', 'L', 'L', 'O' };

    send(fd, head, sizeof(head), MSG_NOSIGNAL | MSG_DONTWAIT);
    send_noise(fd, 194);
}

static void speak(int fd, unsigned kind)
{
    switch (kind) {
    case 1:
        send_noise(fd, 512);
        break;
    case 2:
        greet(fd, "CURVE");
        break;
    case 3:
        greet(fd, "NULL");
        send_noise(fd, 64);
        break;
    case 4:
        greet(fd, "CURVE");
        send_hello(fd);
        break;
    }
}

static void tend(size_t i)
{
    uint8_t sink[4096];

    if (connections[i].fd >= 0 && connections[i].revents & POLLOUT) {
        connections[i].events = POLLIN;
        speak(connections[i].fd, i % 5);
    }
    if (connections[i].fd >= 0 && connections[i].revents & ~POLLOUT &&
        recv(connections[i].fd, sink, sizeof(sink), MSG_DONTWAIT) <= 0) {
        connections[i].fd = mok_close(connections[i].fd);
        closed++;
    }
    if (connections[i].fd >= 0)
        return;
    connections[i].fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    connections[i].events = POLLIN | POLLOUT;
    if (connections[i].fd >= 0 && connect(connections[i].fd, (struct sockaddr *)&target, sizeof(target)) < 0 &&
        errno != EINPROGRESS)
        connections[i].fd = mok_close(connections[i].fd);
    opened += connections[i].fd >= 0;
}

int main(int argc, char **argv)
{
    struct rlimit limit;

    if (argc != 5 || inet_pton(AF_INET, argv[1], &target.sin_addr) != 1 || !is_ours(target.sin_addr.s_addr)) {
        fprintf(stderr, "usage: flood HOST PORT SECONDS CONNECTIONS, HOST in 127.0.0.0/8 or 10.77.0.0/24\n");
        return 2;
    }
    target.sin_port = htons((uint16_t)atoi(argv[2]));
    uint64_t end = mok_now_ns() + (uint64_t)atoi(argv[3]) * 1000000000u;
    size_t count = (size_t)atoi(argv[4]) < MAX_CONNECTIONS ? (size_t)atoi(argv[4]) : MAX_CONNECTIONS;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    for (size_t i = 0; i < count; i++)
        connections[i].fd = -1;
    while (mok_now_ns() < end) {
        poll(connections, count, 10);
        for (size_t i = 0; i < count; i++)
            tend(i);
    }
    printf("opened %llu closed %llu\n", (unsigned long long)opened, (unsigned long long)closed);
    return opened > 0 ? 0 : 1;
}
