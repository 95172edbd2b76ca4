/* SPDX-License-Identifier: Apache-2.0 */
#include "listener.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <systemd/sd-daemon.h>

#include "control.pb-c.h"
#include "session.h"
#include "timer.h"
#include "wire.h"

#define BACKLOG 256
#define ACCEPT_BATCH 32
#define PAUSE_MS 100u
#define LOCK_MS 500u
#define COMPLAIN_EVERY_NS 5000000000ull

struct mokd_listener {
    struct mokd_server *server;
    enum mokd_door door;
    uv_poll_t poll;
    int fd, lock_fd;
    int spare_fd; /* given up to accept, and turn away, a connection when there is no other descriptor left */
    struct mokd_timer *pause;
    uint64_t complained_ns;
    char path[MOKD_PATH_MAX], lock_path[MOKD_PATH_MAX + 8]; /* "": somebody else's socket */
};

static int open_spare(void)
{
    return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

/* ------------------------------------------------------------------ accepting */

static void on_connection(uv_poll_t *poll, int status, int events);

static void resume(void *cookie)
{
    struct mokd_listener *listener = cookie;

    mokd_timer_cancel(&listener->pause);
    if (listener->spare_fd < 0)
        listener->spare_fd = open_spare();
    uv_poll_start(&listener->poll, UV_READABLE, on_connection);
}

static void pause_accepting(struct mokd_listener *listener)
{
    if (!listener->pause)
        listener->pause = mokd_timer_start(&listener->server->loop, PAUSE_MS, resume, listener);
    if (listener->pause)
        uv_poll_stop(&listener->poll);
}

static void turn_away(struct mokd_listener *listener)
{
    Mok__Reply reply = MOK__REPLY__INIT;

    reply.code = -MOK_EFDS;
    reply.text = (char *)"mokd is at its descriptor limit";
    listener->spare_fd = mok_close(listener->spare_fd);
    for (int i = 0; i < ACCEPT_BATCH; i++) {
        _cleanup_fd_ int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0)
            break;
        mok_wire_send(fd, &reply.base, NULL, 0);
    }
    listener->spare_fd = open_spare();
}

static const char *remedy(int error)
{
    switch (error) {
    case EMFILE:
        return "raise LimitNOFILE of mokd";
    case ENFILE:
        return "raise fs.file-max";
    }
    return "give the machine memory";
}

/* Said now and then, not for each connection of a flood. */
static void complain(struct mokd_listener *listener, int error)
{
    uint64_t now = mok_now_ns();

    if (listener->complained_ns && now - listener->complained_ns < COMPLAIN_EVERY_NS)
        return;
    listener->complained_ns = now;
    listener->server->errors++;
    mok_log(MOK_LOG_ERROR, "listener", "connections are turned away", "error=\"%s\" remedy=\"%s\"", strerror(error),
            remedy(error));
}

static void accept_failed(struct mokd_listener *listener, int error)
{
    if (error == EAGAIN || error == ECONNABORTED || error == EINTR)
        return;
    complain(listener, error);
    if ((error == EMFILE || error == ENFILE) && listener->spare_fd >= 0)
        turn_away(listener);
    pause_accepting(listener);
}

static void on_connection(uv_poll_t *poll, int status, int events)
{
    struct mokd_listener *listener = poll->data;

    (void)status;
    (void)events;
    bool full = false;
    for (int i = 0; i < ACCEPT_BATCH; i++) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            accept_failed(listener, errno);
            break;
        }
        full |= mokd_session_accept(listener->server, fd, listener->door == MOKD_DOOR_ADMIN) == -MOK_EFDS;
    }
    if (!full)
        return;
    complain(listener, EMFILE);
    pause_accepting(listener);
}

/* ------------------------------------------------------------------ the lock */

static void read_owner(int fd, char *buffer, size_t size)
{
    ssize_t n = pread(fd, buffer, size - 1, 0);
    buffer[n > 0 ? n : 0] = '\0';
    buffer[strcspn(buffer, "\n")] = '\0';
}

static bool is_still_there(int fd, const char *path)
{
    struct stat ours, there;
    return fstat(fd, &ours) == 0 && stat(path, &there) == 0 && ours.st_dev == there.st_dev &&
           ours.st_ino == there.st_ino;
}

