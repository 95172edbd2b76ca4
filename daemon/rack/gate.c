/* SPDX-License-Identifier: Apache-2.0 */
#include "gate.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "util.h"

/* ------------------------------------------------------------------ the socket */

static int listen_error(int error)
{
    switch (error) {
    case EADDRINUSE:
        return -MOK_EEXIST;
    case EACCES:
    case EPERM:
        return -MOK_EACCESS;
    case EADDRNOTAVAIL:
    case EAFNOSUPPORT:
    case EINVAL:
        return -MOK_EARG;
    case EMFILE:
    case ENFILE:
        return -MOK_EFDS;
    }
    return -MOK_EIO;
}

static bool bind_and_listen(int fd, const struct rack_address *address)
{
    struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_port = htons(address->port) };
    struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_port = htons(address->port) };
    int on = 1;

    memcpy(&v4.sin_addr, address->bytes, sizeof(v4.sin_addr));
    memcpy(&v6.sin6_addr, address->bytes, sizeof(v6.sin6_addr));
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) < 0)
        return false;
    int r = address->ipv6 ? bind(fd, (struct sockaddr *)&v6, sizeof(v6)) : bind(fd, (struct sockaddr *)&v4, sizeof(v4));
    return r == 0 && listen(fd, RACK_GATE_BACKLOG) == 0;
}

static void take_spares(struct rack_gate *gate)
{
    gate->spared = true;
    for (size_t i = 0; i < RACK_GATE_BACKLOG; i++)
        if (gate->spare[i] < 0 && (gate->spare[i] = fcntl(gate->fd, F_DUPFD_CLOEXEC, 3)) < 0)
            gate->spared = false;
}

static void give_spares(struct rack_gate *gate)
{
    for (size_t i = 0; i < RACK_GATE_BACKLOG; i++)
        gate->spare[i] = mok_close(gate->spare[i]);
    gate->spared = false;
}

int rack_gate_open(struct rack_gate *gate, const char *address, int *ret_fd, char *text)
{
    struct rack_address where;

    memset(gate->spare, -1, sizeof(gate->spare));
    if (rack_address_parse(address, &where) < 0) {
        snprintf(text, RACK_MAX_TEXT, "[rack] listen = %s: is no address in numbers and a port", address);
        return -MOK_EARG;
    }
    _cleanup_fd_ int fd =
        socket(where.ipv6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP);
    _cleanup_fd_ int twin = -1;
    if (fd >= 0 && bind_and_listen(fd, &where))
        twin = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0 || twin < 0) {
        int error = errno;
        snprintf(text, RACK_MAX_TEXT, "[rack] listen = %s: %s", address, strerror(error));
        return listen_error(error);
    }
    gate->fd = mok_take_fd(&fd);
    take_spares(gate);
    *ret_fd = mok_take_fd(&twin);
    return 0;
}

void rack_gate_close(struct rack_gate *gate)
{
    if (gate->fd < 0)
        return;
    give_spares(gate);
    gate->fd = mok_close(gate->fd);
}

/* ------------------------------------------------------------------ the filter */

#define V4_SOURCE (SKF_NET_OFF + 12)
#define V6_SOURCE (SKF_NET_OFF + 8)
#define PER_V4 2u
#define PER_V6 9u
#define MAX_PROGRAM (8u + PER_V6 * RACK_MAX_NODES)
#define PASS UINT32_MAX

struct program {
    struct sock_filter code[MAX_PROGRAM];
    uint16_t count;
};

static void put(struct program *program, uint16_t code, uint8_t jump_true, uint8_t jump_false, uint32_t value)
{
    program->code[program->count++] = (struct sock_filter){ code, jump_true, jump_false, value };
}

static uint32_t word(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

static void put_v4(struct program *program, const struct rack_address *member)
{
    put(program, BPF_JMP | BPF_JEQ | BPF_K, 0, 1, word(member->bytes));
    put(program, BPF_RET | BPF_K, 0, 0, PASS);
}

static void put_v6(struct program *program, const struct rack_address *member)
{
    for (uint8_t i = 0; i < 4; i++) {
        put(program, BPF_LD | BPF_W | BPF_ABS, 0, 0, (uint32_t)(V6_SOURCE + 4 * i));
        put(program, BPF_JMP | BPF_JEQ | BPF_K, 0, (uint8_t)(7 - 2 * i), word(member->bytes + 4 * i));
    }
    put(program, BPF_RET | BPF_K, 0, 0, PASS);
}

/* Passes what comes from a member's address. A long jump is a short one over a BPF_JA. */
static void make_program(struct program *program, const struct rack_address *members, size_t count)
{
    uint32_t v4 = 0;

    for (size_t i = 0; i < count; i++)
        v4 += !members[i].ipv6;
    program->count = 0;
    put(program, BPF_LD | BPF_B | BPF_ABS, 0, 0, (uint32_t)SKF_NET_OFF);
    put(program, BPF_ALU | BPF_RSH | BPF_K, 0, 0, 4);
    put(program, BPF_JMP | BPF_JEQ | BPF_K, 1, 0, 4);
    put(program, BPF_JMP | BPF_JA, 0, 0, 2 + PER_V4 * v4);
    put(program, BPF_LD | BPF_W | BPF_ABS, 0, 0, (uint32_t)V4_SOURCE);
    for (size_t i = 0; i < count; i++)
        if (!members[i].ipv6)
            put_v4(program, &members[i]);
    put(program, BPF_RET | BPF_K, 0, 0, 0);
    for (size_t i = 0; i < count; i++)
        if (members[i].ipv6)
            put_v6(program, &members[i]);
    put(program, BPF_RET | BPF_K, 0, 0, 0);
}

bool rack_gate_set(struct rack_gate *gate, enum rack_gate_level level, const struct rack_address *members, size_t count)
{
    struct program program;
    int unused = 0;

    if (level == RACK_GATE_OPEN) {
        if (gate->level != RACK_GATE_OPEN)
            setsockopt(gate->fd, SOL_SOCKET, SO_DETACH_FILTER, &unused, sizeof(unused));
        gate->level = level;
        return true;
    }
    make_program(&program, members, level == RACK_GATE_CLOSED || count > RACK_MAX_NODES ? 0 : count);
    struct sock_fprog filter = { .len = program.count, .filter = program.code };
    if (setsockopt(gate->fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof(filter)) < 0)
        return false;
    gate->level = level;
    return true;
}

/* ------------------------------------------------------------------ without descriptors */

void rack_gate_starve(struct rack_gate *gate)
{
    rack_gate_set(gate, RACK_GATE_CLOSED, NULL, 0);
    give_spares(gate);
}

bool rack_gate_recover(struct rack_gate *gate)
{
    if (!gate->spared)
        take_spares(gate);
    return gate->spared;
}
