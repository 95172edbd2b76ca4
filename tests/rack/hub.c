/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A switch in user space between network namespaces, with a will of its own: drops, loses and delays frames from one
 * port to another as standard input says, in one direction or both. For kernels without netem too.
 *
 *     hub IFACE...           port i has the MAC address 02:00:00:00:00:(i + 1); answers each line with "ok"
 *         drop A B | pass A B | loss A B PERCENT | delay A B MS       A, B: a port's number, or "all"
 *     hub --plain IFACE      turns off what a frame must not leave to hardware: checksums, segmentation
 */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/ethtool.h>
#include <linux/if_packet.h>
#include <linux/sockios.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "util.h"

#define MAX_PORTS 16
#define MAX_FRAME 2048
#define MAX_WAITING 8192

#ifndef PACKET_IGNORE_OUTGOING
#define PACKET_IGNORE_OUTGOING 23
#endif

struct rule {
    bool drop;
    unsigned loss_percent;
    uint64_t delay_ns;
};

struct waiting {
    uint64_t due_ns, number; /* frames that are due at once leave as they came */
    int to;
    size_t size;
    uint8_t bytes[MAX_FRAME];
};

static struct rule rules[MAX_PORTS][MAX_PORTS];
static struct waiting *heap[MAX_WAITING];
static size_t n_waiting;
static int ports[MAX_PORTS], n_ports;
static uint64_t numbers;
static uint32_t dice = 2463534242u;

static int fail(const char *what)
{
    fprintf(stderr, "hub: %s: %s\n", what, strerror(errno));
    return 1;
}

/* ------------------------------------------------------------------ frames that wait, soonest first */

static bool is_sooner(const struct waiting *a, const struct waiting *b)
{
    return a->due_ns != b->due_ns ? a->due_ns < b->due_ns : a->number < b->number;
}

static void swap(size_t a, size_t b)
{
    struct waiting *frame = heap[a];

    heap[a] = heap[b];
    heap[b] = frame;
}

static void push(struct waiting *frame)
{
    size_t i = n_waiting++;

    heap[i] = frame;
    while (i > 0 && is_sooner(heap[i], heap[(i - 1) / 2])) {
        swap(i, (i - 1) / 2);
        i = (i - 1) / 2;
    }
}

static struct waiting *pop(void)
{
    struct waiting *first = heap[0];

    heap[0] = heap[--n_waiting];
    for (size_t i = 0;;) {
        size_t child = 2 * i + 1;
        if (child + 1 < n_waiting && is_sooner(heap[child + 1], heap[child]))
            child++;
        if (child >= n_waiting || !is_sooner(heap[child], heap[i]))
            return first;
        swap(i, child);
        i = child;
    }
}

static void send_due(uint64_t now_ns)
{
    while (n_waiting > 0 && heap[0]->due_ns <= now_ns) {
        struct waiting *frame = pop();
        ssize_t n = send(ports[frame->to], frame->bytes, frame->size, MSG_DONTWAIT);
        (void)n; /* a link that is down, or full, loses it */
        free(frame);
    }
}

/* ------------------------------------------------------------------ forwarding */

static uint32_t roll(void)
{
    dice ^= dice << 13;
    dice ^= dice >> 17;
    dice ^= dice << 5;
    return dice;
}

static void forward(int from, int to, const uint8_t *bytes, size_t size)
{
    const struct rule *rule = &rules[from][to];

    if (rule->drop || (rule->loss_percent > 0 && roll() % 100 < rule->loss_percent) || n_waiting == MAX_WAITING)
        return;
    struct waiting *frame = malloc(sizeof(*frame));
    if (!frame)
        return;
    frame->due_ns = mok_now_ns() + rule->delay_ns;
    frame->number = numbers++;
    frame->to = to;
    frame->size = size;
    memcpy(frame->bytes, bytes, size);
    push(frame);
}

static void take_frames(int from)
{
    uint8_t bytes[MAX_FRAME];

    for (int batch = 0; batch < 64; batch++) {
        ssize_t size = recv(ports[from], bytes, sizeof(bytes), MSG_DONTWAIT);
        if (size < ETHER_HDR_LEN)
            return;
        bool to_all = bytes[0] & 1;
        for (int to = 0; to < n_ports; to++)
            if (to != from && (to_all || bytes[5] == to + 1))
                forward(from, to, bytes, (size_t)size);
    }
}