static void write_owner(int fd, const char *path)
{
    char owner[32];
    int length = snprintf(owner, sizeof(owner), "%d\n", getpid());

    if (ftruncate(fd, 0) < 0 || pwrite(fd, owner, (size_t)length, 0) < 0)
        mok_log(MOK_LOG_WARNING, "listener", "pid not written", "file=%s error=\"%s\"", path, strerror(errno));
}

/* A killed mokd's lock lives a moment longer in a child that it had forked and that has not yet become a worker. */
static bool lock_within(int fd, unsigned ms)
{
    struct timespec pause = { .tv_nsec = 20 * 1000000 };

    for (unsigned waited = 0;; waited += 20) {
        if (flock(fd, LOCK_EX | LOCK_NB) == 0)
            return true;
        if (waited >= ms)
            return false;
        nanosleep(&pause, NULL);
    }
}

/* A file that was removed between our open and our flock locks nothing: then once more. */
static int take_lock(struct mokd_listener *listener, struct mokd_error *error)
{
    char owner[32];

    for (;;) {
        _cleanup_fd_ int fd = open(listener->lock_path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
        if (fd < 0 && errno == ENOENT)
            return mokd_error_set(error, -MOK_EIO,
                                  "the directory of socket %s is not there and could not be made: make it for mokd's "
                                  "user, or choose another place with --runtime-dir DIR or `socket =`",
                                  listener->path);
        if (fd < 0)
            return mokd_error_set(error, errno == EACCES || errno == EPERM ? -MOK_EACCESS : -MOK_EIO,
                                  "%s cannot be opened: %s", listener->lock_path, strerror(errno));
        if (!lock_within(fd, LOCK_MS)) {
            read_owner(fd, owner, sizeof(owner));
            return mokd_error_set(error, -MOK_EEXIST, "another mokd (pid %s) serves %s already",
                                  owner[0] ? owner : "unknown", listener->path);
        }
        if (!is_still_there(fd, listener->lock_path))
            continue;
        write_owner(fd, listener->lock_path);
        listener->lock_fd = mok_take_fd(&fd);
        return 0;
    }
}

/* ------------------------------------------------------------------ the socket */

/* Under systemd the directory is there; by hand it may not be. */
static void make_directory(const char *path)
{
    char copy[MOKD_PATH_MAX];

    snprintf(copy, sizeof(copy), "%s", path);
    if (mkdir(dirname(copy), 0755) < 0 && errno != EEXIST)
        mok_log(MOK_LOG_DEBUG, "listener", "directory not made", "socket=%s error=\"%s\"", path, strerror(errno));
}

/* Whether somebody listens there, who may hold no lock of ours: a service manager that would start mokd. */
static bool is_served(const char *path)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    _cleanup_fd_ int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0 || strlen(path) >= sizeof(address.sun_path))
        return false;
    memcpy(address.sun_path, path, strlen(path) + 1);
    return connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0 || (errno != ECONNREFUSED && errno != ENOENT);
}

/* As lock_within: what a killed mokd's child holds for a moment is stale. */
static bool stays_served(const char *path, unsigned ms)
{
    struct timespec pause = { .tv_nsec = 20 * 1000000 };

    for (unsigned waited = 0; is_served(path); waited += 20) {
        if (waited >= ms)
            return true;
        nanosleep(&pause, NULL);
    }
    return false;
}

/* Removes what is at the path, but only if it is a socket that nobody serves. */
static int clear_path(const char *path, struct mokd_error *error)
{
    struct stat status;

    if (lstat(path, &status) < 0)
        return errno == ENOENT ? 0 : mokd_error_set(error, -MOK_EIO, "%s: %s", path, strerror(errno));
    if (!S_ISSOCK(status.st_mode))
        return mokd_error_set(error, -MOK_EEXIST, "%s is there and is no socket; it stays", path);
    if (stays_served(path, LOCK_MS))
        return mokd_error_set(error, -MOK_EEXIST,
                              "somebody serves %s already, if mokd is a service of this machine then systemd: see "
                              "`systemctl status mokd.socket`, or choose another place with --socket or --runtime-dir",
                              path);
    if (unlink(path) < 0)
        return mokd_error_set(error, -MOK_EACCESS, "%s cannot be removed: %s", path, strerror(errno));
    mok_log(MOK_LOG_NOTICE, "listener", "stale socket removed", "socket=%s", path);
    return 0;
}

