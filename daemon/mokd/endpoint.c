/* SPDX-License-Identifier: Apache-2.0 */
#include "endpoint.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util.h"

#define BACKLOG 32

static int parse_local(const char *path, struct mokd_endpoint *ret, struct mokd_error *error)
{
    struct sockaddr_un *local = &ret->address.local;

    if (path[0] != '/')
        return mokd_error_set(error, -MOK_EARG, "the path after unix: must be absolute");
    if (strlen(path) >= sizeof(local->sun_path))
        return mokd_error_set(error, -MOK_EARG, "the path has %zu bytes, at most %zu", strlen(path),
                              sizeof(local->sun_path) - 1);
    local->sun_family = AF_UNIX;
    memcpy(local->sun_path, path, strlen(path) + 1);
    ret->length = sizeof(*local);
    ret->loopback = true;
    return 0;
}

static int parse_port(const char *text, uint16_t *ret, struct mokd_error *error)
{
    char *end;
    unsigned long port = strtoul(text, &end, 10);

    if (!isdigit((unsigned char)*text) || *end || port < 1 || port > 65535)
        return mokd_error_set(error, -MOK_EARG, "the port must be in 1..65535");
    *ret = htons((uint16_t)port);
    return 0;
}

static int parse_address(const char *host, uint16_t port, struct mokd_endpoint *ret, struct mokd_error *error)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)(void *)&ret->address;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)(void *)&ret->address;

    if (strcmp(host, "localhost") == 0)
        host = "127.0.0.1";
    if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = port;
        ret->length = sizeof(*v4);
        ret->loopback = ntohl(v4->sin_addr.s_addr) >> 24 == 127;
        return 0;
    }
    if (inet_pton(AF_INET6, host, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = port;
        ret->length = sizeof(*v6);
        ret->loopback = IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
        return 0;
    }
    return mokd_error_set(error, -MOK_EARG,
                          "before the port must stand an IPv4 address, [an IPv6 address] or localhost");
}

int mokd_endpoint_parse(const char *text, struct mokd_endpoint *ret, struct mokd_error *error)
{
    struct mokd_endpoint endpoint = { 0 };
    char host[64];
    uint16_t port = 0;
    int r = 0;

    if (strcmp(text, "off") == 0) {
        endpoint.off = true;
        *ret = endpoint;
        return 0;
    }
    if (strncmp(text, "unix:", 5) == 0) {
        r = parse_local(text + 5, &endpoint, error);
    } else {
        const char *colon = strrchr(text, ':');
        size_t length = colon ? (size_t)(colon - text) : 0;
        bool brackets = length >= 2 && text[0] == '[' && colon[-1] == ']';
        if (!colon || length == 0 || length >= sizeof(host))
            return mokd_error_set(error, -MOK_EARG, "must be off, unix:/PATH or ADDRESS:PORT");
        snprintf(host, sizeof(host), "%.*s", (int)(brackets ? length - 2 : length), text + brackets);
        r = parse_port(colon + 1, &port, error);
        if (r == 0)
            r = parse_address(host, port, &endpoint, error);
        if (r == 0 && endpoint.address.any.sa_family == AF_INET6 && !brackets)
            r = mokd_error_set(error, -MOK_EARG, "an IPv6 address stands in brackets");
    }
    if (r == 0)
        *ret = endpoint;
    return r;
}

/* A socket that nobody listens on any more was left by a mokd that was killed. */
static int clear_stale(const struct sockaddr_un *local, struct mokd_error *error)
{
    struct stat status;

    if (lstat(local->sun_path, &status) < 0)
        return 0;
    if (!S_ISSOCK(status.st_mode))
        return mokd_error_set(error, -MOK_EEXIST, "%s is there and is no socket; it stays", local->sun_path);
    _cleanup_fd_ int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe >= 0 && (connect(probe, (const struct sockaddr *)local, sizeof(*local)) == 0 || errno == EAGAIN))
        return mokd_error_set(error, -MOK_EEXIST, "%s is served by another process", local->sun_path);
    if (unlink(local->sun_path) < 0)
        return mokd_error_set(error, -MOK_EACCESS, "%s cannot be removed: %s", local->sun_path, strerror(errno));
    return 0;
}

static int bind_there(int fd, const struct mokd_endpoint *endpoint)
{
    bool local = endpoint->address.any.sa_family == AF_UNIX;
    mode_t old = local ? umask(0177) : 0; /* nobody else gets in before the mode is right */
    int failure = bind(fd, &endpoint->address.any, endpoint->length) < 0 ? errno : 0;

    if (local)
        umask(old);
    return failure;
}

int mokd_endpoint_listen(const struct mokd_endpoint *endpoint, unsigned mode, int *ret_fd, struct mokd_error *error)
{
    bool local = endpoint->address.any.sa_family == AF_UNIX;
    int one = 1;

    int r = local ? clear_stale(&endpoint->address.local, error) : 0;
    if (r < 0)
        return r;
    _cleanup_fd_ int fd = socket(endpoint->address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return mokd_error_set(error, errno == EMFILE || errno == ENFILE ? -MOK_EFDS : -MOK_EIO, "no socket: %s",
                              strerror(errno));
    if (!local)
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    int failure = bind_there(fd, endpoint);
    if (!failure && local && chmod(endpoint->address.local.sun_path, mode) < 0)
        failure = errno;
    if (!failure && listen(fd, BACKLOG) < 0)
        failure = errno;
    if (failure)
        return mokd_error_set(error,
                              failure == EADDRINUSE ? -MOK_EEXIST
                              : failure == EACCES   ? -MOK_EACCESS
                                                    : -MOK_EIO,
                              "cannot be listened on: %s", strerror(failure));
    *ret_fd = mok_take_fd(&fd);
    return 0;
}

void mokd_endpoint_remove(const struct mokd_endpoint *endpoint)
{
    if (!endpoint->off && endpoint->address.any.sa_family == AF_UNIX)
        unlink(endpoint->address.local.sun_path);
}
