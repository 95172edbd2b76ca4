/* SPDX-License-Identifier: Apache-2.0 */
#include "http.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { PATIENCE_MS = 20000 };

static int connect_to(const char *path, int flags)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);

    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

int http_connect(const char *path)
{
    return connect_to(path, 0);
}

int http_connect_at_once(const char *path)
{
    return connect_to(path, SOCK_NONBLOCK);
}

static char *read_all(int fd)
{
    size_t used = 0, room = 4096;
    char *text = malloc(room);

    while (text) {
        struct pollfd wait = { .fd = fd, .events = POLLIN };
        ssize_t n = poll(&wait, 1, PATIENCE_MS) > 0 ? read(fd, text + used, room - used - 1) : -1;
        if (n <= 0) {
            text[used] = '\0';
            break;
        }
        used += (size_t)n;
        if (room - used < 2) {
            room *= 2;
            char *larger = realloc(text, room);
            if (!larger)
                break;
            text = larger;
        }
    }
    return text;
}

char *http_raw(const char *path, const char *request, size_t length)
{
    int fd = http_connect(path);
    char *text = NULL;

    if (fd >= 0 && send(fd, request, length, MSG_NOSIGNAL) == (ssize_t)length)
        text = read_all(fd);
    if (fd >= 0)
        close(fd);
    return text;
}

char *http_get(const char *path, const char *url, const char *headers)
{
    char request[512];
    int length = snprintf(request, sizeof(request), "GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n", url, headers);

    return http_raw(path, request, (size_t)length);
}

const char *http_body(const char *answer)
{
    const char *body = answer ? strstr(answer, "\r\n\r\n") : NULL;
    return body ? body + 4 : "";
}

double http_sample(const char *answer, const char *name)
{
    size_t length = strlen(name);

    for (const char *line = http_body(answer); *line; line += strcspn(line, "\n") + (line[strcspn(line, "\n")] == '\n'))
        if (strncmp(line, name, length) == 0 && line[length] == ' ')
            return strtod(line + length, NULL);
    return -1;
}