static int bind_socket(const char *path, unsigned mode, int *ret_fd, struct mokd_error *error)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };

    if (strlen(path) >= sizeof(address.sun_path))
        return mokd_error_set(error, -MOK_ERANGE, "socket = %s: %zu bytes long, at most %zu", path, strlen(path),
                              sizeof(address.sun_path) - 1);
    memcpy(address.sun_path, path, strlen(path) + 1);
    _cleanup_fd_ int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return mokd_error_set(error, -MOK_EIO, "no socket: %s", strerror(errno));
    mode_t old = umask(0177); /* nobody else gets in before the mode is right */
    int failure = bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 ? errno : 0;
    umask(old);
    if (failure)
        return mokd_error_set(error, failure == EACCES ? -MOK_EACCESS : -MOK_EIO, "%s cannot be bound: %s", path,
                              strerror(failure));
    if (chmod(path, mode) < 0 || listen(fd, BACKLOG) < 0) {
        mokd_error_set(error, -MOK_EIO, "%s cannot listen: %s", path, strerror(errno));
        unlink(path);
        return error->code;
    }
    *ret_fd = mok_take_fd(&fd);
    return 0;
}

static void listener_free(struct mokd_listener *listener)
{
    mok_close(listener->fd);
    mok_close(listener->spare_fd);
    if (listener->lock_fd >= 0)
        unlink(listener->lock_path); /* while it is ours */
    mok_close(listener->lock_fd);
    free(listener);
}

static struct mokd_listener *listener_new(struct mokd_server *server, enum mokd_door door)
{
    struct mokd_listener *listener = calloc(1, sizeof(*listener));

    if (!listener)
        return NULL;
    listener->server = server;
    listener->door = door;
    listener->fd = listener->lock_fd = listener->spare_fd = -1;
    return listener;
}

static int start_accepting(struct mokd_listener *listener, struct mokd_error *error)
{
    int r = uv_poll_init(&listener->server->loop, &listener->poll, listener->fd);
    if (r < 0)
        return mokd_error_set(error, -MOK_EIO, "the socket %s cannot be watched: %s", listener->path, uv_strerror(r));
    listener->poll.data = listener;
    listener->spare_fd = open_spare();
    uv_poll_start(&listener->poll, UV_READABLE, on_connection);
    return 0;
}

int mokd_listener_open(struct mokd_server *server, enum mokd_door door, const char *path, unsigned mode,
                       struct mokd_listener **ret, struct mokd_error *error)
{
    struct mokd_listener *listener = listener_new(server, door);

    if (!listener)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    snprintf(listener->path, sizeof(listener->path), "%s", path);
    snprintf(listener->lock_path, sizeof(listener->lock_path), "%s.lock", path);
    make_directory(path);
    int r = take_lock(listener, error);
    if (r == 0)
        r = clear_path(path, error);
    if (r == 0)
        r = bind_socket(path, mode, &listener->fd, error);
    if (r == 0) {
        r = start_accepting(listener, error);
        if (r < 0)
            unlink(path);
    }
    if (r < 0) {
        listener_free(listener);
        return r;
    }
    *ret = listener;
    return 0;
}

/* A socket that is shared with the service manager blocks unless we say otherwise, and would outlive exec. */
static int check_adopted(int fd, struct mokd_error *error)
{
    if (sd_is_socket_unix(fd, SOCK_SEQPACKET, 1, NULL, 0) <= 0)
        return mokd_error_set(error, -MOK_EARG,
                              "descriptor %d of the service manager is no listening Unix socket of kind seqpacket "
                              "(ListenSequentialPacket=)",
                              fd);
    if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) < 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
        return mokd_error_set(error, -MOK_EIO, "descriptor %d of the service manager: %s", fd, strerror(errno));
    return 0;
}

int mokd_listener_adopt(struct mokd_server *server, enum mokd_door door, int fd, struct mokd_listener **ret,
                        struct mokd_error *error)
{
    int r = check_adopted(fd, error);
    if (r < 0)
        return r;
    struct mokd_listener *listener = listener_new(server, door);
    if (!listener)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    listener->fd = fd;
    r = start_accepting(listener, error);
    if (r < 0) {
        listener->fd = -1;
        listener_free(listener);
        return r;
    }
    *ret = listener;
    return 0;
}

static void poll_closed(uv_handle_t *handle)
{
    listener_free(handle->data);
}

void mokd_listener_close(struct mokd_listener *listener)
{
    if (!listener)
        return;
    mokd_timer_cancel(&listener->pause);
    uv_poll_stop(&listener->poll);
    if (listener->path[0])
        unlink(listener->path);
    uv_close((uv_handle_t *)&listener->poll, poll_closed);
}
