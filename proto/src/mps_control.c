/* SPDX-License-Identifier: Apache-2.0 */
#include "mps_control.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "util.h"

/* Whether somebody listens at a socket, of whatever type. 0 or errno. */
static int try_socket(const char *path)
{
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    _cleanup_fd_ int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0)
        return errno;
    if (strlen(path) >= sizeof(at.sun_path))
        return ENAMETOOLONG;
    memcpy(at.sun_path, path, strlen(path) + 1);
    if (connect(fd, (const struct sockaddr *)&at, sizeof(at)) == 0 || errno == EPROTOTYPE || errno == EAGAIN)
        return 0;
    return errno;
}

/* Whether somebody reads from a pipe. */
static int try_pipe(const char *path)
{
    _cleanup_fd_ int fd = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    return fd < 0 ? errno : 0;
}

int mok_mps_answers(const char *directory)
{
    char path[PATH_MAX];
    struct stat about;

    if ((size_t)snprintf(path, sizeof(path), "%s/control", directory) >= sizeof(path))
        return ENAMETOOLONG;
    return stat(path, &about) < 0 ? errno : S_ISFIFO(about.st_mode) ? try_pipe(path) : try_socket(path);
}
