/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mok-worker: the process that owns one device. mokd spawns it with the control socket as descriptor 3, and it lives no
 * longer than that socket. It must never outlive mokd, and never hides a crash: mokd sees the signal and restarts it.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/log.h"
#include "control.h"

#define CONTROL_FD 3
#define ORPHAN_GRACE_S 2

/* mokd is gone. The socket's end of file says so too and ends us in order; this is for the case that it does not. */
static void orphaned(int signal_)
{
    (void)signal_;
    alarm(ORPHAN_GRACE_S);
}

/*
 * What people and service managers send to the whole process group is mokd's to act on: it tells us to stop, or closes
 * the socket. SIGKILL, and the signals of a crash, keep their meaning.
 */
static int set_signals(void)
{
    static const int ignored[] = { SIGTERM, SIGINT, SIGHUP, SIGPIPE };
    struct sigaction ignore = { .sa_handler = SIG_IGN }, orphan = { .sa_handler = orphaned, .sa_flags = SA_RESTART };

    for (size_t i = 0; i < ARRAY_SIZE(ignored); i++)
        if (sigaction(ignored[i], &ignore, NULL) < 0)
            return -errno;
    if (sigaction(SIGUSR1, &orphan, NULL) < 0 || prctl(PR_SET_PDEATHSIG, SIGUSR1) < 0)
        return -errno;
    return 0;
}

static bool is_control_socket(int fd)
{
    int type = 0;
    socklen_t size = sizeof(type);

    return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_SEQPACKET;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--version") == 0) {
        puts("mok-worker " MOK_BUILD_VERSION);
        return 0;
    }
    if (argc != 1 || !is_control_socket(CONTROL_FD)) {
        fprintf(stderr, "mok-worker: mokd starts it, with the control socket as descriptor %d\n", CONTROL_FD);
        return 2;
    }
    mok_log_open("mok-worker", MOK_LOG_INFO);
    if (set_signals() < 0 || fcntl(CONTROL_FD, F_SETFD, FD_CLOEXEC) < 0 ||
        fcntl(CONTROL_FD, F_SETFL, fcntl(CONTROL_FD, F_GETFL) | O_NONBLOCK) < 0) {
        mok_log(MOK_LOG_ERROR, "worker", "cannot start", "error=\"%s\"", strerror(errno));
        return 1;
    }
    /*
     * Kernels are loaded with their module, not when they are first launched: that may wait for all streams, and one of
     * them may wait for a word of the thread that launches.
     */
    if (setenv("CUDA_MODULE_LOADING", "EAGER", 1) < 0) {
        mok_log(MOK_LOG_ERROR, "worker", "cannot start", "error=\"%s\"", strerror(errno));
        return 1;
    }
    return control_serve(CONTROL_FD) < 0 ? 1 : 0;
}