static int open_port(const char *interface)
{
    int on = 1;
    struct sockaddr_ll address = {
        .sll_family = AF_PACKET,
        .sll_protocol = htons(ETH_P_ALL),
        .sll_ifindex = (int)if_nametoindex(interface),
    };

    int fd = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);
    if (fd < 0 || address.sll_ifindex == 0 || bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 ||
        setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof(on)) < 0)
        return -1;
    return fd;
}

/* ------------------------------------------------------------------ orders */

static void apply(struct rule *rule, const char *verb, unsigned value)
{
    if (strcmp(verb, "drop") == 0)
        rule->drop = true;
    else if (strcmp(verb, "pass") == 0)
        *rule = (struct rule){ 0 };
    else if (strcmp(verb, "loss") == 0)
        rule->loss_percent = value;
    else if (strcmp(verb, "delay") == 0)
        rule->delay_ns = (uint64_t)value * 1000000u;
}

static bool is_meant(const char *text, int port)
{
    return strcmp(text, "all") == 0 || atoi(text) == port;
}

/* False: there will be no more orders. */
static bool take_order(void)
{
    char line[128], verb[16], from[16], to[16];
    unsigned value = 0;

    if (!fgets(line, sizeof(line), stdin))
        return false;
    if (sscanf(line, "%15s %15s %15s %u", verb, from, to, &value) >= 3)
        for (int a = 0; a < n_ports; a++)
            for (int b = 0; b < n_ports; b++)
                if (is_meant(from, a) && is_meant(to, b))
                    apply(&rules[a][b], verb, value);
    puts("ok");
    fflush(stdout);
    return true;
}

static int run(void)
{
    struct pollfd polled[MAX_PORTS + 1];

    setvbuf(stdin, NULL, _IONBF, 0);
    for (int i = 0; i < n_ports; i++)
        polled[i] = (struct pollfd){ .fd = ports[i], .events = POLLIN };
    polled[n_ports] = (struct pollfd){ .fd = STDIN_FILENO, .events = POLLIN };
    for (;;) {
        int wait_ms = 1000;
        if (n_waiting > 0) {
            uint64_t now_ns = mok_now_ns();
            wait_ms = heap[0]->due_ns > now_ns ? (int)((heap[0]->due_ns - now_ns) / 1000000u) + 1 : 0;
        }
        poll(polled, (nfds_t)n_ports + 1, wait_ms);
        for (int i = 0; i < n_ports; i++)
            if (polled[i].revents)
                take_frames(i);
        send_due(mok_now_ns());
        if (polled[n_ports].revents && !take_order())
            return 0;
    }
}

/* ------------------------------------------------------------------ start */

static int make_plain(const char *interface)
{
    static const uint32_t features[] = { ETHTOOL_STXCSUM, ETHTOOL_SSG, ETHTOOL_STSO, ETHTOOL_SGSO, ETHTOOL_SGRO };
    struct ifreq request = { 0 };

    _cleanup_fd_ int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return fail("socket");
    snprintf(request.ifr_name, sizeof(request.ifr_name), "%s", interface);
    for (size_t i = 0; i < ARRAY_SIZE(features); i++) {
        struct ethtool_value value = { .cmd = features[i], .data = 0 };
        request.ifr_data = (void *)&value;
        if (ioctl(fd, SIOCETHTOOL, &request) < 0 && errno != EOPNOTSUPP)
            return fail(interface);
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--plain") == 0)
        return make_plain(argv[2]);
    if (argc < 2 || argc > MAX_PORTS + 1) {
        fprintf(stderr, "usage: hub IFACE... | hub --plain IFACE\n");
        return 2;
    }
    for (n_ports = 0; n_ports < argc - 1; n_ports++) {
        ports[n_ports] = open_port(argv[n_ports + 1]);
        if (ports[n_ports] < 0)
            return fail(argv[n_ports + 1]);
    }
    puts("ok");
    fflush(stdout);
    return run();
}
