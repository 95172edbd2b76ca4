/* SPDX-License-Identifier: Apache-2.0 */
#include "sharing.h"

#include <errno.h>
#include <fcntl.h>
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

int mokd_sharing_answers(const char *directory)
{
    char path[MOKD_PATH_MAX + 16];
    struct stat about;

    snprintf(path, sizeof(path), "%s/control", directory);
    return stat(path, &about) < 0 ? errno : S_ISFIFO(about.st_mode) ? try_pipe(path) : try_socket(path);
}

static int check_directory(const char *directory, struct mokd_error *error)
{
    int reason = directory[0] ? mokd_sharing_answers(directory) : 0;

    if (reason == 0)
        return 0;
    return mokd_error_set(error, -MOK_ESHARING,
                          "sharing = mps: no MPS control daemon answers in mps_pipe = %s (%s); start one there with "
                          "nvidia-cuda-mps-control -d, or set sharing = slices",
                          directory, strerror(reason));
}

int mokd_sharing_check(const struct mokd_config *config, struct mokd_error *error)
{
    if (config->sharing != MOKD_SHARING_MPS || config->mps == MOKD_MPS_OWN)
        return 0;
    int r = check_directory(config->mps_pipe, error);
    for (size_t i = 0; r == 0 && i < config->n_devices; i++)
        r = check_directory(config->devices[i].mps_pipe, error);
    return r;
}
